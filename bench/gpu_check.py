"""The one script for a card: does everything agree, and how fast is it?

    make gpu-check                                      # in .venv-cuda, built here
    python bench/gpu_check.py --wheel FILE              # a wheel from elsewhere, nvcc or not
    python bench/gpu_check.py --budget 240              # correctness, and times while they last
    python bench/gpu_check.py --device cpu --interpret  # no card: the same path, smallest rows

Stages, in this order: (a) environment and import; (b) every operator against the float64 oracle on
the CPU, the attention case table, poison, the row rule; (c) decode steps as CUDA graphs against
eager ones; (d) compute-sanitizer on small calls, where it is found; (e) times beside what others
offer. A row is printed and written to the CSV as soon as it is there; what fails does not stop the
rest and makes the exit status 1. The floor is torch 2.11 with CUDA 13.0, triton 3.6, Python 3.12.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_report import NotHereError, Report, Row

ROOT = Path(__file__).parents[1]
STAGES = ("ops", "attention", "step", "sanitizer", "time")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheel", type=Path, help="install the package from this file first")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--interpret",
        action="store_true",
        help="Triton kernels through its interpreter (--device cpu)",
    )
    parser.add_argument("--quick", action="store_true", help="the smallest rows (always on a CPU)")
    parser.add_argument("--full", action="store_true", help="all rows, on a CPU too")
    parser.add_argument("--stages", default=",".join(STAGES), help=f"of {', '.join(STAGES)} (all)")
    parser.add_argument("--resume", default="0,0", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=float, default=420, help="seconds for everything (420)")
    parser.add_argument(
        "--csv", type=Path, help="where rows go (bench/results/gpu_check.csv; CPU: none)"
    )
    options = parser.parse_args(arguments)
    options.stages = options.stages.split(",")
    unknown = set(options.stages) - set(STAGES)
    if unknown:
        parser.error(f"--stages: expected some of {', '.join(STAGES)}, got {', '.join(unknown)}")
    if options.interpret and options.device != "cpu":
        parser.error("--interpret: expected --device cpu with it")
    options.quick = (options.quick or options.device == "cpu") and not options.full
    if options.csv is None and options.device == "cuda":
        options.csv = ROOT / "bench" / "results" / "gpu_check.csv"
    return options


# Stage (a)


def provide_package(options: argparse.Namespace) -> str:
    """Make `eagle2_kernels` importable: from a wheel, as it is installed, or built here."""
    folder = Path(tempfile.gettempdir()) / f"eagle2-gpu-check-{os.getuid()}"
    if options.wheel is not None:
        if not options.wheel.exists():
            raise FileNotFoundError(f"--wheel: no file {options.wheel}")
        return _install(str(options.wheel), folder, {})
    if importlib.util.find_spec("eagle2_kernels") is not None:
        return "installed"
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if options.device == "cuda" and nvcc is not None:
        import torch

        major, minor = torch.cuda.get_device_capability()
        environment = {"EAGLE2_CUDA": "1", "TORCH_CUDA_ARCH_LIST": f"{major}.{minor}"}
        return f"built here with {nvcc}: " + _install(str(ROOT), folder, environment)
    why = "no nvcc here: the C++ CUDA kernels are missing, give --wheel for them"
    return f"built here, {why}: " + _install(str(ROOT), folder, {"EAGLE2_CUDA": "0"})


def _install(what: str, folder: Path, environment: dict[str, str]) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    command += [
        "--no-build-isolation",
        "--disable-pip-version-check",
        "--target",
        str(folder),
        what,
    ]
    began = time.monotonic()
    run = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise RuntimeError(f"pip install {what}: {(run.stderr or run.stdout).strip()[-500:]}")
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    # For the sanitizer's children.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(folder), os.environ.get("PYTHONPATH")))
    )
    return f"{what} in {time.monotonic() - began:.0f} s"


def provenance(device: str) -> dict[str, str]:
    """What the CSV says of every row."""
    import torch

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    ).stdout.strip()
    card = driver = ""
    if device == "cuda":
        card = torch.cuda.get_device_name()
        smi = shutil.which("nvidia-smi")
        if smi is not None:
            query = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
            said = subprocess.run(query, capture_output=True, text=True, check=False).stdout
            driver = (said.strip().splitlines() or [""])[0]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit or "unknown",
        "card": card or f"none ({platform.machine()} CPU)",
        "driver": driver,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "python": platform.python_version(),
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def check_import(report: Report, options: argparse.Namespace) -> None:
    """Rows of stage (a): libraries, Triton, the card."""
    import torch

    def libraries() -> str:
        from eagle2_kernels import _library

        found = {name: status for name, status in _library.load().items()}
        if not found["_C"].loaded:
            raise RuntimeError(str(found["_C"].reason))
        cuda = found["_C_cuda"]
        if options.device == "cuda" and not cuda.loaded:
            raise RuntimeError(f"_C_cuda: {cuda.reason}")
        return f"_C, _C_cuda {'loaded' if cuda.loaded else 'not there'}"

    def triton() -> str:
        try:
            importlib.import_module("triton")
        except ImportError as error:
            raise NotHereError(f"not importable: {error}") from error
        if options.interpret:
            interpret_triton()
            return "interpreted, for CPU tensors"
        return "compiled" if options.device == "cuda" else "not used"

    def card() -> str:
        if options.device == "cpu":
            raise NotHereError("no card asked for: CPU tensors, perf_counter, no graphs")
        p = torch.cuda.get_device_properties(0)
        size = f"{p.multi_processor_count} SMs, {p.total_memory >> 30} GiB"
        return f"{p.name}, sm_{p.major}{p.minor}, {size}"

    report.run(Row("import", "libraries", ""), libraries)
    report.run(Row("import", "Triton", "the Triton rows"), triton)
    report.run(Row("import", "card", ""), card)


_held: list[Any] = []


def interpret_triton() -> None:
    """Serve CPU tensors by the Triton kernels, which the interpreter runs."""
    import torch

    from eagle2_kernels import ops

    library = torch.library.Library(ops.NAMESPACE, "IMPL")
    _held.append(library)
    for op in ops.OPS:
        if op.triton is not None:
            ops.use_triton(library, op, "CPU")


# Stage (d)


def sanitize(report: Report, options: argparse.Namespace) -> None:
    """This script's operators, quick, under memcheck and racecheck."""
    places = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    tool = shutil.which("compute-sanitizer") or next(
        (p for x in places if x and (p := shutil.which("compute-sanitizer", path=f"{x}/bin"))), None
    )
    for check in ("memcheck", "racecheck"):
        row = Row("sanitizer", check, "operators, quick")

        def body(check: str = check) -> str:
            if options.device == "cpu":
                raise NotHereError("left out: no card")
            if tool is None:
                raise NotHereError("compute-sanitizer: not found")
            script = str(Path(__file__).resolve())
            command = [tool, "--tool", check, "--error-exitcode", "9", sys.executable, script]
            command += ["--quick", "--stages", "ops,attention", "--csv", os.devnull]
            limit = max(10, min(60, report.left / 4))
            try:
                run = subprocess.run(
                    command, capture_output=True, text=True, timeout=limit, check=False
                )
            except subprocess.TimeoutExpired as error:
                raise NotHereError(f"not finished in {limit:.0f} s") from error
            said = (run.stdout + run.stderr).strip().splitlines()
            errors = [x for x in said if "=========" in x and "ERROR SUMMARY" in x]
            if "Device not supported" in run.stdout + run.stderr:
                raise NotHereError("compute-sanitizer: the device is not supported here")
            if run.returncode:
                raise RuntimeError(f"exit status {run.returncode}: {(errors or said or [''])[-1]}")
            return (errors or ["no errors"])[-1].strip("= ")

        report.run(row, body)


def take_up(report: Report) -> None:
    """Go on in a new process: this one's CUDA context is broken, and nothing runs in it again."""
    print(f"the device is lost to this process; a new one goes on after {report.attempts}")
    sys.stdout.flush()
    given = sys.argv[1:]
    for option in ("--resume", "--budget"):
        if option in given:
            at = given.index(option)
            del given[at : at + 2]
    state = ["--resume", f"{report.attempts},{report.failures}", "--budget", f"{report.left:.0f}"]
    os.execv(sys.executable, [sys.executable, str(Path(__file__).resolve()), *given, *state])


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    began = time.monotonic()
    if options.interpret:
        # Read when triton is first imported.
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device here; --device cpu runs the smallest rows")
        return 2
    how = "as before" if options.resume != "0,0" else provide_package(options)
    skip, failures = map(int, options.resume.split(","))
    spent = time.monotonic() - began
    report = Report(options.budget - spent, options.csv, provenance(options.device))
    report.skip, report.failures = skip, failures
    if options.device == "cuda":
        report.settle = torch.cuda.synchronize
        report.lost = take_up
    for name, value in report.provenance.items():
        print(f"{name:14} {value}")
    print(f"{'package':14} {how}; ready after {time.monotonic() - began:.0f} s\n")
    check_import(report, options)
    if skip:
        print(f"going on after {skip} attempts")

    import gpu_correct
    from roofline import card_named

    torch.manual_seed(0)
    where = gpu_correct.Device(torch.device(options.device))
    with torch.inference_mode():
        if "ops" in options.stages:
            gpu_correct.check_ops(report, where, options.quick)
        if "attention" in options.stages:
            gpu_correct.check_attention(report, where, options.quick)
    if "step" in options.stages:
        gpu_correct.check_steps(report, where, options.quick)
    if "sanitizer" in options.stages:
        sanitize(report, options)
    if "time" in options.stages:
        import gpu_time

        card = card_named(report.provenance["card"])
        gpu_time.time_all(report, where, card, options.quick)
    return report.summary()


if __name__ == "__main__":
    sys.exit(main())
