"""A decoder layer on a CPU: its norms and gated activation, and all of it in one call.

Values are rounded to the tensors' dtype where the layers of transformers round them, so these stand
in for a Llama layer's own code; `models/fused.py` does that. The rotation, which stores keys and
values too, is `rope_and_write_kv`; `decoder_layer` is the whole layer from packed weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _checks
from .attention import _check as _check_attention
from .cache import _check_rope
from .linear import check_packed

_norm = torch.ops.eagle2_kernels.rms_norm.default
_add_norm = torch.ops.eagle2_kernels.fused_add_rms_norm.default
_silu = torch.ops.eagle2_kernels.silu_and_mul.default
_layer = torch.ops.eagle2_kernels.decoder_layer.default

_MOST_INT = 2**31 - 1


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, validate: bool = False) -> Tensor:
    """out[i] = weight * round(x / sqrt(mean(x^2) + eps))[i] in every row.

    The mean and the quotient are float32; the quotient is rounded to x's dtype before it is
    multiplied.

    Args:
        x: [..., H] on a CPU, float64, float32, float16 or bfloat16; last dimension contiguous.
        weight: [H] in x's dtype.
        eps: what is added to the mean.
        validate: taken as by every operator; there is nothing to look for in the values.

    Returns:
        [..., H] in x's dtype.

    Raises:
        ValueError: a shape or a device is wrong, or an argument requires grad in grad mode.
        TypeError: a dtype is wrong.

    Source: arXiv 1910.07467, as Llama computes it.
    """
    if torch.is_grad_enabled():
        _checks.refuse_grad(x=x, weight=weight)
    return _checks.call(_norm, _check_norm, validate, x, weight, eps)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, validate: bool = False
) -> None:
    """Residual <- residual + x, then x <- rms_norm(residual): both are written.

    Args:
        x: [..., H], what a layer's half adds; see `rms_norm`.
        residual: [..., H] in x's dtype, the residual stream, in memory apart from x's; the sum is
            rounded to the dtype.
        weight: [H] in x's dtype.
        eps: what is added to the mean.
        validate: as in `rms_norm`.

    Raises:
        ValueError: a shape or a device is wrong, a tensor that is written is an expanded one, or an
            argument requires grad in grad mode.
        TypeError: a dtype is wrong.

    Source: the operator of this name in vLLM.
    """
    if torch.is_grad_enabled():
        _checks.refuse_grad(x=x, residual=residual, weight=weight)
    _checks.call(_add_norm, _check_add_norm, validate, x, residual, weight, eps)


def silu_and_mul(x: Tensor, *, validate: bool = False) -> Tensor:
    """out[i] = round(silu(g[i])) * u[i] for rows x = [g; u], with silu(g) = g / (1 + e^-g).

    Args:
        x: [..., 2 I] on a CPU, a merged gate/up product in float64, float32, float16 or bfloat16;
            last dimension contiguous.
        validate: as in `rms_norm`.

    Returns:
        [..., I] in x's dtype.

    Raises:
        ValueError: a shape or a device is wrong, or the argument requires grad in grad mode.
        TypeError: the dtype is wrong.

    Source: SwiGLU (arXiv 2002.05202); the operator of this name in vLLM.
    """
    if torch.is_grad_enabled():
        _checks.refuse_grad(x=x)
    return _checks.call(_silu, _check_silu, validate, x)


def decoder_layer(
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix_lens: Tensor,
    qkv_packed: Tensor,
    o_packed: Tensor,
    post_norm_weight: Tensor,
    gate_up_packed: Tensor,
    down_packed: Tensor,
    num_heads: int,
    intermediate_size: int,
    norm_weight: Tensor | None = None,
    tree_mask: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    attention_input: Tensor | None = None,
    qkv_bias: Tensor | None = None,
    o_bias: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    page_table: Tensor | None = None,
    tree_len: int | None = None,
    depths: Tensor | None = None,
    sm_scale: float | None = None,
    softcap: float = 0.0,
    window: int | None = None,
    validate: bool = False,
) -> None:
    """Hidden <- hidden + W_o attention(norm(hidden)); hidden <- hidden + mlp(norm(hidden)).

    ::

        hidden --norm--> qkv --rope, write k, v--> tree_attention --> o --+--> hidden
        hidden --norm--> gate_up --silu_and_mul--> down ------------------+--> hidden

    Bit for bit what `rms_norm`, `packed_linear`, `rope_and_write_kv`, `tree_attention`,
    `packed_linear`, `fused_add_rms_norm`, `packed_linear`, `silu_and_mul` and `packed_linear` give
    one after another, in one call; its scratch, up to 16 MiB, stays with the thread. So a row's
    bits depend on the row and on the keys it sees alone: a tree's rows equal those of decoding its
    path token by token.

    Row j of request b is tree slot ``tree_len - N + j``: its keys and values go to cache slot
    ``prefix_lens[b]`` plus that, where `tree_attention` looks for them.

    Args:
        hidden: [B, N, H] bfloat16 on a CPU, contiguous: the residual stream, written.
        cos: [B, N, R] bfloat16 or float32, see `rope_and_write_kv`.
        sin: as ``cos``.
        k_cache: dense [B, S, Hkv, D] or paged [pages, page_size, Hkv, D] bfloat16, any strides with
            a contiguous last dimension; written. Hkv and D are its.
        v_cache: as ``k_cache``; written.
        prefix_lens: int32 [B], tokens in the cache before the tree.
        qkv_packed: `pack_linear_weight` of [(Hq + 2 Hkv) D, W], q above k above v. W is H, or the
            width of ``attention_input``.
        o_packed: that of [H, Hq D].
        post_norm_weight: [H] bfloat16, of the norm before the second half.
        gate_up_packed: that of [2 I, H], gate above up.
        down_packed: that of [H, I].
        num_heads: Hq.
        intermediate_size: I.
        norm_weight: [H] bfloat16, of the norm before attention; None: there is none.
        tree_mask: int64 [B, N, ceil(tree_len / 64)], None: a causal chain; see `tree_attention`.
        lengths: int32 [B], rows whose keys and values are stored; None: all.
        attention_input: [B, N, W] bfloat16, what q, k and v are products of in the place of
            hidden's norm (EAGLE-3: embedding and hidden side by side); last dimension contiguous.
        qkv_bias: [(Hq + 2 Hkv) D] bfloat16.
        o_bias: [H] bfloat16.
        gate_up_bias: [2 I] bfloat16.
        down_bias: [H] bfloat16.
        q_weight: [D] bfloat16, of a norm of every head of q before the rotation (Qwen3).
        k_weight: the same for k.
        eps: of all norms.
        page_table: int32 [B, max_pages] for a paged cache.
        tree_len: tree slots that have keys, at least N (the default): N and those before.
        depths: int32 [B, tree_len], depth of each tree slot; needed with ``window`` and a mask.
        sm_scale: of the logits, default 1 / sqrt(D).
        softcap: 0 is off.
        window: see `tree_attention`.
        validate: check first what `rope_and_write_kv` and `tree_attention` check (always with
            ``EAGLE2_VALIDATE=1``).

    Raises:
        ValueError: a shape or a device is wrong, or an argument requires grad in grad mode.
        TypeError: a dtype is wrong.

    Source: the decoder layer of Llama (arXiv 2302.13971).
    """
    args = (
        hidden,
        cos,
        sin,
        k_cache,
        v_cache,
        prefix_lens,
        qkv_packed,
        o_packed,
        post_norm_weight,
        gate_up_packed,
        down_packed,
        num_heads,
        intermediate_size,
        norm_weight,
        tree_mask,
        lengths,
    )
    options: dict[str, Any] = {
        "attention_input": attention_input,
        "qkv_bias": qkv_bias,
        "o_bias": o_bias,
        "gate_up_bias": gate_up_bias,
        "down_bias": down_bias,
        "q_weight": q_weight,
        "k_weight": k_weight,
        "eps": eps,
        "page_table": page_table,
        "tree_len": tree_len,
        "depths": depths,
        "sm_scale": sm_scale,
        "softcap": softcap,
        "window": window,
    }
    if torch.is_grad_enabled():
        _checks.refuse_grad(**dict(zip(_LAYER_ARGS, args, strict=False)), **options)
    if validate or _checks.VALIDATE:
        _check_layer(*args, **options, values=True)
    try:
        _layer(*args, **options)
    except (RuntimeError, TypeError, ValueError):
        _check_layer(*args, **options, values=False)
        raise


_LAYER_ARGS = [argument.name for argument in _layer._schema.arguments]


def _check_layer(
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix_lens: Tensor,
    qkv_packed: Tensor,
    o_packed: Tensor,
    post_norm_weight: Tensor,
    gate_up_packed: Tensor,
    down_packed: Tensor,
    num_heads: int,
    intermediate_size: int,
    norm_weight: Tensor | None,
    tree_mask: Tensor | None,
    lengths: Tensor | None,
    *,
    attention_input: Tensor | None,
    qkv_bias: Tensor | None,
    o_bias: Tensor | None,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    page_table: Tensor | None,
    tree_len: int | None,
    depths: Tensor | None,
    sm_scale: float | None,
    softcap: float,
    window: int | None,
    values: bool,
) -> None:
    _checks.tensor("hidden", hidden, torch.bfloat16, (None, None, None), "[B, N, H]")
    if not hidden.is_contiguous():
        raise ValueError(f"hidden: expected a contiguous tensor, got strides {hidden.stride()}")
    b, n, size = hidden.shape
    _checks.integer("num_heads", num_heads, 1, _MOST_INT)
    _checks.integer("intermediate_size", intermediate_size, 1, _MOST_INT)
    _checks.number("eps", eps)
    if tree_len is not None:
        _checks.integer("tree_len", tree_len, n, _MOST_INT)
    layout = "[B, S, Hkv, D] or [pages, page_size, Hkv, D]"
    _checks.tensor("k_cache", k_cache, torch.bfloat16, (None, None, None, None), layout)
    heads, dim = k_cache.shape[2:]
    if heads < 1 or dim < 1:
        raise ValueError(
            f"k_cache: expected at least one head of one element, got shape {tuple(k_cache.shape)}"
        )
    _checks.tensor("v_cache", v_cache, torch.bfloat16, (None, None, heads, dim), layout)
    if num_heads % heads:
        raise ValueError(
            f"num_heads: expected a multiple of the {heads} KV heads of k_cache, got {num_heads}"
        )
    width = size
    if attention_input is not None:
        _checks.tensor(
            "attention_input", attention_input, torch.bfloat16, (b, n, None), "[B, N, W]"
        )
        width = attention_input.shape[2]
        if width > 1 and attention_input.stride(2) != 1:
            raise ValueError(
                "attention_input: expected a contiguous last dimension, got strides "
                f"{attention_input.stride()}"
            )
        if norm_weight is not None:
            raise ValueError("norm_weight: expected None beside attention_input, got a tensor")
    norms = {"post_norm_weight": post_norm_weight}
    if norm_weight is not None:
        norms["norm_weight"] = norm_weight
    for name, weight in norms.items():
        _checks.tensor(name, weight, torch.bfloat16, (size,), "[H]")
        if not weight.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {weight.stride()}")
    merged, q_size = (num_heads + 2 * heads) * dim, num_heads * dim
    products = {
        "qkv": (qkv_packed, width, merged, qkv_bias),
        "o": (o_packed, q_size, size, o_bias),
        "gate_up": (gate_up_packed, size, 2 * intermediate_size, gate_up_bias),
        "down": (down_packed, intermediate_size, size, down_bias),
    }
    for name, (packed, inputs, outputs, bias) in products.items():
        check_packed(
            *(f"{name}_packed", packed, f"{name}_bias", bias, inputs, outputs), values=values
        )
    _checks.same_device(
        hidden=hidden,
        cos=cos,
        sin=sin,
        k_cache=k_cache,
        v_cache=v_cache,
        prefix_lens=prefix_lens,
        qkv_packed=qkv_packed,
        o_packed=o_packed,
        post_norm_weight=post_norm_weight,
        gate_up_packed=gate_up_packed,
        down_packed=down_packed,
        norm_weight=norm_weight,
        tree_mask=tree_mask,
        lengths=lengths,
        attention_input=attention_input,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        q_weight=q_weight,
        k_weight=k_weight,
        page_table=page_table,
        depths=depths,
    )
    qkv = hidden.new_empty(b, n, merged)
    first = prefix_lens
    if isinstance(prefix_lens, Tensor) and prefix_lens.dtype == torch.int32:
        first = prefix_lens + ((n if tree_len is None else tree_len) - n)
    table = (first, lengths, page_table, q_weight, k_weight, eps)
    _check_rope(qkv, cos, sin, k_cache, v_cache, *table, values=values)
    q = hidden.new_empty(b, n, num_heads, dim)
    _check_attention(
        *(q, k_cache, v_cache, prefix_lens, tree_mask, tree_len, None, None, page_table, depths),
        *(None, sm_scale, softcap, window, None, None, None, None, None, None),
        values=values,
    )


def _check_rows(name: str, x: Tensor, dtypes: Any, width: int | None) -> None:
    if not isinstance(x, Tensor) or x.dim() < 1:
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        error = ValueError if isinstance(x, Tensor) else TypeError
        raise error(f"{name}: expected a tensor [..., H], got {got}")
    _checks.tensor(name, x, dtypes, (*[None] * (x.dim() - 1), width), "[..., H]")
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name}: expected a contiguous last dimension, got strides {x.stride()}")


def _check_norm(x: Tensor, weight: Tensor, eps: float, *, values: bool) -> None:
    _check_rows("x", x, _checks.FLOATS, None)
    _checks.tensor("weight", weight, x.dtype, (x.shape[-1],), "[H]")
    if not weight.is_contiguous():
        raise ValueError(f"weight: expected a contiguous tensor, got strides {weight.stride()}")
    _checks.number("eps", eps)
    _checks.same_device(x=x, weight=weight)


def _check_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, values: bool
) -> None:
    _check_norm(x, weight, eps, values=values)
    _checks.tensor("residual", residual, x.dtype, tuple(x.shape), "[..., H]")
    _check_rows("residual", residual, x.dtype, x.shape[-1])
    _checks.written(x=x, residual=residual)
    _checks.same_device(x=x, residual=residual)


def _check_silu(x: Tensor, *, values: bool) -> None:
    _check_rows("x", x, _checks.FLOATS, None)
    if x.shape[-1] % 2:
        raise ValueError(f"x: expected an even last dimension, got {x.shape[-1]}")
