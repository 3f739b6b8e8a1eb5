"""Linear layers whose weights come from memory, as those of a decoding step do.

packed_linear against torch's own linear layer and oneDNN's packed one. Each call takes the next of
as many copies of the weight as no cache holds; "forward" is all products of a forward of
SmolLM2-135M, one after another, our weights in one piece of memory as `PackedLinears` has them (so
that they lie in huge pages). The floor is the weight's bytes at the read bandwidth or the
operations at the matmul rate, whichever is longer, and the forward's that of its products together.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from runner import Case
from torch.nn import functional

import eagle2_kernels as ek

OPS = ("packed_linear",)

Product = Callable[[torch.Tensor], torch.Tensor]

_BYTES = 256 << 20  # of the copies: what was read is out of the caches when it is read again
_ROWS = (1, 8, 16, 32, 256)
# (out, in): q/k/v, o, gate/up and down of SmolLM2-135M, its lm_head; q/k/v and gate/up of Llama 8B
_LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
_LM_HEAD = (49_152, 576)
_LARGE = ((6144, 4096), (28_672, 4096))


def _ours(weight: torch.Tensor, memory: torch.Tensor | None = None) -> Product:
    out, inputs = weight.shape
    if memory is None:
        packed = ek.pack_linear_weight(weight)
    else:
        packed = memory.view(-(-out // 32), inputs // 2, 32, 2)
        torch.ops.eagle2_kernels.pack_linear_weight_out(weight, packed=packed)
    return lambda x: ek.packed_linear(x, packed, out)


def _torch(weight: torch.Tensor) -> Product:
    weight = weight.clone()
    return lambda x: functional.linear(x, weight)


def _onednn(weight: torch.Tensor) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, packed, None, "none", [], "")


def _providers() -> dict[str, Callable[[torch.Tensor], Product]]:
    found = {"ours": _ours, "torch linear": _torch}
    if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        found["oneDNN packed"] = _onednn
    return found


def _weight(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape).div(shape[1] ** 0.5).bfloat16()


def _one(shape: tuple[int, int], rows: Sequence[int], copies: int) -> Iterator[Case]:
    """The next copy at every call."""
    weight = _weight(shape)
    made = {name: [make(weight) for _ in range(copies)] for name, make in _providers().items()}
    turns = {name: itertools.cycle(products) for name, products in made.items()}
    for n in rows:
        x = torch.randn(n, shape[1]).bfloat16()
        want = functional.linear(x.float(), weight.float())

        def check(name, got, want=want):
            torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=2**-7, msg=name)

        yield Case(
            "packed_linear",
            f"{shape[0]}x{shape[1]}-N{n}",
            {name: lambda x=x, turn=turn: next(turn)(x) for name, turn in turns.items()},
            check,
            bytes=weight.nbytes + x.nbytes + 2 * want.numel(),
            flops=2 * want.numel() * shape[1],
            dtype=torch.bfloat16,
            calls=max(1, min(copies, 20_000_000 // (weight.numel() * n))),
        )


def _forward(rows: Sequence[int]) -> Iterator[Case]:
    """All products of a forward; the result is that of the lm_head."""
    shapes = [*_LAYER * 30, _LM_HEAD]
    weights = {shape: _weight(shape) for shape in {*shapes}}
    sizes = [-(-out // 32) * 32 * inputs for out, inputs in shapes]
    parts = torch.empty(sum(sizes), dtype=torch.bfloat16).split(sizes)
    made = {"ours": [_ours(weights[s], part) for s, part in zip(shapes, parts, strict=True)]}
    made |= {
        name: [make(weights[s]) for s in shapes]
        for name, make in _providers().items()
        if name not in made
    }
    widths = [shape[1] for shape in shapes]
    for n in rows:
        x = {width: torch.randn(n, width).bfloat16() for width in {*widths}}
        want = functional.linear(x[576].float(), weights[_LM_HEAD].float())

        def run(products, x=x):
            for product, width in zip(products, widths, strict=True):
                out = product(x[width])
            return out

        def check(name, got, want=want):
            torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=2**-7, msg=name)

        size = sum(a * b for a, b in shapes)
        yield Case(
            "packed_linear",
            f"SmolLM2-forward-N{n}",
            {name: functools.partial(run, products) for name, products in made.items()},
            check,
            bytes=2 * size + 2 * n * sum(a + b for a, b in shapes),
            flops=2 * n * size,
            dtype=torch.bfloat16,
        )


def cases(device: torch.device, *, quick: bool) -> Iterator[Case]:
    """Few rows and many; for the CPU only, as the operator."""
    if device.type != "cpu":
        return
    if quick:
        yield from _one((70, 33), (3,), 2)
        return
    yield from _forward(_ROWS)
    for shape in (*_LAYER, _LM_HEAD, *_LARGE):
        yield from _one(shape, _ROWS, -(-_BYTES // (2 * shape[0] * shape[1])))
