"""write_kv and compact_kv: what is written, what is left alone, and the step that follows."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest
import torch
from cases import paged, path_of, random_parents
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle2_kernels import compact_kv, reference, tree_attention, write_kv

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def lens(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Distinct bytes nearly everywhere, and no NaN, so that torch.equal can compare."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).to(dtype)


def equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


LAYOUTS = ["dense", "interleaved", "heads_first", "pages1", "pages5", "pages16"]


def make_cache(layout: str, batch: int, slots: int, heads: int, dim: int, dtype: torch.dtype):
    """A pair of caches, the storage behind them, and a page table or None."""
    table = None
    if layout == "dense":
        both = rows(2, batch, slots, heads, dim, dtype=dtype)
        k, v = both[0], both[1]
    elif layout == "interleaved":
        both = rows(batch, slots, 2, heads, dim, dtype=dtype)
        k, v = both[:, :, 0], both[:, :, 1]
    elif layout == "heads_first":
        both = rows(2, batch, heads, slots, dim, dtype=dtype)
        k, v = both[0].transpose(1, 2), both[1].transpose(1, 2)
    else:
        size = int(layout.removeprefix("pages"))
        entries = (slots + size - 1) // size
        pages = batch * entries + 2
        both = rows(pages, 2, size, heads, dim, dtype=dtype)
        k, v = both[:, 0], both[:, 1]
        g = torch.Generator().manual_seed(9)
        table = torch.randperm(pages, generator=g)[: batch * entries].view(batch, entries).int()
    return k, v, both, table


# write_kv


@dtypes
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ragged", [False, True], ids=["all", "lengths"])
def test_write_puts_rows_behind_the_prefix_and_nothing_else(dtype, layout, ragged):
    b, n, heads, dim = 3, 6, 2, 24
    k_cache, v_cache, both, table = make_cache(layout, b, 20, heads, dim, dtype)
    k = rows(b, heads, n, dim, dtype=dtype, seed=1).transpose(1, 2)
    v = rows(b, n, 2, heads, dim, dtype=dtype, seed=2)[:, :, 1]
    prefix, lengths = lens(0, 7, 14), lens(6, 0, 3) if ragged else None
    want = both.clone()
    want_k, want_v = (
        torch.as_strided(want, x.shape, x.stride(), x.storage_offset()) for x in (k_cache, v_cache)
    )
    assert reference.write_kv(want_k, want_v, k, v, prefix, lengths, table) is None
    assert write_kv(k_cache, v_cache, k, v, prefix, lengths, table) is None
    assert equal(both, want)
    # Said once without the oracle: request 2, row 1.
    slot = 15
    place = (
        (2, slot)
        if table is None
        else (int(table[2, slot // k_cache.shape[1]]), slot % k_cache.shape[1])
    )
    assert equal(k_cache[place], k[2, 1]) and equal(v_cache[place], v[2, 1])


WIDER = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("dtype", WIDER.values(), ids=WIDER)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_rounds_to_float8(dtype, layout):
    """k / k_scale, the nearest float8, saturating; a row already in float8 is copied beside it."""
    b, n, heads, dim = 2, 6, 2, 23
    k_cache, v_cache, both, table = make_cache(layout, b, 20, heads, dim, torch.float8_e4m3fn)
    k = 300 * rows(b, heads, n, dim, dtype=dtype, seed=1).transpose(1, 2)
    v = rows(b, n, heads, dim, dtype=dtype, seed=2)
    k[0, 0, 0, :4] = torch.tensor([float("nan"), float("inf"), float("-inf"), 6e4])
    v[0, 0, 0, :4] = torch.tensor([2.0**-10, 2.0**-9, -(2.0**-11), 0.0])
    prefix, lengths = lens(3, 14), lens(6, 2)
    scales = {"k_scale": torch.tensor([0.37]), "v_scale": torch.tensor(2.5)}
    for kwargs in (scales, {"v_scale": scales["v_scale"]}, {}):
        want = both.clone()
        want_k, want_v = (
            torch.as_strided(want, x.shape, x.stride(), x.storage_offset())
            for x in (k_cache, v_cache)
        )
        reference.write_kv(want_k, want_v, k, v, prefix, lengths, table, **kwargs)
        write_kv(k_cache, v_cache, k, v, prefix, lengths, table, validate=True, **kwargs)
        assert equal(both, want)
    stored = v.to(torch.float8_e4m3fn)
    write_kv(k_cache, v_cache, k, stored, prefix, lengths, table, k_scale=scales["k_scale"])
    reference.write_kv(want_k, want_v, k, v, prefix, lengths, table, k_scale=scales["k_scale"])
    assert equal(both, want)


def test_float8_rows_as_they_are_read_again():
    """Half a unit of the three mantissa bits at most, and the largest value past the range."""
    k = torch.tensor([1.0, -0.3, 447.0, 448.0, 460.0, 1e9, -1e9, float("inf"), float("nan"), 0.0])
    for scale in (1.0, 0.25, 7.0):
        k_cache, v_cache = torch.zeros(2, 1, 4, 1, 10).to(torch.float8_e4m3fn)
        factor = torch.tensor([scale])
        x = (k * scale).view(1, 1, 1, 10)
        write_kv(k_cache, v_cache, x, x, lens(2), k_scale=factor, v_scale=factor)
        read = tree_attention(
            torch.zeros(1, 1, 1, 10),
            torch.zeros_like(k_cache),
            v_cache,
            lens(2),
            torch.tensor([[[1]]]),
            window=1,
            depths=lens(0).view(1, 1),
            v_scale=factor,
        ).flatten()
        assert equal(k_cache, v_cache)
        want = k.clamp(-448, 448) * scale
        error = (read - want).abs()[:8]
        assert (error <= want.abs()[:8] / 16).all()
        assert (read[3:8] == want[3:8]).all()
        assert read[8].isnan() and read[9] == 0


def test_write_skips_pages_below_zero_and_slots_past_the_cache():
    k_cache, v_cache, both, _ = make_cache("pages5", 1, 20, 1, 4, torch.float32)
    before = both.clone()
    k = rows(1, 12, 1, 4, seed=1)
    table = lens(3, -1, 2).view(1, 3)
    write_kv(k_cache, v_cache, k, k, lens(4), None, table)
    want = before.clone()
    want[3, :, 4] = k[0, 0]
    want[2] = k[0, 6:11].expand(2, 5, 1, 4)
    assert equal(both, want)
    for prefix in (-(2**31), -3, 19, 20, 2**31 - 1):
        dense = torch.zeros(1, 20, 1, 4)
        write_kv(dense, dense.clone(), k, k, lens(prefix))
        stop = max(min(20 - prefix, 12), 0)
        start = max(min(-prefix, 12), 0)
        assert dense.count_nonzero() == 4 * max(stop - start, 0)


def test_write_lengths_outside_the_rows_write_none_or_all():
    k = rows(2, 3, 1, 4)
    cache = torch.zeros(2, 9, 1, 4)
    write_kv(cache, torch.zeros_like(cache), k, k, lens(1, 1), lens(-5, 99))
    assert cache[0].count_nonzero() == 0
    assert equal(cache[1, 1:4], k[1]) and cache[1].count_nonzero() == 12


# compact_kv


def random_path(slots: int, length: int, seed: int) -> list[int]:
    """Root first, then any distinct slots in any order."""
    g = torch.Generator().manual_seed(seed)
    return [0, *(torch.randperm(slots - 1, generator=g)[:length] + 1).tolist()]


@dtypes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compaction_is_a_gather_from_a_copy(dtype, layout):
    b, tree, layers = 3, 14, 2
    made = [make_cache(layout, b, 30, 2, 24, dtype) for _ in range(layers)]
    table = made[0][3]
    prefix, accept_length = lens(0, 9, 16), lens(5, -1, 13)
    paths = [random_path(tree, length, seed) for seed, length in enumerate((5, 7, 13))]
    accept_index = torch.full((b, tree), -1, dtype=torch.int32)
    for r, path in enumerate(paths):
        accept_index[r, : len(path)] = torch.tensor(path)
    wants = []
    for k, v, both, _ in made:
        want = both.clone()
        for cache in (k, v):
            copy = torch.as_strided(want, cache.shape, cache.stride(), cache.storage_offset())
            for r in (0, 2):
                for i, slot in enumerate(paths[r]):
                    source, target = int(prefix[r]) + slot, int(prefix[r]) + i
                    size = cache.shape[1]
                    at = (
                        ((r, source), (r, target))
                        if table is None
                        else tuple((int(table[r, s // size]), s % size) for s in (source, target))
                    )
                    copy[at[1]] = cache[at[0]]
        wants.append(want)
    assert (
        compact_kv(
            [x for k, v, *_ in made for x in (k, v)], accept_index, accept_length, prefix, table
        )
        is None
    )
    for (_, _, both, _), want in zip(made, wants, strict=True):
        assert equal(both, want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compaction_of_any_path_is_a_gather_from_a_copy(layout):
    """Any permutation of any slots, sources and targets overlapping, at any prefix."""

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        st.lists(st.tuples(st.permutations(range(1, 9)), st.integers(-1, 8), st.integers(0, 12)))
    )
    def check(requests):
        b = len(requests)
        k, v, both, table = make_cache(layout, b, 21, 1, 2, torch.float32)
        index = torch.full((b, 9), -1, dtype=torch.int32)
        length, prefix = lens(*(n for _, n, _ in requests)), lens(*(p for *_, p in requests))
        at = {}
        for r in range(b):
            for position in range(21):
                page = (r, position) if table is None else divmod(position, k.shape[1])
                at[r, position] = page if table is None else (int(table[r, page[0]]), page[1])
        want = both.clone()
        for cache in (k, v):
            copy = torch.as_strided(want, cache.shape, cache.stride(), cache.storage_offset())
            for r, (order, accepted, start) in enumerate(requests):
                path = [0, *order][: accepted + 1]
                index[r, : len(path)] = torch.tensor(path, dtype=torch.int32)
                for i, slot in enumerate(path):
                    copy[at[r, start + i]] = cache[at[r, start + slot]]
        compact_kv([k, v], index, length, prefix, table, validate=True)
        assert equal(both, want)

    check()


@pytest.mark.parametrize(
    "path", [[0, 1, 2, 3], [0, 3, 1, 2], [0, 2, 4, 1], [0, 2, 3], [0, 5]], ids=str
)
def test_compaction_reads_every_source_before_it_writes(path):
    cache = torch.arange(12.0).view(1, 12, 1, 1).clone()
    index = torch.tensor([path], dtype=torch.int32)
    compact_kv([cache], index, lens(len(path) - 1), lens(4))
    moved = [4.0 + slot for slot in path]
    assert cache.flatten().tolist()[:4] == [0, 1, 2, 3]
    assert cache.flatten().tolist()[4 : 4 + len(path)] == moved


def test_identity_path_changes_nothing_and_twice_is_not_once():
    cache = rows(1, 12, 2, 8)
    before = cache.clone()
    compact_kv([cache], lens(0, 1, 2, -1).view(1, 4), lens(2), lens(3))
    assert equal(cache, before)
    for _ in range(2):
        compact_kv([cache], lens(0, 2, 3, -1).view(1, 4), lens(2), lens(3))
    assert not equal(cache[0, 4], before[0, 5])


def test_sentinels_and_places_outside_the_cache_are_skipped():
    before = rows(1, 6, 1, 4)
    for index, length, prefix in (
        (lens(0, -1, 3), 2, 1),
        (lens(0, 99, 2**31 - 1), 2, 1),
        (lens(0, 2, 3), 2, 2**31 - 1),
        (lens(0, 2, 3), -7, 1),
    ):
        cache = before.clone()
        compact_kv([cache], index.view(1, 3), lens(length), lens(prefix))
        assert equal(cache, before)
    cache = before.clone()
    compact_kv([cache], lens(0, 2, 3).view(1, 3), lens(2**31 - 1), lens(1))
    assert equal(cache[0, 2:4], before[0, 3:5])
    compact_kv([], lens(0, 2, 3).view(1, 3), lens(2), lens(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [None, 5], ids=["dense", "paged"])
@pytest.mark.parametrize("any_order", [False, True], ids=["sorted", "any order"])
def test_the_next_step_equals_straight_decoding(dtype, page_size, any_order):
    """Accept a path through later siblings: the next step must read that path's keys."""
    n, heads, dim, prefix, accepted = 24, 2, 32, 33, 3
    for seed in range(20):
        parents = random_parents(n, seed, any_order=any_order)
        path = max((path_of(parents, i) for i in range(n)), key=lambda p: (len(p), p))
        if len(path) > accepted and path[1] != 1:
            break
    path = path[: accepted + 1]
    k, v = (rows(1, 90, heads, dim, dtype=dtype, seed=s) for s in (1, 2))
    nodes_k, nodes_v = (rows(1, n, heads, dim, dtype=dtype, seed=s) for s in (3, 4))
    q = rows(1, 1, 2 * heads, dim, dtype=dtype, seed=5)
    next_k, next_v = (rows(1, 1, heads, dim, dtype=dtype, seed=s) for s in (6, 7))

    plain_k, plain_v = k.clone(), v.clone()
    after = lens(prefix + len(path))
    write_kv(plain_k, plain_v, nodes_k[:, path], nodes_v[:, path], lens(prefix))
    write_kv(plain_k, plain_v, next_k, next_v, after)
    want = tree_attention(q, plain_k, plain_v, after)

    table = None
    if page_size is not None:
        k, v, table = paged(k, v, page_size, 3, interleaved=True)
    write_kv(k, v, nodes_k, nodes_v, lens(prefix), None, table)
    index = torch.full((1, 8), -1, dtype=torch.int32)
    index[0, : len(path)] = torch.tensor(path)
    compact_kv([k, v], index, lens(len(path) - 1), lens(prefix), table)
    write_kv(k, v, next_k, next_v, after, None, table)
    assert equal(tree_attention(q, k, v, after, page_table=table), want)


@pytest.mark.parametrize("page_size", [None, 1, 16], ids=["dense", "pages of 1", "pages of 16"])
@pytest.mark.parametrize("any_order", [False, True], ids=["sorted", "any order"])
def test_steps_in_a_row_equal_straight_decoding(page_size, any_order):
    """Tree after tree, accepted paths of all lengths: the cache is the one plain decoding fills."""
    n, heads, dim, prefix = 9, 1, 16, 3
    k, v = (rows(1, 120, heads, dim, seed=s) for s in (1, 2))
    plain_k, plain_v = k.clone(), v.clone()
    dense_k, dense_v, table = k, v, None
    if page_size is not None:
        k, v, table = paged(k, v, page_size, 3)
    for step in range(9):
        parents = random_parents(n, step, any_order=any_order)
        deepest = max((path_of(parents, i) for i in range(n)), key=lambda p: (len(p), p))
        path = deepest[: 1 + step % 4]
        nodes_k, nodes_v = (rows(1, n, heads, dim, seed=10 * step + s) for s in (5, 6))
        write_kv(k, v, nodes_k, nodes_v, lens(prefix), None, table)
        index = torch.full((1, n), -1, dtype=torch.int32)
        index[0, : len(path)] = torch.tensor(path)
        compact_kv([k, v], index, lens(len(path) - 1), lens(prefix), table)
        write_kv(plain_k, plain_v, nodes_k[:, path], nodes_v[:, path], lens(prefix))
        prefix += len(path)
        q = rows(1, 1, heads, dim, seed=1000 + step)
        got = tree_attention(q, k, v, lens(prefix), tree_len=0, page_table=table)
        want = tree_attention(q, plain_k, plain_v, lens(prefix), tree_len=0)
        assert equal(got, want), step
    assert table is not None or equal(dense_k[:, :prefix], plain_k[:, :prefix])
    assert table is not None or equal(dense_v[:, :prefix], plain_v[:, :prefix])


# arguments


def write_arguments() -> dict[str, object]:
    return {
        "k_cache": torch.zeros(2, 9, 2, 8),
        "v_cache": torch.zeros(2, 9, 2, 8),
        "k": torch.zeros(2, 3, 2, 8),
        "v": torch.zeros(2, 3, 2, 8),
        "prefix_lens": lens(1, 2),
    }


def float8_caches() -> dict[str, object]:
    return {f"{name}_cache": torch.zeros(2, 9, 2, 8).to(torch.float8_e4m3fn) for name in "kv"}


WRONG_WRITE = [
    ("rank", {"k": torch.zeros(2, 3, 8)}, ValueError, r"k: expected a tensor \[B, N, Hkv, D\]"),
    ("dtype", {"k": torch.zeros(2, 3, 2, 8).half()}, TypeError, "k: expected dtype float32, got"),
    ("head dim", {"v": torch.zeros(2, 3, 2, 4)}, ValueError, "v: expected shape"),
    ("rows", {"v": torch.zeros(2, 4, 2, 8)}, ValueError, "v: expected shape"),
    ("heads", {"k_cache": torch.zeros(2, 9, 1, 8)}, ValueError, "k_cache: expected the 2 heads"),
    ("batch", {"v_cache": torch.zeros(3, 9, 2, 8)}, ValueError, "v_cache: expected shape"),
    (
        "expanded",
        {"k_cache": torch.zeros(1, 9, 2, 8).expand(2, -1, -1, -1)},
        ValueError,
        "k_cache: expected a tensor to write to, got an expanded one",
    ),
    ("strides", {"k": torch.zeros(2, 3, 8, 2).mT}, ValueError, "k: expected a contiguous last"),
    ("lens", {"prefix_lens": lens(1, 2).long()}, TypeError, "prefix_lens: expected dtype int32"),
    ("lengths", {"lengths": lens(1)}, ValueError, "lengths: expected shape"),
    ("table", {"page_table": lens(1, 2)}, ValueError, "page_table: expected shape"),
    (
        "page size",
        {"k_cache": torch.zeros(2, 0, 2, 8), "page_table": lens(1, 2).view(2, 1)},
        ValueError,
        "k_cache: expected a page size",
    ),
    ("list", {"v_cache": [0]}, TypeError, "v_cache: expected a tensor, got list"),
    ("grad", {"k": torch.zeros(2, 3, 2, 8, requires_grad=True)}, ValueError, "k: .* require grad"),
    (
        "scale of a copy",
        {"k_scale": torch.ones(1)},
        ValueError,
        "k_scale: expected None where k is copied as it is .float32 into float32.",
    ),
    (
        "wider into half",
        {"v_cache": torch.zeros(2, 9, 2, 8).half()},
        TypeError,
        "v: expected dtype float16, got float32",
    ),
    (
        "double into float8",
        float8_caches() | {"k": torch.zeros(2, 3, 2, 8).double()},
        TypeError,
        "k: expected dtype float8_e4m3fn or float32 or float16 or bfloat16, got float64",
    ),
    (
        "scales per head",
        float8_caches() | {"v_scale": torch.ones(2)},
        ValueError,
        r"v_scale: expected one element, got shape \(2,\)",
    ),
    (
        "scale dtype",
        float8_caches() | {"k_scale": torch.ones(1).half()},
        TypeError,
        "k_scale: expected a float32 tensor of one element, got float16",
    ),
    (
        "head dim of float8",
        float8_caches() | {"k": torch.zeros(2, 3, 2, 2)},
        ValueError,
        "k: expected shape",
    ),
]


@pytest.mark.parametrize(
    ("change", "error", "message"), [w[1:] for w in WRONG_WRITE], ids=[w[0] for w in WRONG_WRITE]
)
def test_wrong_arguments_of_write_are_named(change, error, message):
    with pytest.raises(error, match=message):
        write_kv(**(write_arguments() | change))


def compact_arguments() -> dict[str, object]:
    return {
        "kv_caches": [torch.zeros(2, 9, 2, 8), torch.zeros(2, 9, 1, 4)],
        "accept_index": torch.tensor([[0, 2, -1], [0, -1, -1]]).int(),
        "accept_length": lens(1, 0),
        "prefix_lens": lens(1, 2),
    }


WRONG_COMPACT = [
    (
        "expanded",
        {"kv_caches": [torch.zeros(1, 9, 2, 8).expand(2, -1, -1, -1)]},
        ValueError,
        r"kv_caches\[0\]: expected a tensor to write to, got an expanded one",
    ),
    (
        "int64",
        {"accept_index": torch.zeros(2, 3).long()},
        TypeError,
        "accept_index: expected dtype int32",
    ),
    ("rank", {"accept_index": lens(0, 1)}, ValueError, "accept_index: expected shape"),
    ("length", {"accept_length": lens(1)}, ValueError, "accept_length: expected shape"),
    ("lens", {"prefix_lens": lens(1, 2, 3)}, ValueError, "prefix_lens: expected shape"),
    (
        "one tensor",
        {"kv_caches": torch.zeros(2, 2, 9, 2, 8)},
        TypeError,
        "kv_caches: expected a list of tensors, got one",
    ),
    (
        "pairs",
        {"kv_caches": [(torch.zeros(2, 9, 2, 8), torch.zeros(2, 9, 2, 8))]},
        TypeError,
        r"kv_caches\[0\]: expected a tensor, got tuple",
    ),
    (
        "cache rank",
        {"kv_caches": [torch.zeros(2, 9, 8)]},
        ValueError,
        r"kv_caches\[0\]: expected shape",
    ),
    (
        "cache batch",
        {"kv_caches": [torch.zeros(2, 9, 1, 8), torch.zeros(1, 9, 1, 8)]},
        ValueError,
        r"kv_caches\[1\]: expected shape",
    ),
    (
        "strides",
        {"kv_caches": [torch.zeros(2, 9, 8, 2).mT]},
        ValueError,
        r"kv_caches\[0\]: expected a contig",
    ),
    ("table", {"page_table": torch.zeros(2, 3)}, TypeError, "page_table: expected dtype int32"),
    (
        "grad",
        {"kv_caches": [torch.zeros(2, 9, 1, 8, requires_grad=True)]},
        ValueError,
        r"kv_caches\[0\]: .* grad",
    ),
]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [w[1:] for w in WRONG_COMPACT],
    ids=[w[0] for w in WRONG_COMPACT],
)
def test_wrong_arguments_of_compact_are_named(change, error, message):
    with pytest.raises(error, match=message):
        compact_kv(**(compact_arguments() | change))


def test_validate_reads_the_values():
    write_kv(**write_arguments(), validate=True)
    compact_kv(**compact_arguments(), validate=True)
    for change, message in (
        (
            {"prefix_lens": lens(1, 7)},
            r"prefix_lens .*k_cache.*\[1\]: expected a value from 0 to 9, got 10",
        ),
        ({"prefix_lens": lens(-1, 2)}, r"prefix_lens\[0\]"),
        ({"lengths": lens(1, 4)}, r"lengths\[1\]: expected a value from 0 to 3"),
        (
            {"page_table": lens(0, 2).view(2, 1)},
            r"page_table\[1, 0\]: expected a value from 0 to 1",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            write_kv(**(write_arguments() | change), validate=True)
    # A request that stores nothing needs no place.
    write_kv(
        **(write_arguments() | {"prefix_lens": lens(1, 99), "lengths": lens(2, 0)}), validate=True
    )
    for change, message in (
        ({"accept_length": lens(1, 3)}, r"accept_length\[1\]: expected a value from -1 to 2"),
        ({"accept_length": lens(2, 0)}, r"accept_index\[0, 2\]"),
        (
            {"accept_index": torch.tensor([[1, 2, -1], [0, -1, -1]]).int()},
            r"accept_index\[0, 0\]: expected a value from 0 to 0, got 1",
        ),
        (
            {
                "accept_index": torch.tensor([[0, -1, -1], [0, 3, 3]]).int(),
                "accept_length": lens(0, 2),
            },
            r"accept_index\[1, 2\]: .* got 3, which accept_index\[1, 1\] is too",
        ),
        ({"prefix_lens": lens(7, 0)}, r"prefix_lens .*kv_caches\[0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            compact_kv(**(compact_arguments() | change), validate=True)


def test_validate_finds_two_requests_that_write_one_place():
    shared = torch.tensor([[0, 1], [0, 1]]).int()
    pages = {"kv_caches": [torch.zeros(3, 4, 2, 8)], "page_table": shared}
    # Page 0 holds a common prefix and is not written: no error.
    own = torch.tensor([[0, 1], [0, 2]]).int()
    after = {"prefix_lens": lens(4, 4)}
    compact_kv(**(compact_arguments() | pages | after | {"page_table": own}), validate=True)
    with pytest.raises(
        ValueError, match=r"page_table\[1, 1\]: .* page 1, which page_table\[0, 1\]"
    ):
        compact_kv(**(compact_arguments() | pages | after), validate=True)
    # The same page, but other slots of it.
    apart = {"prefix_lens": lens(4, 0), "lengths": lens(2, 2), "page_table": own}
    stored = {"k_cache": torch.zeros(3, 4, 2, 8), "v_cache": torch.zeros(3, 4, 2, 8)}
    write_kv(**(write_arguments() | stored | apart), validate=True)
    clash = {"prefix_lens": lens(0, 1), "lengths": lens(2, 2), "page_table": shared}
    with pytest.raises(ValueError, match=r"page_table\[1, 0\]: .* got page 0"):
        write_kv(**(write_arguments() | stored | clash), validate=True)


# the ops as PyTorch sees them


@pytest.mark.parametrize("with_options", [False, True], ids=["plain", "lengths and pages"])
def test_opcheck(with_options):
    args = list(write_arguments().values())
    moves = list(compact_arguments().values())
    if with_options:
        table = torch.tensor([[0], [1]]).int()
        args += [lens(2, 3), table]
        moves += [table]
    torch.library.opcheck(torch.ops.eagle2_kernels.write_kv.default, tuple(args))
    torch.library.opcheck(torch.ops.eagle2_kernels.compact_kv.default, tuple(moves))


def test_compiles_without_graph_breaks():
    def step(k_cache, v_cache, k, v, prefix, index, length):
        write_kv(k_cache, v_cache, k, v, prefix)
        compact_kv([k_cache, v_cache], index, length, prefix)
        return prefix + length + 1

    def arguments():
        return (
            *(torch.zeros(1, 9, 1, 4) for _ in range(2)),
            *(rows(1, 3, 1, 4, seed=s) for s in (1, 2)),
            lens(2),
            lens(0, 2, -1).view(1, 3),
            lens(1),
        )

    want, got = arguments(), arguments()
    step(*want)
    torch.compile(step, fullgraph=True, backend="aot_eager")(*got)
    assert all(equal(a, b) for a, b in zip(got[:2], want[:2], strict=True))
    assert got[0].count_nonzero() == 12


# addresses


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """csrc/address.h, which every backend computes cache addresses with, called from Python."""
    folder = tmp_path_factory.mktemp("address")
    source = folder / "address.cpp"
    source.write_text(
        '#include "address.h"\n'
        'extern "C" int64_t offset(int64_t b, int64_t bs, int64_t s, int64_t ss, int64_t h,'
        " int64_t hs) { return eagle2::cache_offset(b, bs, s, ss, h, hs); }\n"
        'extern "C" int64_t block(int64_t position, int64_t request, const int32_t* table,'
        " int64_t stride, int64_t entries, int64_t size, int64_t blocks, int64_t* slot) {\n"
        "  const auto at = eagle2::cache_slot(position, request, table, stride, entries, size,"
        " blocks);\n  *slot = at.slot;\n  return at.block;\n}\n"
    )
    library = folder / "address.so"
    headers = Path(__file__).parents[1] / "csrc"
    compiler = os.environ.get("CXX", "g++").split()
    subprocess.run(
        [*compiler, "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{headers}", source, "-o", library],
        check=True,
    )
    loaded = ctypes.CDLL(str(library))
    word, pointer = ctypes.c_int64, ctypes.c_void_p
    loaded.offset.argtypes = [word] * 6
    loaded.block.argtypes = [word, word, pointer, word, word, word, word, pointer]
    loaded.offset.restype = loaded.block.restype = word
    return loaded


def test_addresses_pass_two_to_the_31(address):
    assert address.offset(319, 7_864_320, 0, 0, 0, 0) == 2_508_718_080
    assert address.offset(70_001, 3 * 2**20, 15, 65_536, 7, 128) == 70_001 * 3 * 2**20 + 983_936
    assert address.offset(0, 0, 2**31 + 5, 2**20, 0, 0) == (2**31 + 5) * 2**20


def test_pages_are_found_by_position(address):
    slot = ctypes.c_int64()
    table = (ctypes.c_int32 * 6)(70_000, 0, -1, 0, 90_000, 0)

    def find(position: int, pages=table) -> tuple[int, int]:
        # Entries lie two apart: a table may be a strided view.
        call = (position, 3, pages, 2, 3, 16, 80_000, ctypes.byref(slot))
        return address.block(*call), slot.value

    assert find(5) == (70_000, 5)
    assert find(15) == (70_000, 15)
    assert find(16)[0] == -1, "a negative page id"
    assert find(32)[0] == -1, "a page id past the pool"
    assert find(48)[0] == -1, "past the table"
    assert find(-1)[0] == -1
    assert find(2**40)[0] == -1
    assert find(15, None) == (3, 15)
    assert find(16, None)[0] == -1, "past a dense cache"
