"""One worker process: its scratch copy, a mutant planted in it, tests run in a fork.

The process has imported torch before it forks, so a run of tests starts at once.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from table import Mutant, killers

ROOT = Path(__file__).resolve().parents[2]
SCRATCH = ROOT / "build" / "mutants"
# Seconds of one run of tests: processor time (the machine may be busy), and in all.
CPU_LIMIT, CPU_LIMIT_HANGS, TIMEOUT = 120, 12, 900
GIB = 1 << 30


@dataclass(frozen=True)
class Sources:
    """Where the parts of a scratch copy come from; ``objects`` is empty when none is replaced."""

    package: str
    objects: str
    commands: dict[str, str]  # object's name -> its compile command
    build_root: str


@dataclass(frozen=True)
class Outcome:
    """``verdict`` is killed, survived, skipped or broken; ``detail`` says by what, or why."""

    verdict: str
    detail: str
    seconds: float = 0.0


# Set once in each process.
_here = Path()
_sources: Sources


def enter_worker(numbers: multiprocessing.Queue, sources: Sources) -> None:
    global _here, _sources
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _here, _sources = SCRATCH / f"worker{numbers.get()}", sources
    ignore = shutil.ignore_patterns("__pycache__", ".hypothesis")
    shutil.copytree(sources.package, _here / "site" / "eagle2_kernels", ignore=ignore)
    for folder in ("csrc", "tests", "eagle2_kernels", "triton_kernels"):
        shutil.copytree(ROOT / folder, _here / "tree" / folder, ignore=ignore)
    for file in ("pyproject.toml", "README.md", "CHANGELOG.md", "setup.py", "Makefile"):
        shutil.copy(ROOT / file, _here / "tree")
    if sources.objects:
        shutil.copytree(sources.objects, _here / "objects")
        # What a mutant's objects are linked with must make a library that passes, too.
        link(_here / "site", {})
        shutil.copy(library(), _here / "_C.clean")
    # Imported once, before the forks; all but torch and pytest only save time.
    for module in ("torch", "pytest", "hypothesis", "transformers.models.llama.modeling_llama"):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)


def library() -> Path:
    return _here / "site" / "eagle2_kernels" / "_C.abi3.so"


def try_mutant(mutant: Mutant) -> Outcome:
    start = time.monotonic()
    if missing := mutant.missing():
        return Outcome("skipped", f"needs {missing}")
    original = (_here / "tree" / mutant.file).read_text()
    places = [_here / "tree" / mutant.file]
    if not mutant.file.startswith("csrc/"):
        places.append(_here / "site" / mutant.installed)
    try:
        for place in places:
            if place.read_text() != original:
                return Outcome("broken", f"{mutant.file}: the package installed has another")
            place.write_text(original.replace(mutant.old, mutant.new))
        if mutant.objects and (problem := rebuild(mutant)):
            return Outcome("broken", problem, time.monotonic() - start)
        limit = CPU_LIMIT_HANGS if mutant.hangs else CPU_LIMIT
        outcome = run_tests(killers(mutant), limit, first=True, isa=mutant.isa)
    finally:
        for place in places:
            place.write_text(original)
        if mutant.objects:
            shutil.copy(_here / "_C.clean", library())
    if outcome.verdict == "hung":
        verdict = "killed" if mutant.hangs else "broken"
        outcome = Outcome(verdict, f"no end: {outcome.detail}")
    return Outcome(outcome.verdict, outcome.detail, time.monotonic() - start)


def rebuild(mutant: Mutant) -> str:
    """Compile and link the mutant's objects; what the compiler says when it refuses."""
    replaced = {}
    for name in mutant.objects.split():
        target = _here / "objects" / f"mutant_{name}.o"
        command = _sources.commands[name].replace(
            f"{_sources.build_root}/csrc", f"{_here}/tree/csrc"
        )
        # Half the time at -O1, which contracts what -O3 contracts.
        words = ["-O1" if word == "-O3" else word for word in shlex.split(command)]
        words[words.index("-o") + 1] = str(target)
        if "-MF" in words:
            words[words.index("-MF") + 1] = os.devnull
        run = subprocess.run(words, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            errors = [x for x in run.stderr.splitlines() if "error" in x]
            return f"does not compile: {errors[:1] or run.stderr[-200:]}"
        replaced[name] = target
    return link(_here / "site", replaced)


def link(site: Path, replaced: dict[str, Path]) -> str:
    import torch

    clean = {p.stem: p for p in (_here / "objects").rglob("csrc/cpu/*.o")}
    libraries = Path(torch.__file__).parent / "lib"
    target = site / "eagle2_kernels" / "_C.abi3.so"
    target.unlink(missing_ok=True)
    # The first of several definitions of an inline function is taken: the mutant's.
    kept = [path for name, path in clean.items() if name not in replaced]
    objects = [str(path) for path in (*replaced.values(), *kept)]
    run = subprocess.run(
        ["c++", "-shared", *objects, f"-L{libraries}", "-ltorch_cpu", "-lc10", "-o", str(target)],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"does not link: {run.stderr[-200:]}" if run.returncode else ""


class Recorder:
    """A pytest plugin: which test failed, and whether a test ran at all."""

    def __init__(self) -> None:
        self.passed, self.failed, self.errors = 0, [], []

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call":
            if report.passed:
                self.passed += 1
            elif report.failed:
                self.failed.append(report.nodeid)
        elif report.failed:
            self.errors.append(report.nodeid)

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.errors.append(report.nodeid)


def run_tests(tests: list[str], cpu_limit: int, first: bool = False, isa: str = "") -> Outcome:
    """Run tests in a fork. killed: one failed; survived: all passed; hung; broken: none ran."""
    start = time.monotonic()
    result = _here / "result.json"
    result.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        run_pytest(tests, result, cpu_limit, first, isa)
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() - start > TIMEOUT:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return Outcome("hung", tests[0], time.monotonic() - start)
        time.sleep(0.02)
    seconds = time.monotonic() - start
    if os.WIFSIGNALED(done[1]):
        name = signal.Signals(os.WTERMSIG(done[1])).name
        return Outcome("hung" if name == "SIGXCPU" else "killed", f"crash, {name}", seconds)
    if not result.exists():
        return Outcome("broken", f"no test ran; see {_here}/tests.log", seconds)
    found = json.loads(result.read_text())
    if found["failed"]:
        name = found["failed"][0].removeprefix("tests/")
        return Outcome("killed", name, seconds)
    if found["errors"]:
        return Outcome("broken", f"{found['errors'][0]}; see {_here}/tests.log", seconds)
    if found["code"] != 0 or not found["passed"]:
        return Outcome("broken", f"no test ran; see {_here}/tests.log", seconds)
    return Outcome("survived", f"{found['passed']} tests passed", seconds)


def run_pytest(tests: list[str], result: Path, cpu_limit: int, first: bool, isa: str) -> None:
    """The forked child: never returns."""
    try:
        os.setsid()
        with open(_here / "tests.log", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        # A mutant may run or allocate without end.
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit, cpu_limit + 5))
        resource.setrlimit(resource.RLIMIT_DATA, (16 * GIB, 16 * GIB))
        site = str(_here / "site")
        # Compiled files would outlive a mutant of the same second and size.
        sys.dont_write_bytecode = True
        path = os.pathsep.join([site, *filter(None, [os.environ.get("PYTHONPATH")])])
        os.environ.update(PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=path)
        if isa:
            os.environ["EAGLE2_CPU_ISA"] = isa
        sys.path.insert(0, site)
        os.chdir(_here / "tree")
        import pytest

        recorder = Recorder()
        options = ["-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", "not cuda"]
        code = pytest.main([*options, *(["-x"] if first else []), *tests], plugins=[recorder])
        found = {
            "code": int(code),
            "passed": recorder.passed,
            "failed": recorder.failed,
            "errors": recorder.errors,
        }
        result.write_text(json.dumps(found))
    finally:
        os._exit(0)
