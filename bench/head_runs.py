"""Rows for training runs: what each was given, how long it took, how well its head drafts.

::

    python bench/head_runs.py --target demo --texts answers.jsonl --out bench/results/heads.csv RUN

RUN is a work directory of `eagle2 train`. ``--texts`` are answers the target wrote greedily (what
`eagle2 data --prompts FILE` writes), on which the best head is measured teacher-forced; the accept
length and agreement of the log are those of the run's own held-out text. With ``--curve`` a row is
a validation of one run instead of a run.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import torch

from eagle2_kernels.models.heads import EagleHead
from eagle2_kernels.training.data import read_conversations
from eagle2_kernels.training.evaluate import TreeShape, accept_length
from eagle2_kernels.training.plot import read_log
from eagle2_kernels.training.trainer import open_target

SETTINGS = ("kind", "draft_vocab_size", "unroll", "loss", "max_tokens", "batch_size", "seed")
SHAPES = (TreeShape(16, 4, 4), TreeShape(32, 8, 6))


def row_of(run: Path, target: Any, texts: Any) -> dict[str, Any]:
    """The run's settings, its last step, its best validation, and its best head on ``texts``."""
    state = torch.load(run / "checkpoint.pt", map_location="cpu", weights_only=True)
    _, validations = read_log(run / "log.jsonl")
    best = max(validations, key=lambda row: row["accept_length"])
    row = {"run": run.name} | {name: state["config"].get(name, "kl") for name in SETTINGS}
    row |= {"steps": state["step"], "tokens_seen": state["tokens_seen"]}
    row |= {"minutes": round(state["seconds"] / 60, 1), "best_step": best["step"]}
    row |= {name: best[name] for name in ("top1", "top4", "accept_length")}
    head = EagleHead.from_pretrained(run / "best", target=target)
    for shape in SHAPES if texts else ():
        name = f"texts_{shape.max_nodes}_{shape.top_k}_{shape.max_depth}"
        row[name] = round(accept_length(head, target, texts, shape), 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="work directories of eagle2 train"
    )
    parser.add_argument("--target", default="demo", help="what eagle2 train was given (demo)")
    parser.add_argument("--texts", help=".jsonl of the target's greedy answers")
    parser.add_argument("--curve", action="store_true", help="a row for each validation")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--out", type=Path, required=True, help="the CSV file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.curve:
        rows = [
            {"run": run.name} | {key: row[key] for key in row if key != "event"}
            for run in options.runs
            for row in read_log(run / "log.jsonl")[1]
        ]
    else:
        target = open_target(options.target)
        texts = read_conversations(options.texts) if options.texts else []
        rows = [row_of(run, target, texts) for run in options.runs]
    with options.out.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(options.out.read_text(), end="")


if __name__ == "__main__":
    main()
