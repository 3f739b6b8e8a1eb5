"""``python -m eagle2_kernels.env``: what a bug report needs, as text or with ``--json``.

Versions, which compiled libraries loaded or why not, how the build decided about CUDA, what the CPU
can do and how many threads there are. It looks; it changes nothing and sends nothing.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path

import torch

from . import _library
from ._version import __version__

PACKAGES = ("triton", "numpy", "transformers", "tokenizers", "safetensors", "gguf")
# what the CPU kernels and torch's own ask for
CPU_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "sve",
)
VARIABLES = (
    "EAGLE2_BACKEND",
    "EAGLE2_CPU_ISA",
    "EAGLE2_VALIDATE",
    "EAGLE2_CUDA",
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "TRITON_INTERPRET",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "ATEN_CPU_CAPABILITY",
    "LD_PRELOAD",
)


def collect() -> dict[str, dict[str, object]]:
    """The whole report by section; every value is a JSON scalar or a list of them."""
    return {
        "eagle2_kernels": {"version": __version__, "path": str(_library.PACKAGE)},
        "libraries": _libraries(),
        "build": _library.build_info() or {"record": "none: nothing was built for this copy"},
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "platform": platform.platform(),
            "libc": " ".join(platform.libc_ver()),
        },
        "torch": {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "path": str(Path(torch.__file__).parent),
        },
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": _cpu(),
        "gpu": _gpus(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def provenance() -> dict[str, str]:
    """Date, versions, CPU and threads: what a measured row needs beside its figure."""
    cpu = _cpu()
    return {
        "date": datetime.date.today().isoformat(),
        "version": __version__,
        "torch": torch.__version__,
        "cpu": f"{cpu['model']} ({cpu['torch_capability']})",
        "threads": str(cpu["torch_threads"]),
    }


def _libraries() -> dict[str, object]:
    if not _library.status():
        return dict.fromkeys(_library.LIBRARIES, "not looked for: EAGLE2_BACKEND=reference")
    return {
        name: f"loaded from {s.path}" if s.loaded else f"NOT loaded: {s.reason}"
        for name, s in _library.status().items()
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, object]:
    model, flags = platform.processor() or platform.machine(), set()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    if match := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
        model = match.group(1)
    if match := re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE):
        flags = set(match.group(1).split())
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "model": model,
        "flags": [f for f in CPU_FLAGS if f in flags],
        "kernels_isa": _isa(),
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "cpus": os.cpu_count(),
        "cpus_allowed": len(affinity(0)) if affinity else None,
        "torch_threads": torch.get_num_threads(),
        "torch_interop_threads": torch.get_num_interop_threads(),
    }


def _isa() -> str | None:
    """The level the CPU kernels use, or why they have none; None where they are not loaded."""
    library = _library.status().get("_C")
    if library is None or not library.loaded:
        return None
    choose = ctypes.CDLL(str(library.path)).eagle2_choose_isa
    choose.restype = ctypes.c_char_p
    return choose(None, None).decode()


def _gpus() -> dict[str, object]:
    if not torch.cuda.is_available():
        return {"available": False}
    report: dict[str, object] = {"available": True}
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        report[str(i)] = f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB"
    return report


def render(report: dict[str, dict[str, object]]) -> str:
    """The report as text: a line per fact, continuation lines indented under it."""
    lines = []
    for section, facts in report.items():
        lines.append(section)
        for name, value in facts.items():
            shown = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            lines.append(f"  {name}: " + shown.replace("\n", "\n    "))
    return "\n".join(lines)


def main() -> None:
    """Print the report."""
    report = collect()
    print(json.dumps(report, indent=1) if "--json" in sys.argv[1:] else render(report))


if __name__ == "__main__":
    main()
