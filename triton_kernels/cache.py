"""Storing new keys and values behind each request's prefix, in every target layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch


@triton.jit
def write_kv_kernel(
    k_cache,
    v_cache,
    k,
    v,
    prefix_lens,
    lengths,
    page_table,
    num_rows,
    num_pages,
    page_size,
    max_pages,
    page_table_stride,
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
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of one row.

    One program moves one head of one row: reads and writes (DK + DV) elements, nothing else but a
    request's prefix length, row count and page id.
    """
    request = (tl.program_id(0) // num_rows).to(tl.int64)
    row = (tl.program_id(0) % num_rows).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    count = num_rows
    if HAS_LENGTHS:
        count = tl.load(lengths + request)
    slot = tl.load(prefix_lens + request).to(tl.int64) + row
    stored = (row < count) & (slot >= 0)
    page = request
    if PAGED:
        index = slot // page_size
        stored = stored & (index < max_pages)
        page = tl.load(page_table + request * page_table_stride + index, mask=stored, other=-1).to(
            tl.int64
        )
        slot = slot % page_size
    stored = stored & (page >= 0) & (page < num_pages) & (slot < page_size)
    column = tl.arange(0, BLOCK)
    source_k = k + request * k_batch + row * k_row + head * k_head + column
    source_v = v + request * v_batch + row * v_row + head * v_head + column
    target_k = k_cache + page * kc_page + slot * kc_slot + head * kc_head + column
    target_v = v_cache + page * vc_page + slot * vc_slot + head * vc_head + column
    mask_k = stored & (column < DK)
    mask_v = stored & (column < DV)
    tl.store(target_k, tl.load(source_k, mask=mask_k, other=0.0), mask=mask_k)
    tl.store(target_v, tl.load(source_v, mask=mask_v, other=0.0), mask=mask_v)


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
    batch, num_rows, heads, dim_k = k.shape
    dim_v = v.shape[3]
    if batch * num_rows == 0:
        return
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}: expected a contiguous last dimension, got {tensor.stride()}")
    for name, rows, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if rows.dtype != cache.dtype:
            raise NotImplementedError(
                f"{name}: this kernel copies rows in the cache's dtype, {cache.dtype}, and "
                f"does not convert them; got {rows.dtype}"
            )
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            raise ValueError(f"{name}: expected None where rows are copied as they are")
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
            num_rows,
            k_cache.shape[0],
            k_cache.shape[1],
            0 if page_table is None else page_table.shape[1],
            0 if page_table is None else page_table.stride(0),
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            HAS_LENGTHS=lengths is not None,
            PAGED=page_table is not None,
            DK=dim_k,
            DV=dim_v,
            **launch.write_tiles(dim_k, dim_v).keywords(),
        )
