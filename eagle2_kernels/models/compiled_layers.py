"""The decoder layers of a model as compiled parts, put in their places for one forward.

::

    layer(*args, **kwargs)  --its tensors, wherever in the arguments they are-->  CompiledPart
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from .compiled import CompiledPart, Kernels, find_specs, refuse_modules
from .packed import PackedLinears, in_use

__all__ = ["KEYWORD", "CompiledLayers", "TracedCall"]

# By this name a forward's context reaches the attention function of every layer.
KEYWORD = "eagle2"


@dataclass
class TracedCall:
    """What stands for a forward's context while a layer is traced."""

    emit: Callable[..., Tensor]

    def attend(
        self, i: int, query: Tensor, key: Tensor, value: Tensor, s_aux: Tensor | None = None
    ) -> Tensor:
        """Layer i's attention, which stays outside its kernels."""
        return self.emit(2, query, key, value, *([] if s_aux is None else [s_aux]))


class CompiledLayers:
    """A model's decoder layers in fused kernels, in the `over` block; see `compiled.py`.

    ``blocks`` are the layers, ``calls`` the arguments of each in two forwards of ``sizes``
    (requests, rows) each: what changed between them is a number of requests or rows.
    """

    def __init__(
        self,
        name: str,
        blocks: Sequence[nn.Module],
        calls: Sequence[Sequence[tuple[Any, Any]]],
        sizes: tuple[tuple[int, int], tuple[int, int]],
        packed: PackedLinears,
    ) -> None:
        self.kernels = Kernels()
        self._blocks = list(blocks)
        self._rest = packed.without(blocks)
        self._layers: list[_CompiledLayer] = []
        for i, (block, *pair) in enumerate(zip(blocks, *calls, strict=True)):
            where = f"layer {i} of {name}"
            refuse_modules(where, block)
            paths, tensors = zip(*_tensors_in(pair[0]), strict=True)
            others = [t for _, t in _tensors_in(pair[1])]
            try:
                specs = find_specs(tensors, sizes[0], others, sizes[1])
            except ValueError as error:
                raise ValueError(f"compile: {where} {error}: not supported") from error
            function = partial(_call_layer, block, pair[0], paths)
            products = packed.inside(block)
            part = CompiledPart(where, function, block, products, specs, self.kernels)
            self._layers.append(_CompiledLayer(part, [paths[j] for j in part.used]))

    @contextmanager
    def over(self, attend: Callable[..., Tensor]) -> Iterator[None]:
        """Layers run from their kernels in here; ``attend(i, q, k, v)`` is layer i's attention."""
        with in_use(self._rest):
            try:
                for i, (block, layer) in enumerate(zip(self._blocks, self._layers, strict=True)):
                    layer.part.refresh()
                    layer.attend = partial(attend, i)
                    block.__dict__["forward"] = layer.forward
                yield
            finally:
                for block, layer in zip(self._blocks, self._layers, strict=True):
                    block.__dict__.pop("forward", None)
                    layer.attend = None


@dataclass
class _CompiledLayer:
    """One layer's kernels, where its inputs are in the arguments, and its attention in a call."""

    part: CompiledPart
    paths: list[tuple[Any, ...]]
    attend: Callable[..., Tensor] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        tensors = []
        for path in self.paths:
            value: Any = (args, kwargs)
            for key in path:
                value = value[key]
            tensors.append(value)
        assert self.attend is not None
        return self.part(self.attend, tensors)


def _call_layer(
    block: nn.Module, arguments: Any, paths: Sequence[Any], emit: Any, *tensors: Tensor
) -> Tensor:
    """Run a layer's own code with ``tensors`` in the places ``paths`` of ``arguments``."""
    args, kwargs = _replaced(arguments, dict(zip(paths, tensors, strict=True)), ())
    kwargs[KEYWORD] = TracedCall(emit)
    output = type(block).forward(block, *args, **kwargs)
    if not isinstance(output, Tensor):
        raise TypeError(f"expected a tensor from the layer, got {type(output).__name__}")
    return output


def _tensors_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (tuple, list, dict)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors_in(part, (*path, key))


def _replaced(value: Any, tensors: dict[Any, Tensor], path: tuple[Any, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(part, tensors, (*path, key)) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_replaced(part, tensors, (*path, i)) for i, part in enumerate(value))
    return tensors.get(path, value)
