"""Long-form argument checks.

A public wrapper calls its op first. Only when the op refuses, or when validation is asked for, do
these run: they say which argument is wrong, what was expected and what came.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

VALIDATE = os.environ.get("EAGLE2_VALIDATE", "0") not in ("", "0")
"""Whether every call checks the values of its tensors (``EAGLE2_VALIDATE=1``)."""

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def call(op: Callable[..., Any], check: Callable[..., None], validate: bool, *args: Any) -> Any:
    """``op(*args)``; ``check(*args, values=...)`` explains a refusal, or runs first on request."""
    if validate or VALIDATE:
        check(*args, values=True)
    try:
        return op(*args)
    except (RuntimeError, TypeError, ValueError):
        check(*args, values=False)
        raise


def refuse_grad(**tensors: Tensor | float | None) -> None:
    """Raise in grad mode for the first argument that requires grad: no op has a backward."""
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if getattr(tensor, "requires_grad", False):
                raise ValueError(
                    f"{name}: expected a tensor that does not require grad, because this operator "
                    "is not differentiable; call it under torch.no_grad() or on a detached tensor"
                )


def tensor(
    name: str,
    value: object,
    dtypes: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int | None],
    layout: str,
) -> None:
    """Check one tensor; None in ``shape`` accepts any size, ``layout`` is how messages call it."""
    if isinstance(dtypes, torch.dtype):
        dtypes = (dtypes,)
    names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    if not isinstance(value, Tensor):
        article = "an" if names.startswith("int") else "a"
        raise TypeError(
            f"{name}: expected {article} {names} tensor {layout}, got {type(value).__name__}"
        )
    if value.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {names}, got {str(value.dtype)[6:]}")
    got = tuple(value.shape)
    if len(got) != len(shape) or any(
        w is not None and g != w for g, w in zip(got, shape, strict=True)
    ):
        sizes = ", ".join("any" if w is None else str(w) for w in shape)
        raise ValueError(f"{name}: expected shape {layout} = ({sizes}), got {got}")


def written(**tensors: Tensor | None) -> None:
    """No element of a tensor that is written lies at several places, as in an expanded one."""
    for name, value in tensors.items():
        if value is not None and any(
            n > 1 and s == 0 for n, s in zip(value.shape, value.stride(), strict=True)
        ):
            raise ValueError(
                f"{name}: expected a tensor to write to, got an expanded one "
                f"(shape {tuple(value.shape)}, strides {value.stride()})"
            )


def scale(name: str, value: object, values: bool) -> None:
    """Check the scale of a float8 tensor; ``values`` reads it."""
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        got = str(value.dtype)[6:] if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name}: expected a float32 tensor of one element, got {got}")
    if value.numel() != 1:
        raise ValueError(f"{name}: expected one element, got shape {tuple(value.shape)}")
    if values and not 0 < float(value) < float("inf"):
        raise ValueError(f"{name}: expected a positive finite number, got {float(value)}")


def integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """Check a host integer, bounds included."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < low or (high is not None and value > high):
        # Where only the width of integers bounds a number, a small one is told of the other end.
        open_ended = high is None or (value < low and high >= 2**30 - 1)
        wanted = f"at least {low}" if open_ended else f"{low} to {high}"
        raise ValueError(f"{name}: expected {wanted}, got {value}")


def number(name: str, value: object) -> None:
    """Check a host number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")


def same_device(**tensors: Tensor | None) -> None:
    """All tensors given lie on the device of the first."""
    device = None
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            continue  # absent, or refused by the check of its type
        if device is None:
            device = value.device
        elif value.device != device:
            raise ValueError(f"{name}: expected a tensor on {device}, got one on {value.device}")


def values_in(name: str, value: Tensor, low: float, high: float) -> None:
    """Every element lies in [low, high]; reads the tensor back to the host."""
    wrong = ~((value >= low) & (value <= high))
    refuse_where(wrong, name, f"a value from {low} to {high}", value)


def refuse_where(wrong: Tensor, name: str, expected: str, value: Tensor) -> None:
    """Raise for the first place where ``wrong`` holds; reads it back to the host."""
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        place = ", ".join(map(str, at))
        raise ValueError(f"{name}[{place}]: expected {expected}, got {value[at].item()}")


def distinct_in_rows(name: str, value: Tensor, counted: Tensor | None = None) -> None:
    """No two entries of a row of [B, n] are alike, where ``counted`` holds (reads it back)."""
    same = (value[:, :, None] == value[:, None, :]).tril(-1)
    if counted is not None:
        same &= counted[:, :, None] & counted[:, None, :]
    found = same.nonzero()
    if len(found):
        r, later, earlier = found[0].tolist()
        raise ValueError(
            f"{name}[{r}, {later}]: expected distinct entries in a row, got "
            f"{value[r, later].item()}, which {name}[{r}, {earlier}] is too"
        )


def log_probabilities(name: str, value: Tensor) -> None:
    """No element lies above 0 by more than rounding; NaN and -inf pass (reads it back)."""
    values_in(name, torch.where(value.isnan(), -torch.inf, value), -torch.inf, _ROUNDING)


_ROUNDING = 1e-5
"""How far above 0 rounding may leave the logarithm of a probability of 1."""


def vocabulary_map(name: str, ids: Tensor, vocab_size: int) -> None:
    """A draft vocabulary's target ids [V]: in the target's vocabulary, no two alike (host read)."""
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise TypeError(f"{name}: expected integer target ids, got {str(ids.dtype)[6:]}")
    if ids.dim() != 1 or not len(ids):
        raise ValueError(
            f"{name}: expected at least one target id, in one dimension, got shape "
            f"{tuple(ids.shape)}"
        )
    values_in(name, ids, 0, vocab_size - 1)
    ordered, entries = ids.sort(stable=True)
    later = entries[1:][ordered[1:] == ordered[:-1]]
    if later.numel():
        at = int(later.min())
        first = int((ids == ids[at]).nonzero()[0])
        raise ValueError(
            f"{name}[{at}]: expected distinct target ids, got {int(ids[at])}, which "
            f"{name}[{first}] is too ({later.numel()} repeated in all)"
        )


def parents(parents: Tensor, num_nodes: Tensor, *, values: bool) -> None:
    """Parents [B, N] and num_nodes [B]; by value: a root, no parent outside the tree, no cycle."""
    tensor("parents", parents, torch.int32, (None, None), "[B, N]")
    b, n = parents.shape
    tensor("num_nodes", num_nodes, torch.int32, (b,), "[B]")
    same_device(parents=parents, num_nodes=num_nodes)
    if not values:
        return
    values_in("num_nodes", num_nodes, 0, n)
    for r, count in enumerate(num_nodes.tolist()):
        row = parents[r].tolist()
        if count > 0 and row[0] != -1:
            raise ValueError(f"parents[{r}, 0]: expected -1 at the root, got {row[0]}")
        reached = {0}
        for slot in range(1, count):
            walk = []
            while slot not in reached and slot not in walk:
                walk.append(slot)
                if not 0 <= row[slot] < count:
                    raise ValueError(
                        f"parents[{r}, {slot}]: expected a slot from 0 to {count - 1}, "
                        f"got {row[slot]}"
                    )
                slot = row[slot]
            if slot not in reached:
                raise ValueError(
                    f"parents[{r}, {slot}]: expected no cycle, but slot {slot} is its own ancestor"
                )
            reached.update(walk)
