"""vLLM: the plugin that names our backend to it, and, marked `engine`, vLLM itself running on it.

`make vllm` runs the marked tests in an environment of vLLM's own.
"""

import os
import sys
import time
import types
from importlib.metadata import entry_points

import pytest
import torch

from eagle2_kernels.integrations import vllm as adapter


class Entry:
    """A member of vLLM's registry."""

    def __init__(self, overrides, name):
        self.overrides, self.name = overrides, name

    def is_overridden(self):
        return self.name in self.overrides

    def get_path(self):
        return self.overrides.get(self.name, f"vllm.{self.name}")

    def clear_override(self):
        self.overrides.pop(self.name, None)


@pytest.fixture
def fake(monkeypatch):
    """vLLM's registry and platform: `fake.cpu` says which, `fake.overrides` what was registered."""
    fake = types.SimpleNamespace(cpu=True, overrides={}, forgotten=[])
    platforms = types.ModuleType("vllm.platforms")
    platforms.current_platform = types.SimpleNamespace(is_cpu=lambda: fake.cpu)
    registry = types.ModuleType("vllm.v1.attention.backends.registry")
    registry.AttentionBackendEnum = types.SimpleNamespace(
        CPU_ATTN=Entry(fake.overrides, "CPU_ATTN"), CUSTOM=Entry(fake.overrides, "CUSTOM")
    )
    registry.register_backend = lambda entry, path: fake.overrides.update({entry.name: path})
    # what vLLM chose before the change, which must not outlive it
    chosen = types.SimpleNamespace(cache_clear=lambda: fake.forgotten.append(dict(fake.overrides)))
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["vllm.v1.attention"].selector = types.SimpleNamespace(
        _cached_get_attn_backend=chosen
    )
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    return fake


def test_vllm_finds_the_plugin():
    (plugin,) = entry_points(group="vllm.general_plugins", name="eagle2")
    assert plugin.load() is adapter.register


@pytest.mark.parametrize(
    ("cpu", "name", "path"),
    [(True, "CPU_ATTN", "CPUTreeAttentionBackend"), (False, "CUSTOM", "TreeAttentionBackend")],
    ids=["cpu", "elsewhere"],
)
def test_register_twice_is_once_and_can_be_undone(fake, cpu, name, path):
    fake.cpu = cpu
    for _ in range(2):
        adapter.register()
        assert fake.overrides == {
            name: f"eagle2_kernels.integrations.vllm.attention.{path}",
        }
        assert fake.forgotten[-1] == fake.overrides
    for _ in range(2):
        adapter.unregister()
        assert fake.overrides == {}
        assert fake.forgotten[-1] == {}


def test_a_strangers_backend_stays(fake, caplog):
    fake.overrides["CPU_ATTN"] = "somebody.Else"
    adapter.register()
    adapter.unregister()
    assert fake.overrides == {"CPU_ATTN": "somebody.Else"}
    assert "already somebody.Else" in caplog.text


# With vLLM


@pytest.mark.engine
def test_vllm_registers_it_however_often_it_loads_plugins():
    from vllm import plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    for _ in range(2):
        plugins.plugins_loaded = False
        plugins.load_general_plugins()
        backend = AttentionBackendEnum.CPU_ATTN.get_class()
        assert backend.__name__ == "CPUTreeAttentionBackend"


def reference(q, keys, values, options):
    """Attention of the last rows over all keys, in float64; q [n, Hq, D], keys [s, Hkv, D]."""
    n, s, group = len(q), len(keys), q.shape[1] // keys.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    logits = torch.einsum("nhd,shd->hns", q.double(), k) * options["scale"]
    cap = options["softcap"]
    if cap:
        logits = cap * torch.tanh(logits / cap)
    distance = torch.arange(s - n, s)[:, None] - torch.arange(s)
    seen = distance < options["window"] if options["window"] else torch.ones(n, s, dtype=torch.bool)
    if options["causal"]:
        seen &= distance >= 0
    logits = logits.masked_fill(~seen, float("-inf"))
    if options["sinks"] is not None:
        sink = options["sinks"].double()[:, None, None].expand(-1, n, 1)
        weights = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    return torch.einsum("hns,shd->nhd", weights, v)


@pytest.mark.engine
@pytest.mark.parametrize("sharing", [False, True], ids=["own cache", "shared cache"])
@pytest.mark.parametrize("which", ["any platform", "cpu"])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 9}, {"softcap": 3.0, "sinks": True}, {"causal": False}],
    ids=lambda options: ", ".join(options) or "plain",
)
def test_a_ragged_batch_over_vllms_pages_is_plain_attention(which, options, sharing):
    """Rows of prompts, of one decoding request and of padding, twice, over scattered pages."""
    from eagle2_kernels.integrations.vllm import attention

    options = {"window": None, "softcap": 0.0, "sinks": None, "causal": True} | options
    g = torch.Generator().manual_seed(0)
    hq, hkv, d, size = 6, 2, 32, 32
    if options["sinks"]:
        options["sinks"] = torch.randn(hq, generator=g)
    options["scale"] = 0.2
    arguments = dict(
        num_heads=hq, head_size=d, scale=0.2, num_kv_heads=hkv, alibi_slopes=None,
        sliding_window=options["window"], kv_cache_dtype="auto",
        logits_soft_cap=options["softcap"], sinks=options["sinks"],
        kv_sharing_target_layer_name="model.layers.0" if sharing else None,
    )  # fmt: skip
    if which == "cpu":
        impl = object.__new__(attention.CPUTreeAttentionImpl)
        vars(impl).update(arguments, ours=True, attn_type="decoder")
    else:
        impl = attention.TreeAttentionImpl(**arguments)
    # head-major in memory, as vLLM has it on a CPU; what was never written is poison
    cache = torch.full((12, hkv, size, 2 * d), float("nan"))
    pages = torch.randperm(12, generator=g).view(3, 4).int()
    history = [(torch.zeros(0, hkv, d), torch.zeros(0, hkv, d)) for _ in range(3)]
    for lens in ((40, 7, 1), (1, 33, 1)):
        n = sum(lens)
        q = torch.randn(n + 2, hq, d, generator=g)
        k, v = torch.randn(2, n + 2, hkv, d, generator=g)
        starts = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
        slots = torch.full((n + 2,), -1, dtype=torch.int64)
        for r, (begin, end) in enumerate(
            zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
        ):
            first = len(history[r][0])
            positions = torch.arange(first, first + end - begin)
            slots[begin:end] = pages[r].long()[positions // size] * size + positions % size
            history[r] = tuple(
                torch.cat([old, new[begin:end]])
                for old, new in zip(history[r], (k, v), strict=True)
            )
        seq_lens = torch.tensor([len(keys) for keys, _ in history], dtype=torch.int32)
        common = types.SimpleNamespace(
            num_reqs=3, num_actual_tokens=n, max_query_len=max(lens), query_start_loc=starts,
            seq_lens=seq_lens, block_table_tensor=pages, slot_mapping=slots,
            causal=options["causal"],
        )  # fmt: skip
        metadata = attention.make_metadata(common, size)
        out = torch.full((n + 2, hq * d), 7.0)
        if sharing:
            # another layer writes: here, one without the argument
            writer = attention.TreeAttentionImpl(hq, d, 0.2, hkv)
            writer.forward(None, q, k, v, cache, metadata, out.clone())
            k, v = k * float("nan"), v * float("nan")
        impl.forward(None, q, k, v, cache, metadata, out)
        assert (out[n:] == 7.0).all()
        for r, (keys, values) in enumerate(history):
            rows = slice(starts[r], starts[r + 1])
            want = reference(q[rows], keys, values, options).flatten(1)
            torch.testing.assert_close(out[rows].double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.engine
def test_what_has_no_place_in_the_kernel_is_refused_or_stays_with_vllm():
    from eagle2_kernels.integrations.vllm import attention

    for change in ({"alibi_slopes": [1.0]}, {"kv_cache_dtype": "fp8"}, {"attn_type": "encoder"}):
        with pytest.raises(NotImplementedError, match=f"^{next(iter(change))}: not supported"):
            attention.TreeAttentionImpl(4, 32, 1.0, 2, **change)
    common = types.SimpleNamespace(causal=torch.ones(1))
    with pytest.raises(NotImplementedError, match="^causal: expected one value for the batch"):
        attention.make_metadata(common, 32)


TEXT = "A hash table finds a value by its key: a hash function turns the key into a bucket. "


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engines(request):
    """SmolLM2-135M-Instruct in vLLM over our backend and over its own, in this process."""
    from vllm import LLM
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    def load():
        return LLM(
            os.environ["EAGLE2_VLLM_MODEL"],
            dtype=request.param,
            enforce_eager=True,
            max_model_len=1024,
            # prompts in chunks, in batches with requests that decode
            max_num_batched_tokens=256,
        )

    ours = load()
    assert AttentionBackendEnum.CPU_ATTN.is_overridden()
    adapter.unregister()
    try:
        return request.param, {"ours": ours, "its own": load()}
    finally:
        adapter.register()


def impls(engine):
    worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    context = worker.model_runner.compilation_config.static_forward_context
    return {type(layer.impl).__name__ for layer in context.values()}


def assert_parted_at_a_tie(ours, theirs):
    """Equal up to a token where the two best lie closer than bfloat16 logits are apart."""
    pairs = zip(ours.token_ids, theirs.token_ids, strict=True)
    step = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if step is not None:
        best = theirs.logprobs[step]
        a, b = (best[row.token_ids[step]].logprob for row in (ours, theirs))
        assert abs(a - b) < 0.25, (step, a, b)


@pytest.mark.engine
@pytest.mark.parametrize("batch", [1, 8])
def test_greedy_tokens_are_those_of_vllms_own_backend(engines, batch, capsys):
    """In float32 all of them; in bfloat16, whose logits tie, up to a tie."""
    from vllm import SamplingParams

    dtype, engines = engines
    assert impls(engines["ours"]) == {"CPUTreeAttentionImpl"}
    assert impls(engines["its own"]) == {"CPUAttentionBackendImpl"}
    prompts = [TEXT * (2 + 3 * i) + f"Name {i + 3} uses of it." for i in range(batch)]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    results, seconds = {}, {name: [] for name in engines}
    for _ in range(2):
        for name, engine in engines.items():
            start = time.perf_counter()
            results[name] = [r.outputs[0] for r in engine.generate(prompts, greedy, use_tqdm=False)]
            seconds[name].append(time.perf_counter() - start)
    with capsys.disabled():
        speeds = (f"{name} {batch * 24 / min(s):.1f}" for name, s in seconds.items())
        print(f"\n{dtype}, batch {batch}, tokens/s (the better of two): {', '.join(speeds)}")
    for ours, theirs in zip(*results.values(), strict=True):
        assert len(ours.token_ids) == 24
        if dtype == "float32":
            assert list(ours.token_ids) == list(theirs.token_ids)
        else:
            assert_parted_at_a_tie(ours, theirs)


TREES = "eagle2_kernels.integrations.vllm.trees"


@pytest.fixture(scope="module")
def with_trees():
    """The model decoded with trees of 16 nodes, and as it is, in float32."""
    from vllm import LLM

    settings = dict(
        dtype="float32",
        enforce_eager=True,
        max_model_len=160,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
    )
    model = os.environ["EAGLE2_VLLM_MODEL"]
    trees = LLM(
        model,
        worker_cls=f"{TREES}.TreeWorker",
        speculative_config={
            "method": "custom_class",
            "model": f"{TREES}.TreeProposer",
            "num_speculative_tokens": 15,
        },
        disable_log_stats=False,
        **settings,
    )
    return trees, LLM(model, **settings)


def chat(question):
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.engine
def test_trees_inside_vllm_give_the_tokens_of_plain_decoding(with_trees, capsys):
    """Greedy requests of different lengths, one of them to the end of its room; sampled ones too,
    whose tokens vLLM's own sampler draws."""
    from vllm import SamplingParams

    # The long prompt last: it goes in chunks, which vLLM on a CPU cannot do to a seeded request.
    questions = [
        "What is a hash table?",
        "Why?",
        "Count from 1 to 20.",
        TEXT * 4 + "Name two uses.",
    ]
    prompts = [chat(question) for question in questions]
    params = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=16),
        SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.3),
        SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True),
    ]
    for chosen in ([0], [0, 1, 2, 3]):
        tokens, seconds = [], []
        for engine in with_trees:
            start = time.perf_counter()
            results = engine.generate(
                [prompts[i] for i in chosen], [params[i] for i in chosen], use_tqdm=False
            )
            seconds.append(time.perf_counter() - start)
            tokens.append([list(r.outputs[0].token_ids) for r in results])
        assert tokens[0] == tokens[1]
        with capsys.disabled():
            print(f"\n{len(chosen)} requests: trees {seconds[0]:.1f} s, plain {seconds[1]:.1f} s")
    found = {m.name: m.value for m in with_trees[0].get_metrics() if hasattr(m, "value")}
    drafts, accepted = (found[f"vllm:spec_decode_num_{n}"] for n in ("drafts", "accepted_tokens"))
    with capsys.disabled():
        print(f"tokens per target forward with a tree: {1 + accepted / drafts:.2f}")
    assert accepted > 0.5 * drafts


@pytest.mark.engine
def test_trees_with_prefix_caching_are_refused():
    from eagle2_kernels.integrations.vllm.trees import TreeProposer

    config = types.SimpleNamespace(cache_config=types.SimpleNamespace(enable_prefix_caching=True))
    with pytest.raises(ValueError, match="^enable_prefix_caching: expected False"):
        TreeProposer(config)
