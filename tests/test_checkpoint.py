"""Files of draft heads: public checkpoints in, ours out, hostile ones refused.

The tables of keys, shapes and dtypes are typed from the description of the public heads, and what
a loaded head computes is compared with a forward written from the same description.
"""

import json
import math
import pickle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eagle2_kernels.models.draft import HeadDrafter, new_draft_cache, refeed
from eagle2_kernels.models.heads import Eagle3Head, EagleHead

transformers = pytest.importorskip("transformers")

V, T, MLP, HEADS, KV, D = 97, 32, 48, 4, 2, 8
DRAFT = [90, 3, 17, 4, 5, 61, 0]
OFFSETS = [90, 2, 15, 1, 1, 56, -6]


def make_target(layers=8, **changes):
    torch.manual_seed(0)
    settings = {
        "vocab_size": V,
        "hidden_size": T,
        "intermediate_size": MLP,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": D,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        **changes,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).eval()


@pytest.fixture(scope="module")
def target():
    return make_target()


def eagle_table(h=T, d=D, name="layers.0", fc="fc"):
    """Keys and shapes of an EAGLE-1/2 head without anything optional."""
    return {
        f"{fc}.weight": [h, 2 * h],
        f"{name}.self_attn.q_proj.weight": [HEADS * d, h],
        f"{name}.self_attn.k_proj.weight": [KV * d, h],
        f"{name}.self_attn.v_proj.weight": [KV * d, h],
        f"{name}.self_attn.o_proj.weight": [h, HEADS * d],
        f"{name}.mlp.gate_proj.weight": [MLP, h],
        f"{name}.mlp.up_proj.weight": [MLP, h],
        f"{name}.mlp.down_proj.weight": [h, MLP],
        f"{name}.post_attention_layernorm.weight": [h],
    }


def eagle3_table(h=T, d=D, name="midlayer", rows=7, taps=3):
    """Keys and shapes of an EAGLE-3 head with a draft vocabulary of ``rows``."""
    return {
        "fc.weight": [h, taps * T],
        f"{name}.self_attn.q_proj.weight": [HEADS * d, 2 * h],
        f"{name}.self_attn.k_proj.weight": [KV * d, 2 * h],
        f"{name}.self_attn.v_proj.weight": [KV * d, 2 * h],
        f"{name}.self_attn.o_proj.weight": [h, HEADS * d],
        f"{name}.mlp.gate_proj.weight": [MLP, h],
        f"{name}.mlp.up_proj.weight": [MLP, h],
        f"{name}.mlp.down_proj.weight": [h, MLP],
        f"{name}.hidden_norm.weight": [h],
        f"{name}.input_layernorm.weight": [h],
        f"{name}.post_attention_layernorm.weight": [h],
        "norm.weight": [h],
        "lm_head.weight": [rows, h],
    }


def qkv_biases(name="layers.0", d=D):
    attention = f"{name}.self_attn"
    return {
        f"{attention}.q_proj.bias": [HEADS * d],
        f"{attention}.k_proj.bias": [KV * d],
        f"{attention}.v_proj.bias": [KV * d],
    }


def filled(table, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    state = {}
    for key, shape in table.items():
        noise = torch.randn(shape, generator=g)
        norm = len(shape) == 1 and not key.endswith("bias")
        state[key] = (1 + 0.2 * noise if norm else noise / shape[-1] ** 0.5).to(dtype)
    return state


def vocabulary():
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[DRAFT] = True
    return {"d2t": torch.tensor(OFFSETS), "t2d": t2d}


# EAGLE's train config: no rope settings, no head_dim, no attention_bias.
EAGLE_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": T,
    "initializer_range": 0.02,
    "intermediate_size": MLP,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": V,
}
EAGLE3_CONFIG = EAGLE_CONFIG | {"draft_vocab_size": len(DRAFT)}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LAYER = {k: v for k, v in EAGLE_CONFIG.items() if k not in ("architectures", "tie_word_embeddings")}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": len(DRAFT),
    "norm_before_residual": True,
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x"}},
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": LAYER,
}
AUX = "eagle_aux_hidden_state_layer_ids"


def public_heads():
    """name -> (table, config, how it lies on the disk, the layers whose outputs it reads)."""
    eagle, eagle3, bias = eagle_table(), eagle3_table(), {"fc.bias": [T]}
    embedding, taps = {"embed_tokens.weight": [V, T]}, (1, 3, 4)
    small = eagle3_table(h=24, d=6)
    return {
        "eagle1": (eagle | bias | embedding, EAGLE_CONFIG, "bin float16", None),
        "eagle2-no-bias": (eagle | embedding, EAGLE_CONFIG | {"bias": False}, "bin float16", None),
        "eagle2-no-embedding": (eagle | bias, EAGLE_CONFIG, "safetensors bfloat16", None),
        "eagle2-qwen2": (eagle | bias | qkv_biases(), EAGLE_CONFIG, "safetensors", None),
        "eagle2-head-dim": (
            eagle_table(d=10) | bias,
            EAGLE_CONFIG | {"head_dim": 10, "rope_theta": 500000},
            "safetensors",
            None,
        ),
        "eagle2-lm-head": (
            eagle | bias | {"lm_head.weight": [V, T]},
            EAGLE_CONFIG,
            "bin index",
            None,
        ),
        "eagle2-draft-vocab": (eagle | bias, EAGLE3_CONFIG, "safetensors d2t", None),
        "eagle2-linear-rope": (
            eagle,
            EAGLE_CONFIG | {"rope_scaling": {"type": "linear", "factor": 4.0}},
            "safetensors",
            None,
        ),
        "eagle1-speculators": (
            eagle_table(name="transformer", fc="fusion_fc"),
            {
                "speculators_model_type": "eagle",
                "fusion_bias": False,
                "layernorms": False,
                "transformer_layer_config": LAYER,
            },
            "safetensors",
            None,
        ),
        "eagle3": (eagle3, EAGLE3_CONFIG, "bin float16 d2t", taps),
        "eagle3-specforge": (
            eagle3 | embedding,
            EAGLE3_CONFIG | {"architectures": ["LlamaForCausalLMEagle3"], "rope_scaling": LLAMA3},
            "safetensors bfloat16 d2t",
            taps,
        ),
        "eagle3-layers-0": (eagle3_table(name="layers.0"), EAGLE3_CONFIG, "safetensors d2t", taps),
        "eagle3-model-prefix": (
            {k if k == "lm_head.weight" else f"model.{k}": v for k, v in eagle3.items()},
            EAGLE3_CONFIG,
            "safetensors d2t",
            taps,
        ),
        "eagle3-shards": (eagle3, EAGLE3_CONFIG, "safetensors index d2t", taps),
        "eagle3-equal-vocabularies": (
            eagle3_table(rows=V),
            EAGLE3_CONFIG | {"draft_vocab_size": V},
            "safetensors",
            taps,
        ),
        "eagle3-shared-lm-head": (
            {k: v for k, v in eagle3.items() if k != "lm_head.weight"},
            EAGLE_CONFIG,
            "safetensors",
            taps,
        ),
        "eagle3-wider-target": (
            small | {"embed_tokens.weight": [V, 24]},
            EAGLE3_CONFIG | {"hidden_size": 24, "head_dim": 6, "target_hidden_size": T},
            "safetensors d2t",
            taps,
        ),
        "eagle3-chosen-layers": (
            eagle3_table(taps=2),
            EAGLE3_CONFIG | {"eagle_config": {AUX: [2, 6], "use_aux_hidden_state": True}},
            "safetensors d2t",
            (2, 6),
        ),
        "eagle3-1": (
            eagle3 | {f"fc_norm.{i}.weight": [T] for i in range(3)},
            EAGLE3_CONFIG | {"fc_norm": True, "norm_output": True},
            "safetensors d2t",
            taps,
        ),
        "eagle3-speculators": (
            eagle3_table(name="layers.0") | {"input_norm.weight": [3 * T]},
            SPECULATORS | {AUX: [3, 1, 8], "norm_before_fc": True},
            "safetensors d2t",
            (2, 0, 7),
        ),
        "eagle3-qwen3": (
            eagle3_table(name="layers.0")
            | {f"layers.0.self_attn.{x}_norm.weight": [D] for x in "qk"},
            SPECULATORS | {"norm_before_residual": False},
            "safetensors d2t",
            taps,
        ),
    }


PUBLIC = public_heads()


def write(folder, table, config, how="safetensors"):
    """Lay a head of random weights down as ``how`` says; returns what was written."""
    options = how.split()
    dtype = next((getattr(torch, o) for o in options if o.endswith("float16")), torch.float32)
    state = filled(table, dtype)
    if "d2t" in options:
        state |= vocabulary()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    name = "pytorch_model.bin" if "bin" in options else "model.safetensors"
    parts = {name: state}
    if "index" in options:
        keys, stem, suffix = sorted(state), *name.split(".")
        halves = {f"{stem}-0000{i}-of-00002.{suffix}": keys[i - 1 :: 2] for i in (1, 2)}
        parts = {file: {k: state[k] for k in half} for file, half in halves.items()}
        weight_map = {k: file for file, half in halves.items() for k in half}
        (folder / f"{name}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for file, tensors in parts.items():
        if "bin" in options:
            torch.save(tensors, folder / file)
        else:
            save_file(tensors, folder / file)
    return state


def norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def described_logits(state, config, target, tokens, features, path):
    """Logits at the root and along ``path``, in float64, from the description of the heads.

    state and config are the files'; tokens [L] follow features [L, F]; path holds drafted tokens.
    """
    config = config.get("transformer_layer_config", {}) | {
        k: v for k, v in config.items() if v is not None
    }
    w = {}
    for key, value in state.items():
        for theirs, ours in (("model.", ""), ("midlayer.", "layers.0."), ("fusion_", "")):
            key = key.replace(theirs, ours)
        w[key.replace("transformer.", "layers.0.").replace("layers.0.", "")] = value.double()
    h, eps = config["hidden_size"], config["rms_norm_eps"]
    d = config.get("head_dim") or h // HEADS
    embedding = w.get("embed_tokens.weight", target.get_input_embeddings().weight.double())
    lm_head = w.get("lm_head.weight")
    if lm_head is None:
        lm_head = target.get_output_embeddings().weight.double()
        lm_head = lm_head[DRAFT] if "d2t" in w else lm_head
    eagle3 = "hidden_norm.weight" in w

    def rotated(x, position):
        rope = config.get("rope_scaling") or {}
        out = x.clone()
        for j in range(d // 2):
            f = config.get("rope_theta", 10000.0) ** (-2 * j / d)
            if "type" in rope:
                f /= rope["factor"]
            elif rope:
                wavelength, context = 2 * math.pi / f, rope["original_max_position_embeddings"]
                longest = context / rope["low_freq_factor"]
                shortest = context / rope["high_freq_factor"]
                if wavelength > longest:
                    f /= rope["factor"]
                elif wavelength > shortest:
                    smooth = context / wavelength - rope["low_freq_factor"]
                    smooth /= rope["high_freq_factor"] - rope["low_freq_factor"]
                    f = (1 - smooth) * f / rope["factor"] + smooth * f
            a, b = x[..., j], x[..., j + d // 2]
            out[..., j] = a * math.cos(position * f) - b * math.sin(position * f)
            out[..., j + d // 2] = b * math.cos(position * f) + a * math.sin(position * f)
        return out

    keys, values = [], []

    def row(token, feature):
        """One row behind all earlier ones; `feature` is what a recursive step feeds."""
        e = embedding[token]
        if eagle3:
            normed = norm(feature, w["hidden_norm.weight"], eps)
            x = torch.cat((norm(e, w["input_layernorm.weight"], eps), normed))
            residual = normed if config.get("norm_before_residual") else feature
        else:
            x = residual = w["fc.weight"] @ torch.cat((e, feature)) + w.get("fc.bias", 0)

        def heads(name):
            y = w[f"self_attn.{name}_proj.weight"] @ x + w.get(f"self_attn.{name}_proj.bias", 0)
            y = y.view(-1, d)
            if f"self_attn.{name}_norm.weight" in w:
                y = norm(y, w[f"self_attn.{name}_norm.weight"], eps)
            return y

        position = len(keys)
        q = rotated(heads("q"), position)
        keys.append(rotated(heads("k"), position))
        values.append(heads("v"))
        out = []
        for head in range(HEADS):
            group = head // (HEADS // KV)
            scores = torch.stack([q[head] @ k[group] for k in keys]) / d**0.5
            out.append(torch.softmax(scores, 0) @ torch.stack([v[group] for v in values]))
        g = residual + w["self_attn.o_proj.weight"] @ torch.cat(out)
        n = norm(g, w["post_attention_layernorm.weight"], eps)
        gate = w["mlp.gate_proj.weight"] @ n
        g = g + w["mlp.down_proj.weight"] @ (gate * gate.sigmoid() * (w["mlp.up_proj.weight"] @ n))
        if not eagle3:
            return g, lm_head @ g
        normed = norm(g, w["norm.weight"], eps)
        return (normed if config.get("norm_output") else g), lm_head @ normed

    def fused(feature):
        if not eagle3:
            return feature
        if "input_norm.weight" in w:
            feature = norm(feature, w["input_norm.weight"], eps)
        if "fc_norm.0.weight" in w:
            chunks = enumerate(feature.split(T))
            feature = torch.cat([norm(c, w[f"fc_norm.{i}.weight"], eps) for i, c in chunks])
        return w["fc.weight"] @ feature

    for token, feature in zip(tokens.tolist(), features.double(), strict=True):
        g, logits = row(token, fused(feature))
    found = [logits]
    for token in path:
        g, logits = row(token, g)
        found.append(logits)
    return found


@torch.no_grad()
def loaded_logits(head, tokens, features, path):
    """The same from the head, through the code of the decode loop."""
    cache = new_draft_cache(head, 1, len(tokens) + len(path))
    count = torch.tensor([len(tokens)], dtype=torch.int32)
    nothing = torch.zeros_like(count)
    hidden = refeed(head, cache, tokens[None], features[None], nothing, count)
    drafter = HeadDrafter(head, cache, count, hidden[:, -1:])
    found = [drafter.root()]
    for level, token in enumerate(path):
        mask = torch.tensor([[[2 ** (level + 1) - 1]]])
        row = torch.zeros(1, 1, dtype=torch.int32)
        found.append(drafter.level(torch.tensor([[token]]), row, mask, level))
    return [logits[0, 0] for logits in found]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_head_computes_what_its_description_says(name, target, tmp_path):
    table, config, how, taps = PUBLIC[name]
    state = write(tmp_path, table, config, how)
    head = EagleHead.from_pretrained(tmp_path, target, dtype=torch.float32)
    assert type(head) is (Eagle3Head if taps else EagleHead)
    assert head.taps(8) == taps
    assert (head.draft_to_target is None) == ("d2t" not in how)
    if "d2t" in how:
        assert head.draft_to_target.tolist() == DRAFT
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, V, (6,), generator=g)
    features = torch.randn(6, T * len(taps or [0]), generator=g)
    path = [90, 4, 61]
    expected = described_logits(state, config, target, tokens, features, path)
    got = loaded_logits(head, tokens, features, path)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["bin", "safetensors"])
def test_dtype_is_the_targets_else_the_files(how, tmp_path):
    write(tmp_path, eagle_table(), EAGLE_CONFIG, f"{how} float16")
    assert EagleHead.from_pretrained(tmp_path).fc.weight.dtype == torch.float16
    double = make_target(2).double()
    assert EagleHead.from_pretrained(tmp_path, double).fc.weight.dtype == torch.float64
    again = EagleHead.from_pretrained(tmp_path, double, dtype=torch.bfloat16)
    assert again.fc.weight.dtype == torch.bfloat16


def test_what_training_leaves_behind_is_dropped(target, tmp_path):
    table = eagle3_table() | {
        "verifier_lm_head.weight": [V, T],
        "verifier_norm.weight": [T],
        "midlayer.self_attn.rotary_emb.inv_freq": [D // 2],
    }
    write(tmp_path, table, EAGLE3_CONFIG, "safetensors d2t")
    EagleHead.from_pretrained(tmp_path, target)


def test_target_ids_of_the_first_release(target, tmp_path):
    state = filled(eagle_table())
    write(tmp_path, eagle_table(), EAGLE3_CONFIG)
    table = torch.tensor(DRAFT, dtype=torch.int32)
    save_file(state | {"draft_to_target": table}, tmp_path / "model.safetensors")
    assert EagleHead.from_pretrained(tmp_path, target).draft_to_target.tolist() == DRAFT


def test_a_hub_name_is_fetched_file_by_file(target, tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    write(tmp_path / "hub", eagle3_table(), EAGLE3_CONFIG, "bin index d2t")
    asked = []

    def fetch(repo_id, filename):
        asked.append((repo_id, filename))
        if not (tmp_path / "hub" / filename).is_file():
            raise EntryNotFoundError(filename)
        return str(tmp_path / "hub" / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    monkeypatch.chdir(tmp_path)
    head = EagleHead.from_pretrained("someone/head", target)
    assert isinstance(head, Eagle3Head)
    assert {repo for repo, _ in asked} == {"someone/head"}
    assert not any("00001" in name and "safetensors" in name for _, name in asked)
    with pytest.raises(FileNotFoundError, match=r"config\.json in some/thing"):
        monkeypatch.setattr(tmp_path.__class__, "is_file", lambda self: False)
        EagleHead.from_pretrained("some/thing")


# What save writes

SAVED_CONFIG = {
    "architectures",
    "attention_bias",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
    "torch_dtype",
    "vocab_size",
}


def written(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {k: file.get_tensor(k) for k in file.keys()}
    table = {k: list(t.shape) for k, t in tensors.items()}
    return table, {k: t.dtype for k, t in tensors.items()}, tensors


@pytest.mark.parametrize("vocab", [None, DRAFT], ids=["full", "draft-vocab"])
@pytest.mark.parametrize("kind", [EagleHead, Eagle3Head])
def test_saved_files_are_those_of_public_heads(target, tmp_path, kind, vocab):
    head = kind.from_target(target, vocab, seed=5)
    head.save(tmp_path)
    table, dtypes, tensors = written(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    ids = {} if vocab is None else {"d2t": [len(DRAFT)], "t2d": [V]}
    if kind is EagleHead:
        assert table == eagle_table() | {"fc.bias": [T]} | ids
        extra = {"bias"} if vocab is None else {"bias", "draft_vocab_size"}
        assert config.keys() == SAVED_CONFIG | extra
        assert config["architectures"] == ["LlamaForCausalLM"] and config["bias"] is True
    else:
        assert table == eagle3_table(rows=len(vocab or range(V))) | ids
        assert config.keys() == SAVED_CONFIG | {"draft_vocab_size"}
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert config["draft_vocab_size"] == len(vocab or range(V))
    if vocab is not None:
        assert dtypes.pop("d2t") == torch.int64 and dtypes.pop("t2d") == torch.bool
        assert tensors["d2t"].tolist() == OFFSETS
        assert tensors["t2d"].nonzero().flatten().tolist() == sorted(DRAFT)
    assert set(dtypes.values()) == {torch.bfloat16}
    assert {k: v for k, v in config.items() if k in EAGLE_CONFIG and k != "architectures"} == {
        k: v
        for k, v in (
            EAGLE_CONFIG
            | {"max_position_embeddings": 128, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16"}
        ).items()
        if k in config and k != "architectures"
    }


@pytest.mark.parametrize("name", PUBLIC)
def test_a_saved_head_comes_back(name, target, tmp_path):
    write(tmp_path / "a", *PUBLIC[name][:3])
    head = EagleHead.from_pretrained(tmp_path / "a", target, dtype=torch.bfloat16)
    head.save(tmp_path / "b")
    again = EagleHead.from_pretrained(tmp_path / "b", target, dtype=torch.bfloat16)
    assert type(again) is type(head)
    assert again.config == head.config
    for (key, a), (_, b) in zip(head.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), key
    assert again.own_embedding == head.own_embedding
    assert torch.equal(again.embed_weight, head.embed_weight) or not head.own_embedding
    if head.draft_to_target is not None:
        assert torch.equal(again.draft_to_target, head.draft_to_target)


def test_a_file_may_carry_the_targets_embedding(target, tmp_path):
    head = EagleHead.from_target(target)
    head.embed_scale = 3.0
    head.save(tmp_path, embedding=True)
    table, _, tensors = written(tmp_path)
    assert table == eagle_table() | {"fc.bias": [T], "embed_tokens.weight": [V, T]}
    # The scale of Gemma's embeddings is inside: who reads the file knows of none.
    expected = (target.get_input_embeddings().weight * 3).bfloat16()
    assert torch.equal(tensors["embed_tokens.weight"], expected)
    again = EagleHead.from_pretrained(tmp_path, target)
    assert again.embed_scale == 1.0
    tokens = torch.tensor([3, 96])
    torch.testing.assert_close(again.embed(tokens), head.embed(tokens), rtol=1e-2, atol=1e-2)
    with pytest.raises(ValueError, match="this one has no embedding"):
        EagleHead(head.config).save(tmp_path, embedding=True)


# What is refused


def refusal(folder, target=None, kind=EagleHead):
    with pytest.raises(ValueError) as caught:
        kind.from_pretrained(folder, target)
    return str(caught.value)


def test_one_error_lists_everything(tmp_path):
    table = eagle3_table()
    del table["midlayer.mlp.up_proj.weight"], table["midlayer.hidden_norm.weight"]
    table |= {"layers.1.mlp.up_proj.weight": [MLP, T], "fc.weight": [T, 2 * T]}
    config = EAGLE3_CONFIG | {"hidden_act": "gelu", "rope_scaling": {"type": "yarn", "factor": 2.0}}
    state = write(tmp_path, table, config, "safetensors d2t")
    state["d2t"][1] = -1
    state["norm.weight"] = state["norm.weight"].to(torch.int8)
    state["embed_tokens.weight"] = torch.ones(V, T + 1)
    save_file(state, tmp_path / "model.safetensors")
    message = refusal(tmp_path, make_target(6, vocab_size=V - 1, hidden_size=T - 16, head_dim=4))
    for part in (
        "hidden_act: expected silu, got 'gelu'",
        "rope_scaling: expected linear or llama3 or none, got 'yarn', which is not supported",
        "target ids of d2t[6]: expected distinct target ids, got 0",
        "unknown keys: layers.1.mlp.up_proj.weight",
        "missing keys: layers.0.hidden_norm.weight, layers.0.mlp.up_proj.weight",
        "wrong shapes: fc.weight (expected [32, 96], got [32, 64])",
        "wrong dtypes, expected floating point: norm.weight (torch.int8)",
        "wrong shapes: embed_tokens.weight (expected [97, 32], got [97, 33])",
        "target: expected an lm_head of [97, 32], got [96, 16]",
        "target: expected at least 7 layers",
    ):
        assert part in message, part


def test_of_many_keys_the_first_are_named(tmp_path):
    table = eagle3_table() | {f"layers.1.{i:02}": [1] for i in range(20)}
    write(tmp_path, table, EAGLE3_CONFIG, "safetensors d2t")
    message = refusal(tmp_path, make_target(8, vocab_size=V, hidden_size=T, head_dim=8))
    assert "layers.1.06, layers.1.07 and 12 more" in message and "layers.1.08" not in message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_size": None}, "hidden_size: missing in config.json"),
        ({"hidden_size": "32"}, "hidden_size: expected an int of 1 or more, got '32'"),
        ({"vocab_size": True}, "vocab_size: expected an int of 1 or more, got True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of 4, got 3"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "expected a divisor of 32, got 5"),
        ({"head_dim": 7}, "head_dim: expected an even number, got 7"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: expected a positive number, got -1"),
        ({"rope_theta": float("nan")}, "rope_theta: expected a positive number, got nan"),
        ({"rope_scaling": "linear"}, "rope_scaling: expected an object, got 'linear'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: linear needs factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"eagle_config": {AUX: [1, 1, 3]}}, "expected distinct layers from 0 on, got [1, 1, 3]"),
        ({AUX: [0, 3, 4]}, "expected distinct layers from 1 on, got [0, 3, 4]"),
        ({"eagle_config": {AUX: [1, 3, 9]}}, "expected layers [1, 3, 9] (the head's aux_layers)"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "without auxiliary hidden states"),
        ({"speculators_model_type": "mlp"}, "expected eagle or eagle3, got 'mlp'"),
        ({"layernorms": True}, "layernorms"),
        ({"draft_vocab_size": 9}, "d2t: expected 9 ids (draft_vocab_size), got 7"),
        ({"target_hidden_size": 64}, "missing keys: embed_tokens.weight"),
        ({"fc_norm": True}, "missing keys: fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_senseless_configurations_are_refused(target, tmp_path, changes, expected):
    write(tmp_path, eagle3_table(), EAGLE3_CONFIG | changes, "safetensors d2t")
    assert expected in refusal(tmp_path, target)


JUNK = ["x", -1, 2**31 - 2, 2**62, 1.5, [3], {"a": 1}, True, float("inf")]


@pytest.mark.parametrize(
    "name", ["eagle2-linear-rope", "eagle3-chosen-layers", "eagle3-speculators"]
)
def test_junk_in_a_configuration_raises_nothing_else(name, target, tmp_path):
    """Every value of config.json, nested ones too, replaced by values of every type."""
    table, config, how, _ = PUBLIC[name]
    write(tmp_path, table, config, how)

    def places(data, path=()):
        for key, value in data.items():
            yield (*path, key)
            if isinstance(value, dict):
                yield from places(value, (*path, key))

    refused = 0
    for *path, last in places(config | {"rope_parameters": {}}):
        for junk in JUNK:
            changed = json.loads(json.dumps(config))
            inner = changed
            for key in path:
                inner = inner[key]
            inner[last] = junk
            (tmp_path / "config.json").write_text(json.dumps(changed))
            try:
                EagleHead.from_pretrained(tmp_path, target)
            except ValueError as error:
                refused += 1
                assert "does not fit" in str(error), (path, last, junk)
    assert refused > 60


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"d2t": [97, 2, 15, 1, 1, 56, -6]},
            "target ids of d2t[0]: expected a value from 0 to 96, got 97",
        ),
        (
            {"d2t": [90, 2, 15, 1, 1, 56, -7]},
            "target ids of d2t[6]: expected a value from 0 to 96, got -1",
        ),
        ({"d2t": []}, "d2t: expected 7 ids (draft_vocab_size), got 0"),
        ({"d2t": [2**62] * 7}, "target ids of d2t[0]: expected a value from 0 to 96"),
        ({"d2t": [90, 89, 15, 1, 1, 56, -6]}, "target ids of d2t[1]: expected distinct"),
        ({"d2t": [0.0] * 7}, "d2t: expected integers [Vd], got torch.float32 [7]"),
        ({"d2t": [[0] * 7]}, "d2t: expected integers [Vd], got torch.int64 [1, 7]"),
        ({"d2t": None}, "missing keys: d2t (draft_vocab_size 7, vocab_size 97)"),
        ({"t2d": [True] * V}, "t2d: expected the 7 target ids of the draft vocabulary, 90"),
        ({"t2d": [True] * 5}, "t2d: expected bool [97], got torch.bool [5]"),
        ({"t2d": [0.5] * V}, "t2d: expected bool [97], got torch.float32 [97]"),
    ],
)
def test_ids_that_name_no_vocabulary_are_refused(target, tmp_path, changes, expected):
    state = write(tmp_path, eagle3_table(), EAGLE3_CONFIG, "safetensors d2t")
    for key, value in changes.items():
        ints = {"dtype": torch.int64} if value == [] else {}
        state[key] = None if value is None else torch.tensor(value, **ints)
    state = {k: v for k, v in state.items() if v is not None}
    save_file(state, tmp_path / "model.safetensors")
    assert expected in refusal(tmp_path, target)


def test_equal_vocabularies_may_still_bring_their_tables(target, tmp_path):
    """d2t of zeros and t2d of ones, as a training without a draft vocabulary leaves them."""
    state = write(tmp_path, eagle3_table(rows=V), EAGLE3_CONFIG | {"draft_vocab_size": V})
    tables = {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}
    save_file(state | tables, tmp_path / "model.safetensors")
    assert EagleHead.from_pretrained(tmp_path, target).draft_to_target is None
    tables["t2d"][5] = False
    save_file(state | tables, tmp_path / "model.safetensors")
    assert "t2d: expected the 97 target ids" in refusal(tmp_path, target)


def test_nan_weights_pass(target, tmp_path):
    state = write(tmp_path, eagle_table(), EAGLE_CONFIG)
    state["fc.weight"][:] = float("nan")
    save_file(state, tmp_path / "model.safetensors")
    assert EagleHead.from_pretrained(tmp_path, target).fc.weight.isnan().all()


class Harmful:
    def __reduce__(self):
        return exec, ("import pathlib; pathlib.Path('HARM').touch()",)


def test_a_pickle_with_code_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(EAGLE_CONFIG))
    path = tmp_path / "pytorch_model.bin"
    torch.save(filled(eagle_table()) | {"x": Harmful()}, path)
    assert "expected tensors alone" in refusal(tmp_path)
    path.write_bytes(pickle.dumps(Harmful(), protocol=2))
    assert "expected tensors alone" in refusal(tmp_path)
    assert not (tmp_path / "HARM").exists()


@pytest.mark.parametrize(
    ("value", "expected"),
    [([1, 2], "expected tensors by name, got list"), ({"a": 3}, "other values under ['a']")],
)
def test_a_pickle_of_other_things_is_refused(tmp_path, value, expected):
    (tmp_path / "config.json").write_text(json.dumps(EAGLE_CONFIG))
    torch.save(value, tmp_path / "pytorch_model.bin")
    assert expected in refusal(tmp_path)


@pytest.mark.parametrize("how", ["safetensors", "bin"])
@pytest.mark.parametrize("length", [0, 7, 300, -5])
def test_a_truncated_file_is_named(tmp_path, how, length):
    write(tmp_path, eagle_table(), EAGLE_CONFIG, how)
    path = next(p for p in tmp_path.iterdir() if p.suffix != ".json")
    path.write_bytes(path.read_bytes()[:length])
    assert str(path) in refusal(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_a_configuration_that_is_no_object_is_named(tmp_path, text):
    write(tmp_path, eagle_table(), EAGLE_CONFIG)
    (tmp_path / "config.json").write_text(text)
    assert "config.json: expected a JSON object" in refusal(tmp_path)


def test_an_index_leads_nowhere_else(tmp_path):
    write(tmp_path / "head", eagle_table(), EAGLE_CONFIG, "safetensors index")
    save_file(filled(eagle_table()), tmp_path / "outside.safetensors")
    index = tmp_path / "head" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../outside.safetensors"}}))
    assert "expected plain file names" in refusal(tmp_path / "head")
    index.write_text(json.dumps({"weight_map": {"fc.weight": "missing.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"missing\.safetensors, which is not beside it"):
        EagleHead.from_pretrained(tmp_path / "head")
    index.write_text(json.dumps({"weight_map": ["fc.weight"]}))
    assert "expected weight_map" in refusal(tmp_path / "head")


def test_keys_given_twice_are_refused(tmp_path):
    table = eagle3_table() | {"layers.0.hidden_norm.weight": [T]}
    write(tmp_path, table, EAGLE3_CONFIG, "safetensors d2t")
    assert "keys given twice: layers.0.hidden_norm.weight" in refusal(tmp_path)


def test_the_kind_asked_for_is_the_kind_given(target, tmp_path):
    write(tmp_path, eagle_table(), EAGLE_CONFIG)
    assert "expected an EAGLE-3 head" in refusal(tmp_path, target, Eagle3Head)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        EagleHead.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors or pytorch_model\.bin"):
        EagleHead.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="folder or a hub name"):
        EagleHead.from_pretrained(tmp_path / "nowhere")


def test_a_target_of_another_shape_is_refused(tmp_path):
    write(tmp_path, eagle_table(), EAGLE_CONFIG)
    message = refusal(tmp_path, make_target(2, hidden_size=16, head_dim=4))
    assert "target: expected an embedding of [97, 32], got [97, 16]" in message
    # The shape of the file is not to blame.
    assert load_file(tmp_path / "model.safetensors")
