"""Microbenchmarks: ``python bench [attention] [expand] [flatten] [logits] [verify]``.

A line is a provider's median time with its 20th and 80th percentile, the share of the floor's speed
(the floor is what the bytes or operations that any implementation needs take at the copy bandwidth
or matmul rate measured in the same run; above 100 % they came out of a cache), and its time
divided by ours. On a busy machine only the ratios mean anything.
"""

from __future__ import annotations

import argparse
import importlib

import runner
import torch

FAMILIES = ("attention", "expand", "flatten", "logits", "verify")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="family", help="default: all")
    parser.add_argument("--rounds", type=int, default=50, help="timed calls each (50)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--save", action="store_true", help="write bench/results/<family>.csv")
    options = parser.parse_args()
    for family in options.families:
        if family not in FAMILIES:
            parser.error(f"expected families among {', '.join(FAMILIES)}, got {family}")
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        for family in options.families or FAMILIES:
            rows = runner.run(importlib.import_module(family).cases(), options.rounds)
            if options.save:
                print(f"saved {runner.save(family, rows)}")


if __name__ == "__main__":
    main()
