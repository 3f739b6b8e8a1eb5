"""torch.compile: a first call that is compiled, whole steps as one graph, lengths that grow."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compile_first import bits
from growth import i32
from test_ops import NAMES, PYTHON, example, overload

import eagle2_kernels as ek

TESTS = Path(__file__).parent


# The first call of a process


@pytest.fixture(scope="module")
def first_calls():
    """What compile_first.py found for each operator."""
    script = TESTS / "compile_first.py"
    run = subprocess.run(
        [sys.executable, "-P", str(script)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return dict(json.loads(line) for line in run.stdout.splitlines())


@pytest.mark.parametrize("name", NAMES)
def test_the_first_call_of_a_process_may_be_compiled(first_calls, name):
    """The public function, the op and its twin: eager bits, one graph (backend aot_eager)."""
    assert first_calls.get(name, "no result") == ""


INDUCTOR_FIRST = """
import torch, eagle2_kernels as ek

K, N, V, S, H = 3, 4, 17, 40, 8

def step(draft_logits, scores, parents, mask, beam, q, k, v, caches, lm_head, roots, prefix,
         seeds, temperature):
    ek.extend_draft_tree(parents, mask, beam, 0)
    tokens, scores, *_ = ek.expand_topk(draft_logits, scores, K)
    tree = ek.build_tree(roots, prefix, tokens, scores, parents, N)
    ek.write_kv(*caches, k, v, prefix, tree.num_nodes)
    out = ek.tree_attention(q, *caches, prefix, tree.tree_mask, max_prefix_len=S)
    emitted, index, length, bonus = ek.sample_and_verify(
        out.flatten(2) @ lm_head, tree.position_ids, seeds, tree.draft_tokens, tree.first_child,
        tree.next_sibling, 1, tree.num_nodes, temperature=temperature)
    ek.compact_kv(caches, index, length, prefix)
    return (*tree[:-1], out, emitted, index, length, bonus)

def inputs():
    g = torch.Generator().manual_seed(4)
    def normal(*shape): return torch.randn(*shape, generator=g)
    return (normal(2, 1, V), torch.zeros(2, 1), torch.empty(2, K, dtype=torch.int32),
            torch.zeros(2, K, 1).long(), torch.zeros(2, K).long(), normal(2, N, 2, H),
            normal(2, N, 1, H), normal(2, N, 1, H), [normal(2, S, 1, H), normal(2, S, 1, H)],
            normal(2 * H, V), torch.tensor([3, 4]), torch.tensor([9, 20], dtype=torch.int32),
            torch.tensor([1, 2]), torch.tensor([1.0, 0.0]))

ours, twin = inputs(), inputs()
with torch.no_grad():
    got, want = torch.compile(step, fullgraph=True)(*ours), step(*twin)
assert all(map(torch.equal, got, want)), (got, want)
assert all(map(torch.equal, ours[8], twin[8])), "caches"
print("compiled", got[-2].tolist())
"""


def test_the_first_call_of_a_process_may_be_a_step_under_inductor(tmp_path):
    # Nothing compiled before, and no pool of processes for the little there is to compile.
    env = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    run = subprocess.run(
        [*PYTHON, INDUCTOR_FIRST], capture_output=True, text=True, check=False, env=env
    )
    assert run.stdout.startswith("compiled"), run.stderr[-3000:]
    # Somebody accepts a draft, or the cache move had nothing to do.
    assert "1" in run.stdout


# Lengths that grow


class Counting:
    """A backend that counts its graphs."""

    def __init__(self, backend="eager"):
        self.graphs = []
        self._backend = backend

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return torch._dynamo.lookup_backend(self._backend)(graph, inputs)


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def counts(b, n):
    return torch.full((b,), n, dtype=torch.int32)


def chain(b, n):
    return torch.arange(-1, n - 1, dtype=torch.int32).expand(b, n).contiguous()


def links(b, n):
    """Tokens, first children and next siblings of chains."""
    child = torch.arange(1, n + 1, dtype=torch.int32)
    child[-1] = -1
    tokens = torch.arange(n) % 7
    return tokens.expand(b, n).contiguous(), child.expand(b, n).contiguous(), i32([[-1] * n] * b)


def attention(b, n):
    cache, words = normal(b, 3 * n, 2, 8), (n + 63) // 64
    mask = torch.ones(b, n, words, dtype=torch.int64)
    options = {"max_prefix_len": 2 * n, "tree_len": n, "window": n, "return_lse": True}
    options["depths"] = torch.arange(n, dtype=torch.int32).expand(b, n).contiguous()
    return (normal(b, n, 4, 8), cache, cache + 1, counts(b, n + 1), mask), options


def partial(b, n):
    return normal(b, n, 4, 8), normal(b, n, 4)


def rows(b, n):
    """Keys and values."""
    return normal(b, n, 2, 8), normal(b, n, 2, 8) + 1


def candidates(b, n):
    tokens = torch.arange(2 * n).expand(b, 2 * n).contiguous()
    scores = -normal(b, 2 * n).abs()
    limits = i32([[n, n]] * b)
    return (torch.arange(b), counts(b, n), tokens, scores, chain(b, 2 * n), n, limits), {}


def extending(b, n):
    parents = torch.zeros(b, n + 2 * n * n, dtype=torch.int32)
    mask = torch.zeros(b, n, 2 + n, dtype=torch.int64)
    return (parents, mask, torch.zeros(b, n, dtype=torch.int64), 2), {}


def sampling(b, n):
    positions = torch.arange(n).expand(b, n) + n
    return (normal(b, n, n + 4), positions, torch.arange(b)), {"temperature": torch.full((b,), 0.9)}


# name -> (b requests, size n) -> arguments of the public function: everything that follows a
# length in a server follows b or n here.
GROWING = {
    "expand_topk": lambda b, n: ((normal(b, n, n + 40), normal(b, n), n), {}),
    "extend_draft_tree": extending,
    "build_tree": candidates,
    "flatten_tree": lambda b, n: ((chain(b, n), counts(b, n), counts(b, n)), {}),
    "retrieve_indices": lambda b, n: ((chain(b, n), counts(b, n), n), {}),
    "pack_tree_mask": lambda b, n: ((torch.ones(b, n, n, dtype=torch.bool),), {}),
    "unpack_tree_mask": lambda b, n: ((torch.ones(b, n, 3, dtype=torch.int64), n), {}),
    "tree_attention": attention,
    "merge_attention_states": lambda b, n: ((*partial(b, n), *partial(b, n)), {}),
    "packed_linear": lambda b, n: (
        (normal(b, n, 7).bfloat16(), ek.pack_linear_weight(normal(35, 7).bfloat16()), 35),
        {},
    ),
    "sample_tokens": sampling,
    "verify_tree": lambda b, n: ((links(b, n)[0], *links(b, n), n, counts(b, n)), {}),
    "sample_and_verify": lambda b, n: (
        (*sampling(b, n)[0], *links(b, n), n, counts(b, n)),
        sampling(b, n)[1],
    ),
    "compact_kv": lambda b, n: (
        ([*rows(b, 3 * n)], chain(b, n) + 1, counts(b, n - 1), counts(b, n)),
        {},
    ),
    "write_kv": lambda b, n: (
        (*rows(b, 3 * n), *rows(b, n), counts(b, n), counts(b, n)),
        {},
    ),
}


def repeated(name, b):
    """The example of `test_ops`, its batch of 2 repeated, for a row that GROWING lacks."""
    return torch.utils._pytree.tree_map_only(
        torch.Tensor,
        lambda t: torch.cat([t] * b) if t.dim() and t.shape[0] == 2 else t,
        example(name),
    )


def growing(name, b, n):
    public = name.removesuffix("_out")
    if public in GROWING:
        return getattr(ek, public), *GROWING[public](b, n)
    return overload(name), *repeated(name, b)


@pytest.mark.parametrize("name", NAMES)
def test_lengths_that_grow_do_not_recompile(name):
    """Two graphs, the first sizes and any; another where the mask's words become several."""
    torch._dynamo.reset()
    backend = Counting()
    compiled = torch.compile(
        lambda function, args, kwargs: function(*args, **kwargs), backend=backend, fullgraph=True
    )
    sizes = [(2, 5), (3, 9), (5, 17), (6, 33), (8, 64), (9, 65), (11, 70), (12, 130)]
    with torch.no_grad():
        for b, n in sizes:
            function, args, kwargs = growing(name, b, n)
            _, twin, twin_kwargs = growing(name, b, n)
            got = compiled(function, args, kwargs)
            assert bits((got, args)) == bits((function(*twin, **twin_kwargs), twin)), (b, n)
    words = name in ("tree_attention_out", "build_tree", "flatten_tree", "pack_tree_mask")
    assert len(backend.graphs) <= 2 + words


def test_values_that_grow_do_not_recompile():
    """Lengths on the device are data; the host's bound on them is symbolic."""
    torch._dynamo.reset()
    backend = Counting()

    @torch.compile(backend=backend, fullgraph=True)
    def f(q, k, v, prefix_lens, bound, max_depth, num_nodes):
        out = ek.tree_attention(q, k, v, prefix_lens, max_prefix_len=bound)
        return out, ek.verify_tree(*[links(2, 5)[0]] * 2, *links(2, 5)[1:], max_depth, num_nodes)

    k, v, q = normal(2, 600, 2, 8), normal(2, 600, 2, 8), normal(2, 5, 4, 8)
    with torch.no_grad():
        for n in range(3, 500, 31):
            out, _ = f(q, k, v, counts(2, n), n + 64, 2 + n, counts(2, n % 6))
            assert torch.equal(out, ek.tree_attention(q, k, v, counts(2, n)))
    assert len(backend.graphs) <= 2


# The loop's own step


@pytest.fixture(scope="module")
def load():
    """The synthetic target and head of bench/load.py."""
    pytest.importorskip("transformers")
    path = TESTS.parent / "bench" / "load.py"
    spec = importlib.util.spec_from_file_location("bench_load_for_compile", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


NODES, TOP_K, MAX_DEPTH = 12, 3, 2


def decode_step(target, head):
    """One step of `EagleDecoder` without the host: state in, state out."""
    from eagle2_kernels.models.draft import HeadDrafter, grow_candidates, refeed, take_rows

    def step(cache, draft_cache, seeds, temperature, limits, prefix_lens, roots, pending):
        tokens, features, lengths = pending
        before = prefix_lens - lengths
        hidden = refeed(head, draft_cache, tokens, features, before, lengths)
        hidden = take_rows(hidden, (lengths - 1).clamp(min=0)[:, None])
        drafter = HeadDrafter(head, draft_cache, prefix_lens, hidden)
        candidates = grow_candidates(drafter, roots.shape[0], TOP_K, MAX_DEPTH)
        tree = ek.build_tree(roots, prefix_lens, *candidates, NODES, limits)
        features = target.forward(
            cache,
            tree.draft_tokens,
            tree.position_ids,
            prefix_lens,
            tree_mask=tree.tree_mask,
            depths=tree.depths,
            lengths=tree.num_nodes,
        )
        emitted, accept_index, accept_length, bonus = ek.sample_and_verify(
            target.logits(features),
            tree.position_ids,
            seeds,
            tree.draft_tokens,
            tree.first_child,
            tree.next_sibling,
            MAX_DEPTH,
            tree.num_nodes,
            temperature=temperature,
        )
        ek.compact_kv(cache.tensors, accept_index, accept_length, prefix_lens)
        taken = accept_length + 1
        pending = (emitted.clamp(min=0), take_rows(features, accept_index.clamp(min=0)), taken)
        return prefix_lens + taken, torch.where(taken > 0, bonus, roots), pending

    return step


def fresh_state(target, head, b):
    """Caches, constants of the run, and what a step hands to the next."""
    from eagle2_kernels.models.draft import new_draft_cache

    g = torch.Generator().manual_seed(b)
    cache, draft_cache = target.new_cache(b, 96), new_draft_cache(head, b, 96)
    for t in (*cache.tensors, draft_cache.k, draft_cache.v):
        t.copy_(torch.randn(t.shape, generator=g, dtype=t.dtype))
    constants = (torch.arange(b), torch.full((b,), 0.7), i32([[NODES, MAX_DEPTH]] * b))
    width = MAX_DEPTH + 1
    pending = (
        torch.randint(0, 33, (b, width), generator=g),
        torch.randn(b, width, target.hidden_size, generator=g, dtype=torch.float64),
        counts(b, 2),
    )
    roots = torch.randint(0, 33, (b,), generator=g)
    return (cache, draft_cache, *constants), (counts(b, 4), roots, pending)


def run_steps(step, target, head, b, count=4, any_batch=False):
    """Tensors of every step: what it hands on, and the caches.

    ``any_batch`` asks the compiler to take the batch as symbolic from the first call on.
    """
    seen = []
    with torch.inference_mode():
        fixed, moving = fresh_state(target, head, b)
        if any_batch:
            caches = [*fixed[0].tensors, fixed[1].k, fixed[1].v]
            for t in torch.utils._pytree.tree_leaves((caches, fixed[2:], moving)):
                torch._dynamo.mark_dynamic(t, 0)
        for _ in range(count):
            moving = step(*fixed, *moving)
            caches = [*fixed[0].tensors, fixed[1].k, fixed[1].v]
            seen.append([t.clone() for t in torch.utils._pytree.tree_leaves((moving, caches))])
    return seen


@pytest.fixture(scope="module")
def models(load):
    decoder = load.make_decoders()[1]
    return decoder.target, decoder.head


def test_a_step_is_one_graph_with_the_eager_bits(models):
    """... for any batch and prefix, caches included."""
    torch._dynamo.reset()
    step = decode_step(*models)
    backend = Counting("aot_eager")
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        # No size that another dimension has too: PyTorch takes equal sizes of a first call for one.
        for b in (5, 6, 7):
            want = run_steps(step, *models, b)
            assert bits(run_steps(compiled, *models, b, any_batch=b == 5)) == bits(want)
            # Drafts must be accepted, or there was no path to move.
            assert any((taken > 1).any() for _, _, _, _, taken, *_ in want)
    assert len(backend.graphs) == 1


def test_a_step_under_inductor_copies_no_cache(models):
    """The pointwise code of the models stays PyTorch's: compiling it would take a minute."""
    from torch._dynamo.utils import ReinplaceCounters
    from torch._inductor import config

    torch._dynamo.reset()
    ReinplaceCounters.clear()
    step = decode_step(*models)
    with config.patch(fallback_by_default=True, fx_graph_cache=False, compile_threads=1):
        got = run_steps(torch.compile(step, fullgraph=True), *models, 3)
    for ours, want in zip(got, run_steps(step, *models, 3), strict=True):
        for a, b in zip(ours, want, strict=True):
            # Decompositions of norms and rotations may round differently.
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert ReinplaceCounters.get_total_missed() == 0


def test_a_step_on_fake_tensors_reads_nothing(models):
    """A fake tensor has no values: whatever asked for one would raise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    step = decode_step(*models)
    fixed, moving = fresh_state(*models, 3)
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(t):
        return mode.from_tensor(t) if isinstance(t, torch.Tensor) else t

    cache, draft_cache = type(fixed[0]), type(fixed[1])
    with torch.no_grad(), mode:
        fakes = (
            cache([fake(fixed[0].k[0])], [fake(fixed[0].v[0])]),
            draft_cache(fake(fixed[1].k), fake(fixed[1].v)),
            *map(fake, fixed[2:]),
        )
        got = step(*fakes, *torch.utils._pytree.tree_map(fake, moving))
    with torch.no_grad():
        want = step(*fixed, *moving)
    for a, b in zip(*map(torch.utils._pytree.tree_leaves, (got, want)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
