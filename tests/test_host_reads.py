"""A decode step reads back the tokens it emitted, once, and nothing else waits for the device."""

import os

import pytest
import torch
from tiny_models import tiny_head, tiny_model
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

import eagle2_kernels as ek
from eagle2_kernels import EagleDecoder, SamplingParams, TreeConfig

PROMPTS = [[3, 4, 5, 6, 7], [11], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 12, 13, 14]]
# Tensor methods that hand values to the host; a CPU tensor's never reach the dispatcher.
_METHODS = {
    f"torch.Tensor.{name}"
    for name in ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
} | {"torch.Tensor.__array__", "torch.Tensor.__complex__", "torch.Tensor.data_ptr"}
_WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEX = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_}
# Values of the host become a tensor: on a GPU a copy to the device.
_UPLOADS = {"torch.tensor", "torch.as_tensor", "torch.asarray", "torch.from_numpy"}


class _Methods(TorchFunctionMode):
    def __init__(self, reads, uploads):
        self._reads, self._uploads = reads, uploads

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = resolve_name(func) or getattr(func, "__name__", "")
        if name in _METHODS:
            self._reads.append(name.removeprefix("torch.Tensor."))
        if name in _UPLOADS:
            self._uploads.append(name)
        return func(*args, **(kwargs or {}))


class _Dispatch(TorchDispatchMode):
    """Operators that a device cannot run ahead of the host.

    PyTorch tags those whose result is a host value or whose output shape depends on values; an
    index by a mask is ``nonzero`` in disguise.
    """

    def __init__(self, reads):
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in _INDEX:
            waits = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        else:
            waits = not _WAITS.isdisjoint(func.tags)
        if waits:
            self._reads.append(str(func))
        return func(*args, **(kwargs or {}))


class HostReads:
    """Context that lists in ``reads`` what made the host wait, in ``uploads`` what it sent."""

    def __init__(self):
        self.reads, self.uploads = [], []

    def __enter__(self):
        self._modes = (_Methods(self.reads, self.uploads), _Dispatch(self.reads))
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error):
        for mode in reversed(self._modes):
            mode.__exit__(*error)


X = torch.tensor([3, 0, 2])
READS = {
    "item": lambda: X[0].item(),
    "int": lambda: int(X[0]),
    "index": lambda: [1, 2, 3, 4][X[0]],
    "float": lambda: float(X[0]),
    "if": lambda: 1 if X[0] else 2,
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "cpu": lambda: X.cpu(),
    "nonzero": lambda: X.nonzero(),
    "mask": lambda: X[X > 0],
    "where": lambda: torch.where(X > 0),
    "mask_assignment": lambda: X.clone().__setitem__(X > 5, X[:0]),
    "masked_select": lambda: torch.masked_select(X, X > 0),
    "repeat_interleave": lambda: X.repeat_interleave(X),
    "unique": lambda: X.unique(),
    "equal": lambda: torch.equal(X, X + 0),
    "bincount": lambda: X.bincount(),
    "slice": lambda: X[: X[1] + 1],
}


@pytest.mark.parametrize("name", READS)
def test_a_read_is_seen(name):
    with HostReads() as seen:
        READS[name]()
    assert seen.reads


def test_what_needs_no_value_is_not_seen():
    with HostReads() as seen:
        y = X.clone()
        y[torch.tensor([1, 2])] = 5
        y.masked_fill_(y > 4, 0)
        torch.where(y > 0, y, X)[X % 3].gather(0, X % 3).topk(2)
        ek.sample_tokens(torch.randn(1, 2, 5), X[None, :2], 1, temperature=0.5)
    assert seen.reads == [] and seen.uploads == ["torch.tensor"]


@pytest.mark.parametrize("plain", [False, True], ids=["tree", "plain"])
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_a_step_reads_its_tokens_and_nothing_else(model, plain):
    """What a step sends is who still wants a token, where that has changed."""
    pytest.importorskip("transformers")
    if ek.ops.backend() == "reference" or os.environ.get("EAGLE2_VALIDATE", "0") != "0":
        pytest.skip("the oracle and full validation read what they like")
    target = tiny_model(model)
    decoder = EagleDecoder(target, tiny_head(target, list(range(5, 45))))
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.1, "logit_bias": {3: -1.0}}
    stream = decoder.stream(
        PROMPTS,
        max_new_tokens=24,
        eos_token_ids=(),
        sampling=SamplingParams(1.0, 5, 0.9, 0.01, seed=1, **penalties),
        config=TreeConfig(16, 4, 3),
        plain=plain,
    )
    next(stream)
    steps = []
    while True:
        with HostReads() as seen:
            if next(stream, None) is None:
                break
        steps.append((seen.reads, seen.uploads))
    assert len(steps) > 3
    assert all(reads == ["tolist"] for reads, _ in steps), steps
    uploads = [sent for _, sent in steps if sent]
    # Three requests; nothing is sent when the last of them ends.
    assert len(uploads) <= 2 and all(sent == ["torch.tensor"] for sent in uploads), steps
