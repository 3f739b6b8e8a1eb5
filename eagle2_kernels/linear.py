"""Linear layers on the CPU for the few rows that a decoding step has.

A decode step reads every weight once, for one row or a tree of them. `pack_linear_weight` lays a
bfloat16 weight out in the order in which `packed_linear` reads it: as one stream, at the memory's
rate when rows are few. The packed copy serves any number of rows, so the plain one may be freed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks, ops

_pack = getattr(torch.ops, ops.NAMESPACE).pack_linear_weight.default
_linear = getattr(torch.ops, ops.NAMESPACE).packed_linear.default

_MOST_INT = 2**63 - 1


def pack_linear_weight(weight: Tensor, *, validate: bool = False) -> Tensor:
    """packed[p, i, c, j] = weight[32 p + c, 2 i + j], zeros past the weight's edges.

    ::

        panel p: 32 columns of the product     two neighbours of k side by side
          i = 0   | w[32p, 0:2] | w[32p+1, 0:2] | ... | w[32p+31, 0:2] |
          i = 1   | w[32p, 2:4] | w[32p+1, 2:4] | ...

    Args:
        weight: [out, in] bfloat16, as `torch.nn.Linear` keeps it; on the CPU, any strides.
        validate: nothing is left to check by value; there for the sake of uniformity.

    Returns:
        [ceil(out / 32), ceil(in / 2), 32, 2] bfloat16, contiguous, for `packed_linear`.

    Raises:
        TypeError: ``weight`` is no tensor or has another dtype.
        ValueError: ``weight`` has another number of dimensions, lies on another device, or requires
            grad in grad mode.

    Source: the operand layout of vdpbf16ps (Intel's instruction set reference); panels as in GEMM
    packing (Goto and van de Geijn, 2008).
    """
    _checks.refuse_grad(weight=weight)
    return _checks.call(_pack, _check_weight, validate, weight)


def packed_linear(
    x: Tensor,
    packed: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    *,
    validate: bool = False,
) -> Tensor:
    """out[..., c] = bfloat16(sum over k of x[..., k] * weight[c, k] + bias[c]), sums in float32.

    ::

        packed = pack_linear_weight(linear.weight.detach())          # once
        y = packed_linear(x, packed, linear.out_features, bias)      # linear(x)

    **A row's bits depend on the row alone**: not on the number of rows, on the other rows, on
    strides or on the number of threads, since each sum takes k in one and the same order. So a
    tree's rows equal, bit for bit, those of decoding its path token by token. They do depend on the
    instruction set (``EAGLE2_CPU_ISA``); where it multiplies pairs of bfloat16 (vdpbf16ps, AMX),
    subnormal numbers count as zeros.

    For the CPU: on other devices this raises, `torch.nn.functional.linear` is right there.

    Args:
        x: [..., in] bfloat16; any strides with a contiguous last dimension, so a view of some
            columns of another product is welcome.
        packed: what `pack_linear_weight` made of the weight [out, in].
        out_features: out, which ``packed`` rounds up.
        bias: [out] bfloat16, contiguous, or None.
        validate: check first that ``packed`` holds zeros past the weight's edges.

    Returns:
        [..., out] bfloat16, contiguous. NaN and infinities of a row of x reach that row only.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape or stride is wrong, a tensor lies on another device, or an argument
            requires grad in grad mode.

    Source: `torch.nn.functional.linear`, with oneDNN's idea of a weight reordered once.
    """
    if torch.is_grad_enabled():
        _checks.refuse_grad(x=x, packed=packed, bias=bias)
    if validate or _checks.VALIDATE:
        _check_linear(x, packed, out_features, bias, values=True)
    try:
        return _linear(x, packed, out_features, bias)
    except (RuntimeError, TypeError, ValueError):
        _check_linear(x, packed, out_features, bias, values=False)
        raise


def _check_weight(weight: Tensor, *, values: bool) -> None:
    _checks.tensor("weight", weight, torch.bfloat16, (None, None), "[out, in]")
    _on_cpu(weight=weight)


def _check_linear(
    x: Tensor, packed: Tensor, out_features: int, bias: Tensor | None, *, values: bool
) -> None:
    rank = x.dim() if isinstance(x, Tensor) else 1
    if rank == 0:
        raise ValueError("x: expected shape [..., in], got ()")
    _checks.tensor("x", x, torch.bfloat16, (None,) * rank, "[..., in]")
    _checks.integer("out_features", out_features, 0, _MOST_INT)
    in_features = x.shape[-1]
    check_packed("packed", packed, "bias", bias, in_features, out_features, values=values)
    _checks.same_device(x=x, packed=packed, bias=bias)
    _on_cpu(x=x)
    if in_features > 1 and x.stride(-1) != 1:
        raise ValueError(f"x: expected a contiguous last dimension, got strides {x.stride()}")


def check_packed(
    name: str,
    packed: Tensor,
    bias_name: str,
    bias: Tensor | None,
    in_features: int,
    out_features: int,
    *,
    values: bool,
) -> None:
    """A packed weight and its bias, by the names that they have where they are given."""
    shape = ((out_features + 31) // 32, (in_features + 1) // 2, 32, 2)
    layout = "[ceil(out / 32), ceil(in / 2), 32, 2]"
    _checks.tensor(name, packed, torch.bfloat16, shape, layout)
    given = {name: packed}
    if bias is not None:
        _checks.tensor(bias_name, bias, torch.bfloat16, (out_features,), "[out]")
        given[bias_name] = bias
    for each, tensor in given.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{each}: expected a contiguous tensor, got strides {tensor.stride()}")
    if values and packed.device.type == "cpu":
        columns = packed.transpose(1, 2).flatten(0, 1).flatten(1)
        padding = (columns[out_features:] != 0).any() | (columns[:, in_features:] != 0).any()
        if bool(padding):
            raise ValueError(
                f"{name}: expected zeros past {out_features} outputs and {in_features} inputs, got "
                "others (was it packed for more?)"
            )


def _on_cpu(**tensors: Tensor) -> None:
    for name, value in tensors.items():
        if value.device.type not in ("cpu", "meta"):
            raise ValueError(
                f"{name}: expected a CPU tensor, got one on {value.device}: there "
                "torch.nn.functional.linear is right"
            )
