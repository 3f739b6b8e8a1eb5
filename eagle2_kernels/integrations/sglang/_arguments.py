"""What the functions of every file here take: both spellings, and either width of integers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

INTEGERS = (torch.int32, torch.int64)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def both_spellings(function: _Function) -> _Function:
    """Let keyword arguments ``retrieve_...`` be spelled ``retrive_...``, as in sgl-kernel."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in [key for key in kwargs if key.startswith("retrive_")]:
            right = "retrieve_" + name.removeprefix("retrive_")
            if right in kwargs:
                raise TypeError(f"{right}: expected one spelling of the argument, got two")
            kwargs[right] = kwargs.pop(name)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
