"""Layers by fused operators: the modules' values and roundings, and the modules where in doubt."""

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from test_target import decode, lens, tokens
from tiny_models import MOE, tiny_head, tiny_model
from torch import nn
from torch.nn.utils import prune

from eagle2_kernels import EagleDecoder, SamplingParams, TargetModel, TreeConfig
from eagle2_kernels.models import fused
from eagle2_kernels.models.draft import new_draft_cache, refeed
from eagle2_kernels.models.fused import CacheRows
from eagle2_kernels.models.heads import Eagle3Head, EagleHead

transformers = pytest.importorskip("transformers")

PROMPTS = [[3, 4, 5, 6, 7], [11], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 12, 13, 14]]
WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
LONG = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
# every class that is known, and what its layers may have
KNOWN = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1, "head_dim": 24}),
    "llama, odd sizes": ("llama", {"hidden_size": 44, "intermediate_size": 51, "head_dim": 10}),
    "llama, dynamic rope": ("llama", {"rope_parameters": LONG, "max_position_embeddings": 8}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows": ("qwen2", WINDOWS),
    "qwen3": ("qwen3", {}),
    "qwen3, windows": ("qwen3", WINDOWS | {"attention_bias": True}),
}
known = pytest.mark.parametrize("name", KNOWN)
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
# of the largest feature; norms are float32 in any dtype
NEAR = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 4e-3}


def known_model(name, dtype=torch.float64):
    kind, settings = KNOWN[name]
    return tiny_model(kind, dtype=dtype, **settings)


def pair(model, **options):
    """The fused target and one that runs the modules."""
    target = TargetModel(model, **options)
    return target, TargetModel(model, fuse_layers=False, **options)


def near(got, want):
    error = (got.double() - want.double()).abs().max()
    return bool(error <= NEAR[got.dtype] * max(1.0, float(want.double().abs().max())))


def features_of(target, ids=(5, 9, 11, 3)):
    return decode(target, torch.tensor(ids), ())[1]


@torch.inference_mode()
def fuses(target):
    return target.is_fused


@torch.inference_mode()
def forward(target, batch=2, taps=()):
    """A prefix, then a tree with padded rows; features of what is no padding, taps, the caches."""
    cache = target.new_cache(batch, 16)
    ids = tokens(9 * batch).view(batch, 9)
    starts = torch.arange(batch) % 2
    prefix = (starts + 3).int()
    target.forward(
        cache, ids[:, :4], torch.arange(4).expand(batch, 4), lens(*[0] * batch), lengths=prefix
    )
    depths = torch.tensor([[0, 1, 1, 2, 0]] * batch, dtype=torch.int32)
    mask = torch.tensor([[[1], [3], [5], [11], [0]]] * batch)
    args = cache, ids[:, 4:], depths + prefix[:, None].long(), prefix
    options = {"tree_mask": mask, "depths": depths, "lengths": torch.full_like(prefix, 4)}
    if taps:
        features, tapped = target.forward_tapped(taps, *args, **options)
        return features[:, :4], tapped[:, :4], *cache.tensors
    return target.forward(*args, **options)[:, :4], *cache.tensors


@known
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("pack", [False, True], ids=["plain", "packed"])
def test_a_forward_is_the_modules(name, dtype, pack):
    # a dynamic rotation keeps state in the model: one for each
    fast = TargetModel(known_model(name, dtype), pack_weights=pack)
    slow = TargetModel(known_model(name, dtype), pack_weights=pack, fuse_layers=False)
    assert fuses(fast) and not fuses(slow)
    for batch in (1, 2, 3):
        for got, want in zip(forward(fast, batch), forward(slow, batch), strict=True):
            assert got.dtype == want.dtype and near(got, want)
    ids = tokens(24)
    for got, want in zip(decode(fast, ids, (9, 10)), decode(slow, ids, (9, 10)), strict=True):
        assert near(got, want)


@pytest.mark.parametrize("name", ["llama, biases", "qwen3, windows"])
def test_low_precision_is_rounded_where_the_modules_round(name):
    """Nearly every element has the same bits: only the sums of norms have an order of their own."""
    for dtype in (torch.bfloat16, torch.float16):
        fast, slow = pair(known_model(name, dtype))
        for got, want in zip(forward(fast), forward(slow), strict=True):
            assert (got != want).float().mean() < 0.02


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_taps_are_the_outputs_of_layers(name):
    fast, slow = pair(tiny_model(name, num_hidden_layers=5))
    for taps in ((0, 1), (3, 4), (4, 0, 2)):
        for got, want in zip(forward(fast, taps=taps), forward(slow, taps=taps), strict=True):
            assert got.shape == want.shape and near(got, want)
    # features stay what they are without taps
    assert torch.equal(forward(fast, taps=(4,))[0], forward(fast)[0])


@pytest.mark.parametrize("kind", ["EagleHead", "Eagle3Head"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_trees_emit_what_plain_decoding_emits(name, kind):
    model = tiny_model(name, num_hidden_layers=7, dtype=torch.float64)
    decoder = EagleDecoder(model, tiny_head(model, kind=kind))
    assert fuses(decoder.target)
    options = {"max_new_tokens": 24, "eos_token_ids": ()}
    wide = TreeConfig(max_nodes=24, top_k=6, max_depth=3)
    for sampling in (None, SamplingParams(temperature=1.0, seed=5)):
        want = decoder.generate_plain(PROMPTS, **options, sampling=sampling).token_ids
        assert decoder.generate(PROMPTS, **options, sampling=sampling).token_ids == want
        got = decoder.generate(PROMPTS[0], **options, sampling=sampling, config=wide).token_ids
        assert got == want[0]
        # and what the modules emit
        slow = EagleDecoder(TargetModel(model, fuse_layers=False), tiny_head(model, kind=kind))
        assert slow.generate(PROMPTS, **options, sampling=sampling).token_ids == want


HEADS = {
    "EAGLE-2": (EagleHead, {}),
    "EAGLE-2, q/k/v biases, no fc bias": (EagleHead, {"attention_bias": True, "fc_bias": False}),
    "EAGLE-2, head norms": (EagleHead, {"qk_norm": True}),
    "EAGLE-3": (Eagle3Head, {}),
    "EAGLE-3, residual normed": (Eagle3Head, {"norm_before_residual": True, "qk_norm": True}),
    "EAGLE-3.1": (Eagle3Head, {"norm_output": True, "fc_norm": True, "norm_before_fc": True}),
}


def head_of(model, name, pack):
    kind, variant = HEADS[name]
    head = kind.from_target(model, seed=2, **variant)
    with torch.no_grad():
        for p in head.parameters():
            if p.ndim == 1:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) * 0.2)
    return head.pack_weights() if pack else head


@torch.inference_mode()
def draft(head, features):
    """Re-fed pairs of two requests, padded, then a level of a tree; logits, then the cache."""
    cache = new_draft_cache(head, 2, 20)
    fed = refeed(head, cache, tokens(10, 1).view(2, 5), features, lens(2, 0), lens(5, 3))
    mask = torch.tensor([[[0b1001], [0b10010], [0b100100]]] * 2)
    prefix = lens(7, 3)
    # three rows behind three earlier ones of the tree
    rows = CacheRows(cache.k, cache.v, None, prefix, mask, 6)
    hidden = head.advance(
        tokens(6, 4).view(2, 3), fed[:, :3], prefix[:, None] + lens(1, 1, 1), rows
    )
    return head.logits(hidden), hidden, fed[0], fed[1, :3], cache.k, cache.v


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("pack", [False, True], ids=["plain", "packed"])
def test_a_heads_layer_is_the_modules(name, dtype, pack):
    model = tiny_model(num_hidden_layers=7, dtype=dtype)
    fast, slow = head_of(model, name, pack).fuse_layer(), head_of(model, name, pack)
    for scale in (1.0, 1.5):
        fast.embed_scale = slow.embed_scale = scale
        features = torch.randn(2, 5, fast.feature_size, generator=torch.Generator().manual_seed(1))
        features = features.to(dtype)
        before = features.clone()
        with torch.inference_mode():
            assert fast.is_fused and not slow.is_fused
        for got, want in zip(draft(fast, features), draft(slow, features), strict=True):
            assert got.dtype == want.dtype and near(got, want)
        assert torch.equal(features, before)


HEAD_CHANGES = {
    "hook": lambda h: h.layers[0].mlp.register_forward_hook(lambda *args: None),
    "weight": lambda h: setattr(h.fc, "weight", nn.Parameter(h.fc.weight * 2)),
    "module": lambda h: setattr(h.layers[0].mlp, "up_proj", nn.Sequential(h.layers[0].mlp.up_proj)),
    "class": lambda h: setattr(
        h.layers[0].mlp, "__class__", type("Mine", (type(h.layers[0].mlp),), {})
    ),
    "dtype": lambda h: h.layers[0].post_attention_layernorm.double(),
    "forward": lambda h: setattr(h.fc, "forward", lambda x: -x),
}


@pytest.mark.parametrize("change", HEAD_CHANGES)
def test_a_head_of_other_code_runs_its_modules(change):
    """Seen when it is fused, and what a module does not carry about itself afterwards too."""
    head = tiny_head(tiny_model(dtype=torch.float32)).fuse_layer()
    assert fuses(head) and not head.is_fused  # gradients are on here
    HEAD_CHANGES[change](head)
    assert fuses(head) == (change == "dtype")
    assert fuses(head.fuse_layer()) == (change == "weight")


def test_a_head_bound_again_or_copied_runs_its_modules():
    model = tiny_model(dtype=torch.float32)
    head = tiny_head(model).fuse_layer()
    assert not fuses(pickle.loads(pickle.dumps(head))) and not fuses(copy.deepcopy(head))
    assert fuses(head) and not fuses(head.bind(model))


@known
def test_whole_layers_are_their_operators_bit_for_bit(name):
    """`decoder_layer` where everything is packed; the loop over operators gives the same bits."""
    whole, parts = (
        TargetModel(known_model(name, torch.bfloat16), pack_weights=True) for _ in range(2)
    )
    assert whole._fused._wholes and len(parts._fused._wholes) == len(whole._fused._wholes)
    parts._fused._wholes = []
    for taps in ((), (0, 1), (1,)):
        for got, want in zip(forward(whole, taps=taps), forward(parts, taps=taps), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("name", HEADS)
def test_a_heads_whole_layer_is_its_operators_bit_for_bit(name):
    model = tiny_model(num_hidden_layers=7, dtype=torch.bfloat16)
    whole, parts = (head_of(model, name, True).fuse_layer() for _ in range(2))
    assert whole._fused._whole is not None
    parts._fused._whole = None
    features = torch.randn(2, 5, whole.feature_size, generator=torch.Generator().manual_seed(1))
    for got, want in zip(*(draft(h, features.bfloat16()) for h in (whole, parts)), strict=True):
        assert torch.equal(got, want)


def test_layers_that_are_not_all_packed_run_by_their_operators():
    """Norms of different eps, and a product that was left alone."""
    model = tiny_model(dtype=torch.bfloat16)
    assert not TargetModel(model, pack_weights=False)._fused._wholes
    assert not TargetModel(tiny_model(dtype=torch.float32), pack_weights=True)._fused._wholes
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 0.5
    fast, slow = pair(model, pack_weights=True)
    assert fuses(fast) and not fast._fused._wholes
    assert near(features_of(fast), features_of(slow))


def test_a_rows_bits_are_its_own():
    """Every operator works row by row; so do these products in float64, padded to one size."""
    target = TargetModel(tiny_model(dtype=torch.bfloat16))
    with torch.inference_mode():
        ids = torch.randint(3, 61, (1, 8))
        cache = target.new_cache(1, 8)
        args = torch.arange(8)[None], lens(0)
        both = [target.forward(cache, ids, *args)]
        ids[0, 5:] = 7
        both.append(target.forward(cache, ids, *args))
    assert torch.equal(both[0][:, :5], both[1][:, :5])


# where the modules run


def no_silu():
    return tiny_model(hidden_act="gelu")


def unknown_class():
    return tiny_model("granite")


def sub_class():
    model = tiny_model()
    model.model.layers[1].mlp.__class__ = type("Mine", (type(model.model.layers[1].mlp),), {})
    return model


def other_eps():
    model = tiny_model("qwen3")
    model.model.layers[0].self_attn.q_norm.variance_epsilon = 0.5
    return model


def odd_parameter():
    model = tiny_model()
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = type("Odd", (nn.Parameter,), {})(linear.weight.detach())
    return model


def hooked():
    model = tiny_model()
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: -out)
    return model


def forward_in_place():
    model = tiny_model()
    norm = model.model.norm
    norm.forward = lambda x: 2 * type(norm).forward(norm, x)
    return model


def adapter():
    model = tiny_model()
    layer = model.model.layers[1].self_attn
    layer.o_proj = nn.Sequential(layer.o_proj, nn.Tanh())
    return model


def another_module():
    """Which nobody calls: what is not known to the last module is not known."""
    model = tiny_model()
    model.model.layers[1].extra = nn.Identity()
    return model


REFUSED = [no_silu, unknown_class, sub_class, other_eps, odd_parameter, hooked]
REFUSED += [forward_in_place, adapter, another_module]


@pytest.mark.parametrize("make", REFUSED, ids=lambda f: f.__name__)
def test_what_is_not_known_runs_its_modules(make):
    fast, slow = pair(make())
    assert fast._fused is None
    assert torch.equal(features_of(fast), features_of(slow))


def test_experts_run_their_modules():
    model = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**tiny_model().config.to_diff_dict() | MOE | {"head_dim": 8})
    )
    assert TargetModel(model.eval())._fused is None


@pytest.mark.parametrize("what", ["class", "rotation", "linear"])
def test_patched_code_runs_as_it_is(what, monkeypatch):
    """As libraries do that bring layers of their own."""
    from transformers.models.llama import modeling_llama

    model = tiny_model()
    if what == "class":
        own = modeling_llama.LlamaMLP.forward
        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: own(self, x))
    elif what == "rotation":
        turn = modeling_llama.apply_rotary_pos_emb
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *a, **k: turn(*a, **k))
    else:
        own = nn.Linear.forward
        monkeypatch.setattr(nn.Linear, "forward", lambda self, input: own(self, input))
    assert TargetModel(model)._fused is None


def test_a_forward_that_differs_is_not_fused(monkeypatch):
    """A look at the code is not enough: the values must be the modules' too."""
    model = tiny_model()
    assert fuses(TargetModel(model))
    plain = fused._attention_options
    monkeypatch.setattr(
        fused, "_attention_options", lambda scaling, *rest: plain(2 * scaling, *rest)
    )
    assert TargetModel(model)._fused is None


CHANGES = {
    "hook": lambda m: m.layers[1].mlp.act_fn.register_forward_hook(lambda _, a, out: -out),
    "pre-hook": lambda m: m.layers[0].register_forward_pre_hook(lambda _, a: (-a[0],)),
    "hook of the model": lambda m: m.register_forward_hook(
        lambda _, a, out: setattr(out, "last_hidden_state", -out.last_hidden_state)
    ),
    "forward": lambda m: setattr(m.norm, "forward", lambda x: -x),
    "forward of the model": lambda m: setattr(
        m, "forward", lambda own=m.forward, **k: own(**k | {"input_ids": k["input_ids"] * 0})
    ),
    "module": lambda m: setattr(m.layers[1], "mlp", nn.Identity()),
    "layer": lambda m: setattr(m.layers[0], "input_layernorm", nn.Identity()),
    "embedding": lambda m: setattr(m, "embed_tokens", nn.Embedding(61, 32, dtype=m.dtype)),
    "weight": lambda m: setattr(
        m.layers[0].mlp.up_proj, "weight", nn.Parameter(-m.layers[0].mlp.up_proj.weight)
    ),
    "norm's weight": lambda m: setattr(m.norm, "weight", nn.Parameter(-m.norm.weight)),
    "bias": lambda m: setattr(m.layers[0].self_attn.q_proj, "bias", None),
    "weight's memory": lambda m: setattr(
        m.layers[0].mlp.up_proj.weight, "data", torch.ones(48, 32).to(m.dtype)
    ),
    "class": lambda m: setattr(m.layers[1].mlp.down_proj, "__class__", Negated),
    "table of hooks": lambda m: (
        setattr(m.layers[1].mlp, "_forward_hooks", OrderedDict()),
        m.layers[1].mlp.register_forward_hook(lambda _, a, out: -out),
    ),
    "pruned": lambda m: prune.l1_unstructured(m.layers[1].mlp.down_proj, "weight", 0.5),
    "packed weight in place": lambda m: m.layers[1].self_attn.v_proj.weight.mul_(-2),
    "norm in place": lambda m: m.norm.weight.mul_(-2),
}


class Negated(nn.Linear):
    def forward(self, x):
        return -super().forward(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changes_afterwards_are_seen(change, dtype):
    model = tiny_model(dtype=dtype, attention_bias=True, tie_word_embeddings=False)
    fast, slow = pair(model, pack_weights=True)
    before = features_of(fast)
    assert fuses(fast) and near(before, features_of(slow))
    CHANGES[change](model.model)
    got, want = features_of(fast), features_of(slow)
    assert near(got, want) and not near(got, before)
    # what only changed in place is read where it lies, unless a copy of it is in use
    packed = dtype == torch.bfloat16
    stays = {"norm in place", *(() if packed else ("packed weight in place", "weight's memory"))}
    assert fuses(fast) == (change in stays)


@torch.no_grad()
def test_a_class_patched_afterwards_is_seen(monkeypatch):
    model = tiny_model(dtype=torch.float32)
    target = TargetModel(model)
    before, mlp = features_of(target), type(model.model.layers[0].mlp)
    assert fuses(target)
    monkeypatch.setattr(mlp, "forward", lambda self, x, own=mlp.forward: -own(self, x))
    assert not fuses(target) and not near(features_of(target), before)


@torch.no_grad()
def test_a_loops_twin_sees_what_touches_the_whole_model():
    """Hooks anywhere, train(), its first and last layer; not one layer between them."""
    seen = {
        "train": lambda m: m.train(),
        "hook": lambda m: m.layers[1].mlp.register_forward_hook(lambda *args: None),
        "first": lambda m: setattr(m.layers[0].mlp, "up_proj", nn.Identity()),
        "last": lambda m: setattr(m.layers[2].mlp.up_proj, "weight", nn.Parameter(torch.ones(1))),
        "layer": lambda m: m.layers.__setitem__(1, copy.deepcopy(m.layers[1])),
        "norm": lambda m: setattr(m.norm, "forward", lambda x: x),
        "between": lambda m: setattr(m.layers[1].mlp, "up_proj", nn.Identity()),
    }
    for name, change in seen.items():
        model = tiny_model(num_hidden_layers=3)
        target = TargetModel(model)
        with torch.inference_mode():
            twin = target.settled()
        assert twin is not target and fuses(twin)
        assert torch.equal(features_of(twin), features_of(target))
        change(model.model)
        assert not fuses(target) and fuses(twin) == (name == "between")
    slow = TargetModel(tiny_model("granite"))
    assert slow.settled() is slow


def test_training_gradients_and_global_hooks_run_the_modules():
    model = tiny_model()
    target = TargetModel(model)
    assert fuses(target) and not target.is_fused  # gradients are on here
    model.train()
    assert not fuses(target)
    model.eval()
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    assert not fuses(target)
    handle.remove()
    assert fuses(target)


def test_a_model_converted_afterwards_runs():
    model = tiny_model(dtype=torch.float32)
    target = TargetModel(model)
    model.double()
    assert near(features_of(target), features_of(TargetModel(model)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_runs_its_own_modules(copied):
    target = TargetModel(tiny_model())
    twin = copied(target)
    assert fuses(target) and not fuses(twin)
    with torch.no_grad():
        twin.hf_model.model.norm.weight.mul_(-1)
    assert near(features_of(twin), -features_of(target))


def test_the_model_is_what_it_was():
    model = tiny_model()
    implementation = model.config._attn_implementation_internal
    features_of(TargetModel(model, pack_weights=True))
    assert not any("forward" in vars(m) or m._forward_pre_hooks for m in model.modules())
    assert model.config._attn_implementation_internal == implementation
