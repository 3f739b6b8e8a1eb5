"""Tree attention: every node of a draft tree attends to the prefix and to its own ancestors.

In the loop it is the attention of each target layer (and of the draft head), after `write_kv` has
stored the tree's keys behind the prefix and before `verify` walks the tree.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _checks

_attend = torch.ops.eagle2_kernels.tree_attention_out.default
_merge = torch.ops.eagle2_kernels.merge_attention_states.default
_merge_out = torch.ops.eagle2_kernels.merge_attention_states_out.default

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def tree_attention(
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
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    validate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""out[b, i, h] = sum_j softmax_j(softcap(sm_scale * q[b, i, h] . k[j])) * v[j].

    The sum runs over the keys row i sees::

        cache slots of request b
        0                  L = prefix_lens[b]        L + tree_len
        | prefix, all visible | tree slots, where the mask has a bit | never read

    with ``softcap(x) = c * tanh(x / c)`` when ``softcap = c > 0``, and query head h reading KV head
    ``h // (Hq // Hkv)``. The keys and values of tree slot j already lie at cache slot
    ``prefix_lens[b] + j`` (`write_kv`). A row that sees nothing (an empty mask row is padding, it
    does not see the prefix either) is 0 with an LSE of -inf.

    What a row may not see does not touch it, NaN and Inf included; a row that does see one is NaN.
    On the CPU a node's row is, bit for bit, the row that decoding its path token by token gives:
    keys are taken in position order along its own path, in chunks at fixed positions, so siblings,
    slot order, batch, page order, strides and threads do not matter. The path is ordered by
    ``depths`` where given, else by the number of ancestors each slot has in its own mask row; slots
    below ``tree_len - N`` have no row here and are taken in ascending order.

    Args:
        q: [B, N, Hq, D] float64, float32, float16 or bfloat16; last dimension contiguous.
        k_cache: dense [B, S, Hkv, D], or paged [pages, page_size, Hkv, D], in q's dtype; any
            strides with a contiguous last dimension (an HND cache is a transposed view).
        v_cache: as ``k_cache``.
        prefix_lens: int32 [B], tokens in the cache before the tree. Only ``validate`` reports a
            value outside the cache; else it is clipped, and nothing outside the cache is read.
        tree_mask: int64 [B, N, ceil(tree_len / 64)], bit j of row i (bit j % 64 of word j // 64)
            set when query i sees tree slot j: `DraftTree.tree_mask`. None is a causal chain over
            the slots (prefill in chunks, plain decoding).
        tree_len: tree slots whose keys are in the cache (default N); the queries are the last N of
            them. 0: prefix only, for any N.
        qo_indptr: flat ragged queries; not supported yet.
        max_q: goes with ``qo_indptr``.
        page_table: int32 [B, max_pages]; entry p holds cache slots p * page_size and following.
        depths: int32 [B, tree_len], depth of each tree slot; needed with ``window`` and a mask.
        max_prefix_len: a bound on ``prefix_lens`` known on the host. It sizes launches and never
            changes the result.
        sm_scale: scale of the logits, default 1 / sqrt(D).
        softcap: 0 is off.
        window: keep keys with position(query) - position(key) < window, where a tree slot's
            position is prefix_lens + its depth.
        sinks: float [Hq], one extra logit per head, in the denominator only.
        k_scale: scale of a float8 key cache; not supported yet.
        v_scale: scale of a float8 value cache; not supported yet.
        kv_chunk: keys per chunk of the online softmax; the default depends on D alone. Results of
            different chunk sizes may differ in the last bits.
        return_lse: also return the log-sum-exp of each row's logits, float32 [B, N, Hq]: natural
            logarithm, after scale and softcap, sink included.
        out: [B, N, Hq, D] to write instead of a new tensor.
        lse: float32 [B, N, Hq] to write.
        validate: check the values in ``prefix_lens``, ``page_table`` and ``tree_mask`` first
            (always with ``EAGLE2_VALIDATE=1``).

    Returns:
        out, or (out, lse) with ``return_lse``.

    Raises:
        ValueError: a shape or a host value is wrong, or an argument requires grad in grad mode.
        TypeError: a dtype is wrong.
        NotImplementedError: the argument is planned and has no kernel yet.

    Source: EAGLE-2 (arXiv 2406.16858) for the tree, FlashAttention (arXiv 2205.14135) and
    Flash-Decoding for the chunked softmax, StreamingLLM (arXiv 2309.17453) for sinks.
    """
    if qo_indptr is not None or max_q is not None:
        raise NotImplementedError("qo_indptr, max_q: flat ragged queries have no kernel yet")
    if k_scale is not None or v_scale is not None:
        raise NotImplementedError("k_scale, v_scale: float8 caches have no kernel yet")
    if torch.is_grad_enabled():
        _checks.refuse_grad(q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks, out=out)
    if validate or _checks.VALIDATE:
        _check(
            q,
            k_cache,
            v_cache,
            prefix_lens,
            tree_mask,
            tree_len,
            page_table,
            depths,
            max_prefix_len,
            sm_scale,
            softcap,
            window,
            sinks,
            kv_chunk,
            out,
            lse,
            values=True,
        )
    # PyTorch's parser takes a quarter of a microsecond per keyword: pass only what was given.
    options: dict[str, Any] = {}
    if tree_len is not None:
        options["tree_len"] = tree_len
    if page_table is not None:
        options["page_table"] = page_table
    if depths is not None:
        options["depths"] = depths
    if max_prefix_len is not None:
        options["max_prefix_len"] = max_prefix_len
    if sm_scale is not None:
        options["sm_scale"] = sm_scale
    if softcap != 0.0:
        options["softcap"] = softcap
    if window is not None:
        options["window"] = window
    if sinks is not None:
        options["sinks"] = sinks
    if kv_chunk is not None:
        options["kv_chunk"] = kv_chunk
    result = out
    try:
        if result is None:
            result = torch.empty_like(q, memory_format=torch.contiguous_format)
        if return_lse and lse is None:
            lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        if lse is not None:
            options["lse"] = lse
        _attend(q, k_cache, v_cache, prefix_lens, tree_mask, out=result, **options)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        _check(
            q,
            k_cache,
            v_cache,
            prefix_lens,
            tree_mask,
            tree_len,
            page_table,
            depths,
            max_prefix_len,
            sm_scale,
            softcap,
            window,
            sinks,
            kv_chunk,
            out,
            lse,
            values=False,
        )
        raise
    if return_lse and lse is not None:
        return result, lse
    return result


def _contiguous_last(**tensors: Tensor | None) -> None:
    for name, value in tensors.items():
        if value is not None and value.shape[-1] > 1 and value.stride(-1) != 1:
            raise ValueError(
                f"{name}: expected a contiguous last dimension, got strides {value.stride()}"
            )


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix_lens: Tensor,
    tree_mask: Tensor | None,
    tree_len: int | None,
    page_table: Tensor | None,
    depths: Tensor | None,
    max_prefix_len: int | None,
    sm_scale: float | None,
    softcap: float,
    window: int | None,
    sinks: Tensor | None,
    kv_chunk: int | None,
    out: Tensor | None,
    lse: Tensor | None,
    *,
    values: bool,
) -> None:
    """Name the first argument that is wrong; ``values`` also reads the device tensors."""
    _checks.tensor("q", q, _checks.FLOATS, (None,) * 4, "[B, N, Hq, D]")
    b, n, hq, d = q.shape
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if isinstance(cache, Tensor) and cache.dtype in _FLOAT8:
            raise NotImplementedError(f"{name}: float8 caches have no kernel yet")
    paged = page_table is not None
    rows, layout = (None, "[pages, page_size, Hkv, D]") if paged else (b, "[B, S, Hkv, D]")
    _checks.tensor("k_cache", k_cache, q.dtype, (rows, None, None, d), layout)
    hkv = k_cache.shape[2]
    if isinstance(v_cache, Tensor) and v_cache.dim() == 4 and v_cache.shape[3] != d:
        raise NotImplementedError(
            f"v_cache: a head dim ({v_cache.shape[3]}) other than K's ({d}) has no kernel yet"
        )
    _checks.tensor("v_cache", v_cache, q.dtype, tuple(k_cache.shape), layout)
    if hkv < 1 or hq < 1 or hq % hkv:
        raise ValueError(
            f"q: expected a multiple of the {hkv} KV heads of k_cache {layout}, got {hq} heads"
        )
    if d < 1:
        raise ValueError("q: expected a head dim of at least 1, got 0")
    _contiguous_last(q=q, k_cache=k_cache, v_cache=v_cache)
    _checks.tensor("prefix_lens", prefix_lens, torch.int32, (b,), "[B]")
    if tree_len is not None:
        _checks.integer("tree_len", tree_len, 0)
    length = n if tree_len is None else tree_len
    if 0 < length < n:
        raise ValueError(f"tree_len: expected 0 or at least the {n} queries, got {length}")
    if tree_mask is not None:
        shape = (b, n, (length + 63) // 64)
        _checks.tensor("tree_mask", tree_mask, torch.int64, shape, "[B, N, ceil(tree_len / 64)]")
    if depths is not None:
        _checks.tensor("depths", depths, torch.int32, (b, length), "[B, tree_len]")
    if page_table is not None:
        _checks.tensor("page_table", page_table, torch.int32, (b, None), "[B, max_pages]")
        if k_cache.shape[1] < 1:
            raise ValueError("k_cache: expected a page size of at least 1, got 0")
    if max_prefix_len is not None:
        _checks.integer("max_prefix_len", max_prefix_len, 0)
    if window is not None:
        _checks.integer("window", window, 1)
        if length == 0:
            raise ValueError("window: expected tree_len > 0, else the queries have no position")
        if tree_mask is not None and depths is None:
            raise ValueError(
                "depths: expected an int32 tensor [B, tree_len] with window and tree_mask, got None"
            )
    for name, number in (("sm_scale", sm_scale), ("softcap", softcap)):
        if number is not None and not isinstance(number, (int, float)):
            raise TypeError(f"{name}: expected a float, got {type(number).__name__}")
    if not 0 <= softcap < float("inf"):
        raise ValueError(f"softcap: expected 0 (off) or a positive number, got {softcap}")
    if kv_chunk is not None:
        _checks.integer("kv_chunk", kv_chunk, 1, 1 << 16)
    if sinks is not None:
        _checks.tensor("sinks", sinks, _checks.FLOATS, (hq,), "[Hq]")
    if out is not None:
        _checks.tensor("out", out, q.dtype, tuple(q.shape), "[B, N, Hq, D]")
        _contiguous_last(out=out)
    if lse is not None:
        _checks.tensor("lse", lse, torch.float32, (b, n, hq), "[B, N, Hq]")
    _checks.written(out=out, lse=lse)
    _checks.same_device(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        prefix_lens=prefix_lens,
        tree_mask=tree_mask,
        page_table=page_table,
        depths=depths,
        sinks=sinks,
        out=out,
        lse=lse,
    )
    if values:
        _check_values(k_cache, prefix_lens, tree_mask, length, page_table)


def _check_values(
    k_cache: Tensor,
    prefix_lens: Tensor,
    tree_mask: Tensor | None,
    tree_len: int,
    page_table: Tensor | None,
) -> None:
    size = k_cache.shape[1]
    capacity = size if page_table is None else size * page_table.shape[1]
    device = prefix_lens.device
    # A slot that no row sees (padding) needs no place in the cache.
    seen = torch.ones(prefix_lens.shape[0], tree_len, dtype=torch.bool, device=device)
    if tree_mask is not None and tree_len > 0:
        bits = (tree_mask[..., None] >> torch.arange(64, device=device)) & 1
        bits = bits.bool().flatten(-2)
        past = bits[..., tree_len:].any(-1)
        if bool(past.any()):
            at = ", ".join(map(str, past.nonzero()[0].tolist()))
            raise ValueError(
                f"tree_mask[{at}]: expected no bit at or past tree_len = {tree_len}, got one"
            )
        seen = bits[..., :tree_len].any(1)
    slots = torch.arange(1, tree_len + 1, device=device)
    needed = torch.where(seen, slots, 0).amax(1) if tree_len else torch.zeros_like(prefix_lens)
    _checks.values_in("prefix_lens", prefix_lens, 0, capacity)
    last = prefix_lens.long() + needed
    if bool((last > capacity).any()):
        b = int((last > capacity).nonzero()[0])
        raise ValueError(
            f"prefix_lens[{b}]: expected at most {capacity - int(needed[b])}, leaving room for "
            f"the tree in a cache of {capacity} slots, got {int(prefix_lens[b])}"
        )
    if page_table is not None:
        first = torch.arange(page_table.shape[1], device=device) * size
        used = torch.where(first < last[:, None], page_table, 0)
        _checks.values_in("page_table", used, 0, k_cache.shape[0] - 1)


def merge_attention_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    validate: bool = False,
) -> tuple[Tensor, Tensor]:
    """(e^lse_a * out_a + e^lse_b * out_b) / (e^lse_a + e^lse_b), and log(e^lse_a + e^lse_b).

    Two attention results of the same queries over disjoint keys become the result over their union.
    An empty part (LSE -inf) changes nothing, whatever its ``out`` holds; two empty parts give 0 and
    -inf.

    Args:
        out_a: [B, N, H, D] float64, float32, float16 or bfloat16.
        lse_a: float32 [B, N, H], natural logarithm, as `tree_attention` returns it.
        out_b: as ``out_a``.
        lse_b: as ``lse_a``.
        out: to write instead of a new tensor; may be ``out_a`` or ``out_b``.
        lse: to write instead of a new tensor.
        validate: check the arguments first instead of after a refusal.

    Returns:
        (out, lse), as ``out_a`` and ``lse_a``.

    Raises:
        ValueError: a shape is wrong, or an argument requires grad in grad mode.
        TypeError: a dtype is wrong.

    Source: Flash-Decoding; Cascade inference (flashinfer).
    """
    if torch.is_grad_enabled():
        _checks.refuse_grad(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b, out=out, lse=lse)
    if validate or _checks.VALIDATE:
        _check_merge(out_a, lse_a, out_b, lse_b, out, lse)
    try:
        if out is None and lse is None:
            return _merge(out_a, lse_a, out_b, lse_b)
        result = torch.empty_like(out_a) if out is None else out
        sums = torch.empty_like(lse_a) if lse is None else lse
        _merge_out(out_a, lse_a, out_b, lse_b, out=result, lse=sums)
    except (RuntimeError, TypeError, ValueError):
        _check_merge(out_a, lse_a, out_b, lse_b, out, lse)
        raise
    return result, sums


def _check_merge(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
) -> None:
    _checks.tensor("out_a", out_a, _checks.FLOATS, (None,) * 4, "[B, N, H, D]")
    shape = tuple(out_a.shape)
    for name, value in (("out_b", out_b), ("out", out)):
        if value is not None:
            _checks.tensor(name, value, out_a.dtype, shape, "[B, N, H, D]")
    for name, value in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        if name != "lse" or value is not None:
            _checks.tensor(name, value, torch.float32, shape[:3], "[B, N, H]")
    _checks.written(out=out, lse=lse)
    _checks.same_device(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b, out=out, lse=lse)
