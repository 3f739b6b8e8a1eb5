"""tree_attention and merge_attention_states against the oracle, and the rules of the contract."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from cases import (
    ATTENTION_CASES,
    FLOAT8,
    FLOAT8_CASES,
    FLOATS,
    TREE_SIZES,
    AttentionCase,
    AttentionInputs,
    attention_inputs,
    paged,
    path_of,
    random_parents,
    visibility,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from eagle2_kernels import (
    merge_attention_states,
    ops,
    reference,
    tree_attention,
    tree_attention_varlen,
)

NEG_INF = float("-inf")
dtypes = pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
# What caches may be beside queries of a dtype: fields of AttentionCase.
FORMS = {"plain": {}, "V96": {"v_dim": 96}, "float8": {"float8": True}}
formed_dtypes = pytest.mark.parametrize(
    ("form", "dtype"),
    [
        pytest.param(form, dtype, id=f"{name}-{dtype_name}")
        for name, form in FORMS.items()
        for dtype_name, dtype in FLOATS.items()
        if name != "float8" or dtype_name != "float64"
    ],
)


def attend(inputs: AttentionInputs, **changes) -> tuple[Tensor, Tensor]:
    """(out, lse), written over NaN so that nothing is left unwritten unnoticed."""
    out, lse = nan_outputs(inputs.q, inputs.v_cache)
    kwargs = inputs.kwargs | changes
    return tree_attention(*inputs.args, **kwargs, out=out, lse=lse, return_lse=True)


def nan_outputs(q: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
    shape = (*q.shape[:-1], v_cache.shape[-1])
    return q.new_full(shape, float("nan")), torch.full(q.shape[:-1], float("nan"))


def oracle(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Out and LSE in float64, row by row."""
    exact = inputs.double()
    out, lse = nan_outputs(exact.q, exact.v_cache)
    lse = lse.double()
    reference.tree_attention_out(*exact.args, **exact.kwargs, out=out, lse=lse)
    return out, lse


def dense(inputs: AttentionInputs, seen: Tensor, *, peer: bool = False) -> tuple[Tensor, Tensor]:
    """Masked softmax over the whole cache in the queries' dtype; the LSE in at least float32.

    In float64 it is the value to compare with (and equals the oracle, tested below). In the other
    dtypes it is what PyTorch offers: SDPA where that has all the parts, else softmax by hand, over
    float8 caches brought to the queries' dtype.
    """
    inputs = inputs.unscaled(inputs.q.dtype)
    q, seen = inputs.q.transpose(1, 2), seen[:, None]
    group = inputs.q.shape[2] // inputs.k.shape[2]
    k, v = (x.transpose(1, 2).repeat_interleave(group, 1) for x in (inputs.k, inputs.v))
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    scores = q.to(wide) @ k.to(wide).mT / math.sqrt(q.shape[-1])
    softcap, sinks = inputs.kwargs.get("softcap"), inputs.kwargs.get("sinks")
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, NEG_INF)
    if sinks is not None:
        sink = sinks.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    lse = scores.logsumexp(-1).transpose(1, 2)
    if peer and not softcap and sinks is None:
        out = sdpa(q, k, v, attn_mask=seen)
    else:
        out = scores.softmax(-1)[..., : k.shape[2]].to(q.dtype) @ v
    return out.transpose(1, 2), lse


def check_error(out: Tensor, want: Tensor, peer: Tensor, values: Tensor) -> None:
    """``want`` is float64: at most twice the error of PyTorch's own op, plus a rounding or two."""
    dtype = out.dtype
    error, peer_error = (out - want).abs().max(), (peer - want).abs().max()
    # What one rounding of data of this size costs. In float64 `want` is no better than `out`.
    slack = (want.to(dtype) + 0.3 - 0.3 - want.to(dtype)).abs().max().double() * 2
    if dtype == torch.float64:
        slack = 4 * torch.finfo(dtype).eps * values.abs().max()
    assert error <= 2 * peer_error + slack


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, where any NaN equals any NaN."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    equal = a.contiguous().view(words) == b.contiguous().view(words)
    return a.shape == b.shape and bool((equal | (a.isnan() & b.isnan())).all())


def tree_mask(parents: list[list[int]]) -> Tensor:
    return tree_arrays(parents)[1]


def tree_arrays(parents: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Depths and mask words."""
    rows = torch.tensor(parents, dtype=torch.int32)
    count = torch.full((len(parents),), len(parents[0]), dtype=torch.int32)
    depths, _, _, _, mask = reference.flatten_tree(rows, count, torch.zeros_like(count))
    return depths, mask


def lens(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# against the oracle


small_cases = [c for c in ATTENTION_CASES if c.batch * c.nodes <= 33]


@pytest.mark.parametrize("case", small_cases, ids=lambda c: c.name)
def test_dense_float64_is_the_oracle(case):
    inputs = attention_inputs(case, torch.float64)
    out, lse = oracle(inputs)
    want, want_lse = dense(inputs, visibility(inputs))
    torch.testing.assert_close(out, want, rtol=0, atol=1e-14)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{case.name}-{name}")
        for case in (*ATTENTION_CASES, *FLOAT8_CASES)
        for name, dtype in FLOATS.items()
        if not (case.float8 and dtype == torch.float64)
    ],
)
def test_matches_oracle(case, dtype):
    inputs = attention_inputs(case, dtype)
    out, lse = attend(inputs)
    seen = visibility(inputs)
    want, want_lse = dense(inputs.double(), seen)
    peer, peer_lse = dense(inputs, seen, peer=True)
    check_error(out, want, peer, inputs.v)
    lse_slack = (want_lse.float() - want_lse).abs().max() * 2 + 1e-7 * want_lse.abs().max()
    assert (lse - want_lse).abs().max() <= 2 * (peer_lse - want_lse).abs().max() + lse_slack


@pytest.mark.parametrize("nodes", TREE_SIZES, ids=lambda n: f"N{n}")
def test_every_node_equals_causal_attention_of_its_path(nodes):
    """One path at a time through PyTorch's causal attention in float64: no mask of ours."""
    prefix = 41
    inputs = attention_inputs(AttentionCase(nodes, (6, 2), 24, prefix, v_dim=20), torch.float64)
    out, _ = attend(inputs)
    parents, reached = inputs.parents[0], set()
    for leaf in set(range(nodes)) - set(parents):
        path = path_of(parents, leaf)
        slots = [*range(prefix), *(prefix + j for j in path)]
        q = torch.cat([torch.zeros(1, prefix, 6, 24).double(), inputs.q[:, path]], 1)
        k, v = (x[:, slots].repeat_interleave(3, 2) for x in (inputs.k, inputs.v))
        want = sdpa(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
        torch.testing.assert_close(out[:, path], want[:, prefix:], rtol=0, atol=1e-13)
        reached |= set(path)
    assert len(reached) == nodes


@dtypes
def test_exponential_of_whole_numbers(dtype):
    """Two keys whose logits differ by n: the smaller weight is 1 / (1 + e^n)."""
    n = torch.arange(0, 100, dtype=torch.float64)
    q = n.to(dtype).view(1, -1, 1, 1)
    k = torch.tensor([1.0, 0.0], dtype=dtype).view(1, 2, 1, 1)
    v = torch.tensor([1.0, 0.0], dtype=dtype).view(1, 2, 1, 1)
    out = tree_attention(q, k, v, lens(2), tree_len=0, sm_scale=-1.0).flatten().double()
    want = 1 / (1 + n.exp())
    normal = want > 2 * torch.finfo(dtype).tiny
    wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    # A logit of size n is only known to n roundings.
    bound = torch.finfo(dtype).eps + (2 + n) * wide.eps
    assert ((out - want).abs()[normal] <= (bound * want)[normal]).all()
    assert (out[~normal] <= 4 * torch.finfo(dtype).tiny).all()


@dtypes
@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["falling", "rising"])
def test_chunks_whose_logits_lie_far_apart(order, dtype):
    """One key a chunk, logits 0 and -n: a merge scales down the part with the smaller peak."""
    q = torch.arange(0, 1000, 50).to(dtype).view(1, -1, 1, 1)
    k = torch.tensor([0.0, 1.0])[order].to(dtype).view(1, 2, 1, 1)
    v = torch.tensor([0.0, 1.0])[order].to(dtype).view(1, 2, 1, 1)
    out = tree_attention(q, k, v, lens(2), tree_len=0, sm_scale=-1.0, kv_chunk=1)
    want = 1 / (1 + q.double().exp())
    torch.testing.assert_close(out.double(), want, rtol=0, atol=torch.finfo(dtype).eps)


# which keys are seen: with q = 0 all weights are equal and V = one-hot rows name the keys


def seen_keys(mask: Tensor | None, prefix: int, nodes: int, slots: int, **kwargs) -> list[set[int]]:
    q = torch.zeros(1, nodes, 1, slots)
    v = torch.eye(slots).view(1, slots, 1, slots)
    k = torch.randn(1, slots, 1, slots)
    out = tree_attention(q, k, v, lens(prefix), mask, **kwargs)
    rows = [set(row.nonzero()[:, 0].tolist()) for row in out[0, :, 0]]
    for row, keys in zip(out[0, :, 0], rows, strict=True):
        torch.testing.assert_close(row[list(keys)], torch.full((len(keys),), 1 / max(len(keys), 1)))
    return rows


def test_two_long_branches_see_only_their_own():
    """Every non-ancestor of the second branch lies under the causal diagonal."""
    parents = [-1, 0, 1, 2, 3, 0, 5, 6, 7]
    keys = seen_keys(tree_mask([parents]), 2, 9, 16)
    assert keys[4] == {0, 1, 2, 3, 4, 5, 6}
    assert keys[8] == {0, 1, 2, 7, 8, 9, 10}


def test_no_mask_is_a_causal_chain():
    assert seen_keys(None, 3, 3, 16) == [{0, 1, 2, 3}, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4, 5}]
    assert seen_keys(None, 2, 2, 16, tree_len=4) == [{0, 1, 2, 3, 4}, {0, 1, 2, 3, 4, 5}]
    assert seen_keys(None, 4, 3, 16, window=2) == [{3, 4}, {4, 5}, {5, 6}]


def test_a_chain_with_depths_takes_positions_from_them():
    depths = lens(0, 1, 1, 2).view(1, 4)
    keys = seen_keys(None, 3, 4, 16, window=2, depths=depths)
    assert keys == [{2, 3}, {3, 4}, {3, 4, 5}, {4, 5, 6}]


def test_tree_len_zero_is_prefix_only():
    assert seen_keys(None, 3, 5, 16, tree_len=0) == [{0, 1, 2}] * 5
    assert (
        seen_keys(torch.zeros(1, 5, 0, dtype=torch.int64), 3, 5, 16, tree_len=0) == [{0, 1, 2}] * 5
    )
    assert seen_keys(None, 0, 2, 16, tree_len=0) == [set(), set()]


def test_window_goes_by_position_not_by_slot():
    """Root with five children: all are at depth 1, the last child's slot is 5."""
    depths, mask = tree_arrays([[-1, 0, 0, 0, 0, 0]])
    keys = seen_keys(mask, 4, 6, 16, window=3, depths=depths)
    assert keys[0] == {2, 3, 4}
    assert [keys[i] for i in range(1, 6)] == [{3, 4, 4 + i} for i in range(1, 6)]
    assert seen_keys(mask, 4, 6, 16, window=1, depths=depths)[3] == {7}
    assert seen_keys(mask, 4, 6, 16, window=2, depths=depths)[3] == {4, 7}


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7])
def test_query_head_h_reads_kv_head_h_over_group(group):
    hkv = 2
    v = torch.arange(float(hkv)).view(1, 1, hkv, 1).expand(1, 4, hkv, 8).contiguous()
    q, k = torch.randn(1, 2, hkv * group, 8), torch.randn(1, 4, hkv, 8)
    out = tree_attention(q, k, v, lens(2))
    assert out[0, :, :, 0].round().tolist() == [[0.0] * group + [1.0] * group] * 2


def test_tree_call_then_causal_call():
    """No state: the second call does not know the first one's mask."""
    inputs = attention_inputs(AttentionCase(9, (2, 1), 32, 5), torch.float32)
    tree, _ = attend(inputs)
    causal = tree_attention(*inputs.args[:4])
    inputs.tree_mask = None
    want, _ = oracle(inputs)
    torch.testing.assert_close(causal.double(), want, rtol=0, atol=1e-5)
    assert not torch.allclose(causal, tree)


def test_ragged_batch_equals_unpadded_runs():
    q = torch.randn(3, 4, 2, 32)
    k, v = torch.randn(3, 60, 1, 32), torch.randn(3, 60, 1, 32)
    mask = tree_mask([random_parents(4, s) for s in range(3)])
    prefix = lens(50, 7, 0)
    out = tree_attention(q, k, v, prefix, mask)
    for b, length in enumerate(prefix.tolist()):
        stop = length + 4
        alone = tree_attention(
            q[b : b + 1],
            k[b : b + 1, :stop].contiguous(),
            v[b : b + 1, :stop].contiguous(),
            lens(length),
            mask[b : b + 1],
        )
        assert same_bits(out[b : b + 1], alone)


# path rule: a node's row is the row of plain decoding


def plain_decoding(inputs: AttentionInputs, request: int, **changes) -> tuple[Tensor, Tensor]:
    """Row of every node when its path is the prefix: one decoding step of one token each."""
    n, prefix = inputs.q.shape[1], int(inputs.prefix_lens[request])
    kwargs = {k: v for k, v in inputs.kwargs.items() if k not in ("page_table", "depths")}
    outs, sums = [], []
    for i in range(n):
        path = path_of(inputs.parents[request], i)
        slots = [*range(prefix), *(prefix + j for j in path)]
        k, v = inputs.k[request, slots][None], inputs.v[request, slots][None]
        out, lse = tree_attention(
            inputs.q[request, i][None, None],
            k,
            v,
            lens(prefix + len(path) - 1),
            return_lse=True,
            **kwargs,
            **changes,
        )
        outs.append(out[0])
        sums.append(lse[0])
    return torch.cat(outs)[None], torch.cat(sums)[None]


CHAIN_STAR_ROOT = {"chain": [*range(-1, 39)], "star": [-1] + [0] * 39, "root": [-1]}


@formed_dtypes
@pytest.mark.parametrize("parents", CHAIN_STAR_ROOT.values(), ids=CHAIN_STAR_ROOT)
def test_chain_star_and_root_are_plain_decodes(parents, form, dtype):
    case = AttentionCase(len(parents), (6, 2), 64, 110, page_size=16, **form)
    inputs = attention_inputs(case, dtype, parents=[parents])
    out, lse = attend(inputs)
    want, want_lse = plain_decoding(inputs, 0)
    assert same_bits(out, want) and same_bits(lse, want_lse)
    if parents[-1] == len(parents) - 2:
        inputs.tree_mask = None
        causal, causal_lse = attend(inputs)
        assert same_bits(causal, want) and same_bits(causal_lse, want_lse)


@formed_dtypes
def test_a_chain_is_as_exact_as_causal_sdpa(form, dtype):
    n = 150
    inputs = attention_inputs(
        AttentionCase(n, (4, 2), 80, 0, **form), dtype, parents=[[*range(-1, n - 1)]]
    )
    out, _ = attend(inputs)

    def causal(x: AttentionInputs) -> Tensor:
        k, v = (y[:, :n].repeat_interleave(2, 2) for y in (x.k, x.v))
        return sdpa(*(y.transpose(1, 2) for y in (x.q, k, v)), is_causal=True).transpose(1, 2)

    check_error(out, causal(inputs.double()), causal(inputs.unscaled(dtype)), inputs.v)


PATH_CASES = [
    AttentionCase(33, (3, 1), 64, 120),
    AttentionCase(20, (4, 2), 80, 127, batch=2, page_size=5),
    AttentionCase(65, (2, 2), 64, 255, interleaved=True),
    AttentionCase(20, (4, 1), 128, 189),
    AttentionCase(5, (6, 3), 64, 1533),
    AttentionCase(31, (7, 1), 37, 129, page_size=16),
    AttentionCase(40, (3, 1), 64, 250, window=30),
    AttentionCase(24, (2, 1), 64, 20, kv_chunk=8, window=5),
    AttentionCase(24, (2, 1), 96, 0, softcap=3.0, sinks=True, kv_chunk=5),
    AttentionCase(70, (1, 1), 16, 100),
    AttentionCase(40, (3, 1), 64, 120, v_dim=96, page_size=24),
    AttentionCase(20, (4, 2), 37, 70, v_dim=50, batch=2),
    AttentionCase(12, (16, 1), 576, 60, v_dim=512, latent=True, page_size=5),
    AttentionCase(33, (3, 1), 64, 120, float8=True, page_size=5),
    AttentionCase(31, (7, 1), 80, 129, float8=True, window=30),
    AttentionCase(20, (4, 2), 37, 120, batch=2, float8=True, v_dim=50),
]


@pytest.mark.parametrize("seed", range(2), ids=lambda s: f"seed{s}")
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{case.name}-{name}")
        for case in PATH_CASES
        for name, dtype in FLOATS.items()
        if not (case.float8 and dtype == torch.float64)
    ],
)
def test_node_equals_plain_decoding(case, seed, dtype):
    inputs = attention_inputs(case, dtype, seed=seed)
    out, lse = attend(inputs)
    for b in range(case.batch):
        want, want_lse = plain_decoding(inputs, b)
        assert same_bits(out[b : b + 1], want)
        assert same_bits(lse[b : b + 1], want_lse)


@st.composite
def any_case(draw) -> AttentionCase:
    kv_heads = draw(st.integers(1, 3))
    page_size = draw(st.sampled_from([None, 1, 5, 16, 24]))
    return AttentionCase(
        draw(st.integers(1, 70)),
        (kv_heads * draw(st.sampled_from([1, 2, 3, 4, 7])), kv_heads),
        draw(st.integers(1, 90)),
        draw(st.integers(0, 300)),
        batch=draw(st.integers(1, 3)),
        page_size=page_size,
        interleaved=page_size is not None and draw(st.booleans()),
        chain=draw(st.booleans()),
        window=draw(st.sampled_from([None, 1, 7, 150])),
        softcap=draw(st.sampled_from([0.0, 3.0])),
        sinks=draw(st.booleans()),
        kv_chunk=draw(st.sampled_from([None, None, 1, 9, 64])),
        v_dim=draw(st.integers(1, 90)),
        float8=draw(st.booleans()),
    )


def test_any_call_matches_the_oracle_and_keeps_the_rules():
    """Float64 against the formula; then any dtype: one node decoded alone, and flat rows."""

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(any_case(), st.integers(0, 99), st.data())
    def check(case, seed, data):
        exact = attention_inputs(case, torch.bfloat16, seed=seed).double()
        out, lse = attend(exact)
        want, want_lse = dense(exact, visibility(exact))
        bound = 1e-14 * max(1.0, float(want_lse.abs().max()))
        torch.testing.assert_close(out, want, rtol=0, atol=8 * bound)
        torch.testing.assert_close(lse.double(), want_lse, rtol=2e-7, atol=1e-6)

        dtypes = [d for d in FLOATS.values() if not case.float8 or d != torch.float64]
        inputs = attention_inputs(case, data.draw(st.sampled_from(dtypes)), seed=seed)
        out, lse = attend(inputs)
        request = data.draw(st.integers(0, case.batch - 1))
        if not case.chain:
            want, want_lse = plain_decoding(inputs, request)
            assert same_bits(out[request][None], want)
            assert same_bits(lse[request][None], want_lse)
        counts = [data.draw(st.integers(0, case.nodes)) for _ in range(case.batch)]
        flat_out, flat_lse = tree_attention_varlen(**flat(inputs, counts), return_lse=True)
        rows = [torch.cat([x[b, :c] for b, c in enumerate(counts)]) for x in (out, lse)]
        assert same_bits(flat_out, rows[0]) and same_bits(flat_lse, rows[1])

    check()


@pytest.mark.parametrize("nodes", TREE_SIZES, ids=lambda n: f"N{n}")
def test_node_equals_plain_decoding_in_trees_of_any_size(nodes):
    inputs = attention_inputs(AttentionCase(nodes, (3, 1), 16, 120), torch.bfloat16, seed=3)
    out, lse = attend(inputs)
    want, want_lse = plain_decoding(inputs, 0)
    assert same_bits(out, want) and same_bits(lse, want_lse)


@pytest.mark.parametrize("with_depths", [False, True], ids=["popcount", "depths"])
def test_node_equals_plain_decoding_in_any_slot_order(with_depths):
    """Parents may have larger slots than their children: the path is ordered by depth."""
    for seed in range(4):
        case = AttentionCase(40, (3, 1), 64, 120)
        inputs = attention_inputs(case, torch.bfloat16, seed=seed, any_order=True)
        assert any(p > i for i, p in enumerate(inputs.parents[0]))
        if with_depths:
            inputs.kwargs["depths"] = tree_arrays(inputs.parents)[0]
        out, lse = attend(inputs)
        want, want_lse = plain_decoding(inputs, 0)
        assert same_bits(out, want)
        assert same_bits(lse, want_lse)


@dtypes
def test_slot_order_does_not_matter(dtype):
    inputs = attention_inputs(AttentionCase(33, (3, 1), 64, 100), dtype)
    out, _ = attend(inputs)
    order = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(32) + 1])
    place = torch.argsort(order)
    parents = [-1] + [int(place[inputs.parents[0][int(order[i])]]) for i in range(1, 33)]
    slots = torch.cat([torch.arange(100), 100 + order])
    moved = tree_attention(
        inputs.q[:, order],
        inputs.k[:, slots],
        inputs.v[:, slots],
        inputs.prefix_lens,
        tree_mask([parents]),
    )
    assert same_bits(moved, out[:, order])


def test_growing_a_tree_level_by_level_equals_one_call():
    """The draft head's way: queries are the newest slots, ancestors lie in slots without a row."""
    top_k, levels = 4, 3
    parents = [-1] * top_k + [
        (level - 1) * top_k + p for level in range(1, levels) for p in (0, 0, 2, 1)
    ]
    n = len(parents)
    bits = torch.zeros(1, n, n, dtype=torch.bool)
    for i in range(n):
        bits[0, i, path_of(parents, i)] = True
    words = reference.pack_tree_mask(bits)
    q, k, v = torch.randn(1, n, 3, 64), torch.randn(1, 250, 1, 64), torch.randn(1, 250, 1, 64)
    whole = tree_attention(q, k, v, lens(200), words)
    for level in range(levels):
        stop = (level + 1) * top_k
        rows = slice(stop - top_k, stop)
        grown = tree_attention(q[:, rows], k, v, lens(200), words[:, rows], tree_len=stop)
        assert same_bits(grown, whole[:, rows])


@dtypes
def test_prompt_in_chunks_equals_token_by_token(dtype):
    """A causal chain in one call, in pieces, one by one, and as an explicit tree mask."""
    n = 300
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, n, h, 64, generator=g).to(dtype) for h in (3, 1, 1))
    whole = tree_attention(q, k, v, lens(0))
    pieces = [
        tree_attention(q[:, a:b], k, v, lens(a))
        for a, b in ((0, 1), (1, 130), (130, 257), (257, n))
    ]
    assert same_bits(torch.cat(pieces, 1), whole)
    single = [tree_attention(q[:, i : i + 1], k, v, lens(i)) for i in range(n)]
    assert same_bits(torch.cat(single, 1), whole)
    mask = tree_mask([[i - 1 for i in range(n)]])
    assert same_bits(tree_attention(q, k, v, lens(0), mask), whole)


# row rule: a row does not know its neighbours, nor where its keys lie


@formed_dtypes
def test_row_is_independent_of_layout_batch_and_threads(form, dtype):
    case = AttentionCase(33, (6, 2), 80, 200, batch=2, window=170, **form)
    inputs = attention_inputs(case, dtype)
    out, lse = attend(inputs)

    def with_gaps(x: Tensor) -> Tensor:
        rows = torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
        rows[..., : x.shape[-1]] = x
        return rows[..., : x.shape[-1]]

    def same(changed: AttentionInputs, rows=slice(None), batch=slice(None)) -> bool:
        got, got_lse = attend(changed)
        return same_bits(got, out[batch, rows]) and same_bits(got_lse, lse[batch, rows])

    for page_size in (1, 5, 16, 24, 256):
        for interleaved in (False, True):
            k, v, table = paged(inputs.k, inputs.v, page_size, 7, interleaved=interleaved)
            kwargs = inputs.kwargs | {"page_table": table}
            assert same(
                AttentionInputs(
                    inputs.q, k, v, inputs.prefix_lens, inputs.tree_mask, kwargs, [], None, None
                )
            )
    # [B, H, S, D] storage, and rows with a gap behind them.
    hnd = (inputs.k.transpose(1, 2).contiguous().transpose(1, 2), inputs.v)
    gaps = (with_gaps(inputs.k), with_gaps(inputs.v))
    for k, v in (hnd, gaps):
        q = with_gaps(inputs.q)
        assert same(AttentionInputs(q, k, v, inputs.prefix_lens, inputs.tree_mask, inputs.kwargs))
    # Other rows' queries are NaN.
    queries = inputs.q.clone()
    queries[:, ::2] = float("nan")
    changed = AttentionInputs(**(vars(inputs) | {"q": queries}))
    got, got_lse = attend(changed)
    assert same_bits(got[:, 1::2], out[:, 1::2]) and same_bits(got_lse[:, 1::2], lse[:, 1::2])
    assert got[:, ::2].isnan().all()
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            assert same(inputs)
    finally:
        torch.set_num_threads(threads)
    for b in range(2):
        one = slice(b, b + 1)
        kwargs = inputs.kwargs | {"depths": inputs.kwargs["depths"][one]}
        alone = (
            inputs.q[one],
            inputs.k[one],
            inputs.v[one],
            inputs.prefix_lens[one],
            inputs.tree_mask[one],
        )
        assert same(AttentionInputs(*alone, kwargs), batch=one)
        # The last rows only.
        last = (inputs.q[one, 20:], *alone[1:4], inputs.tree_mask[one, 20:])
        rest = kwargs | {"tree_len": 33}
        assert same(AttentionInputs(*last, rest), rows=slice(20, None), batch=one)


@formed_dtypes
def test_keys_shared_by_tasks_give_the_same_bits(form, dtype):
    """Some forty chunks of 8 keys: one task, or several that leave their parts to be merged."""
    case = AttentionCase(33, (6, 3), 64, 300, batch=2, kv_chunk=8, window=290, sinks=True, **form)
    inputs = attention_inputs(case, dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want, want_lse = attend(inputs)
        exact, exact_lse = dense(inputs.double(), visibility(inputs))
        check_error(want, exact, dense(inputs, visibility(inputs), peer=True)[0], inputs.v)
        torch.testing.assert_close(want_lse.double(), exact_lse, rtol=1e-6, atol=1e-5)
        for count in (2, 4, 5, 8):
            torch.set_num_threads(count)
            out, lse = attend(inputs)
            assert same_bits(out, want) and same_bits(lse, want_lse)
    finally:
        torch.set_num_threads(threads)


def test_output_may_be_strided_and_max_prefix_len_is_only_a_hint():
    inputs = attention_inputs(AttentionCase(9, (3, 1), 64, 40), torch.float32)
    want, want_lse = attend(inputs)
    out = torch.full((1, 3, 9, 128), float("nan")).transpose(1, 2)[..., :64]
    lse = torch.full((1, 3, 9), float("nan")).transpose(1, 2)
    for hint in (0, 1, 40, 1000):
        got = tree_attention(*inputs.args, out=out, lse=lse, max_prefix_len=hint)
        assert got is out
        assert same_bits(out, want)
        assert same_bits(lse, want_lse)


@formed_dtypes
def test_buffers_are_reused_and_poisoned_in_between(form, dtype):
    """Nothing of an earlier call is left in out, lse, the caches' free slots or the scratch."""
    q = torch.empty(2, 40, 4, 64, dtype=dtype)
    whole = attention_inputs(AttentionCase(40, (4, 2), 64, 90, batch=2, **form), dtype)
    k_cache, v_cache = torch.empty_like(whole.k), torch.empty_like(whole.v)
    out = torch.empty(2, 40, 4, whole.v.shape[-1], dtype=dtype)
    lse = torch.empty(2, 40, 4)
    for step, (nodes, prefix, chain) in enumerate(
        [(40, 88, False), (1, 3, False), (33, 70, True), (7, 0, False), (40, 30, True)]
    ):
        case = AttentionCase(nodes, (4, 2), 64, prefix, batch=2, chain=chain, **form)
        inputs = attention_inputs(case, dtype, seed=step)
        want, want_lse = attend(inputs)
        slots = inputs.k.shape[1]
        for buffer in (q, k_cache, v_cache, out, lse):
            buffer.fill_(float("nan"))
        tree_attention(q, k_cache, v_cache, lens(90, 90), out=out, lse=lse, **scales(inputs))
        assert out.isnan().all()
        q[:, :nodes] = inputs.q
        k_cache[:, :slots], v_cache[:, :slots] = inputs.k, inputs.v
        tree_attention(
            q[:, :nodes],
            k_cache,
            v_cache,
            inputs.prefix_lens,
            inputs.tree_mask,
            out=out[:, :nodes],
            lse=lse[:, :nodes],
            **inputs.kwargs,
        )
        assert same_bits(out[:, :nodes], want) and same_bits(lse[:, :nodes], want_lse)
        assert out[:, nodes:].isnan().all() and lse[:, nodes:].isnan().all()


def scales(inputs: AttentionInputs) -> dict[str, Tensor]:
    return {name: x for name, x in inputs.kwargs.items() if name in ("k_scale", "v_scale")}


def test_result_is_contiguous_whatever_the_queries_strides():
    q = torch.randn(2, 3, 5, 16).transpose(1, 2)
    k, v = torch.randn(2, 9, 1, 16), torch.randn(2, 9, 1, 16)
    assert tree_attention(q, k, v, lens(1, 2)).is_contiguous()


# poison rule

POISON = {"nan": float("nan"), "inf": float("inf"), "-inf": NEG_INF}
# Float8 e4m3 has no infinity.
poisons = pytest.mark.parametrize(
    ("form", "dtype", "poison"),
    [
        pytest.param(form, dtype, poison, id=f"{name}-{dtype_name}-{poison_name}")
        for name, form in FORMS.items()
        for dtype_name, dtype in FLOATS.items()
        for poison_name, poison in POISON.items()
        if name == "plain" or (poison_name == "nan" and (name, dtype_name) != ("float8", "float64"))
    ],
)


@poisons
@pytest.mark.parametrize("page_size", [None, 5], ids=["dense", "paged"])
@pytest.mark.parametrize("chain", [False, True], ids=["tree", "chain"])
def test_invisible_slots_do_not_touch_the_result(form, dtype, poison, page_size, chain):
    case = AttentionCase(33, (3, 1), 64, 130, window=90, chain=chain, **form)
    inputs = attention_inputs(case, dtype)
    want, want_lse = attend(inputs)
    seen = visibility(inputs)
    for row in (0, 7, 20, 32):
        k, v = inputs.k.clone(), inputs.v.clone()
        hidden = (~seen[0, row]).nonzero()[:, 0]
        k[0, hidden] = poison
        v[0, hidden] = poison
        kwargs = dict(inputs.kwargs)
        if page_size is not None:
            k, v, kwargs["page_table"] = paged(k, v, page_size, row)
        changed = AttentionInputs(inputs.q, k, v, inputs.prefix_lens, inputs.tree_mask, kwargs)
        out, lse = attend(changed)
        assert same_bits(out[:, row], want[:, row])
        assert same_bits(lse[:, row], want_lse[:, row])


@poisons
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("chain", [False, True], ids=["tree", "chain"])
def test_a_row_that_sees_poison_shows_it_and_no_other_does(form, dtype, poison, which, chain):
    case = AttentionCase(33, (3, 1), 64, 130, window=90, chain=chain, **form)
    inputs = attention_inputs(case, dtype)
    want, want_lse = attend(inputs)
    seen = visibility(inputs)[0]
    for slot in (60, 128, 130, 131, 140, 162):
        changed = AttentionInputs(**vars(inputs))
        cache = getattr(inputs, which).clone()
        cache[0, slot, :, 3] = poison
        setattr(changed, f"{which}_cache", cache)
        out, lse = attend(changed)
        hit = seen[:, slot]
        assert same_bits(out[0, ~hit], want[0, ~hit])
        assert same_bits(lse[0, ~hit], want_lse[0, ~hit])
        assert not out[0, hit].isfinite().all(-1).any()


@formed_dtypes
@pytest.mark.parametrize("prefix", [20, 21], ids=["even", "odd"])
def test_poison_outside_the_window_of_a_path(prefix, form, dtype):
    """Every slot in turn: the path's own ancestors leave the window, inside a chunk and a pair."""
    case = AttentionCase(24, (2, 1), 64, prefix, window=4, kv_chunk=8, **form)
    inputs = attention_inputs(case, dtype)
    want, want_lse = attend(inputs)
    seen = visibility(inputs)[0]
    for slot in range(prefix + 24):
        changed = AttentionInputs(**vars(inputs))
        changed.k_cache, changed.v_cache = inputs.k.clone(), inputs.v.clone()
        changed.k_cache[0, slot], changed.v_cache[0, slot] = float("nan"), float("nan")
        out, lse = attend(changed)
        hit = seen[:, slot]
        assert same_bits(out[0, ~hit], want[0, ~hit])
        assert same_bits(lse[0, ~hit], want_lse[0, ~hit])
        assert out[0, hit].isnan().all()


@pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
def test_a_poisoned_page_of_the_latent_cache_stays_where_it_is(poison):
    """K and V in one storage, the node's own slot included."""
    case = AttentionCase(20, (16, 1), 576, 50, v_dim=512, latent=True, page_size=1)
    inputs = attention_inputs(case, torch.bfloat16)
    want, _ = attend(inputs)
    seen = visibility(inputs)[0]
    for slot in (50, 53, 61, 69):
        cache = inputs.k_cache.clone()
        cache[inputs.kwargs["page_table"][0, slot]] = poison
        changed = AttentionInputs(**vars(inputs) | {"k_cache": cache})
        changed.v_cache = cache[..., :512]
        out, _ = attend(changed)
        hit = seen[:, slot]
        assert same_bits(out[0, ~hit], want[0, ~hit])
        assert not out[0, hit].isfinite().any()


def test_page_entries_past_the_tree_are_never_read():
    inputs = attention_inputs(AttentionCase(6, (2, 1), 32, 20, page_size=4), torch.float32)
    want, _ = attend(inputs)
    table = inputs.kwargs["page_table"].clone()
    table[:, 7:] = 2**31 - 1
    assert same_bits(attend(inputs, page_table=table)[0], want)


# rows that see nothing, merging


@dtypes
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_a_row_that_sees_nothing(dtype, sinks):
    """An empty mask row is padding, with a prefix or without."""
    q = torch.randn(2, 3, 2, 64).to(dtype)
    k = torch.full((2, 20, 1, 64), float("nan")).to(dtype)
    mask = torch.zeros(2, 3, 1, dtype=torch.int64)
    sink = torch.tensor([0.5, -2.0]) if sinks else None
    out, lse = tree_attention(q, k, k, lens(0, 15), mask, sinks=sink, return_lse=True)
    assert (out == 0).all()
    want = sink if sinks else torch.full((2,), NEG_INF)
    assert (lse == want).all()
    out, lse = tree_attention(q, k, k, lens(0, 0), tree_len=0, sinks=sink, return_lse=True)
    assert (out == 0).all() and (lse == want).all()


def test_padding_rows_beside_real_ones():
    inputs = attention_inputs(AttentionCase(9, (3, 1), 64, 140), torch.float32)
    want, _ = attend(inputs)
    inputs.tree_mask[:, 5:] = 0
    out, lse = attend(inputs)
    assert same_bits(out[:, :5], want[:, :5])
    assert (out[:, 5:] == 0).all() and (lse[:, 5:] == NEG_INF).all()


@dtypes
def test_merging_with_an_empty_part_changes_nothing(dtype):
    out = torch.randn(2, 3, 4, 64).to(dtype)
    lse = torch.randn(2, 3, 4)
    empty = torch.full((2, 3, 4), NEG_INF)
    junk = torch.full_like(out, float("nan"))
    for got in (
        merge_attention_states(out, lse, junk, empty),
        merge_attention_states(junk, empty, out, lse),
    ):
        assert same_bits(got[0], out) and same_bits(got[1], lse)
    both, both_lse = merge_attention_states(junk, empty, junk, empty)
    assert (both == 0).all() and (both_lse == NEG_INF).all()


@dtypes
def test_merging_parts_equals_the_whole(dtype):
    inputs = attention_inputs(AttentionCase(9, (4, 2), 64, 140), dtype)
    want, want_lse = oracle(inputs)
    q, k, v, prefix, mask = inputs.args
    front = tree_attention(q, k, v, lens(100), tree_len=0, return_lse=True)
    # The other 40 prefix keys and the tree.
    back = tree_attention(q, k[:, 100:], v[:, 100:], prefix - 100, mask, return_lse=True)
    out, lse = merge_attention_states(*front, *back)
    eps = torch.finfo(dtype).eps
    # The sums are float32 in every dtype: a rounding of theirs is an error of the parts' weights.
    rounding = want_lse.abs().max() * 2.0**-23
    assert (out - want).abs().max() <= 4 * (eps + rounding) * want.abs().max()
    assert (lse - want_lse).abs().max() <= 4 * rounding
    exact = [x.double() for x in (front[0], front[1], back[0], back[1])]
    total = torch.logaddexp(exact[1], exact[3])
    merged = exact[0] * (exact[1] - total).exp()[..., None]
    merged += exact[2] * (exact[3] - total).exp()[..., None]
    assert (out - merged).abs().max() <= max(2 * eps, 1e-6) * merged.abs().max()
    oracle_out, _ = reference.merge_attention_states(*front, *back)
    assert (out.double() - oracle_out.double()).abs().max() <= 4 * eps + 1e-6
    again_out, again_lse = torch.empty_like(out), torch.empty_like(lse)
    got = merge_attention_states(*front, *back, out=again_out, lse=again_lse)
    assert got[0] is again_out and same_bits(again_out, out) and same_bits(again_lse, lse)


MERGE_SHAPES = [(1, 1, 1, 1), (2, 3, 5, 37), (3, 65, 2, 80), (7, 3, 64), (1, 1, 3), (0, 3, 2, 8)]


@dtypes
@pytest.mark.parametrize("layout", ["packed", "strided"])
@pytest.mark.parametrize("shape", MERGE_SHAPES, ids=str)
def test_merging_odd_shapes_and_strides(shape, layout, dtype):
    """Rows with both parts, with one and with none, against the formula in float64."""
    g = torch.Generator().manual_seed(len(shape))

    def parts() -> tuple[Tensor, Tensor]:
        out = torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
        lse = 30 * torch.randn(*shape[:-1], generator=g)
        return out, lse.masked_fill(torch.rand(*lse.shape, generator=g) < 0.4, NEG_INF)

    (a, lse_a), (b, lse_b) = parts(), parts()
    empty_a, empty_b = lse_a == NEG_INF, lse_b == NEG_INF
    a, b = (x.masked_fill(e[..., None], float("nan")) for x, e in ((a, empty_a), (b, empty_b)))
    out, lse = torch.full_like(a, float("nan")), torch.full_like(lse_a, float("nan"))
    if layout == "strided":
        # Heads before rows, and elements two apart.
        a, b, out, lse_a, lse_b, lse = (
            torch.stack([x, x], -1).transpose(-4, -3).contiguous().transpose(-4, -3)[..., 0]
            if x.dim() > 2
            else torch.stack([x, x], -1)[..., 0]
            for x in (a, b, out, lse_a, lse_b, lse)
        )
        assert a.numel() < 2 or not a.is_contiguous()
    merge_attention_states(a, lse_a, b, lse_b, out=out, lse=lse)
    total = torch.logaddexp(lse_a.double(), lse_b.double())
    total = torch.where(empty_a & empty_b, NEG_INF, total)
    want = sum(
        torch.where(e[..., None], 0, x.double() * (s.double() - total).exp()[..., None])
        for x, s, e in ((a, lse_a, empty_a), (b, lse_b, empty_b))
    )
    torch.testing.assert_close(lse.double(), total, rtol=1e-6, atol=1e-6)
    eps = max(torch.finfo(dtype).eps, 2.0**-23)
    torch.testing.assert_close(out.double(), want, rtol=4 * eps, atol=8 * eps)
    assert same_bits(out[empty_b & ~empty_a], a[empty_b & ~empty_a])
    assert same_bits(out[empty_a & ~empty_b], b[empty_a & ~empty_b])
    assert same_bits(lse[empty_b & ~empty_a], lse_a[empty_b & ~empty_a])
    assert (out[empty_a & empty_b] == 0).all() and (lse[empty_a & empty_b] == NEG_INF).all()
    fresh, fresh_lse = merge_attention_states(a, lse_a, b, lse_b)
    assert same_bits(fresh, out) and same_bits(fresh_lse, lse)
    oracle_out, oracle_lse = reference.merge_attention_states(a, lse_a, b, lse_b)
    torch.testing.assert_close(oracle_out, out, rtol=4 * eps, atol=8 * eps)
    torch.testing.assert_close(oracle_lse, lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("merge", [merge_attention_states, reference.merge_attention_states])
def test_merging_keeps_a_non_finite_part_however_light(merge):
    """A key that was seen and is not finite shows, even where its part's weight underflows."""
    out = torch.tensor([[[float("inf"), float("nan"), 1.0]]])
    heavy = merge(out, torch.tensor([[-200.0]]), torch.ones(1, 1, 3), torch.tensor([[0.0]]))[0]
    assert heavy[0, 0].isnan().tolist() == [True, True, False] and heavy[0, 0, 2] == 1
    both = merge(out, torch.tensor([[float("nan")]]), torch.ones(1, 1, 3), torch.zeros(1, 1))
    assert both[0].isnan().all() and both[1].isnan().all()


def test_merging_into_a_part():
    a, b = torch.randn(2, 3, 2, 8), torch.randn(2, 3, 2, 8)
    lse_a, lse_b = torch.randn(2, 3, 2), torch.randn(2, 3, 2)
    want, want_lse = merge_attention_states(a, lse_a, b, lse_b)
    merge_attention_states(a, lse_a, b, lse_b, out=b, lse=lse_a)
    assert same_bits(b, want) and same_bits(lse_a, want_lse)


WRONG_MERGE = [
    ("rank", {"out_a": torch.ones(2, 8)}, ValueError, r"out_a: expected shape \[B, N, H, D\]"),
    ("flat lse", {"lse_b": torch.ones(6, 4)}, ValueError, r"lse_b: .* = \(2, 3, 4\), got \(6, 4\)"),
    ("dtype", {"out_b": torch.ones(2, 3, 4, 8).half()}, TypeError, "out_b: .*float32, got float16"),
    ("lse dtype", {"lse_a": torch.ones(2, 3, 4).double()}, TypeError, "lse_a: .* got float64"),
    ("missing", {"out_b": None}, TypeError, "out_b: expected a float32 tensor"),
    ("out", {"out": torch.ones(2, 3, 4, 7)}, ValueError, "out: expected shape"),
    (
        "expanded",
        {"lse": torch.ones(1, 3, 4).expand(2, 3, 4)},
        ValueError,
        "lse: expected a tensor to write to",
    ),
]


@pytest.mark.parametrize(
    ("change", "error", "message"), [w[1:] for w in WRONG_MERGE], ids=[w[0] for w in WRONG_MERGE]
)
def test_wrong_arguments_of_merge_are_named(change, error, message):
    out, lse = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 4)
    with pytest.raises(error, match=message):
        merge_attention_states(
            **({"out_a": out, "lse_a": lse, "out_b": out, "lse_b": lse} | change)
        )


def test_empty_batches_no_nodes_and_empty_caches():
    for b, n in ((0, 3), (2, 0)):
        q = torch.randn(b, n, 2, 16)
        k = torch.randn(b, 5, 1, 16)
        out, lse = tree_attention(q, k, k, lens(*[1] * b), return_lse=True)
        assert out.shape == q.shape and lse.shape == (b, n, 2)
    q = torch.randn(2, 3, 2, 16)
    for k, table in ((torch.randn(2, 0, 1, 16), None), (torch.randn(0, 4, 1, 16), lens(0, 0))):
        table = None if table is None else table.view(2, 1)[:, :0]
        for tree_len in (0, 3):
            out, lse = tree_attention(
                q, k, k, lens(0, 0), tree_len=tree_len, page_table=table, return_lse=True
            )
            assert (out == 0).all() and (lse == NEG_INF).all()


# float8 caches


@pytest.mark.parametrize("dim", [256, 255], ids=["whole vectors", "odd"])
@pytest.mark.parametrize("flush", [False, True], ids=["denormals kept", "denormals flushed"])
def test_every_float8_value_is_read_exactly(dim, flush):
    """All bytes, subnormals and NaN included, as a key and as a value."""
    codes = torch.arange(dim, dtype=torch.int32).to(torch.uint8).view(FLOAT8)
    exact, scale = codes.double().float(), torch.tensor([0.3])
    row = codes.view(1, 1, 1, dim)
    torch.set_flush_denormal(flush)
    try:
        zero = torch.zeros(1, 1, 1, dim)
        out = tree_attention(zero, zero.to(FLOAT8), row, lens(0), v_scale=scale).flatten()
        assert out.isnan().tolist() == [i % 128 == 127 for i in range(dim)]
        torch.testing.assert_close(out, exact * scale, rtol=0, atol=0, equal_nan=True)
        # Query i reads element i of the key: its score is its LSE.
        finite = torch.where(exact.isnan(), 0, exact).view(1, 1, 1, dim).to(FLOAT8)
        q = torch.eye(dim).view(1, dim, 1, dim)
        call = {"tree_len": 0, "sm_scale": 1.0, "k_scale": scale, "return_lse": True}
        _, lse = tree_attention(q, finite, zero.to(FLOAT8), lens(1), **call)
        want = finite.float().flatten() * scale
        torch.testing.assert_close(lse.flatten(), want, rtol=2e-7, atol=1e-30)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("case", FLOAT8_CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_float8_cache_is_the_float32_cache_of_its_values(case, dtype):
    """Bit for bit: dequantised exactly, scaled in float32, everything else as ever."""
    inputs = attention_inputs(case, dtype)
    out, lse = attend(inputs)
    wide = inputs.unscaled(torch.float32)
    wide.q = inputs.q.float()
    want, want_lse = attend(wide)
    assert same_bits(out, want.to(dtype)) and same_bits(lse, want_lse)


@pytest.mark.parametrize("case", FLOAT8_CASES, ids=lambda c: c.name)
def test_the_oracle_reads_float8_caches(case):
    inputs = attention_inputs(case, torch.float32)
    want, want_lse = nan_outputs(inputs.q, inputs.v_cache)
    reference.tree_attention_out(*inputs.args, **inputs.kwargs, out=want, lse=want_lse)
    out, lse = attend(inputs)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


def test_a_float8_cache_without_scales_has_scale_one():
    inputs = attention_inputs(FLOAT8_CASES[1], torch.bfloat16)
    out, lse = attend(inputs, k_scale=torch.ones(1), v_scale=torch.ones(()))
    want, want_lse = attend(inputs, k_scale=None, v_scale=None)
    assert same_bits(out, want) and same_bits(lse, want_lse)


# flat ragged queries


VARLEN_CASES = [
    AttentionCase(33, (4, 2), 64, 130, batch=4),
    AttentionCase(20, (3, 1), 80, 60, batch=4, page_size=5, window=9, sinks=True, softcap=9.0),
    AttentionCase(65, (2, 1), 37, 100, batch=4, chain=True),
    AttentionCase(24, (3, 3), 64, 40, batch=4, chain=True, window=20, v_dim=48),
    AttentionCase(66, (7, 1), 64, 30, batch=4, page_size=24, float8=True, v_dim=32),
    AttentionCase(5, (2, 1), 64, 0, batch=4),
]


def flat(inputs: AttentionInputs, counts: list[int], padding: int = 0) -> dict[str, object]:
    """Arguments of the varlen call: the first ``counts[b]`` slots of each request, then rows of
    nobody whose queries, mask and depths are rubbish.
    """

    def rows(x: Tensor, rubbish: float) -> Tensor:
        parts = [x[b, :count] for b, count in enumerate(counts)]
        return torch.cat([*parts, x.new_full((padding, *x.shape[2:]), rubbish)])

    call = dict(inputs.kwargs)
    if "depths" in call:
        call["depths"] = rows(call["depths"], 7)
    if inputs.tree_mask is not None:
        call["tree_mask"] = rows(inputs.tree_mask, -1)
    return call | {
        "q": rows(inputs.q, float("nan")),
        "k_cache": inputs.k_cache,
        "v_cache": inputs.v_cache,
        "prefix_lens": inputs.prefix_lens,
        "qo_indptr": lens(0, *(sum(counts[: b + 1]) for b in range(len(counts)))),
        "max_q": inputs.q.shape[1],
    }


@pytest.mark.parametrize("padding", [0, 3], ids=["full", "padded"])
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{case.name}-{name}")
        for case in VARLEN_CASES
        for name, dtype in FLOATS.items()
        if not (case.float8 and dtype == torch.float64)
    ],
)
def test_varlen_rows_are_the_dense_rows(case, dtype, padding):
    """Bit for bit, whatever lies in slots that have no row, in idle requests and in padding."""
    inputs = attention_inputs(case, dtype)
    want, want_lse = attend(inputs)
    counts = [case.nodes, 0, case.nodes // 2, 1]
    k, v = inputs.k.clone(), inputs.v.clone()
    for b, count in enumerate(counts):
        stop = int(inputs.prefix_lens[b]) + count if count else 0
        rubbish = torch.full(k[b, stop:].shape, float("nan"))
        k[b, stop:], v[b, stop:] = rubbish.to(k.dtype), rubbish[..., : v.shape[3]].to(v.dtype)
    inputs.k_cache, inputs.v_cache = k, v
    if case.page_size is not None:
        pages = paged(k, v, case.page_size, 3)
        inputs.k_cache, inputs.v_cache, inputs.kwargs["page_table"] = pages
    call = flat(inputs, counts, padding)
    out, lse = nan_outputs(call["q"], inputs.v_cache)
    tree_attention_varlen(**call, out=out, lse=lse, validate=True)
    starts = call["qo_indptr"].tolist()
    for b, count in enumerate(counts):
        rows = slice(starts[b], starts[b + 1])
        assert same_bits(out[rows], want[b, :count])
        assert same_bits(lse[rows], want_lse[b, :count])
    sinks = inputs.kwargs.get("sinks", torch.full(lse.shape[1:], NEG_INF))
    assert (out[starts[-1] :] == 0).all()
    assert (lse[starts[-1] :] == sinks).all()
    if dtype == torch.float64:
        exact, exact_lse = nan_outputs(call["q"], inputs.v_cache)
        reference.tree_attention_out(**call, out=exact, lse=exact_lse)
        torch.testing.assert_close(exact, out, rtol=0, atol=1e-13)
        torch.testing.assert_close(exact_lse, lse, rtol=1e-6, atol=1e-6)


@dtypes
@pytest.mark.parametrize("window", [None, 4], ids=["no window", "window"])
def test_varlen_rows_are_the_last_of_tree_len_slots(dtype, window):
    """The draft head's way with a different number of new nodes in each request."""
    slots, counts = 70, [5, 70, 0, 1]
    inputs = attention_inputs(AttentionCase(slots, (4, 2), 64, 40, batch=4), dtype)
    depths = tree_arrays(inputs.parents)[0]
    extra = {} if window is None else {"window": window, "depths": depths}
    want, _ = attend(inputs, **extra)
    call = {
        "k_cache": inputs.k_cache,
        "v_cache": inputs.v_cache,
        "prefix_lens": inputs.prefix_lens,
        "qo_indptr": lens(0, 5, 75, 75, 76),
        "validate": True,
    }
    q, mask = (
        torch.cat([x[b, slots - count :] for b, count in enumerate(counts)])
        for x in (inputs.q, inputs.tree_mask)
    )
    got = tree_attention_varlen(q, tree_mask=mask, tree_len=slots, **call, **extra)
    rows = torch.cat([want[b, slots - count :] for b, count in enumerate(counts)])
    if window is None:
        # Without depths, slots that have no row are taken in ascending order.
        got = tree_attention_varlen(q, tree_mask=mask, tree_len=slots, depths=depths, **call)
    assert same_bits(got, rows)
    chain = tree_attention_varlen(q, tree_len=slots, **call)
    dense_chain = tree_attention(*inputs.args[:4])
    rows = torch.cat([dense_chain[b, slots - count :] for b, count in enumerate(counts)])
    assert same_bits(chain, rows)
    prefix_only = tree_attention_varlen(q, tree_len=0, **call)
    dense_prefix = tree_attention(*inputs.args[:4], tree_len=0)
    rows = torch.cat([dense_prefix[b, slots - count :] for b, count in enumerate(counts)])
    assert same_bits(prefix_only, rows)


def test_varlen_rows_depend_on_no_neighbour_and_no_thread():
    inputs = attention_inputs(VARLEN_CASES[0], torch.bfloat16)
    counts = [33, 7, 0, 20]
    call = flat(inputs, counts)
    want, want_lse = tree_attention_varlen(**call, return_lse=True)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            out, lse = tree_attention_varlen(**call, return_lse=True)
            assert same_bits(out, want) and same_bits(lse, want_lse)
    finally:
        torch.set_num_threads(threads)
    changed = call | {"q": call["q"].clone(), "k_cache": inputs.k_cache.clone()}
    changed["q"][33:40] = float("nan")
    changed["k_cache"][1] = float("nan")
    out = tree_attention_varlen(**changed)
    assert same_bits(out[:33], want[:33]) and same_bits(out[40:], want[40:])
    assert out[33:40].isnan().all()
    # A bound on rows is only a bound; strided rows and outputs are honoured.
    mask = torch.nn.functional.pad(call["tree_mask"], (0, 3))
    wide = torch.full((want.shape[1], want.shape[0], 130), float("nan"), dtype=want.dtype)
    options = call | {"max_q": 256, "tree_mask": mask, "out": wide.transpose(0, 1)[..., :64]}
    assert same_bits(tree_attention_varlen(**options), want)


def test_varlen_of_nobody():
    k = torch.randn(0, 4, 1, 16)
    out, lse = tree_attention_varlen(torch.randn(3, 2, 16), k, k, lens(), lens(0), return_lse=True)
    assert (out == 0).all() and (lse == NEG_INF).all()
    k = torch.randn(2, 4, 1, 16)
    out = tree_attention_varlen(torch.randn(0, 2, 16), k, k, lens(1, 2), lens(0, 0, 0), max_q=0)
    assert out.shape == (0, 2, 16)


# arguments


def base() -> dict[str, object]:
    return {
        "q": torch.randn(2, 5, 4, 16),
        "k_cache": torch.randn(2, 20, 2, 16),
        "v_cache": torch.randn(2, 20, 2, 16),
        "prefix_lens": lens(3, 4),
        "tree_mask": tree_mask([[-1, 0, 0, 1, 2]] * 2),
    }


def float8() -> dict[str, object]:
    return {f"{name}_cache": torch.zeros(2, 20, 2, 16).to(FLOAT8) for name in "kv"}


WRONG = [
    ("rank of q", {"q": torch.randn(5, 4, 16)}, ValueError, r"q: expected shape \[B, N, Hq, D\]"),
    ("type of q", {"q": [1.0]}, TypeError, "q: expected a float32 or .* tensor"),
    ("dtype of q", {"q": torch.ones(2, 5, 4, 16).int()}, TypeError, "q: expected dtype"),
    ("heads", {"q": torch.randn(2, 5, 3, 16)}, ValueError, "q: expected a multiple of the 2 KV"),
    (
        "expanded out",
        {"out": torch.empty(2, 1, 4, 16).expand(2, 5, 4, 16)},
        ValueError,
        "out: expected a tensor to write to, got an expanded one",
    ),
    ("no heads", {"q": torch.randn(2, 5, 0, 16)}, ValueError, "q: expected a multiple .*got 0"),
    ("head dim", {"q": torch.randn(2, 5, 4, 8)}, ValueError, "k_cache: expected shape"),
    ("batch", {"k_cache": torch.randn(3, 20, 2, 16)}, ValueError, "k_cache: expected shape"),
    ("dtype of k", {"k_cache": torch.randn(2, 20, 2, 16).half()}, TypeError, "k_cache: .*float16"),
    ("slots of v", {"v_cache": torch.randn(2, 9, 2, 16)}, ValueError, "v_cache: expected shape"),
    (
        "strides of v",
        {"v_cache": torch.randn(2, 20, 16, 2).mT},
        ValueError,
        "v_cache: expected a contiguous last dimension",
    ),
    ("type of v", {"v_cache": [1.0]}, TypeError, "v_cache: expected a float32 tensor"),
    ("lens dtype", {"prefix_lens": lens(3, 4).long()}, TypeError, "prefix_lens: expected dtype"),
    ("lens size", {"prefix_lens": lens(3)}, ValueError, "prefix_lens: expected shape"),
    ("mask too short", {"tree_len": 70}, ValueError, r"tree_mask: .* got \(2, 5, 1\)"),
    (
        "mask rows missing",
        {"tree_mask": torch.ones(2, 4, 1).long()},
        ValueError,
        r"tree_mask: expected shape .* = \(2, 5, 1\), got \(2, 4, 1\)",
    ),
    (
        "mask transposed",
        {"tree_mask": torch.ones(2, 1, 5).long()},
        ValueError,
        r"tree_mask: .* got \(2, 1, 5\)",
    ),
    ("mask of bools", {"tree_mask": torch.ones(2, 5, 5).bool()}, TypeError, "tree_mask: .* bool"),
    ("mask of int32", {"tree_mask": torch.ones(2, 5, 1).int()}, TypeError, "tree_mask: .* int32"),
    ("mask without batch", {"tree_mask": torch.ones(5, 1).long()}, ValueError, "tree_mask: .*"),
    ("tree_len below N", {"tree_len": 4}, ValueError, "tree_len: expected 0 or at least the 5"),
    ("tree_len negative", {"tree_len": -1}, ValueError, "tree_len: expected at least 0, got -1"),
    ("depths shape", {"depths": torch.ones(2, 4).int()}, ValueError, "depths: expected shape"),
    ("depths dtype", {"depths": torch.ones(2, 5)}, TypeError, "depths: expected dtype int32"),
    ("window without depths", {"window": 4}, ValueError, "depths: .* with window and tree_mask"),
    ("window 0", {"window": 0}, ValueError, "window: expected at least 1, got 0"),
    (
        "window without positions",
        {"window": 4, "tree_len": 0, "tree_mask": None},
        ValueError,
        "window: expected tree_len > 0",
    ),
    ("softcap", {"softcap": -1.0}, ValueError, "softcap: expected 0"),
    ("softcap none", {"softcap": None}, TypeError, "softcap: expected a float, got NoneType"),
    ("q of no dimensions", {"q": torch.zeros(())}, ValueError, "q: expected shape"),
    ("v_cache of no dimensions", {"v_cache": torch.zeros(())}, ValueError, "v_cache: expected sha"),
    ("softcap nan", {"softcap": float("nan")}, ValueError, "softcap: expected 0"),
    ("kv_chunk", {"kv_chunk": 0}, ValueError, "kv_chunk: expected 1 to 65536, got 0"),
    ("max_prefix_len", {"max_prefix_len": -2}, ValueError, "max_prefix_len: expected at least 0"),
    ("sinks", {"sinks": torch.randn(3)}, ValueError, "sinks: expected shape"),
    ("sinks dtype", {"sinks": torch.ones(4).int()}, TypeError, "sinks: expected dtype"),
    (
        "page table dtype",
        {"page_table": torch.ones(2, 3).long()},
        TypeError,
        "page_table: expected dtype int32",
    ),
    (
        "page table rows",
        {"page_table": torch.ones(3, 3).int()},
        ValueError,
        "page_table: expected shape",
    ),
    ("out shape", {"out": torch.empty(2, 5, 4, 15)}, ValueError, "out: expected shape"),
    ("out dtype", {"out": torch.empty(2, 5, 4, 16).half()}, TypeError, "out: expected dtype"),
    ("lse shape", {"lse": torch.empty(2, 5)}, ValueError, "lse: expected shape"),
    ("lse dtype", {"lse": torch.empty(2, 5, 4).double()}, TypeError, "lse: expected dtype"),
    (
        "requires grad",
        {"q": torch.randn(2, 5, 4, 16, requires_grad=True)},
        ValueError,
        "q: expected a tensor that does not require grad",
    ),
    ("max_q", {"max_q": 5}, ValueError, "qo_indptr: expected a tensor beside max_q = 5, got None"),
    (
        "ragged and dense",
        {"qo_indptr": lens(0, 5, 10)},
        ValueError,
        r"q: expected shape \[total, Hq, D\]",
    ),
    (
        "scale without float8",
        {"k_scale": torch.ones(1)},
        ValueError,
        "k_scale: expected None beside float32 caches",
    ),
    (
        "float8 keys only",
        {"k_cache": torch.zeros(2, 20, 2, 16).to(FLOAT8)},
        TypeError,
        "v_cache: expected dtype float8_e4m3fn, got float32",
    ),
    (
        "other float8",
        {"k_cache": torch.zeros(2, 20, 2, 16).to(torch.float8_e5m2)},
        TypeError,
        "k_cache: expected dtype float32 or float8_e4m3fn, got float8_e5m2",
    ),
    (
        "float64 beside float8",
        float8() | {"q": torch.randn(2, 5, 4, 16).double()},
        TypeError,
        "k_cache: expected dtype float64, got float8_e4m3fn",
    ),
    (
        "scale a number",
        float8() | {"v_scale": 1.0},
        TypeError,
        "v_scale: expected a float32 tensor of one element, got float",
    ),
    (
        "scale dtype",
        float8() | {"k_scale": torch.ones(1).half()},
        TypeError,
        "k_scale: expected a float32 tensor of one element, got float16",
    ),
    (
        "scale per head",
        float8() | {"v_scale": torch.ones(2)},
        ValueError,
        r"v_scale: expected one element, got shape \(2,\)",
    ),
    (
        "out has K's head dim",
        {"v_cache": torch.randn(2, 20, 2, 8), "out": torch.empty(2, 5, 4, 16)},
        ValueError,
        r"out: expected shape \[B, N, Hq, Dv\] = \(2, 5, 4, 8\)",
    ),
    (
        "head dim of v 0",
        {"v_cache": torch.randn(2, 20, 2, 0)},
        ValueError,
        "v_cache: expected a head dim of at least 1",
    ),
]


@pytest.mark.parametrize(
    ("change", "error", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG]
)
def test_wrong_arguments_are_named(change, error, message):
    with pytest.raises(error, match=message):
        tree_attention(**(base() | change))


def flat_base() -> dict[str, object]:
    """Two requests of 3 and 5 rows."""
    mask = torch.tensor([1, 3, 5, 1, 3, 5, 11, 19])
    return {
        "q": torch.randn(8, 4, 16),
        "k_cache": torch.randn(2, 20, 2, 16),
        "v_cache": torch.randn(2, 20, 2, 16),
        "prefix_lens": lens(3, 4),
        "qo_indptr": lens(0, 3, 8),
        "tree_mask": mask.view(8, 1),
        "max_q": 5,
    }


WRONG_VARLEN = [
    ("no indptr", {"qo_indptr": None}, TypeError, "qo_indptr: expected an int32 tensor"),
    ("rank", {"q": torch.randn(1, 8, 4, 16)}, ValueError, r"q: expected shape \[total, Hq, D\]"),
    ("int64", {"qo_indptr": lens(0, 3, 8).long()}, TypeError, "qo_indptr: expected dtype int32"),
    ("no entries", {"qo_indptr": lens()}, ValueError, r"qo_indptr: expected shape \[B \+ 1\]"),
    ("start", {"qo_indptr": lens(1, 3, 8)}, ValueError, r"qo_indptr\[0\]: expected 0, got 1"),
    ("order", {"qo_indptr": lens(0, 3, 2)}, ValueError, r"qo_indptr\[2\]: expected 3 to 8 .*got 2"),
    (
        "past q",
        {"qo_indptr": lens(0, 3, 9)},
        ValueError,
        r"qo_indptr\[2\]: expected 3 to 8 .*got 9",
    ),
    (
        "more rows than max_q",
        {"max_q": 4},
        ValueError,
        "qo_indptr: expected at most max_q = 4 rows of request 1, got 5",
    ),
    (
        "more rows than slots",
        {"tree_len": 4},
        ValueError,
        "qo_indptr: expected at most tree_len = 4 rows of request 1, got 5",
    ),
    ("lens", {"prefix_lens": lens(3)}, ValueError, r"prefix_lens: .* = \(2\), got \(1,\)"),
    (
        "mask of max_q",
        {"max_q": 65},
        ValueError,
        r"tree_mask: expected shape \[total, ceil\(max_q / 64\)\] = \(8, 2\), got \(8, 1\)",
    ),
    (
        "mask of tree_len",
        {"tree_len": 70},
        ValueError,
        r"tree_mask: expected shape \[total, ceil\(tree_len / 64\)\] = \(8, 2\)",
    ),
    (
        "dense mask",
        {"tree_mask": torch.ones(2, 5, 1).long()},
        ValueError,
        "tree_mask: expected sha",
    ),
    (
        "mask rows",
        {"tree_mask": torch.ones(7, 1).long()},
        ValueError,
        r"tree_mask: .* got \(7, 1\)",
    ),
    (
        "dense depths",
        {"depths": torch.zeros(2, 5).int(), "window": 3},
        ValueError,
        r"depths: expected shape \[total\] = \(8\)",
    ),
    (
        "flat depths",
        {"depths": lens(*range(8)), "window": 3, "tree_len": 9},
        ValueError,
        r"depths: expected shape \[B, tree_len\] = \(2, 9\)",
    ),
    ("no depths", {"window": 3}, ValueError, "depths: .* with window and tree_mask, got None"),
    (
        "window of no tree",
        {"window": 3, "tree_len": 0, "tree_mask": None},
        ValueError,
        "window: expected tree_len > 0",
    ),
    ("max_q", {"max_q": -1}, ValueError, "max_q: expected at least 0, got -1"),
    ("cache", {"k_cache": torch.randn(3, 20, 2, 16)}, ValueError, r"k_cache: .* = \(2, any"),
    ("out", {"out": torch.empty(8, 4, 8)}, ValueError, r"out: .* \[total, Hq, Dv\] = \(8, 4, 16\)"),
    ("lse", {"lse": torch.empty(2, 5, 4)}, ValueError, r"lse: expected shape \[total, Hq\]"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"), [w[1:] for w in WRONG_VARLEN], ids=[w[0] for w in WRONG_VARLEN]
)
def test_wrong_arguments_of_varlen_are_named(change, error, message):
    tree_attention_varlen(**flat_base())
    with pytest.raises(error, match=message):
        tree_attention_varlen(**(flat_base() | change))


def test_grad_is_allowed_without_grad_mode():
    inputs = base()
    want = tree_attention(**inputs)
    inputs["q"].requires_grad_()
    with torch.no_grad():
        assert same_bits(tree_attention(**inputs), want)


INVALID = [
    ("lens negative", {"prefix_lens": lens(-1, 4)}, r"prefix_lens\[0\]"),
    ("lens past the cache", {"prefix_lens": lens(3, 21)}, r"prefix_lens\[1\]"),
    (
        "no room for the tree",
        {"prefix_lens": lens(3, 17)},
        r"prefix_lens\[1\]: expected at most 15",
    ),
    (
        "no room for the chain",
        {"prefix_lens": lens(3, 17), "tree_mask": None},
        r"prefix_lens\[1\]: expected at most 15",
    ),
    (
        "bit past the tree",
        {"tree_mask": torch.full((2, 5, 1), -1)},
        r"tree_mask\[0, 0\]: expected no bit at or past the 5 tree slots of request 0",
    ),
    ("page id", {"page_table": torch.tensor([[1, 0], [1, 2]]).int()}, r"page_table\[1, 1\].*got 2"),
    (
        "bound of prefix_lens",
        {"max_prefix_len": 3},
        r"prefix_lens\[1\]: expected at most max_prefix_len = 3, got 4",
    ),
    (
        "depth below the root",
        {"depths": torch.tensor([[0, 1, 1, 2, 3], [0, 1, -1, 2, 3]]).int()},
        r"depths\[1, 2\]: expected 0 to 4 for a slot of request 1, got -1",
    ),
    (
        "depth past the tree",
        {"depths": torch.tensor([[0, 1, 1, 2, 5], [0, 1, 1, 2, 3]]).int()},
        r"depths\[0, 4\]: expected 0 to 4 .* got 5",
    ),
    *(
        (
            f"{name} {value}",
            float8() | {name: torch.tensor([value])},
            f"{name}: expected a positive finite number",
        )
        for name in ("k_scale", "v_scale")
        for value in (0.0, -1.0, float("nan"), float("inf"))
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), [w[1:] for w in INVALID], ids=[w[0] for w in INVALID]
)
def test_validate_reads_the_values(change, message):
    inputs = base() | change
    if "page_table" in change:
        inputs["prefix_lens"] = lens(3, 18)
    with pytest.raises(ValueError, match=message):
        tree_attention(**inputs, validate=True)
    # Without it nothing may crash or write elsewhere, whatever the values.
    assert tree_attention(**inputs).shape == inputs["q"].shape


INVALID_VARLEN = [
    ("lens past the cache", {"prefix_lens": lens(3, 21)}, r"prefix_lens\[1\]"),
    ("no room", {"prefix_lens": lens(18, 4)}, r"prefix_lens\[0\]: expected at most 17.*got 18"),
    (
        "bit of another request's slot",
        {"tree_mask": torch.tensor([1, 3, 9, 1, 3, 5, 11, 19]).view(8, 1)},
        r"tree_mask\[2\]: expected no bit at or past the 3 tree slots of request 0",
    ),
    (
        "depth",
        {"depths": lens(0, 1, 1, 0, 1, 9, 2, 2)},
        r"depths\[5\]: expected 0 to 4 for a slot of request 1, got 9",
    ),
    (
        "page id",
        {"page_table": torch.tensor([[2, 9], [1, 9]]).int()},
        r"page_table\[0, 0\].*from 0 to 1, got 2",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), [w[1:] for w in INVALID_VARLEN], ids=[w[0] for w in INVALID_VARLEN]
)
def test_validate_reads_the_values_of_varlen(change, message):
    tree_attention_varlen(**flat_base(), validate=True)
    inputs = flat_base() | change
    with pytest.raises(ValueError, match=message):
        tree_attention_varlen(**inputs, validate=True)
    assert tree_attention_varlen(**inputs).shape == inputs["q"].shape


def test_validation_by_environment():
    code = (
        "import torch, eagle2_kernels as ek\n"
        "k = torch.zeros(1, 4, 1, 8)\n"
        "ek.tree_attention(torch.zeros(1, 2, 1, 8), k, k, torch.tensor([3], dtype=torch.int32))\n"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | {"EAGLE2_VALIDATE": "1"},
        capture_output=True,
        text=True,
    )
    assert "ValueError: prefix_lens[0]: expected at most 2" in run.stderr


def test_validate_accepts_what_is_right():
    tree_attention(**base(), validate=True)
    for case in (*ATTENTION_CASES[:12], *FLOAT8_CASES):
        inputs = attention_inputs(case, torch.float32)
        tree_attention(*inputs.args, **inputs.kwargs, validate=True)


def test_hostile_values_stay_inside_the_cache():
    """Garbage lengths, pages, depths and bits: any result, no crash, no NaN from outside."""
    g = torch.Generator().manual_seed(0)
    for trial in range(60):
        pages, size = 4, 3
        pool = torch.randn(pages, size, 1, 16, generator=g)
        table = torch.randint(-(2**31), 2**31, (2, 3), generator=g).int()
        if trial % 3:
            table %= pages
        prefix = torch.randint(-20, 20, (2,), generator=g).int()
        if trial % 5 == 0:
            prefix[0] = (-(2**31), 2**31 - 1)[trial % 2]
        mask = torch.randint(-(2**62), 2**62, (2, 7, 2), generator=g)
        depths = torch.randint(-(2**31), 2**31, (2, 70), generator=g).int()
        if trial % 2:
            depths = depths % 9
        q = torch.randn(2, 7, 2, 16, generator=g)
        window = [None, 1, 5, 2**62][trial % 4]
        for words in (mask, None):
            out = tree_attention(
                q,
                pool,
                pool,
                prefix,
                words,
                tree_len=70,
                page_table=table,
                depths=depths,
                window=window,
            )
            assert out.isfinite().all()
        call = {"page_table": table, "window": window, "qo_indptr": lens(0, trial % 8, 13)}
        rows, bits = q.flatten(0, 1), mask.flatten(0, 1)
        for words, more in (
            (bits, {"tree_len": 70, "depths": depths}),
            (bits, {"max_q": 70 + trial % 59, "depths": depths[0, :14]}),
            (None, {}),
        ):
            out = tree_attention_varlen(rows, pool, pool, prefix, tree_mask=words, **call, **more)
            assert out.isfinite().all() and (out[13] == 0).all()


def test_keys_past_two_to_the_31():
    """Page 319 of pages 7 864 320 elements apart lies 2 508 718 080 elements in."""
    pool = torch.empty(319 * 7_864_320 + 64, dtype=torch.uint8)  # one page of it is touched
    pool[-64:] = 0x3C  # 1.5 in float8 e4m3
    cache = pool.view(FLOAT8).as_strided((320, 1, 1, 64), (7_864_320, 64, 64, 1))
    table = lens(319).view(1, 1)
    out = tree_attention(torch.randn(1, 1, 1, 64), cache, cache, lens(0), page_table=table)
    assert (out == 1.5).all()


def test_page_ids_above_sixteen_bits():
    pages = 66_000
    k = torch.zeros(pages, 1, 1, 8)
    k[65_999], k[65_999 - 65_536] = 5.0, 7.0
    table = lens(65_999).view(1, 1)
    out = tree_attention(torch.randn(1, 1, 1, 8), k, k, lens(1), tree_len=0, page_table=table)
    assert (out == 5.0).all()


# the op as PyTorch sees it


def op_arguments(case: AttentionCase, counts: list[int] | None) -> dict[str, object]:
    inputs = attention_inputs(case, torch.bfloat16)
    names = ("q", "k_cache", "v_cache", "prefix_lens", "tree_mask")
    call = dict(zip(names, inputs.args, strict=True)) | inputs.kwargs
    if counts is not None:
        call = flat(inputs, counts, padding=1)
    out, lse = nan_outputs(call["q"], call["v_cache"])
    return call | {"out": out, "lse": lse}


@pytest.mark.parametrize(
    ("case", "counts"),
    [
        (
            AttentionCase(
                5, (4, 2), 16, 9, window=4, softcap=2.0, sinks=True, page_size=4, kv_chunk=3
            ),
            None,
        ),
        (AttentionCase(5, (4, 2), 16, 9, chain=True), None),
        (AttentionCase(5, (2, 1), 16, 9, batch=2, v_dim=8, window=3), [3, 5]),
    ],
    ids=["every option", "chain", "ragged"],
)
def test_opcheck_tree_attention(case, counts):
    call = op_arguments(case, counts)
    torch.library.opcheck(torch.ops.eagle2_kernels.tree_attention_out.default, (), call)


def test_opcheck_of_a_float8_cache():
    call = op_arguments(AttentionCase(5, (2, 1), 16, 9, float8=True), None)
    # The schema's test does arithmetic with its arguments, which float8 has none of.
    tests = ("test_autograd_registration", "test_faketensor")
    op = torch.ops.eagle2_kernels.tree_attention_out.default
    torch.library.opcheck(op, (), call, test_utils=tests)


def test_opcheck_merge():
    args = (torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3)) * 2
    torch.library.opcheck(torch.ops.eagle2_kernels.merge_attention_states.default, args)
    outs = {"out": torch.empty(1, 2, 3, 8), "lse": torch.empty(1, 2, 3)}
    torch.library.opcheck(torch.ops.eagle2_kernels.merge_attention_states_out.default, args, outs)


def test_the_op_refuses_what_would_read_out_of_bounds():
    """Engines call the op without the wrapper."""
    op = torch.ops.eagle2_kernels.tree_attention_out.default
    good = base()
    for change in (
        {"tree_mask": torch.ones(2, 4, 1).long()},
        {"prefix_lens": lens(3)},
        {"v_cache": torch.randn(2, 9, 2, 16)},
        {"k_cache": torch.randn(1, 20, 2, 16)},
        {"depths": torch.ones(2, 4).int()},
        {"sinks": torch.randn(3)},
        {"k_scale": torch.ones(1)},
        {"max_q": 5},
    ):
        args = good | change
        with pytest.raises(RuntimeError, match=next(iter(change))):
            op(**args, out=torch.empty_like(good["q"]))
    ragged = flat_base()
    for change in (
        {"q": torch.randn(1, 8, 4, 16)},
        {"qo_indptr": lens()},
        {"qo_indptr": lens(0, 3, 9)},
        {"qo_indptr": lens(0, 3, 2)},
        {"qo_indptr": lens(-1, 3, 8)},
        {"qo_indptr": lens(0, 3, 8), "max_q": 4},
        {"qo_indptr": lens(0, 3, 8), "tree_len": 4},
        {"tree_mask": torch.ones(8, 2).long()},
        {"tree_mask": torch.ones(7, 1).long()},
        {"prefix_lens": lens(3)},
        {"depths": torch.ones(2, 5).int()},
        {"k_cache": torch.randn(1, 20, 2, 16)},
        {"lse": torch.empty(7, 4)},
        {"out": torch.empty(7, 4, 16)},
        {"out": torch.empty(8, 4, 16).half()},
    ):
        with pytest.raises(RuntimeError, match=next(iter(change))):
            op(**({"out": torch.empty(8, 4, 16)} | ragged | change))
    for change in (
        {"k_scale": torch.ones(2)},
        {"v_scale": torch.ones(1).double()},
        {"v_cache": good["v_cache"]},
    ):
        with pytest.raises(RuntimeError, match=next(iter(change))):
            op(**(good | float8() | change), out=torch.empty_like(good["q"]))
    with pytest.raises(RuntimeError, match="q: expected float32, float16 or bfloat16 beside"):
        op(
            **(good | float8() | {"q": good["q"].double()}),
            out=torch.empty_like(good["q"]).double(),
        )
    with pytest.raises(RuntimeError, match="k_cache: expected size 17"):
        op(**(good | {"q": torch.randn(2, 5, 4, 17)}), out=torch.empty(2, 5, 4, 17))
    with pytest.raises(RuntimeError, match="out"):
        op(**good, out=torch.empty(2, 5, 4, 8))
    with pytest.raises(RuntimeError, match="lse"):
        op(**good, out=torch.empty_like(good["q"]), lse=torch.empty(2, 5, 3))


def test_compiles_without_graph_breaks_and_recompiles_at_most_once():
    count = 0

    def backend(module, _):
        nonlocal count
        count += 1
        return module

    compiled = torch.compile(tree_attention, fullgraph=True, backend=backend, dynamic=True)
    for nodes in (5, 6, 9, 12, 33, 40):
        inputs = attention_inputs(AttentionCase(nodes, (2, 1), 16, nodes + 3), torch.float32)
        got, got_lse = compiled(*inputs.args, return_lse=True)
        want, want_lse = attend(inputs)
        assert same_bits(got, want) and same_bits(got_lse, want_lse)
    assert count <= 2


def test_varlen_compiles_and_recompiles_at_most_once():
    count = 0

    def backend(module, _):
        nonlocal count
        count += 1
        return module

    compiled = torch.compile(tree_attention_varlen, fullgraph=True, backend=backend, dynamic=True)
    for nodes in (5, 6, 9, 33):
        case = AttentionCase(nodes, (2, 1), 16, nodes + 5, batch=2, v_dim=24)
        call = flat(attention_inputs(case, torch.float32), [nodes, nodes - 3])
        got, got_lse = compiled(**call, return_lse=True)
        want, want_lse = tree_attention_varlen(**call, return_lse=True)
        assert same_bits(got, want) and same_bits(got_lse, want_lse)
    assert count <= 2


def test_every_op_of_this_room_has_a_compiled_kernel():
    for name in ("tree_attention_out", "merge_attention_states", "merge_attention_states_out"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"{ops.NAMESPACE}::{name}", "CPU")
