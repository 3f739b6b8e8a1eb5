"""The EAGLE-1/2 head: its formula, its vocabulary, its files."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle2_kernels.models.heads import EagleConfig, EagleHead

transformers = pytest.importorskip("transformers")


def tiny_target(seed=0, dtype=torch.float32, **changes):
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        **changes,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    return model.to(dtype).eval()


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def plain_head(head, tokens, feature_of, row):
    """g of one row, scalar loops over heads and keys, in float64 and without the module's code.

    feature_of[j] is the feature that row j was fed; keys are rows 0 .. row.
    """
    w = {k: v.double() for k, v in head.state_dict().items() if v.is_floating_point()}
    c = head.config
    group = c.num_attention_heads // c.num_key_value_heads

    def inputs(j):
        x = torch.cat((head.embed_weight[tokens[j]].double(), feature_of[j].double()))
        return w["fc.weight"] @ x + w.get("fc.bias", 0)

    def rotated(vector, position):
        half = c.head_dim // 2
        out = vector.clone()
        for j in range(half):
            angle = position * c.rope_theta ** (-2 * j / c.head_dim)
            a, b = vector[j], vector[j + half]
            out[j] = a * math.cos(angle) - b * math.sin(angle)
            out[j + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def heads_of(name, x):
        prefix = f"layers.0.self_attn.{name}_proj"
        y = w[prefix + ".weight"] @ x + w.get(prefix + ".bias", 0)
        return y.view(-1, c.head_dim)

    x = inputs(row)
    attn = []
    for h in range(c.num_attention_heads):
        q = rotated(heads_of("q", x)[h], row)
        scores, values = [], []
        for j in range(row + 1):
            xj = inputs(j)
            scores.append(q @ rotated(heads_of("k", xj)[h // group], j) / c.head_dim**0.5)
            values.append(heads_of("v", xj)[h // group])
        attn.append(torch.softmax(torch.stack(scores), 0) @ torch.stack(values))
    h = x + w["layers.0.self_attn.o_proj.weight"] @ torch.cat(attn)
    n = h / (h.square().mean() + c.rms_norm_eps).sqrt()
    n = n * w["layers.0.post_attention_layernorm.weight"]
    gate = w["layers.0.mlp.gate_proj.weight"] @ n
    up = w["layers.0.mlp.up_proj.weight"] @ n
    return h + w["layers.0.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)


def random_text(target, length=9, batch=1, seed=1):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, target.config.vocab_size, (batch, length), generator=g)
    features = torch.randn(batch, length, target.config.hidden_size, generator=g)
    return tokens, features


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "qkv-bias"])
def test_first_level_equals_a_plain_computation(bias):
    target = tiny_target(attention_bias=bias)
    head = EagleHead.from_target(target, seed=3)
    assert head.config.attention_bias is bias
    with torch.no_grad():
        for name, p in head.named_parameters():
            if name.endswith("bias"):
                p.normal_()
        tokens, features = random_text(target)
        out = head.forward_train(tokens, features)[0]
        for row in (0, 1, 8):
            expected = plain_head(head, tokens[0], features[0], row)
            torch.testing.assert_close(out[0, row].double(), expected, rtol=2e-5, atol=2e-5)


def test_recursive_levels_see_what_a_draft_sees(target):
    head = EagleHead.from_target(target, seed=4)
    tokens, features = random_text(target)
    with torch.no_grad():
        levels = head.forward_train(tokens, features, steps=3)
        row = 6
        for depth in (1, 2):
            # A draft of depth `depth` whose last row is `row`: true features up to row - depth,
            # then the head's own outputs, one after the other.
            fed = features[0].clone()
            for j in range(row - depth, row):
                fed[j + 1] = plain_head(head, tokens[0], fed, j)
            expected = plain_head(head, tokens[0], fed, row)
            torch.testing.assert_close(
                levels[depth][0, row].double(), expected, rtol=1e-4, atol=1e-4
            )


def test_training_forward_ignores_padding_and_later_tokens(target):
    head = EagleHead.from_target(target)
    tokens, features = random_text(target)
    with torch.no_grad():
        whole = head.forward_train(tokens, features, steps=2)
        short = head.forward_train(tokens[:, :5], features[:, :5], steps=2)
    for a, b in zip(whole, short, strict=True):
        torch.testing.assert_close(a[:, :5], b, rtol=1e-5, atol=1e-5)


def test_primitives_make_up_the_training_forward(target):
    head = EagleHead.from_target(target)
    tokens, features = random_text(target, batch=2)
    with torch.no_grad():
        x = head.inputs(tokens, features)
        q, k, v = head.project_qkv(x, torch.arange(9))
        assert q.shape == (2, 9, 4, 8) and k.shape == v.shape == (2, 9, 2, 8)
        attn = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2).repeat_interleave(2, 1),
            v.transpose(1, 2).repeat_interleave(2, 1),
            is_causal=True,
        )
        out = head.finish(x, attn.transpose(1, 2))
        torch.testing.assert_close(out, head.forward_train(tokens, features)[0])


def test_steps_below_one_are_refused(target):
    head = EagleHead.from_target(target)
    with pytest.raises(ValueError, match="steps: expected at least 1, got 0"):
        head.forward_train(*random_text(target), steps=0)


def test_rope_is_the_targets_rotation(target):
    head = EagleHead.from_target(target)
    positions = torch.tensor([[0, 1, 77]])
    cos, sin = target.model.rotary_emb(torch.zeros(1, 3, 8), positions)
    ours = head.rope(positions)
    torch.testing.assert_close(ours[0].squeeze(-2), cos)
    torch.testing.assert_close(ours[1].squeeze(-2), sin)


def test_casting_keeps_rotation_frequencies_in_float32(target):
    head = EagleHead.from_target(target)
    before = head.inv_freq.clone()
    head.to(torch.bfloat16)
    assert head.inv_freq.dtype == torch.float32
    assert torch.equal(head.inv_freq, before)


def test_draft_logits_are_rows_of_the_full_logits(target):
    ids = [90, 3, 17, 4, 5]
    head = EagleHead.from_target(target, ids)
    hidden = torch.randn(2, 3, 32)
    with torch.no_grad():
        full = target.lm_head(hidden)
        torch.testing.assert_close(head.logits(hidden), full[..., ids])
        torch.testing.assert_close(EagleHead.from_target(target).logits(hidden), full)
    assert head.draft_to_target.tolist() == ids
    assert head.lm_head_weight.is_contiguous()


def test_embedding_is_shared_with_the_target(target):
    head = EagleHead.from_target(target)
    weight = target.get_input_embeddings().weight
    assert head.embed_weight.data_ptr() == weight.data_ptr()
    assert not head.embed_weight.requires_grad


@pytest.mark.parametrize(
    ("vocab", "error", "match"),
    [
        (8, TypeError, "got a bare int"),
        ([4, 1, 1], ValueError, r"draft_vocab\[2\]: .* got 1, which draft_vocab\[1\] is too"),
        ([0, 97], ValueError, r"draft_vocab\[1\]: expected a value from 0 to 96, got 97"),
        ([], ValueError, r"draft_vocab: expected at least one target id, .* got shape \(0,\)"),
    ],
    ids=["count", "repeated", "out-of-range", "empty"],
)
def test_bad_draft_vocabularies_are_refused(target, vocab, error, match):
    with pytest.raises(error, match=match):
        EagleHead.from_target(target, vocab)


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([5, 2, 5], r"draft_to_target\[2\]: .* got 5, which draft_to_target\[0\] is too"),
        ([5, -1, 60], r"draft_to_target\[1\]: expected a value from 0 to 96, got -1"),
        ([5, 2, 97], r"draft_to_target\[2\]: .* got 97"),
        ([[5], [2], [60]], r"in one dimension, got shape \(3, 1\)"),
    ],
    ids=["repeated", "negative", "past the vocabulary", "two dimensions"],
)
def test_a_head_is_not_made_or_loaded_with_a_bad_vocabulary_map(target, tmp_path, ids, match):
    good = EagleHead.from_target(target, [5, 2, 60])
    with pytest.raises(ValueError, match=match):
        EagleHead(good.config, torch.tensor(ids))
    with pytest.raises(TypeError, match="draft_to_target: expected integer target ids, got float"):
        EagleHead(good.config, torch.tensor(ids).float())
    good.draft_to_target = torch.tensor(ids)
    good.save(tmp_path)
    with pytest.raises(ValueError, match=match):
        EagleHead.from_pretrained(tmp_path)


@pytest.mark.parametrize("vocab", [None, [5, 2, 60]], ids=["full", "draft-vocab"])
def test_saved_head_comes_back(target, tmp_path, vocab):
    head = EagleHead.from_target(target, vocab, seed=5)
    head.save(tmp_path)
    again = EagleHead.from_pretrained(tmp_path, target=target)
    assert again.config == head.config
    assert again.fc.weight.dtype == torch.float32
    for (name, a), (_, b) in zip(head.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b.bfloat16()), name
    if vocab:
        assert again.draft_to_target.tolist() == vocab
    tokens, features = random_text(target)
    with torch.no_grad():
        again.logits(again.forward_train(tokens, features)[0])


def test_saved_weights_are_bfloat16_under_public_names(target, tmp_path):
    EagleHead.from_target(target, [1, 2]).save(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert state["fc.weight"].dtype == torch.bfloat16
    assert state["draft_to_target"].dtype == torch.int32
    assert {"layers.0.self_attn.q_proj.weight", "layers.0.mlp.down_proj.weight"} <= state.keys()
    assert not any("embed" in k or "lm_head" in k for k in state)


def test_loading_lists_everything_that_does_not_fit(target, tmp_path):
    EagleHead.from_target(target).save(tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    del state["layers.0.mlp.up_proj.weight"]
    state["hidden_norm.weight"] = torch.ones(32)
    state["fc.weight"] = torch.ones(32, 32)
    save_file(state, path)
    with pytest.raises(ValueError) as caught:
        EagleHead.from_pretrained(tmp_path, target=target)
    message = str(caught.value)
    assert "unknown keys: hidden_norm.weight" in message
    assert "missing keys: layers.0.mlp.up_proj.weight" in message
    assert "fc.weight (expected [32, 64], got [32, 32])" in message


def test_public_checkpoint_layout_loads(target, tmp_path):
    """pytorch_model.bin without fc.bias, with an embedding of its own, Llama's config.json."""
    head = EagleHead.from_target(target)
    state = {k: v.detach().clone() for k, v in head.named_parameters() if k != "fc.bias"}
    state["embed_tokens.weight"] = torch.randn(97, 32)
    torch.save(state, tmp_path / "pytorch_model.bin")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 97,
        "rms_norm_eps": 1e-6,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = EagleHead.from_pretrained(tmp_path, target=target)
    assert again.fc.bias is None
    assert again.config.rope_theta == 10000.0
    assert torch.equal(again.embed_weight, state["embed_tokens.weight"])


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        EagleHead.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors or pytorch_model\.bin"):
        EagleHead.from_pretrained(tmp_path)


def test_binding_to_another_width_is_refused(target):
    head = EagleHead.from_target(target)
    with pytest.raises(ValueError, match=r"expected an embedding of \[97, 32\]"):
        head.bind(tiny_target(hidden_size=16))


def test_unbound_head_says_so(target):
    head = EagleHead(EagleConfig.from_target(target.config))
    with pytest.raises(RuntimeError, match=r"call head\.bind"):
        head.embed(torch.tensor([1]))
    with pytest.raises(RuntimeError, match=r"call head\.bind"):
        head.logits(torch.zeros(1, 32))
