"""Instructions that the CPU kernels execute, against committed budgets: a clock that cannot jitter.

    python bench/budgets.py            # compares with bench/results/budgets.csv; exits 1 on a miss
    python bench/budgets.py --write    # after a change that is meant

Callgrind counts a call of the public wrapper on one thread: kernel, outputs, dispatch, and some ten
thousand instructions of Python. Valgrind knows no AVX-512, so the avx2 level is what has budgets.
The counts hold for the compiler, the Python and the torch that made them: others need ``--write``.
Exits 2, having measured nothing, where valgrind or a C compiler is missing.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import runner  # also puts the tests' case table on the path

BUDGETS = runner.RESULTS / "budgets.csv"
TOLERANCE = 0.03

# Callgrind's client requests are macros that only a C compiler can expand.
REQUESTS = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void stop(const char* name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""


def calls() -> dict[str, Callable[[], object]]:
    """What is counted: a call of each operator that a decode step spends time in."""
    import cases as table
    import torch

    import eagle2_kernels as ek

    result: dict[str, Callable[[], object]] = {}

    def count(name: str, function: Callable, *args: object, **kwargs: object) -> None:
        result[name] = lambda: function(*args, **kwargs)

    expand = next(c for c in table.EXPAND_CASES if c.vocab == 8192)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = table.expand_inputs(expand, dtype)
        name = f"expand_topk {expand.name} {str(dtype).removeprefix('torch.')}"
        count(name, ek.expand_topk, *inputs, expand.top_k)
    root, prefix_lens = torch.tensor([1]), torch.tensor([200], dtype=torch.int32)
    for case in table.DRAFT_CASES[1:]:
        candidates = table.draft_candidates(case)
        args = (root, prefix_lens, *candidates, case.max_nodes)
        count(f"build_tree {case.name}", ek.build_tree, *args)
    tree = ek.build_tree(root, prefix_lens, *candidates, 64)
    count("flatten_tree N64", ek.flatten_tree, tree.parents, tree.num_nodes, prefix_lens)
    for case in table.VERIFY_CASES[:3]:
        x = table.verify_inputs(case)
        draw = (x.logits, x.position_ids, x.seeds)
        links = (x.draft_tokens, x.first_child, x.next_sibling, x.max_depth, x.num_nodes)
        count(f"sample_and_verify {case.name}", ek.sample_and_verify, *draw, *links, **x.filters)
    probs, half = x.logits.softmax(-1), torch.full(x.draft_tokens.shape, 0.5)
    coins = (probs, *links[:3], half, half[:, 0], x.max_depth, x.num_nodes)
    count(f"verify_tree_coins V{case.vocab}-N{case.nodes}", ek.verify_tree_coins, *coins)
    for dtype in (torch.float32, torch.bfloat16):
        attention = table.AttentionCase(16, (9, 3), 64, 256)
        x = table.attention_inputs(attention, dtype)
        name = f"tree_attention {attention.name} {str(dtype).removeprefix('torch.')}"
        count(name, ek.tree_attention, *x.args)
    k, v = torch.randn(2, 1, 16, 3, 64)
    count(
        "write_kv N16-H3-D64", ek.write_kv, x.k_cache.float(), x.v_cache.float(), k, v, prefix_lens
    )
    path = torch.tensor([[0, 2, 5, 9, -1]], dtype=torch.int32)
    length = torch.tensor([3], dtype=torch.int32)
    count("compact_kv 2x4xH3-D64", ek.compact_kv, [k, v], path, length, length)
    return result


def inside(requests: str) -> None:
    """Runs under callgrind: one dump a call, named after it."""
    import torch

    torch.manual_seed(0)
    library = ctypes.CDLL(requests)
    gc.disable()
    for name, call in calls().items():
        # What first calls allocate, look up and specialise is not counted.
        for _ in range(3):
            call()
        library.start()
        call()
        library.stop(name.encode())


def measure() -> dict[str, int]:
    """Instructions by name."""
    valgrind, compiler = shutil.which("valgrind"), shutil.which("cc")
    if valgrind is None or compiler is None:
        missing = "valgrind" if valgrind is None else "cc"
        print(f"{missing} is not installed: nothing was measured (apt-get install valgrind gcc)")
        raise SystemExit(2)
    with tempfile.TemporaryDirectory() as folder:
        requests = f"{folder}/requests.so"
        source = Path(folder, "requests.c")
        source.write_text(REQUESTS)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", requests, str(source)], check=True)
        environment = os.environ | {
            "EAGLE2_CPU_ISA": "avx2",
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
        }
        command = [
            valgrind,
            "--tool=callgrind",
            "--instr-atstart=no",
            f"--callgrind-out-file={folder}/out",
            sys.executable,
            *(["-P"] if sys.flags.safe_path else []),
            __file__,
            "--inside",
            requests,
        ]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            print(run.stdout[-2000:], run.stderr[-4000:], sep="\n")
            raise SystemExit(f"the run under valgrind failed with {run.returncode}")
        found = {}
        for path in Path(folder).glob("out.*"):
            text = path.read_text()
            name = re.search(r"^desc: Trigger: Client Request: (.+)$", text, re.MULTILINE)
            total = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
            if name and total:
                found[name.group(1)] = int(total.group(1))
    return found


def compiler_version() -> str:
    """What the installed kernels were compiled with."""
    from eagle2_kernels import _library

    return str((_library.build_info() or {}).get("compiler", "unknown"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="replace the budgets")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options.inside)
        return 0
    found = measure()
    if options.write:
        with BUDGETS.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["call", "instructions", "compiler"])
            writer.writerows((*item, compiler_version()) for item in found.items())
    with BUDGETS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    budgets = {row["call"]: int(row["instructions"]) for row in rows}
    made_by = {row["compiler"] for row in rows} - {compiler_version()}
    if made_by:
        print(f"the budgets were made by {', '.join(made_by)}, these kernels {compiler_version()}")
    misses = 0
    for name in sorted(budgets.keys() | found.keys()):
        budget, count = budgets.get(name), found.get(name)
        if budget is None or count is None:
            verdict = "no budget" if budget is None else "not measured"
            misses += 1
        else:
            change = count / budget - 1
            verdict = f"{change:+.1%}"
            if change > TOLERANCE:
                misses += 1
                verdict += "  OVER"
            elif change < -TOLERANCE:
                verdict += "  less than its budget: --write"
        print(f"{name:50} {count or 0:12,} of {budget or 0:12,}  {verdict}")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
