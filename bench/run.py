"""Microbenchmarks of the operators, each beside what a PyTorch user would otherwise call.

A line is a provider's median time with its 20th and 80th percentile, the bytes or operations that
any implementation needs per second of it, and its share of the ceiling: the read bandwidth or
matmul rate measured at the start of the run (above 100 % the bytes came out of a cache). Every
result is compared with the oracle before it is timed. On a busy machine only ratios mean anything.

    python bench/run.py --op expand_topk --shape V49152
    python bench/run.py --save --plot        # bench/results/: rows of this run, charts of all rows
    python bench/run.py --quick              # the smallest cases: correctness
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import re
from collections.abc import Iterator, Sequence

import runner
import torch

FAMILIES = ("attention", "calls", "expand", "flatten", "linear", "logits", "step", "verify")


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, {error}") from error
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a count of at least 1, got {text}")
    return int(text)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--op", type=_regex, metavar="REGEX", help="operators (all)")
    result.add_argument("--shape", type=_regex, metavar="REGEX", help="shapes (all)")
    result.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    result.add_argument("--rounds", type=_count, help="timed samples each (50; 3 with --quick)")
    threads = torch.get_num_threads()
    result.add_argument("--threads", type=_count, default=threads, help="of torch")
    result.add_argument("--save", action="store_true", help="append to bench/results/DEVICE.csv")
    result.add_argument("--plot", action="store_true", help="draw what bench/results/ holds")
    result.add_argument("--quick", action="store_true", help="the smallest cases of each operator")
    return result


def selected(options: argparse.Namespace, device: torch.device) -> Iterator[runner.Case]:
    """The cases asked for; a family without an operator of that name is not even made."""
    modules = [importlib.import_module(name) for name in FAMILIES]
    families = (
        module.cases(device, quick=options.quick)
        for module in modules
        if not options.op or any(re.search(options.op, op) for op in module.OPS)
    )
    for case in itertools.chain.from_iterable(families):
        if options.op and not re.search(options.op, case.op):
            continue
        if options.shape and not re.search(options.shape, case.shape):
            continue
        yield case


def main(arguments: Sequence[str] | None = None) -> list[runner.Row]:
    options = parser().parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser().error("--device cuda: torch sees no CUDA device here (torch.cuda.is_available())")
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    with torch.inference_mode():
        rounds = options.rounds or (3 if options.quick else 50)
        machine = runner.Machine(device, samples=min(rounds, 15))
        rates = ", ".join(
            f"matmul {str(d).removeprefix('torch.')} {r / 1e9:.0f} GFLOP/s"
            for d, r in machine.matmul_rates.items()
        )
        print(f"read {machine.read_bandwidth / 1e9:.1f} GB/s, {rates}, {options.threads} threads")
        rows = runner.run(selected(options, device), machine, rounds)
    if not rows:
        parser().error(f"no case matches --op {options.op} --shape {options.shape}")
    if options.save:
        print(f"\nsaved {runner.save(rows, machine)}")
    if options.plot:
        import plot

        for path in plot.draw(device.type):
            print(f"drew {path}")
    return rows


if __name__ == "__main__":
    main()
