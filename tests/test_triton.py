"""Triton kernels under the interpreter against the oracle (values only: it sees no races)."""

import os
import subprocess
import sys

import pytest
import torch

from eagle2_kernels import reference

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def cache_kernels():
    # The interpreter is chosen when a kernel is decorated.
    os.environ["TRITON_INTERPRET"] = "1"
    from eagle2_kernels.triton_kernels import cache

    return cache


@pytest.mark.parametrize("page_size", [None, 1, 5, 16], ids=lambda p: f"page{p}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("with_lengths", [False, True], ids=["full", "ragged"])
def test_write_kv_stores_only_the_rows_asked_for(cache_kernels, page_size, dtype, with_lengths):
    generator = torch.Generator().manual_seed(3)
    batch, rows, heads, dim = 3, 5, 2, 24
    k = torch.randn(batch, rows, heads, dim, generator=generator).to(dtype)
    v = torch.randn(batch, rows, heads, dim, generator=generator).to(dtype)
    prefix = torch.tensor([0, 7, 14], dtype=torch.int32)
    lengths = torch.tensor([5, 0, 3], dtype=torch.int32) if with_lengths else None
    table = None
    shape = (batch, 16, heads, dim)
    if page_size is not None:
        per_request = -(-16 // page_size)
        pages = torch.randperm(batch * per_request, generator=generator)
        table = pages.view(batch, per_request).int()
        table[2, -1] = -1
        shape = (batch * per_request, page_size, heads, dim)
    # Interleaved storage: strides must be honoured, not recomputed from shapes.
    storage = torch.full((shape[0], 2, *shape[1:]), 9.0, dtype=dtype)
    expected = storage.clone()
    args = (k, v, prefix, lengths, table)
    reference.write_kv(expected[:, 0], expected[:, 1], *args)
    cache_kernels.write_kv(storage[:, 0], storage[:, 1], *args)
    assert torch.equal(storage, expected)


def test_importing_the_package_does_not_import_triton():
    code = "import sys, eagle2_kernels; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
