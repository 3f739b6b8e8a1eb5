"""Storing new keys and values behind each request's prefix, in every target layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch


@triton.jit
def _to_float8(x):
    # The bits of the float8 e4m3 number nearest to x, ties to even. What lies past the largest
    # number becomes that number; NaN stays NaN. Integer steps, for no older card knows the type.
    x = tl.where(x > 448.0, 448.0, x)
    x = tl.where(x < -448.0, -448.0, x)
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Below 2^-6 numbers are multiples of 2^-9, the last bit of what lies past 2^14.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    normal = (size - 0x3C000000 + 0x0007FFFF + ((size >> 20) & 1)) >> 20
    number = tl.where(size < 0x3C800000, small, normal)
    number = tl.where(size > 0x7F800000, 0x7F, number)
    return (number | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def write_kv_kernel(
    k_cache,
    v_cache,
    k,
    v,
    prefix_lens,
    lengths,
    page_table,
    k_scale,
    v_scale,
    num_rows,
    num_pages,
    page_size,
    max_pages,
    prefix_batch,
    lengths_batch,
    table_batch,
    table_entry,
    kc_page,
    kc_slot,
    kc_head,
    vc_page,
    vc_slot,
    vc_head,
    k_batch,
    k_row,
    k_head,
    v_batch,
    v_row,
    v_head,
    HAS_LENGTHS: tl.constexpr,
    PAGED: tl.constexpr,
    ROUND_K: tl.constexpr,
    ROUND_V: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of one row, copied, or rounded to float8 in a cache of those.

    Program (request and row, head).

    bytes = rows * kv_heads * (DK + DV) * (element + stored element), and a request's prefix length,
            row count and page id
    flops = rows * kv_heads * (DK + DV) where it rounds, else 0
    """
    request = (tl.program_id(0) // num_rows).to(tl.int64)
    row = (tl.program_id(0) % num_rows).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    count = num_rows
    if HAS_LENGTHS:
        count = tl.load(lengths + request * lengths_batch)
    slot = tl.load(prefix_lens + request * prefix_batch).to(tl.int64) + row
    stored = (row < count) & (slot >= 0)
    page = request
    if PAGED:
        index = slot // page_size
        stored = stored & (index < max_pages)
        entry = page_table + request * table_batch + index * table_entry
        page = tl.load(entry, mask=stored, other=-1).to(tl.int64)
        slot = slot % page_size
    stored = stored & (page >= 0) & (page < num_pages) & (slot < page_size)
    column = tl.arange(0, BLOCK)
    source_k = k + request * k_batch + row * k_row + head * k_head + column
    source_v = v + request * v_batch + row * v_row + head * v_head + column
    target_k = k_cache + page * kc_page + slot * kc_slot + head * kc_head + column
    target_v = v_cache + page * vc_page + slot * vc_slot + head * vc_head + column
    mask_k = stored & (column < DK)
    mask_v = stored & (column < DV)
    x = tl.load(source_k, mask=mask_k, other=0)
    if ROUND_K:
        x = x.to(tl.float32)
        if HAS_K_SCALE:
            x = tl.div_rn(x, tl.zeros_like(x) + tl.load(k_scale))
        x = _to_float8(x)
    tl.store(target_k, x, mask=mask_k)
    y = tl.load(source_v, mask=mask_v, other=0)
    if ROUND_V:
        y = y.to(tl.float32)
        if HAS_V_SCALE:
            y = tl.div_rn(y, tl.zeros_like(y) + tl.load(v_scale))
        y = _to_float8(y)
    tl.store(target_v, y, mask=mask_v)


# Elements that are copied as they are go as integers of their size.
_COPIED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROUNDED = (torch.float32, torch.float16, torch.bfloat16)


def _as_stored(
    name: str, rows: Tensor, cache: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor, bool]:
    """Rows and cache as the kernel sees them, and whether it rounds them."""
    rounds = cache.dtype == torch.float8_e4m3fn and rows.dtype in _ROUNDED
    if not rounds and rows.dtype != cache.dtype:
        raise TypeError(
            f"{name}: expected the dtype of {name}_cache, {cache.dtype}, got {rows.dtype}"
        )
    if scale is not None:
        if not rounds:
            raise ValueError(f"{name}_scale: expected None where rows are copied as they are")
        launch.check_scale(f"{name}_scale", scale)
    if rounds:
        return rows, cache.view(torch.uint8), True
    if cache.itemsize not in _COPIED:
        raise TypeError(f"{name}_cache: expected elements of at most 8 bytes, got {cache.dtype}")
    plain = _COPIED[cache.itemsize]
    return rows.view(plain), cache.view(plain), False


def write_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_lens: Tensor,
    lengths: Tensor | None = None,
    page_table: Tensor | None = None,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Cache slot prefix_lens[b] + j <- row j of request b, for j < lengths[b]."""
    launch.check("k", k, k.dtype, (None,) * 4)
    batch, num_rows, heads, dim_k = k.shape
    launch.check("v", v, v.dtype, (batch, num_rows, heads, None))
    dim_v = v.shape[3]
    blocks = batch if page_table is None else None
    launch.check("k_cache", k_cache, k_cache.dtype, (blocks, None, heads, dim_k))
    pages, page_size = k_cache.shape[:2]
    launch.check("v_cache", v_cache, v_cache.dtype, (pages, page_size, heads, dim_v))
    launch.check("prefix_lens", prefix_lens, torch.int32, (batch,))
    launch.check("lengths", lengths, torch.int32, (batch,))
    launch.check("page_table", page_table, torch.int32, (batch, None))
    if page_table is not None and page_size < 1:
        raise ValueError("k_cache: expected a page size of at least 1, got 0")
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v)):
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name}: expected a contiguous last dimension, got {tensor.stride()}")
    launch.check_same_device(
        k,
        k_cache=k_cache,
        v_cache=v_cache,
        v=v,
        prefix_lens=prefix_lens,
        lengths=lengths,
        page_table=page_table,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    k, k_cache, rounds_k = _as_stored("k", k, k_cache, k_scale)
    v, v_cache, rounds_v = _as_stored("v", v, v_cache, v_scale)
    if batch * num_rows * heads * max(dim_k, dim_v) == 0:
        return
    # A tensor stands in for a pointer the kernel does not read.
    with torch.cuda.device_of(k):
        write_kv_kernel[(batch * num_rows, heads)](
            k_cache,
            v_cache,
            k,
            v,
            prefix_lens,
            prefix_lens if lengths is None else lengths,
            prefix_lens if page_table is None else page_table,
            prefix_lens if k_scale is None else k_scale,
            prefix_lens if v_scale is None else v_scale,
            num_rows,
            pages,
            page_size,
            0 if page_table is None else page_table.shape[1],
            prefix_lens.stride(0),
            0 if lengths is None else lengths.stride(0),
            *((0, 0) if page_table is None else page_table.stride()),
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            HAS_LENGTHS=lengths is not None,
            PAGED=page_table is not None,
            ROUND_K=rounds_k,
            ROUND_V=rounds_v,
            HAS_K_SCALE=k_scale is not None,
            HAS_V_SCALE=v_scale is not None,
            DK=dim_k,
            DV=dim_v,
            **launch.write_tiles(dim_k, dim_v).keywords(),
        )
