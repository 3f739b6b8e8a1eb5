"""The curve of a training run: loss by level and held-out accept length against tokens seen."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

__all__ = ["plot_log", "read_log"]


def read_log(path: Path) -> tuple[list[dict], list[dict]]:
    """(training rows, validation rows) of a log.jsonl, in order; a resumed run's steps once."""
    rows = []
    for line in path.read_text().splitlines():
        # An interruption may have cut a line.
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    found = []
    for event in ("train", "validation"):
        # A run that was interrupted repeats the steps since its last checkpoint.
        by_step = {row["step"]: row for row in rows if row["event"] == event}
        found.append([by_step[step] for step in sorted(by_step)])
    return found[0], found[1]


def plot_log(log: Path, image: Path) -> bool:
    """Draw the run of ``log`` into ``image``; False, and nothing drawn, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    training, validation = read_log(log)
    figure = Figure(figsize=(7, 4), layout="constrained")
    loss, accept = figure.subplots(), None
    for level in range(max((len(row["loss"]) for row in training), default=0)):
        rows = [row for row in training if len(row["loss"]) > level]
        seen = [row["tokens_seen"] / 1e6 for row in rows]
        loss.plot(seen, [row["loss"][level] for row in rows], lw=0.8, label=f"level {level + 1}")
    accept = loss.twinx()
    accept.plot(
        [row["tokens_seen"] / 1e6 for row in validation],
        [row["accept_length"] for row in validation],
        "ko-",
        label="accept length",
    )
    loss.set(xlabel="million tokens seen", ylabel="loss")
    accept.set(ylabel="held-out accept length")
    figure.legend(loc="outside upper center", ncols=4)
    figure.savefig(image, dpi=110)
    return True
