"""Triton kernels under the interpreter against the oracle, and compiled for every card.

The interpreter gives values: it sees no races and no bounds, and its bfloat16 is float32.
"""

import csv
import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import AttentionCase, attention_inputs, paged, visibility

from eagle2_kernels import reference
from eagle2_kernels.ops import OPS

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"),
]
ROOT = Path(__file__).parent.parent
AOT = ROOT / "bench" / "results" / "aot.csv"


@pytest.fixture(scope="module", autouse=True)
def interpreter():
    # Chosen when a kernel is decorated, Triton's own library when triton is first imported, which
    # may be at the collection of another file. Not set here: tests on a card must not get it.
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.fail("expected TRITON_INTERPRET=1 in the environment, as `make cuda` sets it")


def launcher(module, name):
    return getattr(importlib.import_module(f"eagle2_kernels.triton_kernels.{module}"), name)


def filled(name, *args, **kwargs):
    """What the launcher of an allocating op writes into poisoned outputs, by name."""
    op = next(op for op in OPS if op.name == name)
    made = op.fake(*args, **kwargs)
    made = (made,) if isinstance(made, torch.Tensor) else made
    outs = {key: out.fill_(77) for key, out in zip(op.outs, made, strict=True)}
    launcher(op.triton, f"{name}_out")(*args, **kwargs, **outs)
    return outs


# write_kv


@pytest.mark.parametrize("page_size", [None, 1, 5, 16], ids=lambda p: f"page{p}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("with_lengths", [False, True], ids=["full", "ragged"])
def test_write_kv_stores_only_the_rows_asked_for(page_size, dtype, with_lengths):
    generator = torch.Generator().manual_seed(3)
    batch, rows, heads, dim = 3, 5, 2, 24
    k = torch.randn(batch, rows, heads, dim, generator=generator).to(dtype)
    v = torch.randn(batch, rows, heads, dim, generator=generator).to(dtype)
    prefix = torch.tensor([0, 7, 14], dtype=torch.int32)
    lengths = torch.tensor([5, 0, 3], dtype=torch.int32) if with_lengths else None
    table = None
    shape = (batch, 16, heads, dim)
    if page_size is not None:
        per_request = -(-16 // page_size)
        pages = torch.randperm(batch * per_request, generator=generator)
        table = pages.view(batch, per_request).int()
        table[2, -1] = -1
        shape = (batch * per_request, page_size, heads, dim)
    # K's storage is interleaved, V's has heads first: strides must be honoured, each cache's own.
    pages, size = shape[:2]
    stored = torch.full((pages, 2, size, heads, dim), 9.0, dtype=dtype)
    stored_v = torch.full((pages, heads, size, dim), 9.0, dtype=dtype)
    expected, expected_v = stored.clone(), stored_v.clone()
    args = (k, v, prefix, lengths, table)
    reference.write_kv(expected[:, 0], expected_v.transpose(1, 2), *args)
    launcher("cache", "write_kv")(stored[:, 0], stored_v.transpose(1, 2), *args)
    assert torch.equal(stored, expected) and torch.equal(stored_v, expected_v)


# expand_topk


def assert_expands_as_the_oracle(logits, beam_scores, top_k, draft_to_target=None):
    args = (logits, beam_scores, top_k, draft_to_target)
    got = filled("expand_topk", *args)
    for (name, value), want in zip(got.items(), reference.expand_topk(*args), strict=True):
        if value.is_floating_point():
            torch.testing.assert_close(value, want, rtol=2e-6, atol=2e-5, msg=name)
        else:
            assert torch.equal(value, want), name


# 4096 logits are one program's: 4095, 4096 and 4097 are its edges.
@pytest.mark.parametrize(
    ("b", "p", "v", "k"),
    [(1, 1, 1, 1), (2, 3, 11, 4), (1, 2, 3, 5), (1, 4, 4095, 4), (2, 1, 4096, 3), (1, 3, 8193, 7)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_expand_equals_the_oracle(dtype, b, p, v, k):
    g = torch.Generator().manual_seed(v)
    logits = (torch.randn(b, p, v, generator=g, dtype=torch.float64) * 3).to(dtype)
    if dtype == torch.float16:
        logits = (logits * 2).round() / 2  # ties by the hundred
    beam_scores = -torch.rand(b, p, generator=g) * (p > 1)
    ids = torch.randperm(2 * v, generator=g)[:v] if k != 4 else None
    assert_expands_as_the_oracle(logits, beam_scores, k, ids)


def test_expand_takes_hostile_logits_and_dead_parents_as_the_oracle_does():
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor(
        [
            [1.0, nan, inf, 2.0, inf, -inf],
            [nan, nan, nan, nan, nan, nan],
            [-inf, 0.0, -0.0, 0.0, -inf, nan],
            [5.0, 4.0, 3.0, 2.0, 1.0, 0.0],
            [3.4e38, -3.4e38, 1.0, -inf, 0.0, 1.0],
        ]
    )[None]
    assert_expands_as_the_oracle(logits, torch.tensor([[0.0, -1.0, -2.0, -inf, nan]]), 4)
    assert_expands_as_the_oracle(logits, torch.zeros(1, 5), 8)


def test_expand_ties_go_to_the_lowest_id_and_index():
    args = (torch.zeros(1, 3, 5000), torch.zeros(1, 3), 4)
    got = filled("expand_topk", *args)
    assert got["candidate_tokens"].tolist() == [[0, 1, 2, 3] * 3]
    assert got["beam"].tolist() == [[0, 1, 2, 3]] and got["beam_rows"].tolist() == [[0] * 4]


def test_expand_reads_strided_logits_and_no_dead_parents():
    g = torch.Generator().manual_seed(5)
    storage = torch.randn(2, 70, 3, generator=g)
    logits, scores = storage.transpose(1, 2), torch.randn(2, 6, generator=g)[:, ::2]
    scores[1, 2] = float("-inf")
    assert_expands_as_the_oracle(logits, scores, 5)


def test_expand_refuses_what_its_tiles_cannot_hold():
    with pytest.raises(ValueError, match=r"top_k: expected 1 to 64 on CUDA, got 65"):
        filled("expand_topk", torch.zeros(1, 1, 100), torch.zeros(1, 1), 65)
    with pytest.raises(TypeError, match=r"beam_scores: expected torch\.float32"):
        filled("expand_topk", torch.zeros(1, 1, 100), torch.zeros(1, 1).double(), 2)


# tree_attention


def attend(inputs, **changes):
    kwargs = {**inputs.kwargs, **changes}
    dim_v = inputs.v_cache.shape[3]
    out = torch.full((*inputs.q.shape[:3], dim_v), float("nan"), dtype=inputs.q.dtype)
    lse = torch.full(inputs.q.shape[:3], float("nan"))
    launcher("attention", "tree_attention_out")(*inputs.args, **kwargs, out=out, lse=lse)
    return out, lse


def assert_attends_as_the_oracle(inputs, **changes):
    got, got_lse = attend(inputs, **changes)
    exact = inputs.double()
    want, lse = torch.empty(got.shape, dtype=torch.float64), torch.empty(got_lse.shape)
    kwargs = {**exact.kwargs, **changes}
    reference.tree_attention_out(*exact.args, **kwargs, out=want, lse=lse)
    atol = 2e-6 if inputs.q.dtype == torch.float32 else 2e-3
    torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)
    torch.testing.assert_close(got_lse, lse, rtol=2e-6, atol=2e-6)


CASES = [
    AttentionCase(1, (1, 1), 64, 0),
    AttentionCase(3, (3, 1), 80, 33, batch=2),
    AttentionCase(31, (2, 1), 16, 70, page_size=16),
    AttentionCase(33, (3, 3), 24, 31, page_size=5),
    AttentionCase(17, (4, 2), 37, 64, interleaved=True),
    AttentionCase(65, (2, 1), 16, 60, page_size=24, interleaved=True),
    AttentionCase(128, (1, 1), 16, 129),
    AttentionCase(5, (2, 1), 1, 9),
    AttentionCase(33, (2, 1), 16, 150, window=17, kv_chunk=64),
    AttentionCase(20, (3, 1), 16, 40, window=1, page_size=5),
    AttentionCase(16, (4, 2), 32, 100, window=80, softcap=20.0, sinks=True),
    AttentionCase(70, (2, 1), 16, 90, chain=True, kv_chunk=32),
    AttentionCase(33, (2, 1), 16, 60, chain=True, window=20),
    AttentionCase(12, (2, 1), 16, 20, kv_chunk=7),
]


@pytest.mark.parametrize(
    ("case", "dtype"),
    # float16 takes the wide tile, float32 the narrow one; the interpreter takes a second a case.
    [(case, torch.float32) for case in CASES] + [(case, torch.float16) for case in CASES[1::3]],
    ids=lambda x: x.name if isinstance(x, AttentionCase) else str(x)[6:],
)
def test_attention_equals_the_oracle(case, dtype):
    assert_attends_as_the_oracle(attention_inputs(case, dtype, any_order=case.nodes % 2 == 0))


def test_attention_of_the_last_rows_of_a_tree_and_of_the_prefix_alone():
    inputs = attention_inputs(AttentionCase(9, (2, 1), 16, 40), torch.float32)
    want, lse = attend(inputs)
    tail = replace(inputs, q=inputs.q[:, 5:], tree_mask=inputs.tree_mask[:, 5:])
    out, tail_lse = attend(tail, tree_len=9)
    assert torch.equal(out, want[:, 5:]) and torch.equal(tail_lse, lse[:, 5:])
    assert_attends_as_the_oracle(replace(inputs, tree_mask=None), tree_len=0)


def test_v_may_have_a_head_dim_of_its_own():
    inputs = attention_inputs(AttentionCase(5, (2, 1), 24, 40), torch.float32)
    assert_attends_as_the_oracle(replace(inputs, v_cache=inputs.v_cache[..., :17].contiguous()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_rows_bits_do_not_depend_on_what_stands_beside_it(dtype, monkeypatch):
    from eagle2_kernels.triton_kernels import attention

    case = AttentionCase(20, (2, 1), 16, 300, kv_chunk=32)
    inputs = attention_inputs(case, dtype)
    monkeypatch.setattr(attention, "_device", lambda device: (80, 10**6))
    want, lse = attend(inputs)
    # One program folds whole groups of chunks; other pages; the row alone; a second request.
    monkeypatch.setattr(attention, "_device", lambda device: (80, 1))
    for other in (attend(inputs), attend(inputs, max_prefix_len=300)):
        assert torch.equal(other[0], want) and torch.equal(other[1], lse)
    k, v, table = paged(inputs.k, inputs.v, 7, 3)
    other = attend(replace(inputs, k_cache=k, v_cache=v), page_table=table)
    assert torch.equal(other[0], want) and torch.equal(other[1], lse)
    row = replace(inputs, q=inputs.q[:, 19:], tree_mask=inputs.tree_mask[:, 19:])
    assert torch.equal(attend(row, tree_len=20)[0], want[:, 19:])
    twice = replace(
        inputs,
        **{
            name: torch.cat([getattr(inputs, name)] * 2)
            for name in ("q", "k_cache", "v_cache", "tree_mask")
        },
        prefix_lens=torch.tensor([7, 300], dtype=torch.int32),
    )
    assert torch.equal(attend(twice)[0][1:], want)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("chain", [False, True], ids=["tree", "chain"])
def test_poison_touches_the_rows_that_see_it_and_no_other(poison, chain):
    case = AttentionCase(20, (2, 1), 16, 40, window=30, chain=chain)
    inputs = attention_inputs(case, torch.float32)
    want, _ = attend(inputs)
    seen = visibility(inputs)[0]
    for name, slot in (("k", 5), ("v", 25), ("k", 43), ("v", 43), ("v", 59), ("v", 62)):
        cache = getattr(inputs, name).clone()
        cache[0, slot, :, 3] = poison
        out, _ = attend(replace(inputs, **{f"{name}_cache": cache}))
        hit = seen[:, slot]
        assert torch.equal(out[0, ~hit], want[0, ~hit])
        assert not out[0, hit].isfinite().all(-1).any()


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -2.0])], ids=["plain", "sinks"])
def test_rows_that_see_nothing_read_nothing(sinks):
    case = AttentionCase(9, (2, 1), 16, 40, page_size=8)
    inputs = attention_inputs(case, torch.float32)
    want, _ = attend(inputs, sinks=sinks)
    mask = inputs.tree_mask.clone()
    mask[:, 5:] = 0
    out, lse = attend(replace(inputs, tree_mask=mask), sinks=sinks)
    nothing = torch.full((2,), float("-inf")) if sinks is None else sinks
    assert torch.equal(out[:, :5], want[:, :5])
    assert (out[:, 5:] == 0).all() and (lse[:, 5:] == nothing).all()
    # An inactive request's page table and length may hold anything.
    table = torch.full_like(inputs.kwargs["page_table"], 2**31 - 1)
    idle = replace(
        inputs,
        tree_mask=torch.zeros_like(mask),
        prefix_lens=torch.tensor([2**31 - 1], dtype=torch.int32),
    )
    out, lse = attend(idle, page_table=table, sinks=sinks)
    assert (out == 0).all() and (lse == nothing).all()


def test_page_entries_past_the_tree_are_never_read():
    inputs = attention_inputs(AttentionCase(6, (2, 1), 16, 20, page_size=4), torch.float32)
    want, _ = attend(inputs)
    table = inputs.kwargs["page_table"].clone()
    table[:, 7:] = 2**31 - 1
    assert torch.equal(attend(inputs, page_table=table)[0], want)


def test_a_prefix_past_the_hosts_bound_is_still_attended():
    inputs = attention_inputs(AttentionCase(4, (2, 1), 16, 200, kv_chunk=32), torch.float32)
    want, _ = attend(inputs)
    got, _ = attend(inputs, max_prefix_len=40)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_attention_refuses_tiles_and_dtypes_the_hardware_does_not_take(monkeypatch):
    from eagle2_kernels.triton_kernels import launch

    inputs = attention_inputs(AttentionCase(2, (2, 1), 16, 4), torch.float64)
    with pytest.raises(TypeError, match=r"q: expected float32, float16 or bfloat16 on CUDA"):
        attend(inputs)
    monkeypatch.setattr(launch, "split_dim", lambda dim: (8, 0))
    with pytest.raises(ValueError, match=r"D_LOW: expected a power of two of at least 16, got 8"):
        launch.attention_tiles(90, torch.bfloat16, 8, 8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_merging_equals_the_oracle(dtype):
    g = torch.Generator().manual_seed(2)
    out_a, out_b = torch.randn(2, 2, 3, 4, 24, generator=g).to(dtype)
    lse_a, lse_b = torch.randn(2, 2, 3, 4, generator=g) * 3
    lse_a[0, 0], lse_b[0, 1] = float("-inf"), float("-inf")
    lse_a[1, 2], lse_b[1, 2] = float("-inf"), float("-inf")
    out_a[0, 0], out_b[0, 1], out_a[1, 2] = float("nan"), float("inf"), float("nan")
    args = (out_a.transpose(1, 2).contiguous().transpose(1, 2), lse_a, out_b, lse_b)
    got = filled("merge_attention_states", *args)
    want, lse = reference.merge_attention_states(*args)
    torch.testing.assert_close(got["out"], want, rtol=0, atol=2e-3 if dtype.itemsize < 4 else 1e-6)
    torch.testing.assert_close(got["lse"], lse, rtol=1e-6, atol=1e-6)
    assert torch.equal(got["out"][0, 0], out_b[0, 0]) and torch.equal(got["out"][0, 1], out_a[0, 1])
    flat = filled("merge_attention_states", *(x.flatten(0, 1) for x in args))
    assert torch.equal(flat["out"], got["out"].flatten(0, 1))
    assert torch.equal(flat["lse"], got["lse"].flatten(0, 1))


def test_page_id_times_page_stride_passes_31_bits():
    # 319 * 7 864 320 elements; the storage is address space, only a few pages of it are touched.
    inputs = attention_inputs(AttentionCase(2, (2, 1), 16, 5, page_size=8), torch.float16)
    want, _ = attend(inputs)
    stride = 7_864_320
    far = []
    for cache in (inputs.k_cache, inputs.v_cache):
        storage = torch.empty(320 * stride, dtype=torch.float16)
        pages = torch.as_strided(storage, (320, *cache.shape[1:]), (stride, 16, 16, 1))
        pages[319] = cache[int(inputs.kwargs["page_table"][0, 0])]
        far.append(pages)
    table = torch.tensor([[319]], dtype=torch.int32)
    got, _ = attend(replace(inputs, k_cache=far[0], v_cache=far[1]), page_table=table)
    assert torch.equal(got, want)


# sample_tokens, sample_and_verify


@pytest.fixture
def rounded_once(monkeypatch):
    """The interpreter's fma rounds twice; the hardware's, and the oracle's, once."""
    from triton.runtime import interpreter

    def fma(self, x, y, z):
        if x.data.dtype != np.float32:
            return interpreter.TensorHandle(x.data * y.data + z.data, z.dtype.scalar)
        a, b, c = (torch.from_numpy(np.array(h.data, copy=True)) for h in (x, y, z))
        exact = np.asarray(reference._fma(a, b, c).numpy())
        return interpreter.TensorHandle(exact, z.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)


# In a file and a process of its own: a kernel needs its source, and its language as a global.
NOISE = """
import json, sys
import numpy as np
import torch, triton
import triton.language as tl
from triton.runtime import interpreter
from eagle2_kernels import reference
from eagle2_kernels.triton_kernels import verify

@triton.jit
def kernel(out, seeds, positions, tokens, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    token = tl.load(tokens + i)
    w0, w1, w2, w3 = verify._philox(tl.load(seeds + i), tl.load(positions + i), token // 4)
    low, high = tl.where(token % 2 == 0, w0, w1), tl.where(token % 2 == 0, w2, w3)
    tl.store(out + i, verify._gumbel(tl.where(token % 4 < 2, low, high)))

def fma(self, x, y, z):
    a, b, c = (torch.from_numpy(np.array(h.data, copy=True)) for h in (x, y, z))
    return interpreter.TensorHandle(np.asarray(reference._fma(a, b, c).numpy()), z.dtype.scalar)

interpreter.InterpreterBuilder.create_fma = fma
rows = json.load(open(sys.argv[1]))["rows"]
count = 1 << len(rows).bit_length()
rows += rows[-1:] * (count - len(rows))
seeds, positions, tokens, _, bits = zip(*rows)
seeds = torch.tensor([s - 2**64 * (s >= 2**63) for s in seeds])
out = torch.zeros(count)
kernel[(1,)](out, seeds, torch.tensor(positions), torch.tensor(tokens), count)
assert out.view(torch.int32).tolist() == list(bits)
print("done")
"""


def test_golden_noise_bit_for_bit(tmp_path):
    script = tmp_path / "noise.py"
    script.write_text(NOISE)
    golden = Path(__file__).parent / "data" / "gumbel_noise.json"
    result = subprocess.run(
        [sys.executable, "-P", str(script), str(golden)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout == "done\n", result.stderr


def draw_inputs(vocab, seed=0):
    """Two requests, three nodes: ties by the dozen, a NaN, and a row of nothing."""
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(2, 3, vocab, generator=g) * 6).round() / 2
    logits[0, 0, 5], logits[1, 2] = float("nan"), float("-inf")
    positions = torch.randint(0, 2**40, (2, 3), generator=g)
    words = torch.randint(-(2**31), 2**31, (2, 3, -(-vocab // 32)), generator=g).int()
    return (logits, positions, torch.tensor([3, -(2**40)])), words


FILTERS = {
    "greedy": {},
    "temperature": {"temperature": [0.7, 0.0]},
    "top_k": {"temperature": [0.7, 1.3], "top_k": [7, 40]},
    "top_p": {"temperature": [0.7, 1.3], "top_p": [0.5, 0.0]},
    "all": {
        "temperature": [0.7, 1.3],
        "top_k": [0, 60],
        "top_p": [0.9, 0.95],
        "min_p": [0.01, 0.05],
        "mask": True,
    },
}


@pytest.mark.parametrize("name", FILTERS)
def test_draws_equal_the_oracles(name, rounded_once):
    args, words = draw_inputs(4100 if name in ("greedy", "temperature") else 70)
    filters = dict(FILTERS[name])
    mask = {"allowed_mask": words} if filters.pop("mask", False) else {}
    kwargs = {
        key: torch.tensor(value, dtype=torch.int32 if key == "top_k" else torch.float32)
        for key, value in filters.items()
    } | mask
    got = filled("sample_tokens", *args, **kwargs)["tokens"]
    assert torch.equal(got, reference.sample_tokens(*args, **kwargs))


@pytest.mark.parametrize(
    ("filters", "kept"), [({"top_k": 3}, 3), ({"top_p": 0.125}, 5), ({"top_k": 8, "top_p": 0.5}, 4)]
)
def test_among_equals_a_filter_keeps_the_lowest_ids(filters, kept):
    # 40 equal logits at 16 positions: each of the few that stay is drawn.
    args = (torch.zeros(1, 16, 40), torch.arange(16)[None], torch.tensor([1]))
    tensors = {
        key: torch.tensor([value], dtype=torch.int32 if key == "top_k" else torch.float32)
        for key, value in filters.items()
    }
    got = filled("sample_tokens", *args, temperature=torch.ones(1), **tensors)["tokens"]
    assert set(got[0].tolist()) == set(range(kept))


@pytest.mark.parametrize("temperature", [None, [1.0, 0.5]], ids=["greedy", "sampled"])
def test_the_fused_walk_equals_the_oracles(temperature, rounded_once):
    g = torch.Generator().manual_seed(4)
    b, n, v, max_depth = 2, 8, 9, 3
    logits = torch.randn(b, n, v, generator=g)
    seeds, positions = torch.tensor([3, 4]), torch.arange(n).repeat(b, 1)
    parents = torch.tensor([[-1, 0, 0, 0, 1, 1, 2, 4], [-1, 0, 1, 2, 3, 4, 5, 6]]).int()
    counts, prefix = torch.tensor([8, 8]).int(), torch.tensor([5, 0]).int()
    _, _, child, sibling, _ = reference.flatten_tree(parents, counts, prefix)
    kwargs = {} if temperature is None else {"temperature": torch.tensor(temperature)}
    targets = reference.sample_tokens(logits, positions, seeds, **kwargs)
    # Children that the walk will meet: second in line, then first, then none.
    draft = (targets.gather(1, parents.long().clamp(min=0)) + torch.arange(n)) % v
    draft[0, 2], draft[0, 6] = targets[0, 0], targets[0, 2]
    draft[1, 1:] = targets[1, :-1]
    for num_nodes in (None, torch.tensor([8, 0]).int(), torch.tensor([0, 2]).int()):
        args = (logits, positions, seeds, draft, child, sibling, max_depth, num_nodes)
        want = reference.sample_and_verify(*args, **kwargs)
        got = filled("sample_and_verify", *args, **kwargs)
        assert [x.tolist() for x in got.values()] == [x.tolist() for x in want]
    assert int(want[2][1]) > 0
    # Unvisited rows are not looked at, and links that loop or leave the tree end the walk.
    poisoned = logits.clone()
    poisoned[1, 5:] = float("nan")
    args = (poisoned, positions, seeds, draft, child, sibling, max_depth, counts)
    again = filled("sample_and_verify", *args, **kwargs)["emitted_tokens"]
    want = reference.sample_and_verify(logits, *args[1:], **kwargs)[0]
    assert torch.equal(again[1], want[1])
    loop = torch.full_like(child, 1)
    args = (logits, positions, seeds, draft * 0 + 99, loop, loop, max_depth, counts)
    assert filled("sample_and_verify", *args)["accept_length"].tolist() == [0, 0]
    wild = torch.full_like(child, 2**31 - 1)
    args = (logits, positions, seeds, draft, wild, wild, max_depth, counts)
    assert filled("sample_and_verify", *args)["accept_length"].tolist() == [0, 0]


def test_draws_refuse_float64_logits():
    args = (torch.zeros(1, 1, 4).double(), torch.zeros(1, 1).long(), torch.zeros(1).long())
    with pytest.raises(TypeError, match=r"logits: expected float32, float16 or bfloat16 on CUDA"):
        filled("sample_tokens", *args)


# compiled ahead of time, in processes of their own: here kernels are decorated for the interpreter


def compiled(*arguments, cache):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-P", str(ROOT / "bench" / "aot.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=env | {"TRITON_CACHE_DIR": str(cache)},
    )


@pytest.mark.parametrize("arch", [80, 90, 100, 120], ids=lambda a: f"sm_{a}")
def test_representative_variants_compile_within_their_budgets(arch, tmp_path):
    result = compiled("--arch", str(arch), "--representative", "--check", cache=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("\n") >= 5


def test_every_variant_has_a_committed_budget_within_its_card():
    from eagle2_kernels.triton_kernels import launch

    listed = {(v.kernel, v.name, arch) for v in launch.variants() for arch in v.archs}
    with AOT.open() as file:
        rows = list(csv.DictReader(file))
    assert {(r["kernel"], r["variant"], int(r["arch"])) for r in rows} == listed
    assert len(rows) == len(listed)
    for row in rows:
        assert int(row["shared_bytes"]) <= launch.SHARED_LIMIT[int(row["arch"])], row


def test_importing_the_package_does_not_import_triton():
    code = "import sys, eagle2_kernels; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
