"""Layers as fused kernels: the eager forward's values, one compilation, a model left as it was.

But for one test the traced graphs run as they are, which shows everything but Inductor's own work.
"""

import copy
import pickle

import pytest
import torch
import torch._inductor.config
from test_target import TOLERANCE, decode, lens, tokens
from tiny_models import BASE, MOE, randomized, tiny_head, tiny_model
from torch import nn

from eagle2_kernels import EagleDecoder, SamplingParams, TargetModel, TreeConfig
from eagle2_kernels.models import compiled
from eagle2_kernels.models.compiled import TensorSpec, find_specs

transformers = pytest.importorskip("transformers")

PROMPTS = [[3, 4, 5, 6, 7], [11], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 12, 13, 14]]


@pytest.fixture
def graphs(monkeypatch):
    """The graphs handed to Inductor, which run as they are."""
    seen = []

    def keep(graph, inputs):
        seen.append(graph)
        return graph

    monkeypatch.setattr(compiled, "_compile", keep)
    return seen


def decoders(model, kind="EagleHead"):
    """An eager decoder and a compiled one over one model."""
    heads = [tiny_head(model, kind=kind) for _ in range(2)]
    return EagleDecoder(model, heads[0]), EagleDecoder(model, heads[1], compile=True)


def text(decoder):
    return decoder.generate(PROMPTS, max_new_tokens=10, eos_token_ids=()).token_ids


def texts(decoder):
    """Tokens of trees of two shapes and of plain decoding, for one request and for several."""
    options = {"max_new_tokens": 10, "eos_token_ids": ()}
    wide = TreeConfig(max_nodes=24, top_k=6, max_depth=3)
    sampled = SamplingParams(temperature=1.0, seed=5)
    return [
        decoder.generate(PROMPTS, **options).token_ids,
        decoder.generate(PROMPTS[0], **options, config=wide, sampling=sampled).token_ids,
        decoder.generate_plain(PROMPTS, **options).token_ids,
        decoder.generate_plain(PROMPTS[0], **options, sampling=sampled).token_ids,
    ]


def features_of(target, ids=(5, 9, 11, 3)):
    ids = torch.tensor(ids)
    return decode(target, ids, ())[1]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_neox", "gpt2"])
def test_features_are_the_eager_forwards(graphs, name):
    eager = TargetModel(tiny_model(name))
    fast = eager.compiled()
    assert fast.is_compiled and not eager.is_compiled and fast.compiled() is fast
    ids = tokens(24)
    for got, want in zip(decode(fast, ids, (9, 10)), decode(eager, ids, (9, 10)), strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)
    # both layers of each of these models are the same code
    assert len(graphs) == 1


def test_tokens_are_the_eager_decoders(graphs):
    eager, fast = decoders(tiny_model("qwen2"))
    got = texts(fast)
    assert got == texts(eager)
    assert got[0] == got[2] and got[1] == got[3]
    # one for the layers, one for the head, whatever was decoded
    assert len(graphs) == 2


def test_an_eagle3_head_reads_compiled_layers(graphs):
    eager, fast = decoders(tiny_model(num_hidden_layers=7), "Eagle3Head")
    assert text(fast) == text(eager)
    assert len(graphs) == 2


def test_attention_sinks_and_experts_or_a_refusal(graphs):
    """Experts may choose rows by value, which no graph can hold: then the layer is named."""
    settings = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    sinks = transformers.GptOssForCausalLM(transformers.GptOssConfig(**(BASE | settings)))
    moe = transformers.Qwen3MoeConfig(**(BASE | MOE | {"head_dim": 8}))
    for model in (sinks, transformers.Qwen3MoeForCausalLM(moe)):
        eager = TargetModel(randomized(model, 0).eval())
        try:
            fast = eager.compiled()
        except ValueError as error:
            assert f"compile: layer 0 of {type(model).__name__} cannot be traced" in str(error)
            continue
        torch.testing.assert_close(features_of(fast), features_of(eager), rtol=1e-3, atol=1e-3)


def test_kernels_give_the_eager_tokens_and_a_row_the_same_bits(monkeypatch):
    """Inductor's own work, on the target; the head's graph runs as it is."""
    inductor, names = compiled._compile, []

    def compile_first(graph, inputs):
        names.append(graph)
        return inductor(graph, inputs) if len(names) == 1 else graph

    monkeypatch.setattr(compiled, "_compile", compile_first)
    model = tiny_model(dtype=torch.float32)
    # no pool of processes for the little there is to compile
    with torch._inductor.config.patch(compile_threads=1):
        eager, fast = decoders(model)
    assert texts(fast) == texts(eager)
    assert len(names) == 2
    # What is fused gives a row the same bits in any company; products of few rows need not.
    with torch.no_grad():
        for linear in (m for m in model.model.modules() if isinstance(m, nn.Linear)):
            linear.weight.zero_()
    many = features_of(fast.target, (5, 9, 11, 3))
    assert torch.equal(features_of(fast.target, (5,))[0], many[0])
    torch.testing.assert_close(many, features_of(eager.target, (5, 9, 11, 3)))


@torch.no_grad()
def test_layers_of_other_code_or_constants_do_not_share(graphs):
    model = tiny_model(num_hidden_layers=3)
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5
    eager = TargetModel(model)
    torch.testing.assert_close(features_of(eager.compiled()), features_of(eager), **TOLERANCE)
    assert len(graphs) == 2


def test_the_model_is_what_it_was(graphs):
    model = tiny_model()
    eager = TargetModel(model)
    before = features_of(eager)
    implementation = model.config._attn_implementation_internal
    fast = eager.compiled()
    features_of(fast)

    def check():
        assert not any("forward" in vars(m) or m._forward_pre_hooks for m in model.modules())
        assert model.config._attn_implementation_internal == implementation
        assert torch.equal(features_of(eager), before)

    check()
    with pytest.raises(IndexError):
        features_of(fast, (5, 1000))
    check()


@pytest.mark.parametrize("pack", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("change", ["in place", "replaced", "norm"])
@torch.no_grad()
def test_changed_weights_are_read(graphs, pack, change):
    model = tiny_model(dtype=torch.bfloat16)
    eager = TargetModel(model, pack_weights=pack)
    fast = eager.compiled()
    assert eager.is_packed(model.model.layers[0].mlp.up_proj) == pack
    before = features_of(fast)
    layer = model.model.layers[0]
    if change == "in place":
        layer.self_attn.k_proj.weight.mul_(-2)
    elif change == "replaced":
        layer.mlp.down_proj.weight = nn.Parameter(layer.mlp.down_proj.weight * -2)
    else:
        layer.input_layernorm.weight = nn.Parameter(layer.input_layernorm.weight * -2)
    got, want = features_of(fast).float(), features_of(eager).float()
    assert (got - before.float()).abs().max() > 0.5
    torch.testing.assert_close(got, want, rtol=0.1, atol=0.1)


def test_products_run_from_packed_weights(graphs):
    model = tiny_model(dtype=torch.bfloat16)
    TargetModel(model, pack_weights=True).compiled()
    # q, k, v; o; gate, up; down
    code = graphs[0].code
    assert code.count("eagle2_models.outside") - 1 == 4
    assert "aten.mm" not in code


def test_a_model_converted_afterwards_is_refused(graphs):
    model = tiny_model(dtype=torch.float32)
    fast = TargetModel(model).compiled()
    model.double()
    with pytest.raises(ValueError, match=r"layer 0 of LlamaForCausalLM.*float32.*got .*float64"):
        features_of(fast)
    model.float()
    model.model.layers[1].input_layernorm.weight = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"layer 1 of LlamaForCausalLM.*\[32\].*got .*\[1\]"):
        features_of(fast)


def test_weights_on_another_device_are_refused(graphs):
    """Kernels would read from their addresses."""
    model = tiny_model()
    fast = TargetModel(model).compiled()
    model.model.layers[1].input_layernorm.to("meta")
    with pytest.raises(ValueError, match=r"layer 1 of Llama.*type='cpu'.*got .*type='meta'"):
        features_of(fast)


@pytest.mark.parametrize("what", ["adapter", "hook", "pre-hook"])
def test_modules_changed_afterwards_are_refused(graphs, what):
    """What stands in their place would not run."""
    model = tiny_model()
    eager = TargetModel(model)
    fast = eager.compiled()
    mlp = model.model.layers[1].mlp
    if what == "adapter":
        mlp.up_proj = nn.Sequential(mlp.up_proj, nn.Tanh())
    elif what == "hook":
        mlp.act_fn.register_forward_hook(lambda module, args, out: -out)
    else:
        mlp.act_fn.register_forward_pre_hook(lambda module, args: -args[0])
    message = "got others" if what == "adapter" else "got hooks on some"
    with pytest.raises(ValueError, match=f"compile: expected layer 1 of Llama.*{message}; make"):
        features_of(fast)
    features_of(eager)
    if what == "adapter":
        torch.testing.assert_close(features_of(eager.compiled()), features_of(eager), **TOLERANCE)


def test_hooks_of_a_layer_itself_still_run(graphs):
    model = tiny_model()
    eager = TargetModel(model)
    fast = eager.compiled()
    before = features_of(fast)
    model.model.layers[0].register_forward_hook(lambda module, args, out: -out)
    torch.testing.assert_close(features_of(fast), features_of(eager), **TOLERANCE)
    assert not torch.allclose(features_of(fast), before)


def test_a_head_bound_again_forgets_its_kernels(graphs):
    """Or a later decoder could not use a head in another dtype, compiled or not."""
    model = tiny_model(dtype=torch.float32)
    head = tiny_head(model)
    EagleDecoder(model, head, compile=True)
    model.double(), head.double()
    for compile in (False, True):
        decoder = EagleDecoder(model, head, compile=compile)
        assert (head._compiled is not None) == compile
        assert text(decoder) == text(EagleDecoder(model, tiny_head(model)))


def test_inputs_that_do_not_fit_are_refused(graphs):
    """Kernels look at no shape themselves."""
    head = tiny_head(tiny_model()).compile_layer()
    assert head._compiled is not None
    ids, features = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, 32).double()

    def attend(q, k, v):
        return torch.zeros_like(q)

    with torch.inference_mode():
        assert head.advance(ids, features, ids, attend).shape == (2, 3, 32)
        for bad in (
            (ids, features, ids[:1]),
            (ids, features[:, :2], ids),
            (ids, features[..., :31], ids),
            (ids, features, ids.int()),
            (ids[0], features, ids),
        ):
            with pytest.raises(ValueError, match="compile: the EagleHead expected"):
                head.advance(*bad, attend)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_is_not_compiled_and_works(graphs, copied):
    _, fast = decoders(tiny_model())
    twin = copied(fast)
    assert fast.target.is_compiled and not twin.target.is_compiled
    assert text(twin) == text(fast)


class Strange(nn.Module):
    """An MLP's stand-in that does what no graph can hold."""

    def __init__(self, what):
        super().__init__()
        self.what, self.table = what, torch.ones(32, dtype=torch.float64)

    def forward(self, x):
        if self.what == "a constant":
            return x * self.table
        if self.what == "a branch":
            return x if x.sum() > 0 else -x
        if self.what == "rows by value":
            return x[x[..., 0] > 0].sum() * x
        return x + torch.rand_like(x)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a constant", "layer 1 of LlamaForCausalLM"),
        ("a branch", "layer 1 of LlamaForCausalLM cannot be traced"),
        ("rows by value", "layer 1 of LlamaForCausalLM cannot be traced"),
        ("random numbers", "layer 1 of LlamaForCausalLM draws random numbers"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(graphs, what, message):
    model = tiny_model()
    target = TargetModel(model)
    model.model.layers[1].mlp = Strange(what)
    with pytest.raises(ValueError, match=rf"compile: {message}.*compile=False"):
        target.compiled()
    assert not any("forward" in vars(m) for m in model.modules())


def test_what_runs_beside_the_modules_code_is_refused():
    for change, message in (
        (lambda mlp: mlp.register_forward_hook(lambda *args: None), "mlp carries hooks"),
        (lambda mlp: setattr(mlp, "forward", lambda x: x), "mlp has a forward put in its place"),
        (
            lambda mlp: setattr(mlp.up_proj, "weight", type("Odd", (nn.Parameter,), {})()),
            "mlp.up_proj has weights of a kind of its own",
        ),
    ):
        layer = tiny_model().model.layers[1]
        change(layer.mlp)
        with pytest.raises(ValueError, match=f"compile: layer 1.{message}"):
            compiled.refuse_modules("layer 1", layer)


def test_a_missing_compiler_is_said(monkeypatch):
    def fail(graph, inputs):
        raise OSError("No working C++ compiler found\nmore lines")

    monkeypatch.setattr(compiled, "_compile", fail)
    with pytest.raises(RuntimeError, match=r"layer 0 of Llama.*g\+\+.*compiler found; Eagle"):
        TargetModel(tiny_model()).compiled()


def test_off_the_cpu_it_is_refused():
    target = TargetModel(tiny_model())
    target.hf_model.to("meta")
    with pytest.raises(ValueError, match="expected the target on a CPU, got meta"):
        target.compiled()


def test_inputs_are_told_by_two_sizes():
    first = torch.zeros(2, 3, 8), torch.zeros(1, 3, dtype=torch.int64), torch.zeros(2, 2)
    second = torch.zeros(5, 7, 8), torch.zeros(1, 7, dtype=torch.int64), torch.zeros(5, 2)
    assert find_specs(first, (2, 3), second, (5, 7)) == [
        TensorSpec(("B", "N", 8), torch.float32),
        TensorSpec((1, "N"), torch.int64),
        TensorSpec(("B", 2), torch.float32),
    ]
    with pytest.raises(ValueError, match=r"takes a tensor of \[6, 8\] for 3 rows"):
        find_specs([torch.zeros(6, 8)], (2, 3), [torch.zeros(35, 8)], (5, 7))


def test_a_padded_tree_of_several_requests(graphs):
    eager = TargetModel(tiny_model("gemma3"))
    args = tokens(10).view(2, 5), torch.tensor([[0, 1, 1, 2, 0]] * 2), lens(0, 0)
    mask = torch.tensor([[[1], [3], [5], [11], [0]]] * 2)
    depths = torch.tensor([[0, 1, 1, 2, 0]] * 2, dtype=torch.int32)
    kwargs = {"tree_mask": mask, "depths": depths, "lengths": lens(4, 3)}
    with torch.inference_mode():
        want, got = (
            (t.forward(cache, *args, **kwargs), cache)
            for t in (eager, eager.compiled())
            for cache in [t.new_cache(2, 8)]
        )
    torch.testing.assert_close(got[0][0, :4], want[0][0, :4], **TOLERANCE)
    torch.testing.assert_close(got[0][1, :3], want[0][1, :3], **TOLERANCE)
    for a, b in zip(got[1].tensors, want[1].tensors, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)
