"""Charts of bench/results/<device>.csv, newest row of each provider and shape.

Ratios: how much longer the best peer takes than ours, case by case. Roofline: the rate reached over
the ceiling measured in the same run, against the time a call takes.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import matplotlib
from runner import OURS, RESULTS

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NOT_A_RATIO = ("call",)  # what a wrapper adds to its operator is no speed-up


def newest(device: str) -> list[dict[str, str]]:
    """Ours, one row a case: the last one saved with the most threads."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    with (RESULTS / f"{device}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["provider"] == OURS and row["op"] not in NOT_A_RATIO:
                key = (row["op"], row["shape"], row["dtype"])
                if key not in found or int(row["threads"]) >= int(found[key]["threads"]):
                    found[key] = row
    return list(found.values())


def draw(device: str) -> list[Path]:
    """The two charts of a device, as PNG files beside its CSV."""
    rows = newest(device)
    return [_ratios(rows, device), _roofline(rows, device)]


def _label(row: dict[str, str]) -> str:
    dtype = {"bfloat16": " bf16", "float32": ""}.get(row["dtype"], f" {row['dtype']}")
    return f"{row['op']}  {row['shape']}{dtype}"


def _save(figure: plt.Figure, name: str) -> Path:
    path = RESULTS / f"{name}.png"
    # No date or version in the file: the same rows give the same picture.
    figure.savefig(path, dpi=90, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
    return path


def _ratios(rows: list[dict[str, str]], device: str) -> Path:
    rows = rows[::-1]
    ratios = [float(row["ratio"]) for row in rows]
    figure, axes = plt.subplots(figsize=(9, 0.24 * len(rows) + 1))
    bars = axes.barh([_label(row) for row in rows], ratios, color="tab:blue", height=0.7)
    axes.bar_label(bars, [f"{r:.3g}x" for r in ratios], padding=3, fontsize=7)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.margins(x=0.1, y=0.01)
    axes.tick_params(labelsize=7)
    axes.set_xlabel(f"time of the best peer / ours, {_where(rows, device)}", fontsize=8)
    return _save(figure, f"ratios_{device}")


def _roofline(rows: list[dict[str, str]], device: str) -> Path:
    groups: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        groups[row["op"]].append(row)
    figure, axes = plt.subplots(figsize=(8, 4))
    for op, members in groups.items():
        axes.scatter(
            [float(row["median_us"]) for row in members],
            [100 * float(row["ceiling_share"]) for row in members],
            label=op,
            s=18,
        )
    axes.axhline(100, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(f"time of a call, us, {_where(rows, device)}", fontsize=8)
    axes.set_ylabel("% of read bandwidth or matmul rate", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return _save(figure, f"roofline_{device}")


def _where(rows: list[dict[str, str]], device: str) -> str:
    last = rows[-1]
    name = last["gpu"] if device == "cuda" else f"{last['cpu']}, {last['threads']} threads"
    return f"{name}, torch {last['torch']}"
