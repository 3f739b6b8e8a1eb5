"""Steps as graphs, without a card: a tape stands for the graph, fake tensors for the device.

A tape is what a CUDA graph is: a list of operators with the memory they read and write, replayed
without Python. What a step bakes in, rebinds or leaves behind in Python shows as other tokens.
"""

from contextlib import nullcontext

import pytest
import torch
from test_host_reads import HostReads
from tiny_models import copycat_decoder, tiny_head, tiny_model
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from eagle2_kernels import EagleDecoder, SamplingParams, TreeConfig, graphs
from eagle2_kernels.step import PlainStep, State, TreeStep

pytest.importorskip("transformers")

PROMPTS = [[3, 4, 5, 6, 7], [11], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 12, 13, 14]]
SAMPLED = SamplingParams(
    1.0,
    20,
    0.9,
    0.01,
    seed=3,
    repetition_penalty=1.2,
    presence_penalty=0.1,
    logit_bias={3: -1.0},
    logprobs="processed",
)


def tensors_in(value):
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def memory(tensor):
    return tensor.untyped_storage().data_ptr()


class Record(TorchDispatchMode):
    """Writes down every operator, and puts back what it wrote into memory from before."""

    def __init__(self):
        super().__init__()
        self.tape, self._own, self._before = [], set(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = tensors_in((args, kwargs))
        if func._schema.is_mutable:
            for t in inputs:
                if memory(t) not in self._own and memory(t) not in self._before:
                    whole = t.new_empty(0).set_(t.untyped_storage())
                    self._before[memory(t)] = whole, whole.clone()
        result = func(*args, **kwargs)
        there = {memory(t) for t in inputs}
        made = [t for t in tensors_in(result) if memory(t) not in there]
        self._own |= {memory(t) for t in made}
        if made or func._schema.is_mutable:
            self.tape.append((func, args, kwargs, made))
        return result

    def put_back(self):
        for whole, before in self._before.values():
            whole.copy_(before)


class Tape:
    """`graphs.Recorder` on the CPU."""

    device_type = "cpu"
    captures = 0
    eager = 0
    replays = 0

    def __init__(self, device):
        pass

    def run(self, body):
        Tape.eager += 1
        return body()

    def capture(self, body):
        Tape.captures += 1
        record = Record()
        with HostReads() as seen, record:
            result = body()
        assert seen.reads == [] and seen.uploads == []
        record.put_back()
        # Nothing is computed by a capture: its results are garbage until the first replay.
        for t in tensors_in(result):
            t.fill_(True if t.dtype == torch.bool else 77)
        return lambda: self.replay(record.tape), result

    @staticmethod
    def replay(tape):
        Tape.replays += 1
        for func, args, kwargs, made in tape:
            again = tensors_in(func(*args, **kwargs))
            for old, new in zip(made, again[len(again) - len(made) :], strict=True):
                old.copy_(new)


class Taped(EagleDecoder):
    _recorder = Tape

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, cuda_graph=True)


@pytest.fixture(autouse=True)
def fresh_counts():
    Tape.captures = Tape.eager = Tape.replays = 0


@pytest.fixture(scope="module")
def copycat():
    """Often right, and moved by everything the head reads: what it drafts from shows in counts."""
    decoder = copycat_decoder(0.05)
    head, generator = decoder.head, torch.Generator().manual_seed(1)
    width = head.config.hidden_size
    with torch.no_grad():
        for weight in (head.fc.weight[:, width:], head.layers[0].self_attn.o_proj.weight):
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.03)
    return decoder


def pair(name="llama", draft_vocab=None, kind="EagleHead", **settings):
    """An eager and a taped decoder of the same models."""
    model = tiny_model(name, **settings)
    eager = EagleDecoder(model, tiny_head(model, draft_vocab, kind=kind))
    return eager, Taped(eager.target, eager.head)


def assert_same(eager, taped, prompts=PROMPTS, plain=False, **settings):
    name = "generate_plain" if plain else "generate"
    want = getattr(eager, name)(prompts, **settings)
    got = getattr(taped, name)(prompts, **settings)
    assert got.token_ids == want.token_ids
    assert got.stats.target_forwards == want.stats.target_forwards
    assert got.stats.accept_histogram == want.stats.accept_histogram
    for a, b in zip(got, want, strict=True) if isinstance(got, list) else [(got, want)]:
        assert a.logprobs == b.logprobs and a.finish_reason == b.finish_reason
        assert (a.logits is None) == (b.logits is None)
        assert a.logits is None or torch.equal(a.logits, b.logits)


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_replayed_steps_emit_what_eager_steps_emit(name, sampling):
    eager, taped = pair(name, list(range(5, 45)))
    settings = {"max_new_tokens": 20, "eos_token_ids": (), "sampling": sampling}
    assert_same(eager, taped, **settings, config=TreeConfig(16, 4, 3))
    assert (Tape.eager, Tape.captures) == (2, 1) and Tape.replays > 3


def test_an_eagle3_head_is_captured_with_the_layers_it_reads():
    eager, taped = pair(kind="Eagle3Head", num_hidden_layers=7)
    assert_same(eager, taped, max_new_tokens=16, eos_token_ids=())
    assert Tape.captures == 1


@pytest.mark.parametrize("rows", [1, 3])
def test_plain_steps_are_captured_too(copycat, rows):
    taped = Taped(copycat.target, copycat.head)
    settings = {"max_new_tokens": 12, "eos_token_ids": (), "pad_rows": rows, "keep_logits": True}
    assert_same(copycat, taped, plain=True, sampling=SAMPLED, **settings)
    assert (Tape.eager, Tape.captures, Tape.replays) == (2, 1, 9)


@pytest.mark.parametrize("kind", [EagleDecoder, Taped], ids=["eager", "taped"])
def test_a_request_that_ended_stands_still(copycat, kind):
    """Ends by EOS are the host's to tell; those by length are computed on the device."""
    emitted = []

    class Spy(kind):
        def _take(self, batch, state, verified):
            ended = [bool(r.finish_reason) for r in batch.requests]
            emitted.append((ended, verified.emitted.clone()))
            return super()._take(batch, state, verified)

    spy = Spy(copycat.target, copycat.head)
    plain = copycat.generate(PROMPTS, max_new_tokens=40, eos_token_ids=())
    for ids in ((plain.token_ids[1][17],), (plain.token_ids[0][25],), ()):
        settings = {"max_new_tokens": 40, "eos_token_ids": ids, "keep_logits": True}
        assert_same(copycat, spy, **settings)
    assert Tape.captures == (kind is Taped)
    still = [bool((row == -1).all()) for ended, rows in emitted for row in rows[ended]]
    assert len(still) > 10 and all(still)


def test_a_later_call_replays_from_its_first_step(copycat):
    """With another prompt, seed, temperature and length: all of it lies in the buffers."""
    taped = Taped(copycat.target, copycat.head)
    settings = {"eos_token_ids": (), "config": TreeConfig(12, 3, 3)}
    assert_same(copycat, taped, [5, 6, 7], max_new_tokens=30, sampling=SAMPLED, **settings)
    before = Tape.eager, Tape.captures
    other = SamplingParams(**{**vars(SAMPLED), "temperature": 0.6, "seed": 9, "top_k": 4})
    # Short ones, where the first step's draft decides how many steps there are.
    for prompt in ([8, 9, 10, 11], [2], [40, 3], [17, 17, 5], [33], [21, 8], [50]):
        for sampling, length in ((other, 12), (SAMPLED, 5)):
            assert_same(
                copycat, taped, prompt, max_new_tokens=length, sampling=sampling, **settings
            )
    assert (Tape.eager, Tape.captures) == before == (2, 1)


def test_a_first_call_of_a_single_step_leaves_a_bucket_to_warm_up(copycat):
    taped = Taped(copycat.target, copycat.head)
    config = TreeConfig(4, 1, 3)
    for length in (1, 2, 3, 24):
        assert_same(copycat, taped, [4, 5], max_new_tokens=length, eos_token_ids=(), config=config)
    assert Tape.captures == 1


def test_each_bucket_has_a_graph(copycat):
    taped = Taped(copycat.target, copycat.head)
    shapes = [(PROMPTS, TreeConfig(8, 2, 2)), (PROMPTS[:1], TreeConfig(8, 2, 2))]
    shapes += [(PROMPTS, TreeConfig(9, 2, 2)), (PROMPTS, TreeConfig(8, 2, 3))]
    for count, (prompts, config) in enumerate(shapes, start=1):
        for _ in range(2):
            assert_same(copycat, taped, prompts, max_new_tokens=20, config=config)
        assert Tape.captures == count
    sampling = SamplingParams(temperature=1.0, seed=1)
    for more in ({"sampling": sampling}, {"keep_logits": True}):
        assert_same(copycat, taped, max_new_tokens=20, config=TreeConfig(8, 2, 2), **more)
    assert Tape.captures == len(shapes) + 2


def test_the_least_recently_used_bucket_goes(copycat, monkeypatch):
    monkeypatch.setattr(graphs, "KEPT", 2)
    taped = Taped(copycat.target, copycat.head)
    for nodes in (5, 6, 5, 7, 5, 6):
        config = TreeConfig(nodes, 2, 2)
        taped.generate([5, 6], max_new_tokens=20, eos_token_ids=(), config=config)
    # 6 was dropped for 7, 5 was not
    assert Tape.captures == 4
    assert len(taped._idle.graphs) == 2


def test_graphs_go_with_the_caches_and_weights_they_were_captured_over(copycat):
    decoder = copycat_decoder(0.5)
    taped = Taped(decoder.target, decoder.head)
    settings = {"max_new_tokens": 20, "eos_token_ids": ()}
    assert_same(decoder, taped, **settings)
    with torch.no_grad():
        # In place, as loading a state dict does: the graph reads the new values.
        decoder.head.fc.weight.mul_(0.5)
        assert_same(decoder, taped, **settings)
        assert Tape.captures == 1
        weight = decoder.target.hf_model.model.embed_tokens.weight
        weight.data = weight.flip(0).clone()
    assert_same(decoder, taped, **settings)
    assert Tape.captures == 2
    # Past the caches' room: new caches.
    assert_same(decoder, taped, [[5, 6] * 118], max_new_tokens=18, eos_token_ids=())
    assert taped._idle.target.capacity > 256
    assert_same(decoder, taped, **settings)
    assert Tape.captures == 4


def test_streams_side_by_side_do_not_share_buffers(copycat):
    taped = Taped(copycat.target, copycat.head)
    prompts = [[5, 6, 7], [9, 3]]
    settings = {"max_new_tokens": 24, "eos_token_ids": (), "config": TreeConfig(8, 2, 3)}
    streams = [taped.stream(p, **settings, token_ids=True) for p in prompts]
    got = [[], []]
    for pieces in zip(*streams, strict=False):
        for tokens, piece in zip(got, pieces, strict=True):
            tokens.extend(piece)
    for prompt, tokens in zip(prompts, got, strict=True):
        want = copycat.generate(prompt, **settings).token_ids
        assert tokens == want[: len(tokens)] and len(tokens) > 12


# Where capture is refused


def test_a_cpu_is_refused_with_the_reason(copycat):
    with pytest.raises(ValueError, match=r"cuda_graph: expected the models on a CUDA device, got"):
        EagleDecoder(copycat.target, copycat.head, cuda_graph=True)


def test_checks_that_read_values_are_refused(copycat, monkeypatch):
    monkeypatch.setattr("eagle2_kernels._checks.VALIDATE", True)
    with pytest.raises(ValueError, match=r"cuda_graph: expected EAGLE2_VALIDATE unset"):
        Taped(copycat.target, copycat.head)
    monkeypatch.undo()
    monkeypatch.setenv("EAGLE2_BACKEND", "reference")
    with pytest.raises(ValueError, match=r"cuda_graph: expected compiled operators"):
        Taped(copycat.target, copycat.head)


def test_drafting_that_reads_values_is_refused(copycat):
    taped = Taped(copycat.target, copycat.head)
    config = TreeConfig(8, 2, 3, stop_below=0.1)
    with pytest.raises(
        ValueError, match=r"config: expected stop_below 0 with cuda_graph.*got 0\.1"
    ):
        taped.generate([5, 6], max_new_tokens=9, config=config)
    copycat.generate([5, 6], max_new_tokens=9, config=config)


def test_models_over_several_devices_are_refused():
    model = tiny_model()
    decoder = EagleDecoder(model, tiny_head(model))
    layer = model.model.layers[1]
    layer.mlp.down_proj.weight = torch.nn.Parameter(layer.mlp.down_proj.weight.to("meta"))
    with pytest.raises(ValueError, match=r"expected the models on one device, got cpu, meta"):
        Taped(decoder.target, decoder.head)


SYNCS = {
    "item": (lambda x: x * float(x[0, 0, 0]), "hands a value to the host"),
    "nonzero": (lambda x: x + x.nonzero().sum(), "gives a shape that depends on values"),
    "mask": (lambda x: x + x[x > 0].sum(), "gives a shape that depends on values"),
    "equal": (lambda x: x * int(torch.equal(x, x + 0)), "hands a value to the host"),
}


@pytest.mark.parametrize("where", ["target", "head"])
@pytest.mark.parametrize("sync", SYNCS)
def test_models_that_wait_for_the_device_are_refused_with_the_line(sync, where):
    decoder = copycat_decoder(0.5)
    layers = decoder.head.layers if where == "head" else decoder.target.hf_model.model.layers
    change, reason = SYNCS[sync]
    layers[0].mlp.register_forward_hook(lambda module, args, out: change(out))
    taped = Taped(decoder.target, decoder.head)
    for _ in range(2):  # whoever tries again is told again
        with pytest.raises(graphs.CaptureError, match=reason) as error:
            taped.generate([5, 6], max_new_tokens=9, eos_token_ids=())
        assert "test_graphs.py:" in str(error.value) and "cuda_graph=False" in str(error.value)
    assert Tape.captures == 0
    # The models are as they were: the eager loop still runs.
    decoder.generate([5, 6], max_new_tokens=9, eos_token_ids=())


def test_a_copy_between_devices_is_refused():
    with graphs.NoWaits(), pytest.raises(graphs.CaptureError, match=r"copies between cpu and meta"):
        torch.ones(3).to("meta")


def test_state_whose_shape_changes_is_refused(copycat, monkeypatch):
    taped = Taped(copycat.target, copycat.head)
    verify = TreeStep.verify

    def grows(step, state, tree):
        result = verify(step, state, tree)
        state.roots = torch.cat([state.roots, state.roots])[: 1 + (grows.calls > 0)]
        grows.calls += 1
        return result

    grows.calls = 0
    monkeypatch.setattr(TreeStep, "verify", grows)
    with pytest.raises(graphs.CaptureError, match=r"expected roots of the same shape"):
        taped.generate([5, 6], max_new_tokens=20, eos_token_ids=())


def test_what_a_broken_capture_said_first_is_reported(copycat):
    class Breaks(Tape):
        def capture(self, body):
            try:
                raise RuntimeError("operation not permitted when stream is capturing\nmore")
            finally:
                raise RuntimeError("capture was invalidated")

    taped = Taped(copycat.target, copycat.head)
    taped._recorder = Breaks
    message = r"test_graphs\.py:\d+: operation not permitted when stream is capturing; EagleDec"
    with pytest.raises(graphs.CaptureError, match=message):
        taped.generate([5, 6], max_new_tokens=20, eos_token_ids=())


# A step without values


def move(module, device):
    """Weights on a device, or fake ones under `FakeTensorMode`, keeping the modules."""
    for child in module.modules():
        for table in (child._parameters, child._buffers):
            for name, t in table.items():
                if t is not None:
                    empty = torch.empty(t.shape, dtype=t.dtype, device=device)
                    parameter = isinstance(t, torch.nn.Parameter)
                    table[name] = torch.nn.Parameter(empty, False) if parameter else empty


@pytest.mark.parametrize("kind", ["EagleHead", "Eagle3Head"])
@pytest.mark.parametrize("plain", [False, True], ids=["tree", "plain"])
@pytest.mark.parametrize("device", ["fake", "meta"])
def test_a_step_needs_no_value_and_stays_on_its_device(kind, plain, device):
    """A fake tensor's value cannot be read; beside meta tensors one made on the host shows."""
    model = tiny_model(num_hidden_layers=7)
    decoder = EagleDecoder(model, tiny_head(model, list(range(3, 40)), kind=kind))
    batch, fake = 2, device == "fake"
    device = "cpu" if fake else "meta"
    with FakeTensorMode() if fake else nullcontext(), torch.no_grad():
        move(model, device)
        move(decoder.head, device)
        caches = decoder._take_caches(batch, 64)

        def zeros(*shape, dtype=torch.int32):
            return torch.zeros(batch, *shape, dtype=dtype, device=device)

        state = State(
            cache=caches.target,
            draft_cache=caches.draft,
            seeds=zeros(dtype=torch.int64),
            filters={"temperature": zeros(dtype=torch.float32)},
            processors={
                "repetition_penalty": zeros(dtype=torch.float32),
                "output_counts": zeros(61),
            },
            ends=zeros(),
            alive=zeros(),
            prefix_lens=zeros(),
            roots=zeros(dtype=torch.int64),
            root_hidden=zeros(1, 32, dtype=torch.float64),
        )
        step = TreeStep(
            decoder.target, decoder.head, decoder._taps, TreeConfig(9, 3, 3), True, "raw"
        )
        if plain:
            step = PlainStep(decoder.target, 3, True, "raw")
        shapes = []
        for _ in range(3):
            result = step(state)
            named = {**state.tensors(), **result._asdict()}
            assert {t.device.type for t in named.values()} == {device}
            shapes.append({name: t.shape for name, t in named.items()})
        assert shapes[1] == shapes[2] and shapes[0]["emitted"] == (batch, 1 if plain else 4)
        with pytest.raises((RuntimeError, NotImplementedError)):
            result.emitted.tolist()
