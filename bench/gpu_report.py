"""What `gpu_check.py` writes down: a line and a CSV row as soon as there is one, and a clock."""

from __future__ import annotations

import csv
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from costs import Cost


class NotHereError(Exception):
    """Something that this machine lacks: no failure."""


@dataclass
class Row:
    """One thing that was tried. ``ratio`` is this provider's time over ours in the same row."""

    stage: str
    op: str
    shape: str
    provider: str = "ours"
    mode: str = ""
    result: str = "ok"
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    bytes: int | None = None
    flops: int | None = None
    floor_us: float | None = None
    floor_share: float | None = None
    ratio: float | None = None


@dataclass
class Report:
    """Rows in order; ``failures`` counts those that make the exit status 1."""

    budget: float
    path: Path | None
    provenance: dict[str, str] = field(default_factory=dict)
    failures: int = 0
    late: int = 0
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._start = time.monotonic()
        self._file = None

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.budget - (time.monotonic() - self._start)

    def add(self, row: Row) -> None:
        """Show and store a row."""
        self.rows.append(row)
        failed = row.result.startswith("FAILED")
        self.failures += failed
        where = f"{row.stage:9} {row.op:26} {row.shape:44} {row.mode:5}{row.provider:22}"
        if row.median_us is None:
            print(f"{where} {row.result}", flush=True)
        else:
            share = "" if row.floor_share is None else f"{row.floor_share:7.1%} of floor"
            ratio = "" if row.ratio is None else f"{row.ratio:7.2f} x ours"
            print(
                f"{where} {row.median_us:10.2f} us [{row.p20_us:.2f}, {row.p80_us:.2f}]"
                f"{share}{ratio}",
                flush=True,
            )
        self._write(row)

    def run(self, row: Row, body: Callable[[], str | None]) -> bool:
        """Add ``row`` with the outcome of ``body``, which may return a remark; False if it failed.

        What raises is written down and the next row follows.
        """
        if self.left <= 0:
            self.late += 1
            return False
        began = time.monotonic()
        try:
            remark = body()
            row.result = f"ok{f' ({remark})' if remark else ''}"
            if time.monotonic() - began > 2:
                row.result += f", {time.monotonic() - began:.1f} s"
        except NotHereError as error:
            row.result = str(error)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            said = str(error).strip().splitlines() or [""]
            row.result = f"FAILED: {type(error).__name__}: {said[0][:300]}"
            traceback.print_exc(file=sys.stderr)
        self.add(row)
        return not row.result.startswith("FAILED")

    def _write(self, row: Row) -> None:
        if self.path is None:
            return
        columns = [f.name for f in fields(Row)]
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w", newline="")
            self._csv = csv.writer(self._file, lineterminator="\n")
            self._csv.writerow([*columns, *self.provenance])
        values = asdict(row)
        texts = [
            "" if (v := values[c]) is None else f"{v:.5g}" if isinstance(v, float) else v
            for c in columns
        ]
        self._csv.writerow([*texts, *self.provenance.values()])
        # A lease may end at any moment.
        self._file.flush()

    def summary(self) -> int:
        """Print the end of the report; the exit status."""
        timed = sum(row.median_us is not None for row in self.rows)
        print(
            f"\n{len(self.rows)} rows, {timed} of them times; {self.failures} failed, {self.late} "
            f"left out for lack of time; {self.budget - self.left:.0f} s"
        )
        for row in self.rows:
            if row.result.startswith("FAILED"):
                print(f"  {row.stage} {row.op} {row.shape} {row.mode} {row.provider}: {row.result}")
        return 1 if self.failures else 0


def priced(row: Row, cost: Cost, floor: float | None) -> Row:
    """The row with what any implementation must move and compute."""
    row.bytes, row.flops = cost.bytes, cost.flops
    if floor is not None:
        row.floor_us = floor * 1e6
        if row.median_us:
            row.floor_share = row.floor_us / row.median_us
    return row
