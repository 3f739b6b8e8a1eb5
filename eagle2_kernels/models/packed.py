"""Linear layers with their weights reordered once, for the few rows a decoding step has.

`packed_linear` reads a copy of the weight that lies in the order of its product, at the memory's
rate, and gives a row the same bits whatever the other rows are. Here that copy is kept beside the
weight, and layers that read the same input (q, k and v; gate and up) are one product, for each
product costs its start.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops

__all__ = [
    "PackedLinears",
    "PackedProduct",
    "can_pack",
    "in_use",
    "one_at_a_time",
    "pack_linear",
    "weight_state",
]

_pack_into = getattr(torch.ops, ops.NAMESPACE).pack_linear_weight_out.default
_packed_linear = getattr(torch.ops, ops.NAMESPACE).packed_linear.default

# Siblings that read the same input, by the names that transformers gives them, in call order.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def can_pack(weight: Tensor) -> bool:
    """Whether a packed copy of ``weight`` [out, in] helps: bfloat16, on the CPU."""
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16


def pack_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """``x -> x W^T + b`` from a packed copy of ``weight`` [out, in], which must stay unchanged."""
    return _multiply_by(_pack(weight), weight.shape[0], bias)


def _pack(weight: Tensor, memory: Tensor | None = None) -> Tensor:
    """A packed copy of ``weight`` [out, in] in the first `_elements` of ``memory``."""
    out_features, in_features = weight.shape
    if memory is None:
        memory = weight.new_empty(_elements(out_features, in_features))
    packed = memory[: _elements(out_features, in_features)]
    packed = packed.view((out_features + 31) // 32, (in_features + 1) // 2, 32, 2)
    _pack_into(weight, packed=packed)
    return packed


def _multiply_by(
    packed: Tensor, out_features: int, bias: Tensor | None
) -> Callable[[Tensor], Tensor]:
    if bias is not None:
        bias = bias.contiguous()

    def linear(input: Tensor) -> Tensor:
        if input.stride(-1) != 1:
            input = input.contiguous()
        return _packed_linear(input, packed, out_features, bias)

    return linear


def _elements(out_features: int, in_features: int) -> int:
    """Elements of a packed weight."""
    return (out_features + 31) // 32 * 32 * ((in_features + 1) // 2 * 2)


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

    Siblings named q_proj, k_proj, v_proj or gate_proj, up_proj are one product: the first one
    called computes it, the others take their columns (views) when called with the same tensor,
    which nobody may have written to in between.

    Outside the block the model is what it was. A layer whose weight was changed, moved or replaced
    since (or that carries a forward of its own: hooks of accelerate, quantised layers) is left
    alone; writing into weights through ``.data``, or into such made under
    ``torch.inference_mode()``, goes unnoticed. Threads wait for each other at the block. Not for
    autograd.
    """

    def __init__(self, *roots: nn.Module) -> None:
        modules = {id(m): m for root in roots for m in root.modules()}
        linears = {
            key: m
            for key, m in modules.items()
            if type(m) is nn.Linear and "forward" not in vars(m) and can_pack(m.weight)
        }
        groups = []
        for parent in modules.values():
            for names in _TOGETHER:
                group = [linears.get(id(getattr(parent, name, None))) for name in names]
                if _go_together(group):
                    groups.append([m for m in group if m is not None])
                    for m in groups[-1]:
                        del linears[id(m)]
        groups += [[m] for m in linears.values()]
        sizes = [_elements(sum(m.out_features for m in g), g[0].in_features) for g in groups]
        # In one piece, which may lie in huge pages; small weights by themselves do not fill one.
        memory = torch.empty(sum(sizes), dtype=torch.bfloat16, device="cpu")
        self._products = [
            PackedProduct(group, part)
            for group, part in zip(groups, memory.split(sizes), strict=True)
        ]
        self._active: list[PackedProduct] = []

    def __getstate__(self) -> dict[str, Any]:
        # A copy has weights of its own: what was packed are not these.
        return {"_products": [], "_active": []}

    def __len__(self) -> int:
        """Layers that were packed."""
        return sum(len(product.modules) for product in self._products)

    def __contains__(self, module: object) -> bool:
        """Whether this very layer runs from a packed copy inside the block."""
        return self.out_features(module) is not None

    def out_features(self, module: object) -> int | None:
        """Columns of the product that this layer is part of inside the block; None if of none."""
        for product in self._products:
            if any(m is module for m in product.modules) and product.is_current():
                return sum(product.sizes)
        return None

    def inside(self, root: nn.Module) -> list[PackedProduct]:
        """The products of layers under ``root``."""
        modules = {id(m) for m in root.modules()}
        return [p for p in self._products if id(p.modules[0]) in modules]

    def multiply_by(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        """The product of a layer alone that has this very weight and bias; None if there is none.

        Detached views of them count: they share memory.
        """
        for product in self._products:
            m = product.modules[0]
            if (
                len(product.modules) == 1
                and m.weight.shape == weight.shape
                and weight_state(m.weight, m.bias) == weight_state(weight, bias)
                and product.is_current()
            ):
                return product.multiply
        return None

    def without(self, roots: Sequence[nn.Module]) -> PackedLinears:
        """The products of layers that are under none of ``roots``."""
        modules = {id(m) for root in roots for m in root.modules()}
        rest = PackedLinears()
        rest._products = [p for p in self._products if id(p.modules[0]) not in modules]
        return rest

    @property
    def nbytes(self) -> int:
        """Memory of the packed copies."""
        return sum(m.weight.nbytes for product in self._products for m in product.modules)

    def __enter__(self) -> PackedLinears:
        if self._products:
            one_at_a_time(self).__enter__()
        for product in self._products:
            if product.is_current():
                product.install()
                self._active.append(product)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for product in self._active:
            product.remove()
        self._active.clear()
        if self._products:
            one_at_a_time(self).__exit__(kind, error, traceback)


def _go_together(group: Sequence[nn.Linear | None]) -> bool:
    """Whether these siblings, all of them there, can be one product."""
    first = group[0]
    return first is not None and all(
        m is not None
        and m.in_features == first.in_features
        and (m.bias is None) == (first.bias is None)
        and not any(m is other for other in group[:i])
        for i, m in enumerate(group)
    )


class PackedProduct:
    """One product from packed weights: one layer, or several that read the same input.

    Attributes:
        modules: the layers.
        sizes: columns of each in the product, in this order.
        packed: the packed weights, of all layers together.
        bias: their biases, or None.
        multiply: x [..., in] -> [..., sum(sizes)] from the packed copy.
    """

    def __init__(self, modules: Sequence[nn.Linear], memory: Tensor) -> None:
        self.modules = list(modules)
        self.sizes = [m.out_features for m in modules]
        self._seen = [
            (m, m.__dict__, m._parameters, m.weight, m.bias, weight_state(m.weight, m.bias))
            for m in modules
        ]
        weights = [m.weight.detach() for m in modules]
        biases = [m.bias.detach() for m in modules if m.bias is not None]
        # Kept: an address tells memory from other memory only while it is not given back.
        self._sources = weights + biases
        self.packed = _pack(weights[0] if len(weights) == 1 else torch.cat(weights), memory)
        self.bias = torch.cat(biases) if biases else None
        self.multiply = _multiply_by(self.packed, sum(self.sizes), self.bias)
        self._shared = _Shared(self.multiply, self.sizes)
        self._forwards = self._shared.forwards()

    def is_current(self) -> bool:
        """Whether the packed copy is of the layers' present weights and they run nothing else."""
        # straight from the dictionaries: this runs for every layer of every forward
        for module, own, parameters, weight, bias, state in self._seen:
            if (
                type(module) is not nn.Linear
                or parameters.get("weight") is not weight
                or parameters.get("bias") is not bias
                or "forward" in own
                or weight_state(weight, bias) != state
            ):
                return False
        return True

    def plain(self, x: Tensor) -> Tensor:
        """`multiply` by the layers themselves."""
        return torch.cat([m(x) for m in self.modules], dim=-1)

    def install(self) -> None:
        """Let the layers run from the product."""
        for module, forward in zip(self.modules, self._forwards, strict=True):
            module.__dict__["forward"] = forward

    def remove(self) -> None:
        """Let the layers be what they were."""
        for module in self.modules:
            module.__dict__.pop("forward", None)
        self._shared.forget()

    def forwards(self, multiply: Callable[[Tensor], Tensor]) -> list[Callable[[Tensor], Tensor]]:
        """A forward for each layer over ``multiply``, which runs once for a tensor they share."""
        return _Shared(multiply, self.sizes).forwards()


class _Shared:
    """A product's columns, handed out to each of its layers once."""

    def __init__(self, multiply: Callable[[Tensor], Tensor], sizes: Sequence[int]) -> None:
        self._multiply, self._sizes = multiply, list(sizes)
        self._x: Tensor | None = None
        self._columns: Sequence[Tensor] = ()
        self._taken: set[int] = set()

    def forwards(self) -> list[Callable[[Tensor], Tensor]]:
        if len(self._sizes) == 1:
            return [self._multiply]
        return [partial(self._take, i) for i in range(len(self._sizes))]

    def forget(self) -> None:
        self._x, self._columns = None, ()

    def _take(self, i: int, input: Tensor) -> Tensor:
        # A tensor that comes to a layer a second time may have been written to.
        if input is not self._x or i in self._taken:
            self._x, self._columns = input, self._multiply(input).split(self._sizes, dim=-1)
            self._taken.clear()
        out = self._columns[i]
        self._taken.add(i)
        if len(self._taken) == len(self._sizes):
            self.forget()
        return out


def weight_state(weight: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    """What changes when a linear layer's weights are written or replaced."""
    # inference tensors count no versions
    version = 0 if weight.is_inference() else weight._version
    if bias is None:
        return version, weight.data_ptr()
    return version, weight.data_ptr(), *weight_state(bias, None)
