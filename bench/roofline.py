"""Floor times of every kernel on five cards: bytes at the memory's rate, operations at their peak.

    python bench/roofline.py                 # the shapes that gpu_check.py times
    python bench/roofline.py --cases         # and the attention case table of the tests
    python bench/roofline.py --csv FILE

A floor is the largest of three: compulsory bytes / memory bandwidth, matrix operations / dense
matrix peak, other operations / float32 peak (`costs.py` has the formulas). Which of them it is
stands behind the time: m, x or v. No kernel reaches a floor; a launch alone takes about 3 us.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from costs import Cost
from shapes import SHAPES

TERA = 1e12


@dataclass(frozen=True)
class Card:
    """Peaks of one card, per second: bytes, dense bfloat16 and float32 operations."""

    bandwidth: float
    matrix: float
    vector: float
    source: str

    def times(self, cost: Cost, *, matrix_units: bool = True) -> dict[str, float]:
        """Seconds by each of the three limits; float32 products have no matrix units here."""
        matrix = self.matrix if matrix_units else self.vector
        return {
            "m": cost.bytes / self.bandwidth,
            "x": cost.flops / matrix,
            "v": cost.vector / self.vector,
        }

    def floor(self, cost: Cost, *, matrix_units: bool = True) -> float:
        """Seconds below which no implementation gets."""
        return max(self.times(cost, matrix_units=matrix_units).values())


# Dense rates with float32 accumulation: half of what a datasheet gives "with sparsity".
CARDS = {
    "H100": Card(
        3.35 * TERA, 989 * TERA, 67 * TERA, "NVIDIA H100 Tensor Core GPU datasheet, SXM5 80 GB"
    ),
    "H200": Card(4.8 * TERA, 989 * TERA, 67 * TERA, "NVIDIA H200 Tensor Core GPU datasheet, SXM"),
    "A100": Card(
        2.039 * TERA, 312 * TERA, 19.5 * TERA, "NVIDIA A100 Tensor Core GPU datasheet, SXM4 80 GB"
    ),
    "L4": Card(0.3 * TERA, 121 * TERA, 30.3 * TERA, "NVIDIA L4 Tensor Core GPU datasheet"),
    "RTX 4090": Card(
        1.008 * TERA, 165.2 * TERA, 82.6 * TERA, "NVIDIA Ada GPU Architecture whitepaper, appendix"
    ),
}


def card_named(device_name: str) -> Card | None:
    """The card that a driver calls ``device_name``, where it is in the table."""
    words = device_name.replace("-", " ").split()
    return next((card for name, card in CARDS.items() if set(name.split()) <= set(words)), None)


def rows(cases: bool) -> Iterator[tuple[str, str, Cost]]:
    """(operator, shape, cost) of everything asked for."""
    for shape in SHAPES:
        yield shape.op, str(shape), shape.cost()
    if not cases:
        return
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    import torch
    from cases import ATTENTION_CASES, attention_inputs, visibility
    from costs import tree_attention

    for case in ATTENTION_CASES:
        inputs = attention_inputs(case, torch.bfloat16)
        cost = tree_attention(
            inputs.prefix_lens.tolist(),
            case.nodes,
            case.heads,
            case.head_dim,
            case.v_dim or case.head_dim,
            2,
            seen=int(visibility(inputs).sum()),
            latent=case.latent,
        )
        yield "tree_attention", case.name, cost


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", action="store_true", help="the tests' attention cases too")
    parser.add_argument("--csv", type=Path, help="write the rows to this file as well")
    options = parser.parse_args(arguments)
    for name, card in CARDS.items():
        print(
            f"{name:8}  {card.bandwidth / TERA:5.2f} TB/s  {card.matrix / TERA:5.0f} TFLOP/s bf16  "
            f"{card.vector / TERA:5.1f} TFLOP/s float32   {card.source}"
        )
    heads = "".join(f"{name:>11}" for name in CARDS)
    print(f"\n{'floors in us':<60}{'MB':>9}{'GFLOP':>8}{heads}")
    table = []
    for op, shape, cost in rows(options.cases):
        line = f"{op:<18}{shape:<42}{cost.bytes / 1e6:9.3f}{cost.flops / 1e9:8.2f}"
        floors = {}
        for name, card in CARDS.items():
            times = card.times(cost)
            limit = max(times, key=lambda k: times[k])
            floors[name] = times[limit] * 1e6
            line += f"{floors[name]:9.2f} {limit}"
        print(line)
        table.append(
            [op, shape, cost.bytes, cost.flops, cost.vector]
            + [f"{floors[name]:.4g}" for name in CARDS]
        )
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            columns = [f"{name} floor_us" for name in CARDS]
            writer.writerow(["op", "shape", "bytes", "flops", "vector", *columns])
            writer.writerows(table)


if __name__ == "__main__":
    main()
