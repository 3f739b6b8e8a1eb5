"""Triton kernels under the interpreter against the oracle, and compiled for every card.

The interpreter gives values: it sees no races and no bounds, and its bfloat16 is float32.
"""

import contextlib
import csv
import importlib.util
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import (
    ATTENTION_CASES,
    EXPAND_CASES,
    FLOAT8_CASES,
    VERIFY_CASES,
    AttentionCase,
    attention_inputs,
    expand_inputs,
    paged,
    verify_inputs,
    visibility,
)
from test_logits import processor_case, same
from test_ops import example

import eagle2_kernels
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
    prefix = torch.tensor([[0, 1], [7, 1], [14, 1]], dtype=torch.int32)[:, 0]
    lengths = torch.tensor([5, 9, 0, 9, 3], dtype=torch.int32)[::2] if with_lengths else None
    table = None
    shape = (batch, 16, heads, dim)
    if page_size is not None:
        per_request = -(-16 // page_size)
        pages = torch.randperm(batch * per_request, generator=generator)
        table = torch.stack([pages.view(batch, per_request).int()] * 2, -1)[..., 0]
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_write_kv_rounds_to_float8_as_the_cpu_does(dtype, scaled):
    """Every float8 number, the middles between them, their neighbours, and what lies past them."""
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (every[1:] + every[:-1]) / 2
    edges = torch.cat([every, middles, torch.tensor([449.0, 464.0, 480.0, 6e4, float("inf")])])
    if dtype == torch.float32:
        near = [edges.nextafter(torch.tensor(x)) for x in (0.0, float("inf"))]
        edges = torch.cat([edges, *near, torch.tensor([1e-40, 2.0**-149, 3e38])])
    rows = torch.cat([edges, -edges, torch.tensor([float("nan")])])
    rows = torch.nn.functional.pad(rows, (0, -len(rows) % 128)).to(dtype).view(1, -1, 2, 64)
    lens = torch.zeros(1, dtype=torch.int32)
    scales = {}
    if scaled:
        scales = {"k_scale": torch.tensor([0.37]), "v_scale": torch.tensor(3.0)}
    stored = [torch.zeros(2, *rows.shape).to(torch.float8_e4m3fn) for _ in range(3)]
    launcher("cache", "write_kv")(*stored[0], rows, -rows, lens, **scales)
    reference.write_kv(*stored[1], rows, -rows, lens, **scales)
    torch.ops.eagle2_kernels.write_kv(*stored[2], rows, -rows, lens, **scales)
    got, *others = (x.view(torch.uint8) for x in stored)
    for want in others:
        # The sign of NaN is nobody's promise.
        both_nan = (got & 0x7F == 0x7F) & (want & 0x7F == 0x7F)
        assert torch.equal(got[~both_nan], want[~both_nan])


def test_write_kv_copies_float8_beside_rounding_and_any_element_size():
    g = torch.Generator().manual_seed(0)
    k = torch.randn(1, 2, 1, 24, generator=g)
    v = torch.randn(1, 2, 1, 16, generator=g).to(torch.float8_e4m3fn)
    lens = torch.ones(1, dtype=torch.int32)
    got, want = (
        [torch.zeros(1, 4, 1, d).to(torch.float8_e4m3fn) for d in (24, 16)] for _ in range(2)
    )
    launcher("cache", "write_kv")(*got, k, v, lens)
    reference.write_kv(*want, k, v, lens)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    for dtype in (torch.float64, torch.int8, torch.bfloat16):
        cache = torch.zeros(2, 1, 4, 1, 24, dtype=dtype)
        launcher("cache", "write_kv")(*cache, k.to(dtype), k.to(dtype), lens)
        assert torch.equal(cache[1, :, 1:3], k.to(dtype)) and (cache[:, :, ::3] == 0).all()


def test_write_kv_refuses_what_it_would_misread():
    rows, cache = torch.zeros(2, 3, 2, 8), torch.zeros(2, 9, 2, 8)
    good = dict(k_cache=cache, v_cache=cache, k=rows, v=rows, prefix_lens=torch.zeros(2).int())
    for changes, error, message in (
        ({"prefix_lens": torch.zeros(2).long()}, TypeError, r"prefix_lens: expected torch\.int32"),
        ({"v": rows[:, :2]}, ValueError, r"v: expected shape \(2, 3, 2, None\)"),
        ({"k_cache": cache[:, :, :1]}, ValueError, r"k_cache: expected shape \(2, None, 2, 8\)"),
        ({"k": rows.double()}, TypeError, r"k: expected the dtype of k_cache, torch\.float32"),
        ({"k_scale": torch.ones(1)}, ValueError, r"k_scale: expected None where rows are copied"),
        ({"lengths": torch.zeros(1).int()}, ValueError, r"lengths: expected shape \(2,\)"),
    ):
        with pytest.raises(error, match=message):
            launcher("cache", "write_kv")(**good | changes)


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
    [
        (1, 1, 1, 1),
        (2, 3, 11, 4),
        (1, 2, 3, 5),
        (1, 4, 4095, 4),
        (2, 1, 4096, 3),
        (1, 3, 8193, 7),
        (1, 2, 4200, 128),
    ],
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


@pytest.mark.parametrize("case", EXPAND_CASES, ids=lambda case: case.name)
def test_expand_equals_the_oracle_over_the_case_table(case):
    case = replace(case, vocab=min(case.vocab, 9000))
    assert_expands_as_the_oracle(*expand_inputs(case, torch.float32), case.top_k)


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
    with pytest.raises(ValueError, match=r"top_k: expected 1 to 128 on CUDA, got 129"):
        filled("expand_topk", torch.zeros(1, 1, 200), torch.zeros(1, 1), 129)
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


def small(case):
    """A row of the case table at a size that the interpreter gets through in a second."""
    return replace(
        case,
        nodes=min(case.nodes, 20),
        prefix=min(case.prefix, 40),
        head_dim=min(case.head_dim, 40),
        v_dim=case.v_dim and min(case.v_dim, 24),
        window=case.window and min(case.window, 30),
        kv_chunk=case.kv_chunk or 32,
    )


CASES += dict.fromkeys(map(small, ATTENTION_CASES))


@pytest.mark.parametrize(
    ("case", "dtype"),
    # float16 takes the wide tile, float32 the narrow one; the interpreter takes a second a case.
    [(case, torch.float32) for case in CASES] + [(case, torch.float16) for case in CASES[1::3]],
    ids=lambda x: x.name if isinstance(x, AttentionCase) else str(x)[6:],
)
def test_attention_equals_the_oracle(case, dtype):
    assert_attends_as_the_oracle(attention_inputs(case, dtype, any_order=case.nodes % 2 == 0))


SMALL_FLOAT8 = [
    replace(case, nodes=min(case.nodes, 18), head_dim=24, prefix=min(case.prefix, 40), kv_chunk=32)
    for case in FLOAT8_CASES[:-1]
]


@pytest.mark.parametrize(
    ("case", "dtype", "hardware"),
    [(case, torch.float32, False) for case in SMALL_FLOAT8[1:]]
    + [(SMALL_FLOAT8[4], torch.float16, True)],
    ids=lambda x: x.name if isinstance(x, AttentionCase) else str(x).removeprefix("torch."),
)
def test_attention_over_float8_caches_equals_the_oracle(case, dtype, hardware, monkeypatch):
    """Both ways to read float8: as such, and as bytes where the card knows no e4m3."""
    from eagle2_kernels.triton_kernels import attention

    monkeypatch.setattr(attention, "_device", lambda device: (80, 8, hardware))
    assert_attends_as_the_oracle(attention_inputs(case, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_float8_number_is_read_as_it_is(dtype):
    # The one key's values are all the numbers; NaN, which makes a row NaN, in calls of its own.
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = torch.where(every.isnan(), 0, every.float()).to(torch.float8_e4m3fn)

    def call(k, v):
        out = torch.full((1, 1, 1, v.shape[0]), 7.0, dtype=dtype)
        q, lens = torch.ones(1, 1, 1, 16, dtype=dtype), torch.zeros(1, dtype=torch.int32)
        caches = (x.view(1, 1, 1, -1) for x in (k, v))
        launcher("attention", "tree_attention_out")(
            q, *caches, lens, v_scale=torch.tensor([0.5]), out=out
        )
        return out.flatten()

    zeros = torch.zeros(16).to(torch.float8_e4m3fn)
    assert torch.equal(call(zeros, finite), (finite.float() * 0.5).to(dtype))
    for nan in every[every.isnan()]:
        poison = zeros.clone()
        poison[3] = nan
        assert call(zeros, poison).isnan().all() and call(poison, zeros).isnan().all()


def test_latent_attention_takes_the_wide_tiles():
    """DeepSeek's shape: V is the first 512 of K's 576 columns, one KV head for all."""
    case = AttentionCase(3, (4, 1), 576, 20, v_dim=512, latent=True, page_size=16)
    assert_attends_as_the_oracle(attention_inputs(case, torch.float32))
    assert_attends_as_the_oracle(attention_inputs(replace(case, float8=True), torch.float16))


def ragged_inputs(case, counts, padding=0):
    """Requests with ``counts`` rows of the case's trees, one after another; padding rows last."""
    inputs = attention_inputs(case, torch.float32)
    keep = torch.cat([torch.arange(n) + b * case.nodes for b, n in enumerate(counts)])

    def flat(tensor, fill):
        rows = tensor.flatten(0, 1)[keep]
        return torch.cat([rows, torch.full((padding, *rows.shape[1:]), fill, dtype=rows.dtype)])

    starts = torch.tensor([0, *counts]).cumsum(0).int()
    kwargs = dict(inputs.kwargs, qo_indptr=starts)
    if "depths" in kwargs:
        kwargs["depths"] = flat(kwargs["depths"], 0)
    mask = None if inputs.tree_mask is None else flat(inputs.tree_mask, -1)
    return replace(inputs, q=flat(inputs.q, 1.0), tree_mask=mask, kwargs=kwargs)


def attend_flat(inputs, **changes):
    out = torch.full((*inputs.q.shape[:2], inputs.v_cache.shape[3]), float("nan"))
    lse = torch.full(inputs.q.shape[:2], float("nan"))
    kwargs = {**inputs.kwargs, **changes}
    launcher("attention", "tree_attention_out")(*inputs.args, **kwargs, out=out, lse=lse)
    return out, lse


RAGGED = [
    AttentionCase(9, (4, 2), 16, 40, batch=4),
    AttentionCase(9, (2, 1), 16, 40, batch=4, chain=True, page_size=5, window=20),
    AttentionCase(18, (2, 1), 16, 30, batch=4, page_size=16, window=25, sinks=True),
    AttentionCase(9, (2, 1), 16, 40, batch=4, float8=True, kv_chunk=16),
]


@pytest.mark.parametrize("case", RAGGED, ids=lambda case: case.name)
def test_ragged_rows_equal_the_oracles_and_their_own_calls(case):
    counts = [case.nodes, 0, 1, 5]
    inputs = ragged_inputs(case, counts, padding=3)
    changes = {"max_q": case.nodes}
    got, lse = attend_flat(inputs, **changes)
    want, want_lse = torch.empty_like(got), torch.empty_like(lse)
    reference.tree_attention_out(*inputs.args, **inputs.kwargs, **changes, out=want, lse=want_lse)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse, want_lse, rtol=2e-6, atol=2e-6)
    # The bits of a call with that request alone.
    whole = attention_inputs(case, torch.float32)
    dense = ("depths",) if case.window and not case.chain else ()
    for b, first in ((0, 0), (3, sum(counts[:3]))):
        n = counts[b]
        kwargs = {name: x for name, x in whole.kwargs.items() if name not in dense}
        kwargs |= {name: whole.kwargs[name][b : b + 1, :n] for name in dense}
        if "page_table" in kwargs:
            kwargs["page_table"] = whole.kwargs["page_table"][b : b + 1]
        else:
            whole_k, whole_v = whole.k_cache[b : b + 1], whole.v_cache[b : b + 1]
        own = replace(
            whole,
            q=whole.q[b : b + 1, :n],
            k_cache=whole.k_cache if "page_table" in kwargs else whole_k,
            v_cache=whole.v_cache if "page_table" in kwargs else whole_v,
            prefix_lens=whole.prefix_lens[b : b + 1],
            tree_mask=None if whole.tree_mask is None else whole.tree_mask[b : b + 1, :n],
            kwargs=kwargs,
        )
        alone, alone_lse = attend(own)
        assert torch.equal(got[first : first + n], alone[0])
        assert torch.equal(lse[first : first + n], alone_lse[0])


def test_ragged_rows_of_a_longer_tree_and_of_the_prefix_alone():
    case = AttentionCase(9, (2, 1), 16, 40, batch=3)
    inputs = attention_inputs(case, torch.float32)
    counts = [3, 0, 4]
    tails = [torch.arange(9 - n, 9) + 9 * b for b, n in enumerate(counts)]
    keep = torch.cat(tails)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    flat = replace(
        inputs,
        q=inputs.q.flatten(0, 1)[keep],
        tree_mask=inputs.tree_mask.flatten(0, 1)[keep],
        kwargs={"qo_indptr": starts},
    )
    want, lse = attend(inputs)
    for max_q in (4, None):
        got, got_lse = attend_flat(flat, tree_len=9, max_q=max_q)
        assert torch.equal(got, want.flatten(0, 1)[keep])
        assert torch.equal(got_lse, lse.flatten(0, 1)[keep])
    prefix, prefix_lse = attend(replace(inputs, tree_mask=None), tree_len=0)
    got, got_lse = attend_flat(replace(flat, tree_mask=None), tree_len=0, max_q=4)
    assert torch.equal(got, prefix.flatten(0, 1)[keep])
    assert torch.equal(got_lse, prefix_lse.flatten(0, 1)[keep])


def test_rows_past_the_hosts_bound_are_padding():
    g = torch.Generator().manual_seed(1)
    q, cache = torch.randn(6, 2, 16, generator=g), torch.randn(1, 30, 1, 16, generator=g)
    lens = torch.tensor([5], dtype=torch.int32)
    starts = torch.tensor([0, 6], dtype=torch.int32)
    out = torch.full_like(q, 7.0)
    launcher("attention", "tree_attention_out")(
        q, cache, cache, lens, qo_indptr=starts, max_q=4, out=out
    )
    assert (out[:4] != 0).all() and (out[4:] == 0).all()


@pytest.mark.parametrize("starts", [[0, 5, 3], [0, 99, 99], [-4, 2, 6], [0]], ids=str)
def test_row_starts_of_any_value_read_and_write_inside_the_rows(starts):
    g = torch.Generator().manual_seed(1)
    batch = len(starts) - 1
    q, cache = torch.randn(6, 2, 16, generator=g), torch.randn(batch, 30, 1, 16, generator=g)
    # The rows around are what an access outside the tensors would meet.
    stored = torch.full((18, 2, 16), 7.0)
    kwargs = {"qo_indptr": torch.tensor(starts).int(), "max_q": 6}
    args = (q, cache, cache, torch.zeros(batch).int() + 5)
    launcher("attention", "tree_attention_out")(*args, **kwargs, out=stored[6:12])
    assert (stored[:6] == 7).all() and (stored[12:] == 7).all()
    assert stored[6:12].isfinite().all()
    assert batch > 0 or (stored[6:12] == 0).all()


def test_attention_refuses_scales_and_rows_it_cannot_use():
    inputs = attention_inputs(AttentionCase(2, (2, 1), 16, 4), torch.float32)
    with pytest.raises(ValueError, match=r"k_scale: expected None beside torch\.float32 caches"):
        attend(inputs, k_scale=torch.ones(1))
    with pytest.raises(ValueError, match=r"qo_indptr: expected a tensor beside max_q = 3"):
        attend(inputs, max_q=3)
    inputs = attention_inputs(AttentionCase(2, (2, 1), 16, 4, float8=True), torch.float32)
    with pytest.raises(TypeError, match=r"v_scale: expected torch\.float32, got torch\.float64"):
        attend(inputs, v_scale=torch.ones(1).double())
    with pytest.raises(ValueError, match=r"k_scale: expected one element, got shape \(2,\)"):
        attend(inputs, k_scale=torch.ones(2))


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

    case = AttentionCase(20, (2, 1), 16, 290, kv_chunk=32)
    inputs = attention_inputs(case, dtype)
    monkeypatch.setattr(attention, "_device", lambda device: (80, 10**6, False))
    want, lse = attend(inputs)
    # One program folds whole groups of chunks; other pages; the row alone; a second request.
    monkeypatch.setattr(attention, "_device", lambda device: (80, 1, False))
    for other in (attend(inputs), attend(inputs, max_prefix_len=290)):
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
        prefix_lens=torch.tensor([7, 290], dtype=torch.int32),
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


# process_logits, count_tokens, mark_tokens, token_logprobs


@pytest.mark.parametrize("hostile", [False, True], ids=["clean", "hostile"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_edited_logits_are_the_oracles(dtype, hostile):
    rng = random.Random(hostile)
    for trial in range(12):
        (logits, *tree), kwargs = processor_case(rng, dtype, hostile)
        got, want = logits.clone(), logits.clone()
        launcher("logits", "process_logits")(got, *tree, **kwargs)
        reference.process_logits(want, *tree, **kwargs)
        assert same(got, want), trial


def test_logits_are_edited_across_slices_and_where_they_lie():
    """2048 tokens are one program's; rows, counts and bits between others that must stay."""
    g = torch.Generator().manual_seed(1)
    b, n, vocab = 2, 3, 2050
    store = torch.full((vocab, n, b, 2), 7.0)
    view = store[..., 1].permute(2, 1, 0)
    view.copy_(torch.randn(b, n, vocab, generator=g))
    want = view.clone()
    draft = torch.tensor([[0, 2047, 2048], [0, 2049, 2049]])
    parents = torch.tensor([[-1, 0, 1]] * b).int()
    counts = torch.zeros(b, vocab, 2).int()
    counts[0, 2047], counts[1, 2048] = 3, 1
    kwargs = {
        "output_counts": counts[..., 0],
        "prompt_mask": torch.full((b, 65), 1).int(),
        "repetition_penalty": torch.tensor([1.3, 1.0]),
        "frequency_penalty": torch.tensor([0.3, 0.7]),
        "bias_tokens": torch.tensor([[2047, 2048, -1], [5, 5, 2**40]]),
        "bias_values": torch.tensor([[1.5, -0.5, 9.0], [0.1, 0.2, 9.0]]),
    }
    launcher("logits", "process_logits")(view, draft, parents, **kwargs)
    reference.process_logits(want, draft, parents, **kwargs)
    assert torch.equal(view, want)
    assert (store[..., 0] == 7).all()


def test_parents_that_loop_or_leave_the_tree_leave_their_rows_alone():
    logits = torch.ones(1, 4, 9)
    kwargs = {"output_counts": torch.ones(1, 9).int(), "presence_penalty": torch.ones(1)}
    draft = torch.zeros(1, 4, dtype=torch.int64)
    for parents, edited in (
        ([-1, 2, 1, 0], [0, 3]),
        ([-1, 1, 2**31 - 1, -(2**31)], [0]),
        ([0, 0, 0, 0], []),
    ):
        got = logits.clone()
        launcher("logits", "process_logits")(got, draft, torch.tensor([parents]).int(), **kwargs)
        assert [i for i in range(4) if (got[0, i] != 1).any()] == edited


@pytest.mark.parametrize("vocab", [1, 31, 33, 64])
def test_tokens_are_counted_and_marked_as_by_the_oracle(vocab):
    g = torch.Generator().manual_seed(vocab)
    tokens = torch.randint(-2, 70, (2, 300), generator=g)
    # Written through a view whose neighbours must stay.
    counts = torch.full((2, vocab, 2), -3, dtype=torch.int32)
    mask = torch.randint(-(2**31), 2**31, (2, -(-vocab // 32), 2), generator=g).int() & 0x0F0F0F0F
    want_counts, want_mask = counts.clone(), mask.clone()
    launcher("logits", "count_tokens")(counts[..., 0], tokens)
    reference.count_tokens(want_counts[..., 0], tokens)
    assert torch.equal(counts, want_counts)
    launcher("logits", "mark_tokens")(mask[..., 1], tokens)
    reference.mark_tokens(want_mask[..., 1], tokens)
    assert torch.equal(mask, want_mask)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 15, 4097])
def test_log_probabilities_are_those_of_log_softmax(dtype, vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(2, 4, vocab, generator=generator) * 6).to(dtype)
    slots = torch.randint(0, 4, (2, 5), generator=generator).int()
    tokens = torch.randint(0, vocab, (2, 5), generator=generator)
    rows = torch.arange(2)[:, None]
    exact = torch.log_softmax(logits.double(), -1)[rows, slots.long(), tokens]
    torch_own = torch.log_softmax(logits.float(), -1)[rows, slots.long(), tokens]
    strided = logits.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    got = filled("token_logprobs", logits, slots, tokens)["logprobs"]
    error = (got.double() - exact).abs().max()
    assert error <= 2 * (torch_own.double() - exact).abs().max() + 4e-6
    assert torch.equal(filled("token_logprobs", strided, slots, tokens)["logprobs"], got)


def test_log_probabilities_of_odd_rows():
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[[0.0, nan, -inf], [inf, 0.0, inf], [nan, -inf, nan]]])
    slots = torch.tensor([[0, 0, 0, 1, 1, 2, -1, 3, 0, 0, 2**31 - 1]]).int()
    tokens = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0, -1, 3, 2**62]])
    got = filled("token_logprobs", logits, slots, tokens)["logprobs"]
    torch.testing.assert_close(got, reference.token_logprobs(logits, slots, tokens))


def test_the_logits_launchers_refuse_what_they_would_misread():
    logits, counts = torch.zeros(1, 2, 40), torch.zeros(1, 40).int()
    tree = (torch.zeros(1, 2).long(), torch.zeros(1, 2).int())
    for call, error, message in (
        (("process_logits", logits.int()), TypeError, "logits: expected float64, float32"),
        (("process_logits", logits), ValueError, "draft_tokens, parents: expected both"),
        (("process_logits", logits, tree[0].int(), tree[1]), TypeError, "draft_tokens: expected"),
        (("count_tokens", counts.long(), tree[0]), TypeError, r"counts: expected torch\.int32"),
        (("mark_tokens", counts, tree[1]), TypeError, r"tokens: expected torch\.int64"),
    ):
        with pytest.raises(error, match=message):
            launcher("logits", call[0])(*call[1:])
    with pytest.raises(ValueError, match="output_counts: expected a tensor"):
        launcher("logits", "process_logits")(logits, *tree, presence_penalty=torch.ones(1))


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


# what a launcher does beside launching


ATTENTION_FORMS = {
    "dense": {},
    "float8 pages": {
        "page_table": torch.arange(6).view(2, 3).int(),
        "depths": torch.zeros(2, 5).int(),
        "window": 4,
        "sinks": torch.zeros(4),
        "k_scale": torch.ones(1),
        "v_scale": torch.ones(1),
    },
    "ragged": {"qo_indptr": torch.tensor([0, 2, 3]).int(), "max_q": 2},
}


def launches(name):
    """Calls of an op's launcher, with and without its options."""
    args, kwargs = example(name)
    yield args, kwargs
    if name == "tree_attention_out":
        q, k, v, lens, mask = args
        pages = [x.view(8, 3, 2, 8).to(torch.float8_e4m3fn) for x in (k, v)]
        yield (q, *pages, lens, mask), kwargs | ATTENTION_FORMS["float8 pages"]
        flat = {key: out[0, :3] for key, out in kwargs.items()}
        yield (q[0, :3], k, v, lens, mask[0, :3]), flat | ATTENTION_FORMS["ragged"]
    elif name == "write_kv":
        caches = [x.view(8, 3, 2, 8).to(torch.float8_e4m3fn) for x in args[:2]]
        table = ATTENTION_FORMS["float8 pages"]["page_table"]
        yield (*caches, *args[2:], table), dict.fromkeys(("k_scale", "v_scale"), torch.ones(1))


@pytest.mark.parametrize("name", [op.name for op in OPS if op.triton])
def test_a_launcher_reads_no_value_and_launches_on_the_arguments_device(name, monkeypatch):
    """So it never waits for the device and may be captured: tensors here have no values at all.

    What it allocates are torch's own tensors, so they come from torch's caching allocator.
    """
    from eagle2_kernels.triton_kernels import attention
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    op = next(op for op in OPS if op.name == name)
    module = importlib.import_module(f"eagle2_kernels.triton_kernels.{op.triton}")
    guarded, launched = [], []

    @contextlib.contextmanager
    def device_of(tensor):
        guarded.append(tensor.device)
        yield
        guarded.pop()

    class Launch:
        def __init__(self, kernel):
            self.names = kernel.arg_names

        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                values = dict(zip(self.names, args, strict=False)) | kwargs
                options = {"num_warps", "num_stages", "enable_fp_fusion"}
                assert values.keys() - options == set(self.names)
                tensors = [x for x in values.values() if isinstance(x, torch.Tensor)]
                assert guarded == [tensors[0].device] == [torch.device("cuda:0")]
                assert all(isinstance(x, FakeTensor) and x.is_cuda for x in tensors)
                others = [x for x in values.values() if not isinstance(x, torch.Tensor)]
                assert all(type(x) in (int, float, bool) for x in (*others, *grid))
                launched.append(grid)

            return launch

    kernels = [kernel for kernel in vars(module) if kernel.endswith("_kernel")]
    for kernel in kernels:
        monkeypatch.setattr(module, kernel, Launch(getattr(module, kernel)))
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(attention, "_device", lambda device: (90, 132, True))
    count = 0
    with FakeTensorMode():
        for args, kwargs in launches(name):
            args, kwargs = torch.utils._pytree.tree_map_only(
                torch.Tensor,
                lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda"),
                (args, kwargs),
            )
            before, count = len(launched), count + 1
            if op.outs:
                made = op.fake(*args, **kwargs)
                made = (made,) if isinstance(made, torch.Tensor) else made
                kwargs = kwargs | dict(zip(op.outs, made, strict=True))
            getattr(module, f"{name}_out" if op.outs else name)(*args, **kwargs)
            assert len(launched) > before
    assert count >= 1


def test_the_cuda_library_calls_nothing_that_waits_for_the_device():
    """Its kernels' launches aside, no function of the CUDA runtime; and no read of a value."""
    library = Path(eagle2_kernels.__file__).parent / "_C_cuda.abi3.so"
    if not library.exists():
        pytest.skip("built without CUDA; `make cuda` insists on the library")
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
    )
    wanted = {line.split()[-1].split("@")[0] for line in listed.stdout.splitlines()}
    runtime = {name for name in wanted if name.startswith(("cuda", "cu"))}
    assert {n for n in runtime if "Launch" not in n} <= {"cudaGetLastError", "cudaGetErrorString"}
    # torch_list_get_item takes a tensor from a list, and stays.
    reads = ("torch_item", "local_scalar", "synchronize")
    assert not [n for n in wanted if any(word in n.lower() for word in reads)]


@pytest.mark.parametrize("case", VERIFY_CASES, ids=lambda case: case.name)
def test_verification_equals_the_oracle_over_the_case_table(case):
    x = verify_inputs(replace(case, vocab=min(case.vocab, 3000)))
    tree = (x.draft_tokens, x.first_child, x.next_sibling, x.max_depth, x.num_nodes)
    args = (x.logits, x.position_ids, x.seeds, *tree)
    got = filled("sample_and_verify", *args, **x.filters)
    wanted = reference.sample_and_verify(*args, **x.filters)
    for (name, value), want in zip(got.items(), wanted, strict=True):
        assert torch.equal(value, want), name


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


def test_what_spills_is_excused_by_name_and_nothing_else_is():
    spec = importlib.util.spec_from_file_location("aot", ROOT / "bench" / "aot.py")
    aot = importlib.util.module_from_spec(spec)
    sys.modules["aot"] = aot
    spec.loader.exec_module(aot)
    with AOT.open() as file:
        spilling = {
            (r["arch"], r["kernel"], r["variant"])
            for r in csv.DictReader(file)
            if r["spills"] != "0"
        }
    excused = {(arch, kernel, name) for archs, kernel, name in aot.SPILLS for arch in archs.split()}
    assert spilling == excused


def test_importing_the_package_does_not_import_triton():
    code = "import sys, eagle2_kernels; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
