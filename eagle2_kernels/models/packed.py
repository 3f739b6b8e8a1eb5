"""Linear layers with their weights reordered once, for the few rows a decoding step has.

oneDNN multiplies bfloat16 matrices from a blocked layout of the weight. PyTorch's linear layer
keeps the plain layout, so each call reorders the whole weight first: with 1 to 64 rows that costs
as much as the product. Here the reordered copy is kept beside the weight.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PackedLinears", "can_pack", "in_use", "one_at_a_time", "pack_linear", "weight_state"]

# Rows the layout is chosen for; any number of rows may follow.
_ROWS = 16


def can_pack(weight: Tensor) -> bool:
    """Whether a packed copy of ``weight`` [out, in] helps: bfloat16, where oneDNN has that."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def pack_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """``x -> x W^T + b`` from a packed copy of ``weight`` [out, in], which must stay unchanged."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def linear(x: Tensor) -> Tensor:
        return multiply(x, packed, bias, "none", [], "")

    return linear


# Not in the objects themselves: a lock can be neither copied nor pickled.
_locks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_lock_of_locks = threading.Lock()


def one_at_a_time(owner: object) -> AbstractContextManager[Any]:
    """Held by one thread at a time, for whoever changes ``owner`` for the length of a call."""
    if torch.compiler.is_compiling():
        return nullcontext()
    with _lock_of_locks:
        return _locks.setdefault(owner, threading.RLock())


def in_use(packed: PackedLinears) -> AbstractContextManager[Any]:
    """``packed`` as a block; nothing under `torch.compile`, which lays out weights by itself."""
    return nullcontext() if torch.compiler.is_compiling() else packed


class PackedLinears:
    """The linear layers under ``roots``, running from packed weights inside the ``with`` block.

    ::

        packed = PackedLinears(model)     # one more copy of the weights
        with torch.inference_mode(), packed:
            model(...)                    # same values as outside, less time

    Outside the block the model is what it was. A layer whose weight was changed, moved or replaced
    since (or that carries a forward of its own: hooks of accelerate, quantised layers) is left
    alone; writing into weights made under ``torch.inference_mode()`` goes unnoticed. Threads wait
    for each other at the block. Not for autograd.
    """

    def __init__(self, *roots: nn.Module) -> None:
        modules = {id(m): m for root in roots for m in root.modules()}
        self._layers = [
            _Packed(m)
            for m in modules.values()
            if type(m) is nn.Linear and "forward" not in vars(m) and can_pack(m.weight)
        ]
        self._active: list[dict[str, Any]] = []

    def __getstate__(self) -> dict[str, Any]:
        # A copy has weights of its own, and oneDNN's layout can be neither pickled nor copied.
        return {"_layers": [], "_active": []}

    def __len__(self) -> int:
        """Layers that were packed."""
        return len(self._layers)

    def __contains__(self, module: object) -> bool:
        """Whether this very layer runs from a packed copy inside the block."""
        return any(layer.module is module and layer.is_current() for layer in self._layers)

    @property
    def nbytes(self) -> int:
        """Memory of the packed copies."""
        return sum(layer.weight.nbytes for layer in self._layers)

    def __enter__(self) -> PackedLinears:
        if self._layers:
            one_at_a_time(self).__enter__()
        for layer in self._layers:
            if layer.is_current():
                own = layer.module.__dict__
                own["forward"] = layer.linear
                self._active.append(own)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for own in self._active:
            own.pop("forward", None)
        self._active.clear()
        if self._layers:
            one_at_a_time(self).__exit__(kind, error, traceback)


class _Packed:
    """One layer, and which weight its packed copy is of."""

    def __init__(self, module: nn.Linear) -> None:
        self.module = module
        self.weight, self.bias = module.weight, module.bias
        self._seen = self._state()
        bias = None if self.bias is None else self.bias.detach()
        self.linear = pack_linear(self.weight.detach(), bias)

    def _state(self) -> tuple[int, ...]:
        return weight_state(self.weight, self.bias)

    def is_current(self) -> bool:
        # straight from the dictionaries: this runs for every layer of every forward
        own = self.module.__dict__
        parameters = own["_parameters"]
        return (
            parameters["weight"] is self.weight
            and parameters["bias"] is self.bias
            and "forward" not in own
            and self._state() == self._seen
        )


def weight_state(weight: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    """What changes when a linear layer's weights are written or replaced."""
    if bias is None:
        return _version(weight), weight.data_ptr()
    return _version(weight), weight.data_ptr(), _version(bias), bias.data_ptr()


def _version(tensor: Tensor) -> int:
    # inference tensors count no versions
    return 0 if tensor.is_inference() else tensor._version
