"""A layer as a few fused CPU kernels around its matrix products and its attention.

::

    x -> [norm] -> product -> [rotation] -> attention -> product -> [residual, norm] -> product ..
         kernel    outside      kernel       outside     outside        kernel          outside

A layer is traced with symbolic numbers of requests and rows, so one compilation serves prompts,
trees and plain decoding, and a row's bits depend on no other row. Layers of the same code share it.
What is computed better elsewhere stays outside: products from packed weights (`packed.py`), and
attention over the slot cache. Inductor (`torch.compile`'s backend) makes the kernels; that it needs
a C++ compiler at run time is the reason why none of this happens unasked.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .packed import PackedProduct

__all__ = ["Attend", "CompiledPart", "Kernels", "TensorSpec", "find_specs", "refuse_modules"]

# Requests and rows of the traced example. The compiler sizes its loops by them and takes care of
# other values, but would make constants of 0 and 1.
_EXAMPLE = {"B": 2, "N": 16}

_HINT = "; EagleDecoder(compile=False) runs layers eagerly"


# Attention of the new rows over the cache, where their keys and values go first: q, k, v as the
# layer has them, and sinks where it has some -> [B, N, Hq, D].
Attend = Callable[..., Tensor]


class TensorSpec(NamedTuple):
    """An input of a layer: "B" and "N" stand for the numbers of requests and rows."""

    shape: tuple[int | str, ...]
    dtype: torch.dtype


def find_specs(
    first: Sequence[Tensor],
    sizes: tuple[int, int],
    second: Sequence[Tensor],
    others: tuple[int, int],
) -> list[TensorSpec]:
    """What two calls with different numbers of requests and rows tell about a layer's inputs.

    Raises ValueError where a size changed with neither number.
    """
    specs = []
    for a, b in zip(first, second, strict=True):
        shape: list[int | str] = []
        for x, y in zip(a.shape, b.shape, strict=True):
            names = [n for n, *pair in zip("BN", sizes, others, strict=True) if pair == [x, y]]
            if not names and x != y:
                raise ValueError(f"takes a tensor of {list(a.shape)} for {sizes[1]} rows")
            shape.append(names[0] if names else x)
        specs.append(TensorSpec(tuple(shape), a.dtype))
    return specs


_library = torch.library.Library("eagle2_models", "DEF")
_library.define("outside(Tensor[] inputs, int slot, SymInt[] shape) -> Tensor")


class _Running(threading.local):
    """What the slots of the part that runs in this thread are."""

    slots: Sequence[Callable[..., Tensor]] = ()


_running = _Running()


def _outside(inputs: list[Tensor], slot: int, shape: list[int]) -> Tensor:
    return _running.slots[slot](*inputs)


def _fake_outside(inputs: list[Tensor], slot: int, shape: list[int]) -> Tensor:
    return inputs[0].new_empty(shape)


_library.impl("outside", _outside, "CPU")
torch.library.register_fake("eagle2_models::outside", _fake_outside, lib=_library)
_call_outside = torch.ops.eagle2_models.outside.default


def _attend_outside(rows_dim: int, *inputs: Tensor) -> Tensor:
    q, v = inputs[0], inputs[2]
    heads = 3 - rows_dim
    return _call_outside(inputs, 0, [q.shape[0], q.shape[rows_dim], q.shape[heads], v.shape[3]])


def _product_outside(slot: int, columns: int, x: Tensor) -> Tensor:
    return _call_outside([x], slot, [*x.shape[:-1], columns])


class _Piece(nn.Module):
    """A function of tensors whose weights are ``module``'s, for `functional_call`."""

    def __init__(self, module: nn.Module, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module = module
        self._function = function

    def forward(self, *tensors: Tensor) -> tuple[Tensor]:
        return (self._function(*tensors),)


class _Graph(NamedTuple):
    """What was traced, without the inputs that nobody reads: most are weights of products."""

    module: torch.fx.GraphModule
    inputs: list[Tensor]
    used: list[int]


class _Compiled(NamedTuple):
    run: Callable[..., Any]
    used: list[int]
    layouts: list[tuple[Any, ...]]


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device


class Kernels:
    """Compiled graphs by their code: layers of the same code share one."""

    def __init__(self) -> None:
        self._compiled: dict[object, _Compiled] = {}

    def __len__(self) -> int:
        """Graphs compiled."""
        return len(self._compiled)

    def of(self, name: str, trace: Callable[[bool], _Graph]) -> _Compiled:
        """The kernels of what ``trace(symbolic)`` gives.

        Code and inputs of the trace with numbers tell layers apart, in an eighth of the time that
        the trace with symbols takes. Raises RuntimeError when Inductor fails.
        """
        graph = trace(False)
        layouts = [_layout(graph.inputs[i]) for i in graph.used]
        key = graph.module.code, tuple(graph.used), tuple(layouts)
        if key not in self._compiled:
            graph = trace(True)
            inputs = [graph.inputs[i] for i in graph.used]
            try:
                run = _compile(graph.module, inputs)
            except Exception as error:
                said = str(error).strip().splitlines() or [type(error).__name__]
                raise RuntimeError(
                    f"compile: Inductor made no kernels of {name} (it needs a C++ compiler: g++, "
                    f"or what the variable CXX names): {said[0]}{_HINT}"
                ) from error
            self._compiled[key] = _Compiled(run, graph.used, layouts)
        return self._compiled[key]


def _compile(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    from torch import _inductor
    from torch._inductor import config

    # A part looks at its inputs itself: looking at every tensor in between costs 2 % of a step.
    unneeded = [name for name in ("size_asserts", "alignment_asserts") if hasattr(config, name)]
    return _inductor.compile(graph, inputs, options=dict.fromkeys(unneeded, False))


class CompiledPart:
    """``function(attend, *tensors)`` -> [B, N, ...] with its work in fused kernels.

    Args:
        name: for errors.
        function: traced once; it calls ``module`` or parts of it, and ``attend`` with the rows'
            dimension, q, k, v [B, N, H, D] or [B, H, N, D] and sinks.
        module: whose parameters and buffers ``function`` reads; they are read anew at each call.
        products: products that stay outside.
        specs: of ``tensors``.
        kernels: where the result is shared.

    Raises:
        ValueError: ``function`` cannot be traced, draws random numbers, or looks at values.
        RuntimeError: there is no C++ compiler.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Tensor],
        module: nn.Module,
        products: Sequence[PackedProduct],
        specs: Sequence[TensorSpec],
        kernels: Kernels,
    ) -> None:
        self._name, self._products = name, list(products)
        piece = _Piece(module, partial(function, _attend_outside))
        compiled = kernels.of(name, partial(_trace, name, piece, self._products, specs))
        self._run, count = compiled.run, len(specs)
        self.used = [i for i in compiled.used if i < count]
        """Which of ``tensors`` are read: `__call__` takes these."""
        tables = list(_tables(piece))
        self._weights = [tables[i - count][1:] for i in compiled.used if i >= count]
        # Of each module: what it holds now and what it held; its hooks. Straight from the
        # dictionaries: this runs for every layer of every forward.
        self._modules = [(m._modules, dict(m._modules)) for m in module.modules()]
        inner = [m for m in module.modules() if m is not module]
        self._hooks = [h for m in inner for h in (m._forward_hooks, m._forward_pre_hooks)]
        self._layouts = compiled.layouts[len(self.used) :]
        self._specs = [specs[i] for i in self.used]
        self._right: set[tuple[Any, ...]] = set()
        self._slots: list[Callable[..., Tensor]] = []

    def refresh(self) -> None:
        """Look whether weights changed since the last call: in place, or replaced by their like.

        Raises ValueError where they have another shape, dtype or device now, or where the modules
        they are in were replaced or carry hooks.
        """
        hooked = any(self._hooks)
        if hooked or any([now != before for now, before in self._modules]):
            raise ValueError(
                f"compile: expected {self._name} with the modules it was compiled from, got "
                f"{'hooks on some' if hooked else 'others'}; make a new decoder"
            )
        layouts = [_layout(owner[key]) for owner, key in self._weights]
        if layouts != self._layouts:
            i = next(
                i
                for i, pair in enumerate(zip(layouts, self._layouts, strict=True))
                if pair[0] != pair[1]
            )
            raise ValueError(
                f"compile: expected {self._name} with weights of the shapes, dtypes and device "
                f"it was compiled for, {self._layouts[i]}, got {layouts[i]}; make a new decoder"
            )
        self._slots = [p.multiply if p.is_current() else p.plain for p in self._products]

    def __call__(self, attend: Attend, tensors: Sequence[Tensor]) -> Tensor:
        """Run the kernels; `refresh` comes first, whenever something may have changed.

        Raises ValueError for tensors that do not fit the specs.
        """
        given = tuple([(t.shape, t.dtype) for t in tensors])
        if given not in self._right:
            self._check(given)
            self._right.add(given)
        weights = [owner[key] for owner, key in self._weights]
        before, _running.slots = _running.slots, (attend, *self._slots)
        try:
            return self._run(*[t.contiguous() for t in tensors], *weights)[0]
        finally:
            _running.slots = before

    def _check(self, given: tuple[Any, ...]) -> None:
        sizes: dict[int | str, int] = {}
        for (shape, dtype), spec in zip(given, self._specs, strict=True):
            fits = dtype == spec.dtype and len(shape) == len(spec.shape)
            # the first that says B or N decides what it is
            if not fits or any(
                size != (sizes.setdefault(d, size) if isinstance(d, str) else d)
                for size, d in zip(shape, spec.shape, strict=True)
            ):
                raise ValueError(
                    f"compile: {self._name} expected {list(spec.shape)} {spec.dtype} with "
                    f"{sizes}, got {list(shape)} {dtype}"
                )


def _tables(piece: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Name, owner and key of each parameter and buffer of a `_Piece`."""
    for prefix, module in piece.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for key, value in table.items():
                if value is not None:
                    yield f"{prefix}.{key}" if prefix else key, table, key


def _trace(
    name: str,
    piece: nn.Module,
    products: Sequence[PackedProduct],
    specs: Sequence[TensorSpec],
    symbolic: bool,
) -> _Graph:
    """The operators of ``piece``; its inputs are fakes of the tensors, then of all its weights."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
    )

    names = [weight for weight, _, _ in _tables(piece)]
    # Equal sizes are not the same number, and no size or branch may depend on values.
    shapes = ShapeEnv(
        duck_shape=False, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False
    )
    mode = FakeTensorMode(shape_env=shapes)

    def fake(t: Tensor, kind: DimDynamic) -> Tensor:
        context: Any = StatelessSymbolicContext(dynamic_sizes=[kind] * t.dim())
        return mode.from_tensor(t.detach(), symbolic_context=context)

    def run(*inputs: Tensor) -> tuple[Tensor]:
        tensors, weights = inputs[: len(specs)], inputs[len(specs) :]
        table = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(piece, table, tensors, tie_weights=False)

    kind = DimDynamic.DYNAMIC if symbolic else DimDynamic.STATIC
    example = fake(torch.empty(*_EXAMPLE.values()), kind)
    sizes = dict(zip(_EXAMPLE, example.shape, strict=True))
    with mode:
        inputs = [
            torch.empty([sizes[d] if isinstance(d, str) else d for d in s.shape], dtype=s.dtype)
            for s in specs
        ]
    inputs += [fake(table[key], DimDynamic.STATIC) for _, table, key in _tables(piece)]
    try:
        with mode, contextlib.ExitStack() as stack:
            for slot, product in enumerate(products, start=1):
                outside = partial(_product_outside, slot, sum(product.sizes))
                for module, forward in zip(product.modules, product.forwards(outside), strict=True):
                    module.__dict__["forward"] = forward
                stack.callback(product.remove)
            graph = make_fx(run)(*inputs)
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"compile: {name} cannot be traced: {said[0]}{_HINT}") from error
    _refuse_nodes(name, graph)
    used = []
    for i, node in enumerate(n for n in list(graph.graph.nodes) if n.op == "placeholder"):
        if node.users:
            used.append(i)
        else:
            graph.graph.erase_node(node)
    graph.recompile()
    return _Graph(graph, inputs, used)


def _refuse_nodes(name: str, graph: torch.fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            why = "keeps a tensor that is neither a parameter nor a buffer"
        elif torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            why = f"draws random numbers ({node.target})"
        else:
            continue
        raise ValueError(f"compile: {name} {why}: not supported{_HINT}")


def refuse_modules(name: str, module: nn.Module) -> None:
    """Raise ValueError for what runs beside a module's own code and would be lost when traced."""
    for path, m in module.named_modules():
        where = f"{name}.{path}" if path else name
        if "forward" in vars(m):
            why = "has a forward put in its place (accelerate?)"
        elif path and (m._forward_hooks or m._forward_pre_hooks):
            why = "carries hooks"
        else:
            kinds = {type(p) for p in m.parameters(recurse=False)} - {nn.Parameter}
            if not kinds:
                continue
            why = f"has weights of a kind of its own, {kinds.pop().__name__}"
        raise ValueError(f"compile: {where} {why}: not supported{_HINT}")
