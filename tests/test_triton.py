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
    # K's storage is interleaved, V's has heads first: strides must be honoured, each cache's own.
    pages, size = shape[:2]
    stored = torch.full((pages, 2, size, heads, dim), 9.0, dtype=dtype)
    stored_v = torch.full((pages, heads, size, dim), 9.0, dtype=dtype)
    expected, expected_v = stored.clone(), stored_v.clone()
    args = (k, v, prefix, lengths, table)
    reference.write_kv(expected[:, 0], expected_v.transpose(1, 2), *args)
    cache_kernels.write_kv(stored[:, 0], stored_v.transpose(1, 2), *args)
    assert torch.equal(stored, expected) and torch.equal(stored_v, expected_v)


# Runs in a process of its own: here the kernels are decorated for the interpreter.
COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from eagle2_kernels.triton_kernels.cache import _write_kv_kernel as kernel

def kind(name):
    if name in ("k_cache", "v_cache", "k", "v"):
        return "*bf16"
    if name in ("prefix_lens", "lengths", "page_table"):
        return "*i32"
    return "constexpr" if name.isupper() else "i64" if name.startswith(("kc_", "vc_")) else "i32"

constants = dict(HAS_LENGTHS=True, PAGED=True, DK=128, DV=128, BLOCK=128)
source = ASTSource(
    kernel,
    {name: kind(name) for name in kernel.arg_names},
    constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()},
)
compiled = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32))
print(len(compiled.asm["cubin"]))
"""


@pytest.mark.parametrize("arch", [80, 90, 100, 120], ids=lambda a: f"sm_{a}")
def test_write_kv_compiles_ahead_of_time(arch, tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = tmp_path / "compile_kernel.py"
    script.write_text(COMPILE)
    result = subprocess.run(
        [sys.executable, str(script), str(arch)],
        capture_output=True,
        text=True,
        check=False,
        env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 0


def test_importing_the_package_does_not_import_triton():
    code = "import sys, eagle2_kernels; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
