"""Plants the one-line faults of `table.py`, one at a time, and sees whether the tests notice.

Everything happens in scratch copies below build/mutants: the checkout and the installed package are
read only. A worker process has imported torch and forks for each run of tests, so a mutant in
Python costs its tests and nothing else; one in C++ costs the objects that hold it, compiled with
the commands of the package's own build, and a link. Run it as ``make mutants``; every run starts
from fresh copies, so it can be interrupted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from table import MUTANTS, killers
from worker import CPU_LIMIT, ROOT, SCRATCH, Sources, enter_worker, run_tests, try_mutant


def main() -> int:
    options = parse()
    stale = [m.stale(ROOT) for m in MUTANTS]
    if any(stale):
        print("\n".join(s for s in stale if s))
        return 1
    chosen = [
        m
        for m in MUTANTS
        if (m.quick or not options.fast) and re.search(options.only, f"{m.name} {m.slugs}")
    ]
    if options.list:
        print("\n".join(m.name for m in chosen))
        return 0
    sources = find_sources(options.objects, any(m.objects for m in chosen))
    shutil.rmtree(SCRATCH, ignore_errors=True)
    SCRATCH.mkdir(parents=True)
    start, counts = time.monotonic(), {"survived": 0, "broken": 0, "killed": 0, "skipped": 0}
    jobs = max(1, min(options.jobs, len(chosen)))
    context = multiprocessing.get_context("spawn")
    numbers = context.Queue()
    for number in range(jobs):
        numbers.put(number)
    with ProcessPoolExecutor(jobs, context, enter_worker, (numbers, sources)) as pool:
        tests = sorted({t for m in chosen if not m.missing() for t in killers(m)})
        print(f"{len(chosen)} mutants, {len(tests)} tests, {jobs} at a time", flush=True)
        baseline = pool.submit(run_tests, tests, 10 * CPU_LIMIT).result()
        print(f"without a mutant: {baseline.detail} in {baseline.seconds:.0f} s", flush=True)
        if baseline.verdict != "survived":
            print(f"the tests must pass first; see {SCRATCH}/*/tests.log")
            return 1
        # The slow ones first: they would be alone at the end.
        order = sorted(chosen, key=lambda m: m.cost, reverse=True)
        runs = {pool.submit(try_mutant, m): m for m in order}
        for done, run in enumerate(as_completed(runs), start=1):
            mutant, outcome = runs[run], run.result()
            counts[outcome.verdict] += 1
            print(
                f"[{done:3}/{len(chosen)}] {outcome.verdict:8} {outcome.seconds:5.1f} s  "
                f"{mutant.name}: {outcome.detail}",
                flush=True,
            )
    summary = ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n)
    print(f"{summary}; {time.monotonic() - start:.0f} s")
    return 1 if counts["survived"] or counts["broken"] else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("mutants", description=__doc__)
    parser.add_argument("--fast", action="store_true", help="the subset that CI runs")
    parser.add_argument("--only", default="", metavar="REGEX", help="search in name and slugs")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--list", action="store_true", help="names only")
    parser.add_argument("--objects", type=Path, help="folder of the build's build.ninja")
    return parser.parse_args()


def find_sources(objects: Path | None, compile_some: bool) -> Sources:
    """The installed package, and the objects it was linked from where some are to be replaced."""
    spec = importlib.util.find_spec("eagle2_kernels")
    if spec is None or spec.origin is None:
        raise SystemExit("eagle2_kernels is not installed here: run `make mutants`")
    package = str(Path(spec.origin).parent)
    if not compile_some:
        return Sources(package, "", {}, "")
    if objects is None:
        built = find_objects() or build_objects()
        objects = max(built, key=lambda p: p.stat().st_mtime).parent
    compdb = subprocess.run(
        ["ninja", "-t", "compdb"], cwd=objects, capture_output=True, text=True, check=True
    )
    commands, root = {}, ""
    for entry in json.loads(compdb.stdout):
        if entry["file"].endswith(".cpp"):
            path = Path(entry["directory"], entry["file"])
            commands[path.stem] = entry["command"]
            root = str(path.parents[2])
    return Sources(package, str(objects), commands, root)


def find_objects() -> list[Path]:
    return list((ROOT / "build").glob("cpu-torch*/temp*/build.ninja"))


def build_objects() -> list[Path]:
    print("no objects of an earlier build: building, a minute or two", flush=True)
    wheel = ["-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w"]
    subprocess.run(
        [sys.executable, *wheel, str(ROOT / "build" / "mutants-wheel"), str(ROOT)],
        env=os.environ | {"EAGLE2_CUDA": "0"},
        check=True,
    )
    return find_objects()


if __name__ == "__main__":
    sys.exit(main())
