"""Microbenchmarks: ``python bench [attention] [expand] [flatten] [logits] [verify]``."""

from __future__ import annotations

import argparse
import importlib

import runner
import torch

FAMILIES = ("attention", "expand", "flatten", "logits", "verify")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []], help="default: all")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--save", action="store_true", help="write bench/results/<family>.csv")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        for family in options.families or FAMILIES:
            rows = runner.run(importlib.import_module(family).cases(), options.rounds)
            if options.save:
                print(f"saved {runner.save(family, rows)}")


if __name__ == "__main__":
    main()
