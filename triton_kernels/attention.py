"""tree_attention: a tree's queries over the paged or dense cache, and merging partial results.

Keys are cut into chunks at fixed positions. `attend_kernel` computes partial results of chunks,
spread over the card; `combine_kernel` merges them in ascending order, chunks to groups of `GROUP`
and groups to the row. A program may fold a whole group itself: the operations are the same, so a
row's bits do not depend on how the work was spread, on the batch, or on the rows beside it.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch

LOG2_E = 1.4426950408889634


@triton.jit
def _fold(m, total, acc, part_m, part_total, part_acc, ACROSS: tl.constexpr):
    # Weights are powers of two: m holds base-2 logits. One fixed contraction, so that folding here
    # and in the other kernel gives the same bits. A NaN sum survives a maximum of -inf.
    peak = tl.maximum(m, part_m)
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    old, new = tl.exp2(m - safe), tl.exp2(part_m - safe)
    total = tl.fma(total, old, part_total * new)
    if ACROSS:
        shape: tl.constexpr = acc.shape
        old, new = tl.broadcast_to(old[:, None], shape), tl.broadcast_to(new[:, None], shape)
    else:
        old, new = tl.zeros_like(acc) + old, tl.zeros_like(acc) + new
    return peak, total, tl.fma(acc, old, part_acc * new)


@triton.jit
def _tanh(x):
    # Cephes' polynomial near 0, exponentials elsewhere; NaN stays NaN.
    size = tl.abs(x)
    decay = tl.exp2(size * -2.8853900817779268)
    large = (1.0 - decay) / (1.0 + decay)
    square = x * x
    y = tl.fma(square, tl.zeros_like(x) - 5.70498872745e-3, tl.zeros_like(x) + 2.06390887954e-2)
    y = tl.fma(y, square, tl.zeros_like(x) - 5.37397155531e-2)
    y = tl.fma(y, square, tl.zeros_like(x) + 1.33314422036e-1)
    y = tl.fma(y, square, tl.zeros_like(x) - 3.33332819422e-1)
    small = tl.fma(y * square, x, x)
    return tl.where(size < 0.625, small, tl.where(x < 0, -large, large))


@triton.jit
def _widen(x, dtype: tl.constexpr):
    # Cache elements as the query's dtype, exact and NaN kept. Cards that know no float8 e4m3 get
    # its bytes: as float16 bits they are the number times 2^-8.
    if x.dtype == tl.uint8:
        bits = x.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        number = half.to(tl.float16, bitcast=True) * 256.0
        x = tl.where((bits & 0x7F) == 0x7F, float("nan"), number).to(tl.float16)
    return x.to(dtype)


@triton.jit
def _rows_of(qo_indptr, request, known, stride, total, most):
    # Where a request's rows begin and how many they are: inside the tensor and at most the host's
    # bound, whatever is in it.
    first = tl.load(qo_indptr + request * stride, mask=known, other=0)
    end = tl.load(qo_indptr + request * stride + stride, mask=known, other=0)
    first = tl.minimum(tl.maximum(first, 0), total)
    end = tl.minimum(tl.maximum(end, first), total)
    return first.to(tl.int64), tl.minimum(end - first, most)


@triton.jit
def _request_of(qo_indptr, row, stride, batch, BLOCK: tl.constexpr):
    # The request that has a row: as many as end at or before it. `batch` where none has.
    request = row.to(tl.int32) * 0
    lane = tl.arange(0, BLOCK)
    for first in range(0, batch, BLOCK):
        entry = (first + lane).to(tl.int64) + 1
        end = tl.load(qo_indptr + entry * stride, mask=first + lane < batch, other=2147483647)
        request += tl.sum((end <= row).to(tl.int32), axis=0)
    return request


@triton.jit
def _attend_block(
    q_low,
    q_high,
    m,
    total,
    acc,
    k_base,
    v_base,
    start,
    end,
    prefix_len,
    row_mask,
    row_depths,
    row_table,
    live,
    slot,
    position,
    words,
    tree_len,
    num_blocks,
    page_size,
    window,
    scale,
    cap,
    kc_page,
    kc_slot,
    vc_page,
    vc_slot,
    mask_word,
    depths_slot,
    table_entry,
    MASKED: tl.constexpr,
    PAGED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_DEPTHS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EXPONENT: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D_LOW: tl.constexpr,
    D_HIGH: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    # Keys [start, start + BLOCK_N) into the running maximum, sum and accumulator.
    column = start + tl.arange(0, BLOCK_N)
    there = column < end
    if MASKED:
        key = column - prefix_len
        if HAS_MASK:
            # The block's 64 bits of a row, out of the two words that may hold them.
            ahead = tl.maximum(start - prefix_len, 0)
            first, shift = (ahead // 64).to(tl.int64), (ahead % 64).to(tl.uint64)
            low = tl.load(row_mask + first * mask_word, mask=live, other=0)
            high = tl.load(
                row_mask + (first + 1) * mask_word, mask=live & (first + 1 < words), other=0
            )
            low, high = low.to(tl.uint64, bitcast=True), high.to(tl.uint64, bitcast=True)
            # Two shifts, for a shift by 64 is none.
            bits = (low >> shift) | ((high << 1) << (63 - shift))
            bits = bits << tl.minimum(tl.maximum(prefix_len - start, 0), 63).to(tl.uint64)
            bit = tl.arange(0, BLOCK_N)
            word = tl.where(
                (bit < 32)[None, :],
                (bits & 0xFFFFFFFF).to(tl.uint32)[:, None],
                (bits >> 32).to(tl.uint32)[:, None],
            )
            seen = ((word >> (bit & 31).to(tl.uint32)[None, :]) & 1) != 0
            seen = seen | (key < 0)[None, :]
        else:
            seen = (key[None, :] <= slot[:, None]) | (key < 0)[None, :]
        seen = seen & live[:, None] & there[None, :]
        if HAS_WINDOW:
            if HAS_DEPTHS:
                depth = tl.load(
                    row_depths + key.to(tl.int64) * depths_slot,
                    mask=(key >= 0) & (key < tree_len),
                    other=0,
                )
                depth = tl.where(key < 0, key, depth)
            else:
                depth = key
            seen = seen & (position[:, None] - depth[None, :] < window)
        # What no row of the tile sees is not read: 0 x NaN is NaN in a matrix unit.
        there = tl.max(seen.to(tl.int32), axis=0) > 0
    if PAGED:
        entry = column // page_size
        page = tl.load(row_table + entry.to(tl.int64) * table_entry, mask=there, other=-1)
        there = there & (page >= 0) & (page < num_blocks)
        page = page.to(tl.int64)
        inside = (column - entry * page_size).to(tl.int64)
        k_row = k_base + page * kc_page + inside * kc_slot
        v_row = v_base + page * vc_page + inside * vc_slot
    else:
        k_row = k_base + column.to(tl.int64) * kc_slot
        v_row = v_base + column.to(tl.int64) * vc_slot
    d = tl.arange(0, D_LOW)
    if D_LOW > D:
        k = tl.load(k_row[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
    elif MASKED or PAGED:
        k = tl.load(k_row[:, None] + d[None, :], mask=there[:, None], other=0.0)
    else:
        k = tl.load(k_row[:, None] + d[None, :])
    scores = tl.dot(q_low, tl.trans(_widen(k, q_low.dtype)), input_precision="ieee")
    if D_HIGH > 0:
        d_high = D_LOW + tl.arange(0, D_HIGH)
        k = tl.load(
            k_row[:, None] + d_high[None, :],
            mask=there[:, None] & (d_high < D)[None, :],
            other=0.0,
        )
        scores = tl.dot(q_high, tl.trans(_widen(k, q_low.dtype)), scores, input_precision="ieee")
    # An infinite score becomes NaN: a row that sees a non-finite key is not finite.
    scores = scores * scale
    scores = tl.fma(scores, tl.zeros_like(scores), scores)
    if HAS_SOFTCAP:
        scores = cap * _tanh(scores)
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    peak = tl.maximum(m, tl.max(scores, axis=1))
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    decay = tl.exp2(m - safe)
    p = tl.exp2(scores - safe[:, None])
    total = tl.fma(total, decay, tl.sum(p, axis=1))
    acc = acc * decay[:, None]

    dv = tl.arange(0, BLOCK_DV)
    if BLOCK_DV > DV:
        v = tl.load(
            v_row[:, None] + dv[None, :], mask=there[:, None] & (dv < DV)[None, :], other=0.0
        )
    elif MASKED or PAGED:
        v = tl.load(v_row[:, None] + dv[None, :], mask=there[:, None], other=0.0)
    else:
        v = tl.load(v_row[:, None] + dv[None, :])
    v = _widen(v, q_low.dtype)
    if MASKED:
        if EXPONENT == 0x7F800000:
            magnitude = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        else:
            magnitude = v.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
        # Rows differ in what they see: those that see a non-finite value are NaN, and no other.
        bad = magnitude >= EXPONENT
        v = tl.where(bad, 0.0, v)
        bad_key = tl.max(bad.to(tl.int32), axis=1)
        touched = tl.max(tl.where(seen, bad_key[None, :], 0), axis=1) > 0
        acc = tl.where(touched[:, None], float("nan"), acc)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return peak, total, acc


@triton.jit(
    do_not_specialize=[
        "total",
        "num_rows",
        "tree_len",
        "capacity",
        "num_blocks",
        "window",
        "chunk",
        "run",
        "num_parts",
        "tiles",
        "words",
    ]
)
def attend_kernel(
    q,
    k_cache,
    v_cache,
    prefix_lens,
    tree_mask,
    qo_indptr,
    depths,
    page_table,
    k_scale,
    part_acc,
    part_m,
    part_total,
    total,
    num_rows,
    group,
    kv_heads,
    tree_len,
    capacity,
    num_blocks,
    page_size,
    window,
    chunk,
    run,
    num_parts,
    tiles,
    words,
    scale,
    cap,
    q_batch,
    q_row,
    q_head,
    kc_page,
    kc_slot,
    kc_head,
    vc_page,
    vc_slot,
    vc_head,
    prefix_batch,
    mask_batch,
    mask_row,
    mask_word,
    depths_batch,
    depths_slot,
    table_batch,
    table_entry,
    indptr_entry,
    RAGGED: tl.constexpr,
    OWN_LEN: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    PAGED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_DEPTHS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EXPONENT: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D_LOW: tl.constexpr,
    D_HIGH: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Partial results of one tile of rows over one part of the keys.

    Program (request, KV head, part, tile), the tile fastest: programs that read the same keys run
    side by side. A tile is BLOCK_M rows, nodes times the query heads of the group; a part is
    `run` chunks.

    bytes = tiles * keys * kv_heads * (D + DV) * element + rows * heads * D * 2
          + rows * heads * parts * 4 * (DV + 2)
    flops = rows * heads * keys * 2 * (D + DV)
    tiles = ceil(nodes * group / BLOCK_M): K and V come once from memory and then from the
    second-level cache; element is 1 for float8, 2 in 16 bits.
    """
    tl.static_assert(BLOCK_N <= 64)
    tile = tl.program_id(0) % tiles
    part = tl.program_id(0) // tiles % num_parts
    pair = tl.program_id(0) // (tiles * num_parts)
    request = (pair // kv_heads).to(tl.int64)
    kv_head = (pair % kv_heads).to(tl.int64)
    prefix_len = tl.load(prefix_lens + request * prefix_batch)
    prefix_len = tl.minimum(tl.maximum(prefix_len, 0), capacity)
    # Where the request's rows begin among all, and how many they are.
    first_row = request * num_rows
    if RAGGED:
        first_row, num_rows = _rows_of(
            qo_indptr, request, request >= 0, indptr_entry, total, num_rows
        )
        if OWN_LEN:
            tree_len = num_rows
    key_end = tl.minimum(prefix_len + tree_len, capacity)

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node = row // group
    live = node < num_rows
    stored = live
    slot = tree_len - num_rows + node
    first_slot = tree_len - num_rows + tile * BLOCK_M // group
    last_slot = tree_len - num_rows + (tile * BLOCK_M + BLOCK_M - 1) // group
    mask_first = request * mask_batch
    q_first = request * q_batch
    depths_first = request * depths_batch
    if RAGGED:
        mask_first = first_row * mask_row
        q_first = first_row * q_row
        if OWN_LEN:
            depths_first = first_row * depths_slot
    row_mask = tree_mask + mask_first + node.to(tl.int64) * mask_row
    row_depths = depths + depths_first
    row_table = page_table + request * table_batch
    if HAS_MASK:
        bits = tl.zeros((BLOCK_M,), tl.int64)
        next_word = row_mask
        for _ in range(words):
            bits |= tl.load(next_word, mask=live, other=0)
            next_word += mask_word
        # A row without a bit is padding.
        live = live & (bits != 0)
        full_end = prefix_len
    else:
        # A chain: keys behind the tile's last row are seen by none, those up to its first by all.
        key_end = tl.minimum(key_end, prefix_len + tl.maximum(last_slot + 1, 0))
        full_end = prefix_len + tl.maximum(first_slot + 1, 0)
    # A tile of nothing but padding (an inactive request) reads no key.
    key_end = tl.where(tl.max(live.to(tl.int32), axis=0) > 0, key_end, 0)
    # Positions and depths count from the end of the prefix.
    position = slot
    seen_from = 0
    if HAS_WINDOW:
        full_end = 0
        if HAS_DEPTHS:
            position = tl.load(row_depths + slot.to(tl.int64) * depths_slot, mask=stored, other=0)
        nearest = tl.min(tl.where(stored, position, 2147483647), axis=0)
        seen_from = tl.maximum(prefix_len + nearest - window + 1, 0)

    d = tl.arange(0, D_LOW)
    head = kv_head * group + row % group
    q_base = q + q_first + node.to(tl.int64) * q_row + head * q_head
    q_low = tl.load(q_base[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
    if D_HIGH > 0:
        d_high = D_LOW + tl.arange(0, D_HIGH)
        q_high = tl.load(
            q_base[:, None] + d_high[None, :],
            mask=live[:, None] & (d_high < D)[None, :],
            other=0.0,
        )
    else:
        q_high = q_low
    if HAS_K_SCALE:
        scale *= tl.load(k_scale)
    k_base = k_cache + kv_head * kc_head
    v_base = v_cache + kv_head * vc_head
    if not PAGED:
        k_base += request * kc_page
        v_base += request * vc_page

    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    chunks = (key_end + chunk - 1) // chunk
    # Keys past the host's bound, where there are any, fall to the last part.
    last = tl.where(part == num_parts - 1, chunks, tl.minimum(part * run + run, chunks))
    for c in range(part * run, last):
        begin = c * chunk
        end = tl.minimum(begin + chunk, key_end)
        full = begin + tl.maximum(tl.minimum(end, full_end) - begin, 0) // BLOCK_N * BLOCK_N
        skipped = tl.maximum(seen_from - begin, 0) // BLOCK_N * BLOCK_N
        chunk_m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        chunk_total = tl.zeros((BLOCK_M,), tl.float32)
        chunk_acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        for start in range(begin, full, BLOCK_N):
            chunk_m, chunk_total, chunk_acc = _attend_block(
                q_low, q_high, chunk_m, chunk_total, chunk_acc,
                k_base, v_base, start, end, prefix_len, row_mask, row_depths, row_table,
                live, slot, position, words, tree_len, num_blocks, page_size, window, scale, cap,
                kc_page, kc_slot, vc_page, vc_slot, mask_word, depths_slot, table_entry,
                False, PAGED, HAS_MASK, HAS_DEPTHS, HAS_WINDOW, HAS_SOFTCAP, EXPONENT,
                D, DV, BLOCK_N, D_LOW, D_HIGH, BLOCK_DV,
            )  # fmt: skip
        for start in tl.range(tl.maximum(full, begin + skipped), end, BLOCK_N, num_stages=1):
            chunk_m, chunk_total, chunk_acc = _attend_block(
                q_low, q_high, chunk_m, chunk_total, chunk_acc,
                k_base, v_base, start, end, prefix_len, row_mask, row_depths, row_table,
                live, slot, position, words, tree_len, num_blocks, page_size, window, scale, cap,
                kc_page, kc_slot, vc_page, vc_slot, mask_word, depths_slot, table_entry,
                True, PAGED, HAS_MASK, HAS_DEPTHS, HAS_WINDOW, HAS_SOFTCAP, EXPONENT,
                D, DV, BLOCK_N, D_LOW, D_HIGH, BLOCK_DV,
            )  # fmt: skip
        m, sums, acc = _fold(m, sums, acc, chunk_m, chunk_total, chunk_acc, True)

    target = ((first_row + node) * kv_heads * group + head) * num_parts + part
    tl.store(part_m + target, m, mask=stored)
    tl.store(part_total + target, sums, mask=stored)
    dv = tl.arange(0, BLOCK_DV)
    # An empty part's accumulator is not read.
    stored = stored & ((sums == 0) == 0)
    tl.store(
        part_acc + target[:, None] * DV + dv[None, :],
        acc,
        mask=stored[:, None] & (dv < DV)[None, :],
    )


@triton.jit(
    do_not_specialize=[
        "batch", "total", "num_rows", "tree_len", "capacity", "chunk", "run", "num_parts", "words",
    ]
)  # fmt: skip
def combine_kernel(
    part_acc,
    part_m,
    part_total,
    prefix_lens,
    tree_mask,
    qo_indptr,
    sinks,
    v_scale,
    out,
    lse,
    batch,
    total,
    num_rows,
    heads,
    tree_len,
    capacity,
    chunk,
    run,
    num_parts,
    words,
    prefix_batch,
    mask_batch,
    mask_row,
    mask_word,
    sinks_head,
    out_batch,
    out_row,
    out_head,
    lse_batch,
    lse_row,
    lse_head,
    indptr_entry,
    RAGGED: tl.constexpr,
    OWN_LEN: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    INDPTR_BLOCK: tl.constexpr,
):
    """One row out of its parts.

    Program (request, row, head).

    bytes = rows * heads * (parts * 4 * (DV + 2) + DV * element + 4)
    flops = rows * heads * parts * DV * 4
    """
    head = (tl.program_id(0) % heads).to(tl.int64)
    any_row = (tl.program_id(0) // heads).to(tl.int64)
    if RAGGED:
        # Rows lie one after another; those of no request, or past the host's bound, are padding.
        row = any_row
        owner = _request_of(qo_indptr, any_row, indptr_entry, batch, INDPTR_BLOCK)
        request, known = owner.to(tl.int64), owner < batch
        first_row, own_rows = _rows_of(qo_indptr, request, known, indptr_entry, total, num_rows)
        place = any_row - first_row
        known = known & (place >= 0) & (place < own_rows)
        if OWN_LEN:
            tree_len = own_rows
    else:
        row = any_row % num_rows
        request = any_row // num_rows
        known = any_row >= 0
    prefix_len = tl.load(prefix_lens + request * prefix_batch, mask=known, other=0)
    prefix_len = tl.minimum(tl.maximum(prefix_len, 0), capacity)
    key_end = tl.where(known, tl.minimum(prefix_len + tree_len, capacity), 0)
    batch_of_row = request
    if RAGGED:
        batch_of_row = request * 0
    if HAS_MASK:
        bits = tl.zeros((1,), tl.int64)
        next_word = tree_mask + batch_of_row * mask_batch + row * mask_row
        next_word += tl.zeros((1,), tl.int32)
        for _ in range(words):
            bits |= tl.load(next_word)
            next_word += mask_word
        key_end = tl.where(tl.max((bits != 0).to(tl.int32), axis=0) > 0, key_end, 0)
    chunks = (key_end + chunk - 1) // chunk

    dv = tl.arange(0, BLOCK_DV)
    source = tl.program_id(0).to(tl.int64) * num_parts
    m, sums = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
    acc = tl.zeros((BLOCK_DV,), tl.float32)
    for first in range(0, chunks, GROUP):
        group_m, group_total = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
        group_acc = tl.zeros((BLOCK_DV,), tl.float32)
        parts = (tl.minimum(first + GROUP, chunks) + run - 1) // run
        for part in range(first // run, tl.minimum(parts, num_parts)):
            part_sum = tl.load(part_total + source + part)
            # Nothing, or not a number: only an empty part is not read.
            filled = tl.where(part_sum == 0, 0, DV)
            x = tl.load(part_acc + (source + part) * DV + dv, mask=dv < filled, other=0.0)
            group_m, group_total, group_acc = _fold(
                group_m,
                group_total,
                group_acc,
                tl.load(part_m + source + part),
                part_sum,
                x,
                False,
            )
        m, sums, acc = _fold(m, sums, acc, group_m, group_total, group_acc, False)
    if HAS_SINKS:
        sink = tl.load(sinks + head * sinks_head).to(tl.float32) * 1.4426950408889634
        m, sums, acc = _fold(m, sums, acc, sink, sums * 0.0 + 1.0, tl.zeros_like(acc), False)
    empty = sums == 0.0
    result = acc / tl.where(empty, 1.0, sums)
    if HAS_V_SCALE:
        result *= tl.load(v_scale)
    target = out + batch_of_row * out_batch + row * out_row + head * out_head + dv
    tl.store(target, result.to(out.dtype.element_ty), mask=dv < DV)
    if HAS_LSE:
        log_sum = (m + tl.log2(tl.where(empty, 1.0, sums))) * 0.6931471805599453
        log_sum = tl.where(empty, float("-inf"), log_sum)
        tl.store(lse + batch_of_row * lse_batch + row * lse_row + head * lse_head, log_sum)


def tree_attention_out(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix_lens: Tensor,
    tree_mask: Tensor | None = None,
    *,
    tree_len: int | None = None,
    qo_indptr: Tensor | None = None,
    max_q: int | None = None,
    page_table: Tensor | None = None,
    depths: Tensor | None = None,
    max_prefix_len: int | None = None,
    sm_scale: float | None = None,
    softcap: float = 0.0,
    window: int | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_chunk: int | None = None,
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """softmax(softcap(q k^T * sm_scale)) v over the visible keys and the sink.

    With ``qo_indptr`` the rows of request b are q[qo_indptr[b] : qo_indptr[b + 1]], at most
    ``max_q`` of them.
    """
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"q: expected float32, float16 or bfloat16 on CUDA, got {q.dtype}")
    ragged = qo_indptr is not None
    launch.check("q", q, q.dtype, (None,) * (3 if ragged else 4))
    rows_shape = tuple(q.shape[:-2])
    heads, dim = q.shape[-2:]
    total = math.prod(rows_shape)
    if qo_indptr is not None:
        launch.check("qo_indptr", qo_indptr, torch.int32, (None,))
        if qo_indptr.shape[0] < 1:
            raise ValueError("qo_indptr: expected shape (B + 1,), got (0,)")
        batch, num_rows = qo_indptr.shape[0] - 1, total if max_q is None else max_q
        if num_rows < 0:
            raise ValueError(f"max_q: expected a number of rows, got {max_q}")
    else:
        batch, num_rows = rows_shape
        if max_q is not None:
            raise ValueError(f"qo_indptr: expected a tensor beside max_q = {max_q}, got None")
    paged = page_table is not None
    float8 = k_cache.dtype == torch.float8_e4m3fn
    dtype = k_cache.dtype if float8 else q.dtype
    launch.check("k_cache", k_cache, dtype, (None if paged else batch, None, None, dim))
    num_blocks, page_size, kv_heads = k_cache.shape[:3]
    launch.check("v_cache", v_cache, dtype, (num_blocks, page_size, kv_heads, None))
    dim_v = v_cache.shape[3]
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(f"q: expected a multiple of the {kv_heads} KV heads, got {heads} heads")
    if dim < 1 or dim_v < 1:
        raise ValueError(f"q, v_cache: expected head dims of at least 1, got {dim} and {dim_v}")
    for name, factor in (("k_scale", k_scale), ("v_scale", v_scale)):
        if factor is None:
            continue
        if not float8:
            raise ValueError(f"{name}: expected None beside {k_cache.dtype} caches, got a tensor")
        launch.check_scale(name, factor)
    launch.check("out", out, q.dtype, (*rows_shape, heads, dim_v))
    launch.check("lse", lse, torch.float32, (*rows_shape, heads))
    launch.check("prefix_lens", prefix_lens, torch.int32, (batch,))
    length = num_rows if tree_len is None else tree_len
    if length < 0 or (not ragged and 0 < length < num_rows):
        raise ValueError(f"tree_len: expected 0 or at least the {num_rows} queries, got {length}")
    # A request's own rows are its tree slots.
    own_len = ragged and tree_len is None
    words = -(-length // 64)
    launch.check("tree_mask", tree_mask, torch.int64, (*rows_shape, words))
    launch.check("depths", depths, torch.int32, (total,) if own_len else (batch, length))
    launch.check("page_table", page_table, torch.int32, (batch, None))
    if page_table is not None and page_size < 1:
        raise ValueError("k_cache: expected a page size of at least 1, got 0")
    if sinks is not None:
        launch.check_float("sinks", sinks)
        launch.check("sinks", sinks, sinks.dtype, (heads,))
    if window is not None and (window < 1 or (length == 0 and not own_len)):
        raise ValueError(f"window: expected at least 1 key and a tree, got {window}")
    if window is not None and tree_mask is not None and depths is None:
        raise ValueError("depths: needed with window, a slot does not tell its position")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap: expected 0 (off) or a positive number, got {softcap}")
    if max_prefix_len is not None and max_prefix_len < 0:
        raise ValueError(f"max_prefix_len: expected a length, got {max_prefix_len}")
    if kv_chunk is not None and not 1 <= kv_chunk <= 1 << 16:
        raise ValueError(f"kv_chunk: expected 1 to {1 << 16} keys, got {kv_chunk}")
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("out", out)):
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name}: expected a contiguous last dimension, got {tensor.stride()}")
    launch.check_same_device(
        q,
        k_cache=k_cache,
        v_cache=v_cache,
        prefix_lens=prefix_lens,
        tree_mask=tree_mask,
        qo_indptr=qo_indptr,
        depths=depths,
        page_table=page_table,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        out=out,
        lse=lse,
    )
    if total == 0:
        return

    capacity = page_size if page_table is None else page_size * page_table.shape[1]
    chunk = launch.kv_chunk(kv_heads) if kv_chunk is None else kv_chunk
    bound = capacity if max_prefix_len is None else min(capacity, max_prefix_len + length)
    group = heads // kv_heads
    arch, processors, reads_float8 = _device(q.device)
    sizes = launch.attention_tiles(arch, q.dtype, dim, dim_v, float8)
    tiles = -(-num_rows * group // sizes.constants["BLOCK_M"])
    pairs, chunks = batch * kv_heads, max(1, -(-bound // chunk))
    # Whole groups of chunks per program where they fill the card: fewer partial results to write.
    groups = -(-chunks // launch.GROUP)
    run = launch.GROUP if pairs * tiles * groups >= processors else 1
    num_parts = -(-chunks // run)
    part_acc = q.new_empty((total, heads, num_parts, dim_v), dtype=torch.float32)
    part_m = q.new_empty((total, heads, num_parts), dtype=torch.float32)
    part_total = torch.empty_like(part_m)
    scale = 1 / math.sqrt(dim) if sm_scale is None else sm_scale
    mask = tree_mask if length > 0 else None
    # A flat tensor has no stride from request to request.
    flat = (0,) if ragged else ()
    if float8 and not reads_float8:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    # A tensor stands in for a pointer the kernel does not read.
    with torch.cuda.device_of(q):
        if tiles * pairs > 0:
            attend_kernel[(tiles * num_parts * pairs,)](
                q,
                k_cache,
                v_cache,
                prefix_lens,
                prefix_lens if mask is None else mask,
                prefix_lens if qo_indptr is None else qo_indptr,
                prefix_lens if depths is None else depths,
                prefix_lens if page_table is None else page_table,
                part_m if k_scale is None else k_scale,
                part_acc,
                part_m,
                part_total,
                total,
                num_rows,
                group,
                kv_heads,
                length,
                capacity,
                num_blocks,
                page_size,
                0 if window is None else window,
                chunk,
                run,
                num_parts,
                tiles,
                words,
                float(scale / softcap if softcap else scale * LOG2_E),
                float(softcap * LOG2_E),
                *flat,
                *q.stride()[:-1],
                *k_cache.stride()[:3],
                *v_cache.stride()[:3],
                prefix_lens.stride(0),
                *((0, 0, 0) if mask is None else (*flat, *mask.stride())),
                *((0, 0) if depths is None else (0,) * own_len + depths.stride()),
                *((0, 0) if page_table is None else page_table.stride()),
                0 if qo_indptr is None else qo_indptr.stride(0),
                RAGGED=ragged,
                OWN_LEN=own_len,
                HAS_K_SCALE=k_scale is not None,
                PAGED=paged,
                HAS_MASK=mask is not None,
                HAS_DEPTHS=depths is not None,
                HAS_WINDOW=window is not None,
                HAS_SOFTCAP=softcap > 0,
                EXPONENT=launch.EXPONENTS[q.dtype],
                D=dim,
                DV=dim_v,
                **sizes.keywords(),
            )
        combine_kernel[(total * heads,)](
            part_acc,
            part_m,
            part_total,
            prefix_lens,
            prefix_lens if mask is None else mask,
            prefix_lens if qo_indptr is None else qo_indptr,
            prefix_lens if sinks is None else sinks,
            part_m if v_scale is None else v_scale,
            out,
            part_m if lse is None else lse,
            batch,
            total,
            num_rows,
            heads,
            length,
            capacity,
            chunk,
            run,
            num_parts,
            words,
            prefix_lens.stride(0),
            *((0, 0, 0) if mask is None else (*flat, *mask.stride())),
            0 if sinks is None else sinks.stride(0),
            *flat,
            *out.stride()[:-1],
            *((0, 0, 0) if lse is None else (*flat, *lse.stride())),
            0 if qo_indptr is None else qo_indptr.stride(0),
            RAGGED=ragged,
            OWN_LEN=own_len,
            HAS_V_SCALE=v_scale is not None,
            HAS_MASK=mask is not None,
            HAS_SINKS=sinks is not None,
            HAS_LSE=lse is not None,
            DV=dim_v,
            **launch.combine_tiles(dim_v).keywords(),
        )


@functools.cache
def _device(device: torch.device) -> tuple[int, int, bool]:
    """Row of the launch table, number of processors, and whether the card knows float8 e4m3.

    The interpreter plays a small sm_80.
    """
    if device.type != "cuda":
        return 80, 8, False
    properties = torch.cuda.get_device_properties(device)
    major, minor = properties.major, properties.minor
    arch = launch.table_arch(major, minor)
    return arch, properties.multi_processor_count, launch.reads_float8(major, minor)


@triton.jit
def merge_states_kernel(
    out_a,
    lse_a,
    out_b,
    lse_b,
    out,
    lse,
    num_rows,
    heads,
    a_batch,
    a_row,
    a_head,
    a_dim,
    b_batch,
    b_row,
    b_head,
    b_dim,
    o_batch,
    o_row,
    o_head,
    o_dim,
    la_batch,
    la_row,
    la_head,
    lb_batch,
    lb_row,
    lb_head,
    lo_batch,
    lo_row,
    lo_head,
    WIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One row out of two.

    Program (request, row, head).

    bytes = rows * heads * (3 * D * element + 12)
    flops = rows * heads * D * 3
    """
    head = (tl.program_id(0) % heads).to(tl.int64)
    row = (tl.program_id(0) // heads % num_rows).to(tl.int64)
    request = (tl.program_id(0) // heads // num_rows).to(tl.int64)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    there = d < D
    x = tl.load(lse_a + request * la_batch + row * la_row + head * la_head)
    y = tl.load(lse_b + request * lb_batch + row * lb_row + head * lb_head)
    a = tl.load(
        out_a + request * a_batch + row * a_row + head * a_head + d * a_dim, mask=there, other=0.0
    )
    b = tl.load(
        out_b + request * b_batch + row * b_row + head * b_head + d * b_dim, mask=there, other=0.0
    )
    peak = tl.where(x > y, x, y)
    weight_a, weight_b = tl.exp(x - peak), tl.exp(y - peak)
    total = weight_a + weight_b
    share_a, share_b = weight_a / total, weight_b / total
    if WIDE:
        merged = a * share_a.to(tl.float64) + b * share_b.to(tl.float64)
    else:
        merged = a.to(tl.float32) * share_a + b.to(tl.float32) * share_b
    merged = merged.to(a.dtype)
    # An empty part is not looked at, whatever its row holds.
    merged = tl.where(y == float("-inf"), a, tl.where(x == float("-inf"), b, merged))
    merged = tl.where((x == float("-inf")) & (y == float("-inf")), 0.0, merged)
    log_sum = peak + tl.log(total)
    log_sum = tl.where(y == float("-inf"), x, tl.where(x == float("-inf"), y, log_sum))
    target = out + request * o_batch + row * o_row + head * o_head + d * o_dim
    tl.store(target, merged.to(a.dtype), mask=there)
    tl.store(lse + request * lo_batch + row * lo_row + head * lo_head, log_sum)


def merge_attention_states_out(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, out: Tensor, lse: Tensor
) -> None:
    """(e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b); an empty part changes nothing."""
    launch.check_float("out_a", out_a)
    if out_a.dim() == 3:
        # Flat rows are those of one request.
        flat = (out_a, lse_a, out_b, lse_b, out, lse)
        out_a, lse_a, out_b, lse_b, out, lse = (tensor.unsqueeze(0) for tensor in flat)
    launch.check("out_a", out_a, out_a.dtype, (None,) * 4)
    shape = tuple(out_a.shape)
    for name, tensor in (("out_b", out_b), ("out", out)):
        launch.check(name, tensor, out_a.dtype, shape)
    for name, tensor in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        launch.check(name, tensor, torch.float32, shape[:3])
    launch.check_same_device(out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b, out=out, lse=lse)
    if lse.numel() == 0:
        return
    with torch.cuda.device_of(out_a):
        merge_states_kernel[(lse.numel(),)](
            out_a,
            lse_a,
            out_b,
            lse_b,
            out,
            lse,
            shape[1],
            shape[2],
            *out_a.stride(),
            *out_b.stride(),
            *out.stride(),
            *lse_a.stride(),
            *lse_b.stride(),
            *lse.stride(),
            WIDE=out_a.dtype == torch.float64,
            D=shape[3],
            **launch.merge_tiles(shape[3]).keywords(),
        )
