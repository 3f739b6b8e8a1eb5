"""Ahead-of-time compilation of every variant of the Triton launch table; needs no card.

    python bench/aot.py --write               # bench/results/aot.csv, the committed budgets
    python bench/aot.py --arch 90 --kernel expand_slice_kernel

Registers, spills and shared memory are what the cubin's resource usage says; matrix instructions
and 16-byte loads are read from the PTX. Exits with 1 where a variant does not compile, asks for
more shared memory than its card has, spills without being listed in SPILLS, or lacks what its row
of the table expects.
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import importlib
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from eagle2_kernels.triton_kernels import launch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

RESULTS = Path(__file__).parent / "results" / "aot.csv"
COLUMNS = ("arch", "kernel", "variant", "registers", "spills", "shared_bytes")

# (architectures, kernel, variant) patterns that may spill, and why. Read in the machine code
# (`cuobjdump -sass`): none of these has a load or a store of local memory in a loop over keys.
# Triton 3.6, the floor, compiles the table too (all of sm_90, the suite's choice elsewhere; by
# hand): there the 576/512 tiles spill up to 80 bytes, and D64 float8 up to 32 on sm_100.
SPILLS = {
    ("80", "attend_kernel", "bf16-D64-DV64-causal"): (
        "ptxas stops at 128 registers, two blocks a multiprocessor, and keeps six values that the "
        "end of the program needs in memory meanwhile"
    ),
    ("90", "attend_kernel", "bf16-D192-DV128-ragged"): (
        "one value, stored before the loops and read behind them: 64 rows fill the registers"
    ),
    ("80 120", "attend_kernel", "bf16-D576-DV512-float8-bytes"): (
        "what a chunk of keys begins and ends with: two accumulators of 512 columns, and a card "
        "that knows no e4m3 unpacks the bytes in registers"
    ),
}

# What the test suite compiles; --write and a plain run take everything.
REPRESENTATIVE = (
    ("write_kv_kernel", "bf16-float8-*"),
    ("expand_slice_kernel", "bf16"),
    ("expand_merge_kernel", "fp32-P10-*"),
    ("attend_kernel", "bf16-D128-DV128-paged"),
    ("attend_kernel", "bf16-D64-DV64-float8*"),
    ("attend_kernel", "bf16-D576-DV512-ragged"),
    ("combine_kernel", "bf16-DV128-ragged"),
    ("merge_states_kernel", "bf16-*"),
    ("process_logits_kernel", "bf16"),
    ("token_logprobs_kernel", "bf16"),
    ("record_tokens_kernel", "*"),
    ("sample_and_verify_kernel", "bf16-temperature"),
)

MATRIX = re.compile(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b")
FUSED = re.compile(r"\bfma\.")
WIDE_LOAD = re.compile(
    r"ld\.global\S*\.v4\.(?:b|u|s|f)32|ld\.global\S*\.v2\.(?:b|u|s|f)64|ld\.global\S*\.v8\.b16"
    r"|cp\.async\.c[ag]\.shared\.global[^;]*, 0x10|cp\.async\.bulk"
)


@dataclass(frozen=True)
class Usage:
    """What one cubin takes, and what its PTX shows."""

    registers: int
    spills: int
    shared_bytes: int
    matrix: frozenset[str]
    wide_loads: bool
    fused: bool


def kind(variant: launch.Variant, name: str) -> str:
    """The type of one argument as Triton's compiler takes it."""
    if name in variant.tiles.constants or name in variant.ones:
        return "constexpr"
    if name in variant.pointers:
        return "*" + variant.pointers[name]
    if name in variant.floats:
        return "fp32"
    return "i64" if name in variant.longs else "i32"


def compile_variant(variant: launch.Variant, arch: int) -> Usage:
    module = importlib.import_module(f"eagle2_kernels.triton_kernels.{variant.module}")
    kernel = getattr(module, variant.kernel)
    names = kernel.arg_names
    missing = [n for n in (*variant.tiles.constants, *variant.pointers) if n not in names]
    if missing:
        raise ValueError(f"{variant.kernel}: the launch table names {missing}, not arguments of it")
    aligned = (*variant.pointers, *variant.aligned)
    source = ASTSource(
        kernel,
        {name: kind(variant, name) for name in names},
        constexprs={
            (names.index(name),): value
            for name, value in {**variant.tiles.constants, **dict.fromkeys(variant.ones, 1)}.items()
        },
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = variant.tiles.options
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, spills = resource_usage(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    return Usage(
        registers,
        spills,
        compiled.metadata.shared,
        frozenset(MATRIX.findall(ptx)),
        bool(WIDE_LOAD.search(ptx)),
        bool(FUSED.search(ptx)),
    )


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory per thread, by the tool that Triton ships."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump said nothing about registers: {text!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def allowed_spill(arch: int, variant: launch.Variant) -> bool:
    return any(
        str(arch) in archs.split()
        and fnmatch.fnmatch(variant.kernel, kernel)
        and fnmatch.fnmatch(variant.name, name)
        for archs, kernel, name in SPILLS
    )


def problems(variant: launch.Variant, arch: int, usage: Usage) -> list[str]:
    """What stands between this compilation and a launch that does what the table expects."""
    found = []
    if usage.shared_bytes > launch.SHARED_LIMIT[arch]:
        found.append(f"shared memory {usage.shared_bytes} > {launch.SHARED_LIMIT[arch]}")
    if usage.spills and not allowed_spill(arch, variant):
        found.append(f"spills {usage.spills} bytes")
    if variant.expect.get("wide_loads") and not usage.wide_loads:
        found.append("no 16-byte load")
    if variant.expect.get("separate") and usage.fused:
        found.append("a product fused with a sum")
    matrix = variant.expect.get("matrix")
    if matrix and matrix not in usage.matrix:
        found.append(f"no {matrix}, but {sorted(usage.matrix)}")
    return found


def over_budget(budgets: list[dict[str, str]], row: tuple[object, ...]) -> list[str]:
    """Where a row of results exceeds the committed row of the same kernel."""
    for budget in budgets:
        if [budget[c] for c in COLUMNS[:3]] == [str(x) for x in row[:3]]:
            return [
                f"{column} {got} > {budget[column]}"
                for column, got in zip(COLUMNS[3:], row[3:], strict=True)
                if int(str(got)) > int(budget[column])
            ]
    return ["no committed budget"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="*", default=sorted(launch.SHARED_LIMIT))
    parser.add_argument("--kernel", default="*", help="pattern of kernel names")
    parser.add_argument("--variant", default="*", help="pattern of variant names")
    parser.add_argument("--representative", action="store_true", help="the test suite's choice")
    parser.add_argument("--check", action="store_true", help=f"hold against {RESULTS.name}")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS}")
    args = parser.parse_args()
    rows, failed, budgets = [], False, []
    if args.check:
        with RESULTS.open() as file:
            budgets = list(csv.DictReader(file))
    for arch in args.arch:
        for variant in launch.variants():
            if arch not in variant.archs:
                continue
            if not fnmatch.fnmatch(variant.kernel, args.kernel):
                continue
            if not fnmatch.fnmatch(variant.name, args.variant):
                continue
            if args.representative and not any(
                variant.kernel == kernel and fnmatch.fnmatch(variant.name, name)
                for kernel, name in REPRESENTATIVE
            ):
                continue
            usage = compile_variant(variant, arch)
            wrong = problems(variant, arch, usage)
            row = (
                arch,
                variant.kernel,
                variant.name,
                usage.registers,
                usage.spills,
                usage.shared_bytes,
            )
            rows.append(row)
            if args.check:
                wrong += over_budget(budgets, row)
            failed |= bool(wrong)
            notes = [*sorted(usage.matrix), *(["16-byte loads"] if usage.wide_loads else [])]
            print(*row, ", ".join(notes), *(f"WRONG: {w}" for w in wrong), flush=True)
    if args.write:
        with RESULTS.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
