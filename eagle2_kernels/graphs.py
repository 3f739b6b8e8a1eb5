"""Decode steps as CUDA graphs: captured once per bucket, then one launch a step.

A bucket is what captured kernels were given for good: the step (models, tree shape, what is kept),
the shapes of the state's tensors, the number of requests among them, and the addresses of caches
and weights. What moves from step to step lies in buffers that stay where they are: a call copies
its state in, and every replay ends by writing the next step's state over this one's.

The first step of a new bucket runs eagerly and compiles what is compiled at first use. The second
runs eagerly over the buffers, with operators refused that wait for the device. The third is
captured.
"""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from . import _checks, ops
from .step import PlainStep, State, TreeStep, Verified

if TYPE_CHECKING:
    from .models.heads import EagleHead
    from .models.target import TargetModel

__all__ = ["CaptureError", "CudaRecorder", "NoWaits", "Recorder", "StepGraphs", "check_capturable"]

Step = TreeStep | PlainStep
KEPT = 8
"""Buckets whose graphs are kept beside one pair of caches; the least recently used goes first."""

_OFF = "; EagleDecoder(cuda_graph=False) runs steps eagerly"


class CaptureError(RuntimeError):
    """A step cannot be captured as a CUDA graph; the message says what stands in the way."""


class Recorder(Protocol):
    """How a step is recorded."""

    device_type: str

    def __init__(self, device: torch.device) -> None: ...

    def run(self, body: Callable[[], Verified]) -> Verified:
        """Run ``body`` eagerly, where captures will be made."""

    def capture(self, body: Callable[[], Verified]) -> tuple[Callable[[], None], Verified]:
        """Record ``body`` without running it: a replay, and what every replay writes."""


class CudaRecorder:
    """CUDA graphs of one device: a side stream for warm-up and capture, and one memory pool."""

    device_type = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, body: Callable[[], Verified]) -> Verified:
        """Run ``body`` on the side stream, between what the caller's stream did and will do."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = body()
        current.wait_stream(self._stream)
        return result

    def capture(self, body: Callable[[], Verified]) -> tuple[Callable[[], None], Verified]:
        """Capture ``body``; other threads may go on using the device."""
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError("cuda_graph: expected no capture around this one" + _OFF)
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                capture_error_mode="thread_local",
            ),
        ):
            result = body()
        return graph.replay, result


class StepGraphs:
    """The graphs over one pair of caches, by bucket."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._graphs: OrderedDict[object, _StepGraph] = OrderedDict()
        self._weights: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Buckets at hand."""
        return len(self._graphs)

    def take(self, step: Step, state: State) -> Callable[[], Verified]:
        """``step`` over ``state``, as a graph from the third call of its bucket on.

        ``state``'s tensors become the bucket's buffers: write into them, do not replace them.

        Raises:
            ValueError: the tree shape's drafting reads values back.
        """
        if isinstance(step, TreeStep) and step.config.stop_below > 0:
            raise ValueError(
                "config: expected stop_below 0 with cuda_graph, for every level would read a value "
                f"back, got {step.config.stop_below}{_OFF}"
            )
        weights = _addresses(step)
        if weights != self._weights:
            self._graphs.clear()
            self._weights = weights
        key = bucket(step, state)
        graph = self._graphs.pop(key, None) or _StepGraph(self._recorder, step)
        self._graphs[key] = graph
        while len(self._graphs) > KEPT:
            self._graphs.popitem(last=False)
        return graph.over(state)


def bucket(step: Step, state: State) -> object:
    """What a graph is captured for; steps compare by their models and settings."""
    shapes = tuple(
        (name, tuple(t.shape), t.dtype)
        for name, t in state.tensors().items()
        if not name.startswith("pending")
    )
    return step, shapes


def _addresses(step: Step) -> tuple[int, ...]:
    """Where the weights are: a replay reads them there."""
    models = [step.target.hf_model, *([step.head] if isinstance(step, TreeStep) else [])]
    return tuple(t.data_ptr() for m in models for t in (*m.parameters(), *m.buffers()))


class _StepGraph:
    """One bucket: its buffers and, once captured, its graph."""

    def __init__(self, recorder: Recorder, step: Step) -> None:
        self._recorder, self._step = recorder, step
        self._buffers: State | None = None
        self._checked = False
        self._replay: Callable[[], None] | None = None
        self._result: Verified | None = None

    def over(self, state: State) -> Callable[[], Verified]:
        """A call's steps; the first of them in a new bucket runs on ``state`` as it is."""
        fresh = self._buffers is None
        if not fresh:
            self._load(state)

        def run() -> Verified:
            nonlocal fresh
            if self._buffers is None:
                if fresh:
                    fresh = False
                    return self._recorder.run(lambda: self._step(state))
                self._hold(state)
            return self._advance()

        return run

    def _hold(self, state: State) -> None:
        """Make buffers of ``state``'s tensors."""
        state.set_tensors({name: t.clone() for name, t in state.tensors().items()})
        self._buffers = replace(state)

    def _load(self, state: State) -> None:
        """Copy ``state`` into the buffers; no pair is pending at the start of a call."""
        assert self._buffers is not None
        buffers = self._buffers.tensors()
        for name, value in state.tensors().items():
            buffers[name].copy_(value)
        if self._buffers.pending is not None:
            self._buffers.pending[2].zero_()
        state.set_tensors(buffers)

    def _advance(self) -> Verified:
        if not self._checked:
            # Refused once, a step is refused again: only what passed is captured.
            result = self._recorder.run(self._checked_body)
            self._checked = True
            return result
        if self._replay is None:
            try:
                self._replay, self._result = self._recorder.capture(self._body)
            except CaptureError:
                raise
            except Exception as error:
                raise CaptureError(_explain(error)) from error
        self._replay()
        assert self._result is not None
        return self._result

    def _checked_body(self) -> Verified:
        with NoWaits():
            return self._body()

    def _body(self) -> Verified:
        """One step from the buffers to the buffers."""
        assert self._buffers is not None
        moving = replace(self._buffers)
        result = self._step(moving)
        moved = moving.tensors()
        for name, buffer in self._buffers.tensors().items():
            value = moved[name]
            if (value.shape, value.dtype) != (buffer.shape, buffer.dtype):
                raise CaptureError(
                    f"cuda_graph: expected {name} of the same shape at every step, "
                    f"{tuple(buffer.shape)} {buffer.dtype}, got {tuple(value.shape)} {value.dtype}"
                    + _OFF
                )
            if value is not buffer:
                buffer.copy_(value)
        return result


class NoWaits(TorchDispatchMode):
    """Refuses operators for which the host waits, with the line that called them.

    Raises `CaptureError` for an operator whose result is a host value or has a shape that depends
    on values (an index by a mask is ``nonzero`` in disguise), and for copies between devices.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        reason = _why_it_waits(func, args)
        if not reason:
            result = func(*args, **(kwargs or {}))
            devices = {
                t.device
                for t in (*args, result)
                if isinstance(t, Tensor) and (t.dim() > 0 or t.device.type != "cpu")
            }
            if len(devices) < 2 or func.namespace != "aten":
                return result
            reason = f"copies between {' and '.join(sorted(map(str, devices)))}"
        raise CaptureError(
            f"cuda_graph: {func} {reason}, called at {_callers_line()}: such a step cannot be "
            f"captured{_OFF}"
        )


_WAITS = {
    torch.Tag.data_dependent_output: "hands a value to the host",
    torch.Tag.dynamic_output_shape: "gives a shape that depends on values",
}
_INDEX = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_}


def _why_it_waits(func: Any, args: tuple[Any, ...]) -> str:
    if func.overloadpacket in _INDEX:
        masks = (torch.bool, torch.uint8)
        by_mask = any(i is not None and i.dtype in masks for i in args[1])
        return _WAITS[torch.Tag.dynamic_output_shape] if by_mask else ""
    return next((why for tag, why in _WAITS.items() if tag in func.tags), "")


def _callers_line() -> str:
    """The innermost line that is neither PyTorch's nor this file's."""
    torch_folder = str(torch.__path__[0])
    for frame in reversed(traceback.extract_stack()):
        if frame.filename != __file__ and not frame.filename.startswith(torch_folder):
            return f"{frame.filename}:{frame.lineno}"
    return "an unknown line"


def _explain(error: BaseException) -> str:
    """What CUDA said first, and where: a capture that broke complains again when it is closed."""
    while error.__context__ is not None:
        error = error.__context__
    frames = traceback.extract_tb(error.__traceback__)
    torch_folder = str(torch.__path__[0])
    own = [f for f in frames if not f.filename.startswith(torch_folder)]
    where = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"cuda_graph: the step could not be captured{where}: {said}{_OFF}"


def check_capturable(target: TargetModel, head: EagleHead, device_type: str) -> None:
    """Raise ValueError for what no step could be captured with."""
    if target.device.type != device_type:
        raise ValueError(
            f"cuda_graph: expected the models on a CUDA device, got {target.device}{_OFF}"
        )
    if ops.backend() == "reference":
        raise ValueError(
            "cuda_graph: expected compiled operators, got EAGLE2_BACKEND=reference, which reads "
            f"values back{_OFF}"
        )
    if _checks.VALIDATE:
        raise ValueError(
            f"cuda_graph: expected EAGLE2_VALIDATE unset: full checks read values back{_OFF}"
        )
    models: list[nn.Module] = [target.hf_model, head]
    devices = {str(t.device) for m in models for t in (*m.parameters(), *m.buffers())}
    if len(devices) > 1:
        raise ValueError(
            f"cuda_graph: expected the models on one device, got {', '.join(sorted(devices))}{_OFF}"
        )
