"""Tree attention: every node of a draft tree attends to the prefix and to its own ancestors.

In the loop it is the attention of each target layer (and of the draft head), after `write_kv` has
stored the tree's keys behind the prefix and before `verify` walks the tree.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from . import _checks

_attend = torch.ops.eagle2_kernels.tree_attention_out.default
_merge = torch.ops.eagle2_kernels.merge_attention_states.default
_merge_out = torch.ops.eagle2_kernels.merge_attention_states_out.default

_FLOAT8 = torch.float8_e4m3fn


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
        k_cache: dense [B, S, Hkv, D], or paged [pages, page_size, Hkv, D], in q's dtype or in
            float8_e4m3fn (q not float64); any strides with a contiguous last dimension (an HND
            cache is a transposed view).
        v_cache: [..., Dv] beside ``k_cache``, in its dtype. Dv may differ from D and V may be a
            view into K's storage, as in multi-head latent attention (D = 576, Dv = 512).
        prefix_lens: int32 [B], tokens in the cache before the tree. Only ``validate`` reports a
            value outside the cache; else it is clipped, and nothing outside the cache is read.
        tree_mask: int64 [B, N, ceil(tree_len / 64)], bit j of row i (bit j % 64 of word j // 64)
            set when query i sees tree slot j: `DraftTree.tree_mask`. None is a causal chain over
            the slots (prefill in chunks, plain decoding).
        tree_len: tree slots whose keys are in the cache (default N); the queries are the last N of
            them. 0: prefix only, for any N.
        qo_indptr: flat ragged queries, see `tree_attention_varlen`.
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
        k_scale: float32 tensor of one element that float8 keys are multiplied by, in float32, as
            they are read (default 1).
        v_scale: the same for float8 values.
        kv_chunk: keys per chunk of the online softmax; the default depends on D alone. Results of
            different chunk sizes may differ in the last bits.
        return_lse: also return the log-sum-exp of each row's logits, float32 [B, N, Hq]: natural
            logarithm, after scale and softcap, sink included.
        out: [B, N, Hq, Dv] to write instead of a new tensor.
        lse: float32 [B, N, Hq] to write.
        validate: check the values in the tensors first: lengths, page ids, mask bits, depths,
            scales (always with ``EAGLE2_VALIDATE=1``).

    Returns:
        out [B, N, Hq, Dv], or (out, lse) with ``return_lse``.

    Raises:
        ValueError: a shape or a value is wrong, or an argument requires grad in grad mode.
        TypeError: a dtype is wrong.

    Source: EAGLE-2 (arXiv 2406.16858) for the tree, FlashAttention (arXiv 2205.14135) and
    Flash-Decoding for the chunked softmax, StreamingLLM (arXiv 2309.17453) for sinks.
    """
    if torch.is_grad_enabled():
        _checks.refuse_grad(
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            out=out,
            lse=lse,
        )
    given = (
        q,
        k_cache,
        v_cache,
        prefix_lens,
        tree_mask,
        tree_len,
        qo_indptr,
        max_q,
        page_table,
        depths,
        max_prefix_len,
        sm_scale,
        softcap,
        window,
        sinks,
        k_scale,
        v_scale,
        kv_chunk,
        out,
        lse,
    )
    if validate or _checks.VALIDATE:
        _check(*given, values=True)
    # PyTorch's parser takes a quarter of a microsecond per keyword: pass only what was given.
    options: dict[str, Any] = {}
    if tree_len is not None:
        options["tree_len"] = tree_len
    if qo_indptr is not None:
        options["qo_indptr"] = qo_indptr
    if max_q is not None:
        options["max_q"] = max_q
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
    if k_scale is not None:
        options["k_scale"] = k_scale
    if v_scale is not None:
        options["v_scale"] = v_scale
    if kv_chunk is not None:
        options["kv_chunk"] = kv_chunk
    result = out
    try:
        if result is None:
            if v_cache.shape[-1] == q.shape[-1]:  # half the price of new_empty
                result = torch.empty_like(q, memory_format=torch.contiguous_format)
            else:
                result = q.new_empty((*q.shape[:-1], v_cache.shape[-1]))
        if return_lse and lse is None:
            lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        if lse is not None:
            options["lse"] = lse
        _attend(q, k_cache, v_cache, prefix_lens, tree_mask, out=result, **options)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        _check(*given, values=False)
        raise
    if return_lse and lse is not None:
        return result, lse
    return result


def tree_attention_varlen(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix_lens: Tensor,
    qo_indptr: Tensor,
    tree_mask: Tensor | None = None,
    *,
    max_q: int | None = None,
    tree_len: int | None = None,
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
    """`tree_attention` of requests with different numbers of rows, their rows one after another.

    ::

        qo_indptr = [0, 3, 3, 5], total = 6

        row of q, tree_mask, out, lse   0 1 2 | 3 4 | 5
        request                         0     | 2   | none: padding, 0 and -inf
        its tree slots                  0 1 2 | 0 1 |

    Request b has n = qo_indptr[b + 1] - qo_indptr[b] rows. They are the last n of its tree slots,
    and a request has n slots unless ``tree_len`` says otherwise for all. Bit j of a mask row is
    tree slot j of the row's own request: engines whose masks cover the prefix too (the
    ``custom_mask`` of FlashInfer and SGLang) pack its columns from prefix_lens[b] on. Every row has
    the bits that `tree_attention` gives it. Rows behind qo_indptr[B] belong to no request and see
    nothing (graphs of a fixed size pad so).

    Args:
        q: [total, Hq, D], dtypes as in `tree_attention`.
        k_cache: as in `tree_attention`: dense with one row per request, or paged.
        v_cache: as in `tree_attention`.
        prefix_lens: int32 [B].
        qo_indptr: int32 [B + 1], from 0, ascending, at most total.
        tree_mask: int64 [total, ceil(M / 64)] where M is ``tree_len``, else ``max_q``. None is a
            causal chain over each request's slots (prefill of a ragged batch).
        max_q: a bound on n known on the host (default: total). It sizes launches and the mask's
            rows and never changes the result.
        tree_len: tree slots of every request, at least its rows (0: prefix only).
        page_table: int32 [B, max_pages].
        depths: int32 [total], the depth of each row's slot; with ``tree_len`` int32 [B, tree_len].
        max_prefix_len: as in `tree_attention`, like all that follow.
        sm_scale: scale of the logits.
        softcap: 0 is off.
        window: keys kept, by position.
        sinks: float [Hq].
        k_scale: of float8 keys.
        v_scale: of float8 values.
        kv_chunk: keys per chunk.
        return_lse: also return the log-sum-exp, float32 [total, Hq].
        out: [total, Hq, Dv] to write instead of a new tensor.
        lse: float32 [total, Hq] to write.
        validate: check the values in the tensors first (always with ``EAGLE2_VALIDATE=1``).

    Returns:
        out [total, Hq, Dv], or (out, lse) with ``return_lse``.

    Raises:
        ValueError: a shape or a value is wrong, or an argument requires grad in grad mode.
        TypeError: a dtype is wrong.

    Source: the ``cu_seqlens`` of flash-attention and the ``qo_indptr`` of FlashInfer.
    """
    if qo_indptr is None:
        raise TypeError("qo_indptr: expected an int32 tensor [B + 1], got None")
    return tree_attention(
        q,
        k_cache,
        v_cache,
        prefix_lens,
        tree_mask,
        tree_len=tree_len,
        qo_indptr=qo_indptr,
        max_q=max_q,
        page_table=page_table,
        depths=depths,
        max_prefix_len=max_prefix_len,
        sm_scale=sm_scale,
        softcap=softcap,
        window=window,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_chunk=kv_chunk,
        return_lse=return_lse,
        out=out,
        lse=lse,
        validate=validate,
    )


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
    qo_indptr: Tensor | None,
    max_q: int | None,
    page_table: Tensor | None,
    depths: Tensor | None,
    max_prefix_len: int | None,
    sm_scale: float | None,
    softcap: float,
    window: int | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    kv_chunk: int | None,
    out: Tensor | None,
    lse: Tensor | None,
    *,
    values: bool,
) -> None:
    """Name the first argument that is wrong; ``values`` also reads the device tensors."""
    ragged = qo_indptr is not None
    lead = "total" if ragged else "B, N"
    _checks.tensor("q", q, _checks.FLOATS, (None,) * (3 if ragged else 4), f"[{lead}, Hq, D]")
    hq = q.shape[-2]
    b, n = (0, q.shape[0]) if ragged else q.shape[:2]
    if max_q is not None:
        if not ragged:
            raise ValueError(f"qo_indptr: expected a tensor beside max_q = {max_q}, got None")
        _checks.integer("max_q", max_q, 0, 2**63 - 1)
    if qo_indptr is not None:
        _checks.tensor("qo_indptr", qo_indptr, torch.int32, (None,), "[B + 1]")
        if qo_indptr.shape[0] < 1:
            raise ValueError("qo_indptr: expected shape [B + 1], got (0,)")
        b = qo_indptr.shape[0] - 1
    _check_caches(q, k_cache, v_cache, page_table, b)
    hkv, dv = k_cache.shape[2], v_cache.shape[3]
    if hkv < 1 or hq < 1 or hq % hkv:
        raise ValueError(f"q: expected a multiple of the {hkv} KV heads of k_cache, got {hq} heads")
    _contiguous_last(q=q, k_cache=k_cache, v_cache=v_cache)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            continue
        if k_cache.dtype != _FLOAT8:
            raise ValueError(
                f"{name}: expected None beside {str(k_cache.dtype)[6:]} caches, got a tensor"
            )
        _checks.scale(name, scale, values)
    _checks.tensor("prefix_lens", prefix_lens, torch.int32, (b,), "[B]")
    if tree_len is not None:
        _checks.integer("tree_len", tree_len, 0, 2**31 - 1)
    most = n if max_q is None else max_q
    length = tree_len if tree_len is not None else most if ragged else n
    if not ragged and 0 < length < n:
        raise ValueError(f"tree_len: expected 0 or at least the {n} queries, got {length}")
    slots = "tree_len" if tree_len is not None or not ragged else "max_q"
    if tree_mask is not None:
        shape = (n, (length + 63) // 64) if ragged else (b, n, (length + 63) // 64)
        layout = f"[{lead}, ceil({slots} / 64)]"
        _checks.tensor("tree_mask", tree_mask, torch.int64, shape, layout)
    if depths is not None:
        if ragged and tree_len is None:
            _checks.tensor("depths", depths, torch.int32, (n,), "[total]")
        else:
            _checks.tensor("depths", depths, torch.int32, (b, length), "[B, tree_len]")
    if max_prefix_len is not None:
        _checks.integer("max_prefix_len", max_prefix_len, 0, 2**63 - 1)
    if window is not None:
        _checks.integer("window", window, 1, 2**63 - 1)
        if tree_len == 0 or (length == 0 and not ragged):
            raise ValueError("window: expected tree_len > 0, else the queries have no position")
        if tree_mask is not None and depths is None:
            raise ValueError("depths: expected an int32 tensor with window and tree_mask, got None")
    for name, number in (("sm_scale", sm_scale), ("softcap", softcap)):
        if not isinstance(number, (int, float)) and not (name == "sm_scale" and number is None):
            raise TypeError(f"{name}: expected a float, got {type(number).__name__}")
    if not 0 <= softcap < float("inf"):
        raise ValueError(f"softcap: expected 0 (off) or a positive number, got {softcap}")
    if kv_chunk is not None:
        _checks.integer("kv_chunk", kv_chunk, 1, 1 << 16)
    if sinks is not None:
        _checks.tensor("sinks", sinks, _checks.FLOATS, (hq,), "[Hq]")
    if out is not None:
        _checks.tensor("out", out, q.dtype, (*q.shape[:-1], dv), f"[{lead}, Hq, Dv]")
        _contiguous_last(out=out)
    if lse is not None:
        _checks.tensor("lse", lse, torch.float32, tuple(q.shape[:-1]), f"[{lead}, Hq]")
    _checks.written(out=out, lse=lse)
    _checks.same_device(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        prefix_lens=prefix_lens,
        tree_mask=tree_mask,
        qo_indptr=qo_indptr,
        page_table=page_table,
        depths=depths,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        out=out,
        lse=lse,
    )
    # Reading a CPU tensor waits for nobody.
    if qo_indptr is not None and (values or qo_indptr.is_cpu):
        _check_indptr(qo_indptr, n, most, tree_len)
    if values:
        _check_values(
            k_cache,
            prefix_lens,
            tree_mask,
            tree_len,
            qo_indptr,
            n,
            page_table,
            depths,
            max_prefix_len,
        )


def _check_caches(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor | None, b: int
) -> None:
    d = q.shape[-1]
    paged = page_table is not None
    rows, layout = (None, "[pages, page_size, Hkv, D]") if paged else (b, "[B, S, Hkv, D]")
    dtypes = (q.dtype,) if q.dtype == torch.float64 else (q.dtype, _FLOAT8)
    _checks.tensor("k_cache", k_cache, dtypes, (rows, None, None, d), layout)
    layout = layout.replace("D]", "Dv]")
    shape = (*k_cache.shape[:3], None)
    _checks.tensor("v_cache", v_cache, k_cache.dtype, shape, layout)
    for name, dim in (("q", d), ("v_cache", v_cache.shape[3])):
        if dim < 1:
            raise ValueError(f"{name}: expected a head dim of at least 1, got 0")
    if page_table is not None:
        _checks.tensor("page_table", page_table, torch.int32, (b, None), "[B, max_pages]")
        if k_cache.shape[1] < 1:
            raise ValueError("k_cache: expected a page size of at least 1, got 0")


def _check_indptr(qo_indptr: Tensor, total: int, most: int, tree_len: int | None) -> None:
    starts = qo_indptr.tolist()
    if starts[0] != 0:
        raise ValueError(f"qo_indptr[0]: expected 0, got {starts[0]}")
    for b, (start, stop) in enumerate(itertools.pairwise(starts)):
        if not start <= stop <= total:
            raise ValueError(
                f"qo_indptr[{b + 1}]: expected {start} to {total} (the rows of q), got {stop}"
            )
        bound, name = most, "max_q"
        if tree_len and tree_len < most:
            bound, name = tree_len, "tree_len"
        if stop - start > bound:
            raise ValueError(
                f"qo_indptr: expected at most {name} = {bound} rows of request {b}, got "
                f"{stop - start}"
            )


def _check_values(
    k_cache: Tensor,
    prefix_lens: Tensor,
    tree_mask: Tensor | None,
    tree_len: int | None,
    qo_indptr: Tensor | None,
    rows: int,
    page_table: Tensor | None,
    depths: Tensor | None,
    max_prefix_len: int | None,
) -> None:
    """Every slot that a row sees has its place in the cache, and a depth of a tree's."""
    size = k_cache.shape[1]
    capacity = size if page_table is None else size * page_table.shape[1]
    _checks.values_in("prefix_lens", prefix_lens, 0, capacity)
    last = []
    for b, prefix in enumerate(prefix_lens.tolist()):
        if max_prefix_len is not None and prefix > max_prefix_len:
            raise ValueError(
                f"prefix_lens[{b}]: expected at most max_prefix_len = {max_prefix_len}, "
                f"got {prefix}"
            )
        begin, end = (0, rows) if qo_indptr is None else qo_indptr[b : b + 2].tolist()
        length = end - begin if tree_len is None else tree_len
        # A slot that no row sees (padding) needs no place.
        seen = torch.ones(length, dtype=torch.bool, device=prefix_lens.device)
        if tree_mask is not None and length > 0:
            words = tree_mask[b] if qo_indptr is None else tree_mask[begin:end]
            bits = (words[..., None] >> torch.arange(64, device=words.device)) & 1
            bits = bits.bool().flatten(1)
            past = bits[:, length:].any(1)
            if bool(past.any()):
                row = int(past.nonzero()[0])
                at = f"{b}, {row}" if qo_indptr is None else f"{begin + row}"
                raise ValueError(
                    f"tree_mask[{at}]: expected no bit at or past the {length} tree slots of "
                    f"request {b}, got one"
                )
            seen = bits[:, :length].any(0)
        slots = seen.nonzero()[:, 0].tolist()
        needed = slots[-1] + 1 if slots else 0
        last.append(prefix + needed)
        if last[b] > capacity:
            raise ValueError(
                f"prefix_lens[{b}]: expected at most {capacity - needed}, leaving room for the "
                f"tree in a cache of {capacity} slots, got {prefix}"
            )
        if depths is not None:
            own = (depths[begin:end] if depths.dim() == 1 else depths[b]).tolist()
            for slot in slots:
                if not 0 <= own[slot] < length:
                    at = f"{begin + slot}" if depths.dim() == 1 else f"{b}, {slot}"
                    raise ValueError(
                        f"depths[{at}]: expected 0 to {length - 1} for a slot of request {b}, "
                        f"got {own[slot]}"
                    )
    if page_table is not None:
        device = page_table.device
        first = torch.arange(page_table.shape[1], device=device) * size
        used = first < torch.tensor(last, dtype=torch.int64, device=device)[:, None]
        _checks.values_in(
            "page_table", torch.where(used, page_table, 0), 0, max(k_cache.shape[0] - 1, 0)
        )


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
        out_a: [B, N, H, D] or flat [rows, H, D], float64, float32, float16 or bfloat16.
        lse_a: float32 [B, N, H] or [rows, H], natural logarithm, as `tree_attention` returns it.
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
    flat = isinstance(out_a, Tensor) and out_a.dim() == 3
    lead = "rows" if flat else "B, N"
    _checks.tensor("out_a", out_a, _checks.FLOATS, (None,) * (3 if flat else 4), f"[{lead}, H, D]")
    shape = tuple(out_a.shape)
    for name, value in (("out_b", out_b), ("out", out)):
        if name != "out" or value is not None:
            _checks.tensor(name, value, out_a.dtype, shape, f"[{lead}, H, D]")
    for name, value in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        if name != "lse" or value is not None:
            _checks.tensor(name, value, torch.float32, shape[:-1], f"[{lead}, H]")
    _checks.written(out=out, lse=lse)
    _checks.same_device(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b, out=out, lse=lse)
