"""A decoder layer between its matrix products, on a CPU: norms and the gated activation.

Values are rounded to the tensors' dtype where the layers of transformers round them, so these stand
in for a Llama layer's own code; `models/fused.py` does that. The rotation, which stores keys and
values too, is `rope_and_write_kv`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _checks

_norm = torch.ops.eagle2_kernels.rms_norm.default
_add_norm = torch.ops.eagle2_kernels.fused_add_rms_norm.default
_silu = torch.ops.eagle2_kernels.silu_and_mul.default


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
        residual: [..., H] in x's dtype, the residual stream; the sum is rounded to it.
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
