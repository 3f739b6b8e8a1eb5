"""One runner for all benches: check a provider's result, then time the providers in turn.

Rounds interleave the providers, so that a slow spell of the machine meets all of them. Reported are
the median and the 20th and 80th percentile of a call, the ratio to the best peer, and the share of
the floor: bytes at the copy bandwidth, or operations at the matmul rate, measured in the same run.
"""

from __future__ import annotations

import csv
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass
class Case:
    """One shape of one operator.

    ``providers`` maps names to calls; "ours" is the library's. ``check`` raises when a provider's
    result is wrong. ``bytes`` and ``flops`` count what any implementation must move and compute.
    """

    op: str
    shape: str
    providers: dict[str, Callable[[], object]]
    check: Callable[[str, object], None]
    bytes: int
    flops: int = 0
    dtype: torch.dtype = torch.float32


@dataclass
class Row:
    op: str
    shape: str
    dtype: str
    provider: str
    median_us: float
    p20_us: float
    p80_us: float
    bytes: int
    flops: int
    floor_us: float
    floor_share: float
    speedup_of_ours: float
    machine: dict[str, str] = field(default_factory=dict)


def copy_bandwidth() -> float:
    """Bytes per second of a large copy, both directions counted."""
    source = torch.empty(64 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    times = [_timed(lambda: target.copy_(source)) for _ in range(15)]
    return 2 * source.numel() / statistics.median(times)


def matmul_rate(dtype: torch.dtype) -> float:
    """Operations per second of torch's matmul, 1024 cubed."""
    if dtype == torch.float16:
        dtype = torch.float32
    a, b = torch.randn(1024, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
    times = [_timed(lambda: a @ b) for _ in range(15)]
    return 2 * 1024**3 / statistics.median(times)


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def run(cases: list[Case], rounds: int) -> list[Row]:
    """Verify and time every case; prints a table as it goes."""
    bandwidth, rates = copy_bandwidth(), {}
    print(f"copy bandwidth {bandwidth / 1e9:.1f} GB/s, {torch.get_num_threads()} threads")
    machine = provenance() | {"copy_gb_s": f"{bandwidth / 1e9:.1f}"}
    rows = []
    for case in cases:
        rate = rates.setdefault(case.dtype, matmul_rate(case.dtype) if case.flops else 1.0)
        floor = max(case.bytes / bandwidth, case.flops / rate)
        times: dict[str, list[float]] = {name: [] for name in case.providers}
        for name, call in case.providers.items():
            case.check(name, call())
        for _ in range(rounds):
            for name, call in case.providers.items():
                times[name].append(_timed(call))
        medians = {name: statistics.median(t) for name, t in times.items()}
        print(f"\n{case.op}  {case.shape}  {case.dtype}  floor {floor * 1e6:.0f} us")
        for name, values in times.items():
            fifths = statistics.quantiles(values, n=5)
            ours = medians[name] / medians["ours"]
            rows.append(
                Row(
                    case.op,
                    case.shape,
                    str(case.dtype).removeprefix("torch."),
                    name,
                    medians[name] * 1e6,
                    fifths[0] * 1e6,
                    fifths[3] * 1e6,
                    case.bytes,
                    case.flops,
                    floor * 1e6,
                    floor / medians[name],
                    ours,
                    machine,
                )
            )
            print(
                f"  {name:34} {medians[name] * 1e6:10.1f} us  [{fifths[0] * 1e6:.1f}, "
                f"{fifths[3] * 1e6:.1f}]  {floor / medians[name]:6.1%} of the floor's speed  "
                f"{ours:6.2f} x ours"
            )
    return rows


def provenance() -> dict[str, str]:
    """Commit, versions and machine of this run."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
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


def save(name: str, rows: list[Row]) -> Path:
    """Write results/<name>.csv, one line per provider and shape."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        columns = [c for c in Row.__dataclass_fields__ if c != "machine"]
        writer.writerow([*columns, *rows[0].machine])
        for row in rows:
            values = [getattr(row, c) for c in columns]
            writer.writerow(
                [f"{v:.4g}" if isinstance(v, float) else v for v in values]
                + list(row.machine.values())
            )
    return path
