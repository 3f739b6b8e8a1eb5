"""Keys and values behind the prefix: stored before the tree's attention, compacted after it.

`write_kv` puts new keys where `tree_attention` looks for them; `compact_kv` keeps those of the
accepted path. Both work on dense and paged caches of any dtype, and neither changes `prefix_lens`.
`rope_and_write_kv` is `write_kv` with the rotation before it, from a merged q/k/v product.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from . import _checks

_write = torch.ops.eagle2_kernels.write_kv.default
_compact = torch.ops.eagle2_kernels.compact_kv.default
_rope_and_write = torch.ops.eagle2_kernels.rope_and_write_kv.default

_WIDER = (torch.float32, torch.float16, torch.bfloat16)  # what is rounded to float8


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
    validate: bool = False,
) -> None:
    """Cache slot prefix_lens[b] + j <- row j of request b, for j < lengths[b].

    ::

        k[b]:        [ 0 ][ 1 ][ 2 ][ pad ]               lengths[b] = 3
                       |    |    |
        cache[b]:  ... [ L ][L+1][L+2][ untouched         L = prefix_lens[b]

    Rows whose page id is negative or whose slot lies past the cache are skipped. Nothing else is
    written. Rows are copied as they are, but that a float8 cache also takes rows of a wider dtype:
    it stores ``k / k_scale`` rounded to float8, saturating at 448, NaN staying NaN, so that
    `tree_attention` with the same scales reads about k again.

    Args:
        k_cache: dense [B, S, Hkv, D] or paged [pages, page_size, Hkv, D], any dtype, any strides
            with a contiguous last dimension; written.
        v_cache: as ``k_cache``; written.
        k: [B, N, Hkv, D] in the cache's dtype, last dimension contiguous; or float32, float16 or
            bfloat16 for a float8_e4m3fn cache.
        v: as ``k``.
        prefix_lens: int32 [B].
        lengths: int32 [B], rows to store (`DraftTree.num_nodes`, or a prompt's length); None: all.
        page_table: int32 [B, max_pages] for a paged cache.
        k_scale: float32 tensor of one element, where k is converted to float8; default 1.
        v_scale: the same for v.
        validate: check first that every row stored has a place of its own and that scales are
            positive (always with ``EAGLE2_VALIDATE=1``).

    Raises:
        ValueError: a shape is wrong, or an argument requires grad in grad mode.
        TypeError: a dtype is wrong.

    Source: vLLM's ``reshape_and_cache`` (arXiv 2309.06180), by position instead of slot mapping.
    """
    if torch.is_grad_enabled():
        _checks.refuse_grad(
            k_cache=k_cache, v_cache=v_cache, k=k, v=v, k_scale=k_scale, v_scale=v_scale
        )
    args = (k_cache, v_cache, k, v, prefix_lens, lengths, page_table)
    scales = {}
    if k_scale is not None:
        scales["k_scale"] = k_scale
    if v_scale is not None:
        scales["v_scale"] = v_scale
    if validate or _checks.VALIDATE:
        _check_write(*args, k_scale, v_scale, values=True)
    try:
        _write(*args, **scales)
    except (RuntimeError, TypeError, ValueError):
        _check_write(*args, k_scale, v_scale, values=False)
        raise


def rope_and_write_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix_lens: Tensor,
    lengths: Tensor | None = None,
    page_table: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    validate: bool = False,
) -> Tensor:
    """q[b, j] = rope(q[b, j]); k and v go to the cache as by `write_kv`, k = rope(k) before.

    ::

        qkv[b, j] = [ q heads | k heads | v heads ]           D elements a head
        rope(x)   = x * cos[b, j] + [-x2; x1] * sin[b, j]     x = [x1; x2]

    With cos and sin in qkv's dtype both products are rounded to it, as transformers' layers do;
    with float32 ones only the sum is. Tables of fewer than D elements leave the rest of each head
    as it is. With a weight every head of q, or of k, goes through `rms_norm` first (Qwen3).

    Args:
        qkv: [B, N, (Hq + 2 Hkv) D] on a CPU, float64, float32, float16 or bfloat16; last dimension
            contiguous.
        cos: [B, N, R] in qkv's dtype or float32, R even and at most D; last dimension contiguous.
        sin: as ``cos``.
        k_cache: dense [B, S, Hkv, D] or paged [pages, page_size, Hkv, D] in qkv's dtype, any
            strides with a contiguous last dimension; written. Hkv and D are its.
        v_cache: as ``k_cache``; written.
        prefix_lens: int32 [B].
        lengths: int32 [B], rows to store; None: all. Those of q come back whatever it says.
        page_table: int32 [B, max_pages] for a paged cache.
        q_weight: [D] in qkv's dtype.
        k_weight: [D] in qkv's dtype.
        eps: of both norms.
        validate: check first that every row stored has a place of its own (always with
            ``EAGLE2_VALIDATE=1``).

    Returns:
        q [B, N, Hq, D], contiguous.

    Raises:
        ValueError: a shape or a device is wrong, or an argument requires grad in grad mode.
        TypeError: a dtype is wrong.

    Source: RoFormer (arXiv 2104.09864), in GPT-NeoX's layout of pairs.
    """
    if torch.is_grad_enabled():
        _checks.refuse_grad(
            qkv=qkv,
            cos=cos,
            sin=sin,
            k_cache=k_cache,
            v_cache=v_cache,
            q_weight=q_weight,
            k_weight=k_weight,
        )
    args = (qkv, cos, sin, k_cache, v_cache, prefix_lens, lengths, page_table)
    if validate or _checks.VALIDATE:
        _check_rope(*args, q_weight, k_weight, eps, values=True)
    try:
        return _rope_and_write(*args, q_weight=q_weight, k_weight=k_weight, eps=eps)
    except (RuntimeError, TypeError, ValueError):
        _check_rope(*args, q_weight, k_weight, eps, values=False)
        raise


def compact_kv(
    kv_caches: Sequence[Tensor],
    accept_index: Tensor,
    accept_length: Tensor,
    prefix_lens: Tensor,
    page_table: Tensor | None = None,
    *,
    validate: bool = False,
) -> None:
    """Cache slot prefix_lens[b] + i <- slot prefix_lens[b] + accept_index[b, i], in every tensor.

    ::

        accept_index[b] = [0, 2, 5], L = prefix_lens[b]

        before  ... | L: root | a | b | c | d | e | ...
        after   ... | L: root | b | e | unspecified

    It is as if every source had been read before any write, so a path may lie in any slot order.
    Apply it exactly once per step: a second call is not a no-op. The caller then sets
    ``prefix_lens += accept_length + 1``.

    Args:
        kv_caches: the K and V tensors of all layers, each dense [B, S, Hkv, D] or paged
            [pages, page_size, Hkv, D], any dtype, any strides with a contiguous last dimension; a
            flat list, not (K, V) pairs. No two may share memory, which would be moved twice: of an
            MLA cache whose V is a view into K, pass K alone.
        accept_index: int32 [B, max_depth + 1], slots of the accepted path, root first, padded with
            -1 (`verify_tree`).
        accept_length: int32 [B], accepted drafts without the root; a request with a negative length
            is not touched.
        prefix_lens: int32 [B], as they were for the tree's attention.
        page_table: int32 [B, max_pages] for paged caches.
        validate: check first that paths start at the root and repeat no slot, that slots lie in
            the cache and no two requests write one place (always with ``EAGLE2_VALIDATE=1``).

    Raises:
        ValueError: a shape is wrong, or an argument requires grad in grad mode.
        TypeError: a dtype is wrong.

    Source: the KV rearrangement of SpecInfer (arXiv 2305.09781) and EAGLE (arXiv 2401.15077).
    """
    if isinstance(kv_caches, Tensor) or not isinstance(kv_caches, Iterable):
        raise TypeError(
            f"kv_caches: expected a list of tensors, got one {type(kv_caches).__name__}"
        )
    caches = list(kv_caches)
    if torch.is_grad_enabled():
        for i, cache in enumerate(caches):
            if getattr(cache, "requires_grad", False):
                _checks.refuse_grad(**{f"kv_caches[{i}]": cache})
    _checks.call(
        _compact,
        _check_compact,
        validate,
        caches,
        accept_index,
        accept_length,
        prefix_lens,
        page_table,
    )


def _check_cache(
    name: str, cache: Tensor, batch: int, page_table: Tensor | None
) -> tuple[int, int, int]:
    """Slots per block, heads and head dim of a cache tensor."""
    if not isinstance(cache, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(cache).__name__}")
    rows: int | None = batch
    layout = "[B, S, Hkv, D]"
    if page_table is not None:
        rows, layout = None, "[pages, page_size, Hkv, D]"
        _checks.tensor("page_table", page_table, torch.int32, (batch, None), "[B, max_pages]")
    _checks.tensor(name, cache, cache.dtype, (rows, None, None, None), layout)
    if cache.shape[3] > 1 and cache.stride(3) != 1:
        raise ValueError(
            f"{name}: expected a contiguous last dimension, got strides {cache.stride()}"
        )
    _checks.written(**{name: cache})
    if page_table is not None and cache.shape[1] < 1:
        raise ValueError(f"{name}: expected a page size of at least 1, got 0")
    return cache.shape[1], cache.shape[2], cache.shape[3]


def _check_places(
    name: str, cache: Tensor, page_table: Tensor | None, first: Tensor, last: Tensor
) -> None:
    """Positions first[b] .. last[b] - 1 have places in the cache, each written by one request."""
    size = cache.shape[1]
    capacity = size if page_table is None else size * page_table.shape[1]
    _checks.values_in(f"prefix_lens (slots written to {name})", last, 0, capacity)
    if page_table is None:
        return
    start = torch.arange(page_table.shape[1], device=page_table.device) * size
    used = (start < last[:, None]) & (start + size > first[:, None])
    _checks.values_in("page_table", torch.where(used, page_table, 0), 0, max(cache.shape[0] - 1, 0))
    owner: dict[tuple[int, int], tuple[int, int]] = {}
    pages = page_table.tolist()
    for r, (begin, end) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        for position in range(begin, end):
            entry, slot = divmod(position, size)
            other = owner.setdefault((pages[r][entry], slot), (r, entry))
            if other != (r, entry):
                raise ValueError(
                    f"page_table[{r}, {entry}]: expected pages of its own for the slots written, "
                    f"got page {pages[r][entry]}, which page_table[{other[0]}, {other[1]}] is too"
                )


def _check_write(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_lens: Tensor,
    lengths: Tensor | None,
    page_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    *,
    values: bool,
) -> None:
    if not isinstance(k, Tensor) or k.dim() != 4:
        raise ValueError(f"k: expected a tensor [B, N, Hkv, D], got {_describe(k)}")
    b, n, heads = k.shape[:3]
    for name, cache, rows, scale in (("k", k_cache, k, k_scale), ("v", v_cache, v, v_scale)):
        _, _, dim = _check_cache(f"{name}_cache", cache, b, page_table)
        float8 = cache.dtype == torch.float8_e4m3fn
        dtypes = (cache.dtype, *_WIDER) if float8 else (cache.dtype,)
        _checks.tensor(name, rows, dtypes, (b, n, heads, dim), "[B, N, Hkv, D]")
        if scale is not None:
            if not float8 or rows.dtype == cache.dtype:
                raise ValueError(
                    f"{name}_scale: expected None where {name} is copied as it is "
                    f"({str(rows.dtype)[6:]} into {str(cache.dtype)[6:]}), got a tensor"
                )
            _checks.scale(f"{name}_scale", scale, values)
        if cache.shape[2] != heads:
            raise ValueError(
                f"{name}_cache: expected the {heads} heads of {name}, got {cache.shape[2]}"
            )
        if dim > 1 and rows.stride(3) != 1:
            raise ValueError(
                f"{name}: expected a contiguous last dimension, got strides {rows.stride()}"
            )
    _checks.tensor("prefix_lens", prefix_lens, torch.int32, (b,), "[B]")
    if lengths is not None:
        _checks.tensor("lengths", lengths, torch.int32, (b,), "[B]")
    _checks.same_device(
        k_cache=k_cache,
        v_cache=v_cache,
        k=k,
        v=v,
        prefix_lens=prefix_lens,
        lengths=lengths,
        page_table=page_table,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    if values:
        count = torch.full_like(prefix_lens, n) if lengths is None else lengths
        if lengths is not None:
            _checks.values_in("lengths", lengths, 0, n)
        active = count > 0
        first = torch.where(active, prefix_lens, 0).long()
        _checks.values_in("prefix_lens", first, 0, float("inf"))
        last = torch.where(active, first + count, 0)
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            _check_places(name, cache, page_table, first, last)


def _check_rope(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix_lens: Tensor,
    lengths: Tensor | None,
    page_table: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    *,
    values: bool,
) -> None:
    _checks.tensor("qkv", qkv, _checks.FLOATS, (None, None, None), "[B, N, (Hq + 2 Hkv) D]")
    b, n, width = qkv.shape
    if qkv.stride(2) != 1 and width > 1:
        raise ValueError(f"qkv: expected a contiguous last dimension, got strides {qkv.stride()}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_cache(name, cache, b, page_table)
    heads, dim = k_cache.shape[2:]
    if dim < 1 or heads < 1 or width % dim or width // dim <= 2 * heads:
        raise ValueError(
            f"qkv: expected (Hq + 2 * {heads}) * {dim} columns for k_cache's heads, got {width}"
        )
    rotated: int | None = None
    for name, table in (("cos", cos), ("sin", sin)):
        dtypes = (qkv.dtype, torch.float32) if name == "cos" else cos.dtype
        _checks.tensor(name, table, dtypes, (b, n, rotated), "[B, N, R]")
        rotated = table.shape[2]
        if rotated % 2 or rotated > dim:
            raise ValueError(
                f"{name}: expected an even last dimension up to the head dim {dim}, got {rotated}"
            )
        if rotated > 1 and table.stride(2) != 1:
            raise ValueError(
                f"{name}: expected a contiguous last dimension, got strides {table.stride()}"
            )
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            _checks.tensor(name, weight, qkv.dtype, (dim,), "[D]")
            if not weight.is_contiguous():
                raise ValueError(f"{name}: expected a contiguous tensor, got {weight.stride()}")
            _checks.same_device(**{"qkv": qkv, name: weight})
    _checks.number("eps", eps)
    _checks.same_device(qkv=qkv, cos=cos, sin=sin)
    k, v = (qkv[..., : heads * dim].unflatten(-1, (heads, dim)) for _ in "kv")
    _check_write(
        k_cache, v_cache, k, v, prefix_lens, lengths, page_table, None, None, values=values
    )
    _checks.same_device(qkv=qkv, k_cache=k_cache, v_cache=v_cache)


def _check_compact(
    kv_caches: Sequence[Tensor],
    accept_index: Tensor,
    accept_length: Tensor,
    prefix_lens: Tensor,
    page_table: Tensor | None,
    *,
    values: bool,
) -> None:
    _checks.tensor("accept_index", accept_index, torch.int32, (None, None), "[B, max_depth + 1]")
    b, width = accept_index.shape
    _checks.tensor("accept_length", accept_length, torch.int32, (b,), "[B]")
    _checks.tensor("prefix_lens", prefix_lens, torch.int32, (b,), "[B]")
    for i, cache in enumerate(kv_caches):
        _check_cache(f"kv_caches[{i}]", cache, b, page_table)
        _checks.same_device(**{"accept_index": accept_index, f"kv_caches[{i}]": cache})
    _checks.same_device(
        accept_index=accept_index,
        accept_length=accept_length,
        prefix_lens=prefix_lens,
        page_table=page_table,
    )
    if values:
        _checks.values_in("accept_length", accept_length, -1, width - 1)
        steps = torch.arange(width, device=accept_index.device)
        taken = torch.where(steps <= accept_length[:, None], accept_index, 0)
        _checks.values_in("accept_index", taken, 0, float("inf"))
        _checks.values_in("accept_index", taken[:, :1], 0, 0)
        _checks.distinct_in_rows("accept_index", taken, steps <= accept_length[:, None])
        active = accept_length >= 0
        first = torch.where(active, prefix_lens, 0).long()
        last = torch.where(active, first + taken.amax(1) + 1, 0)
        for i, cache in enumerate(kv_caches):
            _check_places(f"kv_caches[{i}]", cache, page_table, first, last)


def _describe(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
