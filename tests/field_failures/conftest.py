"""A test of this folder that asks for a backend runs on the compiled kernels and on the oracle."""

import pytest
import torch

import eagle2_kernels
from eagle2_kernels import reference

BACKENDS = {"compiled": eagle2_kernels, "reference": reference}


@pytest.fixture(params=BACKENDS)
def kernels(request):
    """A module that has the operators by name."""
    return BACKENDS[request.param]


@pytest.fixture
def attend(kernels):
    """tree_attention with poisoned outputs: (out, lse)."""

    def run(q, k, v, prefix_lens, tree_mask=None, **options):
        out = torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=q.dtype)
        lse = torch.full(q.shape[:3], torch.nan)
        options |= {"out": out, "lse": lse}
        if kernels is reference:
            reference.tree_attention_out(q, k, v, prefix_lens, tree_mask, **options)
        else:
            eagle2_kernels.tree_attention(q, k, v, prefix_lens, tree_mask, **options)
        return out, lse

    return run


@pytest.fixture
def seen_slots(attend):
    """Which cache slots each node sees, as a set per node: every visible key weighs the same, and
    the value of a slot is that slot's unit vector.
    """

    def run(nodes, slots, prefix, tree_mask=None, **options):
        k = torch.zeros(1, slots, 1, slots)
        v = torch.eye(slots).view(1, slots, 1, slots)
        q = torch.zeros(1, nodes, 1, slots)
        prefix_lens = torch.tensor([prefix], dtype=torch.int32)
        out, _ = attend(q, k, v, prefix_lens, tree_mask, **options)
        return [set(row.nonzero().flatten().tolist()) for row in out[0, :, 0]]

    return run
