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
    """Rows in order; ``failures`` counts those that make the exit status 1.

    ``settle`` waits for the device, so that a fault belongs to the row that caused it. A device
    that cannot be waited for any more is lost to this process: ``lost`` is told how many attempts
    there were, and a new process takes up after ``skip`` of them.
    """

    budget: float
    path: Path | None
    provenance: dict[str, str] = field(default_factory=dict)
    failures: int = 0
    late: int = 0
    rows: list[Row] = field(default_factory=list)
    settle: Callable[[], None] = lambda: None
    lost: Callable[[Report], None] = lambda report: None
    skip: int = 0
    attempts: int = 0

    def __post_init__(self) -> None:
        self._start = time.monotonic()
        self._file = None

    def due(self) -> bool:
        """Whether the next attempt is to be made: not done by an earlier process, and in time."""
        self.attempts += 1
        if self.attempts <= self.skip:
            return False
        if self.left <= 0:
            self.late += 1
            return False
        return True

    def check_device(self) -> None:
        """Give the process up when the device is lost."""
        try:
            self.settle()
        except Exception:
            self.lost(self)

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
        if not self.due():
            return False
        began = time.monotonic()
        try:
            remark = body()
            self.settle()
            row.result = f"ok{f' ({remark})' if remark else ''}"
            if time.monotonic() - began > 2:
                row.result += f", {time.monotonic() - began:.1f} s"
        except NotHereError as error:
            row.result = str(error)
        except Exception as error:
            row.result = failed(error)
            traceback.print_exc(file=sys.stderr)
        self.add(row)
        if row.result.startswith("FAILED"):
            self.check_device()
            return False
        return True

    def _write(self, row: Row) -> None:
        if self.path is None:
            return
        columns = [f.name for f in fields(Row)]
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a" if self.skip else "w", newline="")
            self._csv = csv.writer(self._file, lineterminator="\n")
            if not self.skip:
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
        """Print the end of the report; the exit status, 0 when something ran and none failed."""
        timed = sum(row.median_us is not None for row in self.rows)
        before = f" (after {self.skip} in processes that lost the device)" if self.skip else ""
        print(
            f"\n{len(self.rows)} rows{before}, {timed} of them times; {self.failures} failed, "
            f"{self.late} left out for lack of time; {self.budget - self.left:.0f} s"
        )
        for row in self.rows:
            if row.result.startswith("FAILED"):
                print(f"  {row.stage} {row.op} {row.shape} {row.mode} {row.provider}: {row.result}")
        return 1 if self.failures or not (self.rows or self.skip) else 0


def failed(error: Exception) -> str:
    """What a row says of an error."""
    said = str(error).strip().splitlines() or [""]
    return f"FAILED: {type(error).__name__}: {said[0][:300]}"


def priced(row: Row, cost: Cost, floor: float | None) -> Row:
    """The row with what any implementation must move and compute."""
    row.bytes, row.flops = cost.bytes, cost.flops
    if floor is not None:
        row.floor_us = floor * 1e6
        if row.median_us:
            row.floor_share = row.floor_us / row.median_us
    return row
