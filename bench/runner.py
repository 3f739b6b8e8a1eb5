"""Check every provider's result, then time the providers in turn: A B A B.

Rounds interleave the providers, so that a slow spell of the machine meets all of them. Reported are
the median and the 20th and 80th percentile of a call, the rate, its share of the ceiling (what the
bytes or operations that any implementation needs take at the read bandwidth and matmul rate
measured at the start of the run) and the ratio to the best peer.
"""

from __future__ import annotations

import contextlib
import csv
import mmap
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
OURS = "ours"

# the case table is the tests'
sys.path.append(str(ROOT / "tests"))


@dataclass
class Case:
    """One shape of one operator.

    ``providers`` maps names to calls; "ours" is the library's. ``check`` raises when a provider's
    result is wrong. ``bytes`` and ``flops`` count what any implementation must move and compute.
    ``calls`` is how many calls in a row a sample averages over, for those of a few microseconds.
    ``before`` runs before each of them, off the clock.
    """

    op: str
    shape: str
    providers: dict[str, Callable[[], object]]
    check: Callable[[str, object], None]
    bytes: int
    flops: int = 0
    dtype: torch.dtype = torch.float32
    calls: int = 1
    before: Callable[[], object] | None = None


@dataclass
class Row:
    """One provider of a case. ``ratio`` of ours: the best peer's time over ours; of a peer: its
    own time over ours.
    """

    op: str
    shape: str
    dtype: str
    device: str
    provider: str
    median_us: float
    p20_us: float
    p80_us: float
    gb_s: float
    gflop_s: float
    ceiling_share: float
    ratio: float


def _memory(size: int, device: torch.device) -> torch.Tensor:
    """Ones, in huge pages where Linux gives them: those are read a fifth faster."""
    if device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.ones(size // 4, device=device)
    memory = mmap.mmap(-1, size)
    # refused where the kernel was built without them
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).fill_(1)


class Machine:
    """Where a run takes place: its device, its clock, its measured ceilings."""

    def __init__(self, device: torch.device, samples: int = 15) -> None:
        self.device = device
        self._samples = samples
        self.read_bandwidth = self._read_bandwidth()
        self.matmul_rates = {d: self._matmul_rate(d) for d in (torch.float32, torch.bfloat16)}

    def time(self, call: Callable[[], object], calls: int = 1) -> float:
        """Seconds of one call."""
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3 / calls
        began = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - began) / calls

    def floor(self, case: Case) -> float:
        """Seconds that the case takes at the ceiling."""
        rate = self.matmul_rates.get(case.dtype, self.matmul_rates[torch.float32])
        return max(case.bytes / self.read_bandwidth, case.flops / rate)

    def _best(self, call: Callable[[], object]) -> float:
        # A ceiling is what the machine can do when nobody else is on it.
        self.time(call)
        return min(self.time(call) for _ in range(self._samples))

    def _read_bandwidth(self) -> float:
        """Bytes per second of the faster of a sum and a maximum over 256 MiB."""
        x = _memory(256 << 20, self.device)
        return x.nbytes / min(self._best(x.sum), self._best(x.max))

    def _matmul_rate(self, dtype: torch.dtype) -> float:
        size = 1024 if self.device.type == "cpu" else 8192
        a, b = (torch.randn(size, size, device=self.device).to(dtype) for _ in range(2))
        return 2 * size**3 / self._best(lambda: a @ b)


def run(cases: Iterable[Case], machine: Machine, rounds: int) -> list[Row]:
    """Verify and time every case; prints a table as it goes."""
    rows = []
    for case in cases:
        times: dict[str, list[float]] = {name: [] for name in case.providers}
        for name, call in case.providers.items():
            case.check(name, call())
        for _ in range(rounds):
            for name, call in case.providers.items():
                if case.before is not None:
                    case.before()
                times[name].append(machine.time(call, case.calls))
        floor = machine.floor(case)
        rows += _rows(case, times, floor, machine.device)
        by_bytes = case.bytes / machine.read_bandwidth >= floor
        print(f"\n{case.op}  {case.shape}  {case.dtype}  ceiling {floor * 1e6:.1f} us")
        for row in rows[-len(times) :]:
            rate = f"{row.gb_s:8.2f} GB/s  " if by_bytes else f"{row.gflop_s:7.1f} GFLOP/s"
            ratio = f"best peer / ours {row.ratio:.2f}" if row.provider == OURS else ""
            print(
                f"  {row.provider:30} {row.median_us:10.1f} us  "
                f"[{row.p20_us:.1f}, {row.p80_us:.1f}]  {rate}  {row.ceiling_share:6.1%}  {ratio}"
            )
    return rows


def _rows(
    case: Case, times: dict[str, list[float]], floor: float, device: torch.device
) -> list[Row]:
    medians = {name: statistics.median(values) for name, values in times.items()}
    peers = [median for name, median in medians.items() if name != OURS]
    rows = []
    for name, values in times.items():
        fifths = (
            statistics.quantiles(values, n=5, method="inclusive") if len(values) > 1 else values * 4
        )
        rows.append(
            Row(
                case.op,
                case.shape,
                str(case.dtype).removeprefix("torch."),
                device.type,
                name,
                medians[name] * 1e6,
                fifths[0] * 1e6,
                fifths[3] * 1e6,
                case.bytes / medians[name] / 1e9,
                case.flops / medians[name] / 1e9,
                floor / medians[name],
                min(peers, default=float("nan")) / medians[OURS]
                if name == OURS
                else medians[name] / medians[OURS],
            )
        )
    return rows


def provenance() -> dict[str, str]:
    """Commit, versions and machine of this run."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    ).stdout.strip()
    model = platform.processor()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit or "unknown",
        "torch": torch.__version__,
        "cpu": f"{model} ({torch.backends.cpu.get_cpu_capability()})",
        "threads": str(torch.get_num_threads()),
    }


def save(rows: list[Row], machine: Machine) -> Path:
    """Append to results/<device>.csv a line per provider and shape, with the command of the run."""
    device = machine.device.type
    extra = provenance()
    if device == "cuda":
        extra["gpu"] = torch.cuda.get_device_name(machine.device)
    extra["read_gb_s"] = f"{machine.read_bandwidth / 1e9:.1f}"
    for dtype, rate in machine.matmul_rates.items():
        extra[f"matmul_{str(dtype).removeprefix('torch.')}_gflop_s"] = f"{rate / 1e9:.0f}"
    extra["command"] = shlex.join(["python", "bench/run.py", *sys.argv[1:]])
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{device}.csv"
    columns = [*Row.__dataclass_fields__, *extra]
    new = not path.exists()
    if not new:
        with path.open(newline="") as file:
            found = next(csv.reader(file))
        if found != columns:
            raise SystemExit(f"{path}: expected the columns {columns}, got {found}")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            values = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in vars(row).items()}
            writer.writerow(values | extra)
    return path
