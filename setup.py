"""Builds the compiled libraries; everything static is in pyproject.toml.

`_C` (csrc/cpu) is always built. `_C_cuda` (csrc/cuda) is built as EAGLE2_CUDA says:

    auto (default)  when torch is a CUDA build, a full toolkit is found and their CUDA majors agree;
                    whatever is missing or fails is printed and kept in the wheel
                    (`python -m eagle2_kernels.env`), and `_C` installs anyway
    1               always: whatever is missing or fails ends the build
    0               never

No GPU is looked for: wheels are built in containers. Both libraries are plain shared objects on
LibTorch's stable ABI, loaded by eagle2_kernels/_library.py, so they need no Python.h, no ATen
header and one build for every torch from 2.10 on. The functions with public names are pure or
nearly so and tested in tests/test_packaging.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import setuptools
from setuptools import Extension, find_packages, setup

# With --no-build-isolation nobody checks the floor of pyproject.toml, and venv brings an old one.
if int(setuptools.__version__.split(".")[0]) < 77:
    raise RuntimeError(
        f"eagle2_kernels needs setuptools >= 77 to build, this environment has "
        f"{setuptools.__version__}: pip install -U setuptools, or drop --no-build-isolation"
    )

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent

# Never -ffast-math (NaN and -inf are data here) and never -march=native (the wheel must run on any
# CPU of its kind; kernels that want AVX-512 or AMX ask at run time). The C++ standard is left to
# torch: its headers know what they need.
STABLE_ABI_FLAGS = ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
CXX_FLAGS = ["-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unknown-pragmas"]
CUDA_FLAGS = ["-DUSE_CUDA"]  # the stable shim declares its CUDA stream functions under this
NVCC_FLAGS = [
    "-O3",
    "-Xcompiler=-fvisibility=hidden",
    "-Xfatbin=-compress-all",
    "-Wno-deprecated-gpu-targets",
]
# -z defs: a symbol nobody provides fails here, with its name, instead of at the user's first
# import.
LINK_FLAGS = ["-Wl,-z,defs", "-Wl,--as-needed"]

CUDA_ARCHS = ["8.0", "9.0", "10.0", "12.0"]
GIB = 1 << 30


class CudaBuildError(RuntimeError):
    """EAGLE2_CUDA=1 was asked for and cannot be had."""


@dataclass(frozen=True)
class Toolkit:
    """What was found of a CUDA toolkit.

    `problem` says what is missing, None when it is complete.
    """

    home: str | None = None
    version: str | None = None
    include_dir: str | None = None
    library_dir: str | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Decision:
    """Whether `_C_cuda` is built, and why."""

    build: bool
    reason: str


def toolkit_top(dryrun: str) -> str | None:
    """The prefix in the output of ``nvcc --dryrun``.

    Nvcc on PATH may be a wrapper far from its toolkit.
    """
    match = re.search(r"^#\$ TOP=(.+)$", dryrun, re.MULTILINE)
    return os.path.normpath(match.group(1).strip()) if match else None


def probe_toolkit(env: Mapping[str, str]) -> Toolkit:
    """Find the toolkit.

    CUDA_HOME, else what nvcc itself says. Complete means nvcc, header and libcudart.
    """
    home = env.get("CUDA_HOME") or env.get("CUDA_PATH")
    if not home:
        nvcc = shutil.which("nvcc", path=env.get("PATH"))
        if nvcc is None:
            return Toolkit(problem="CUDA_HOME is not set and there is no nvcc on PATH")
        home = toolkit_top(_output([nvcc, "--dryrun", "none.cu"]))
        if home is None:
            return Toolkit(problem=f"CUDA_HOME is not set and {nvcc} --dryrun prints no TOP")
    nvcc = os.path.join(home, "bin", "nvcc")
    if not os.access(nvcc, os.X_OK):
        return Toolkit(home, problem=f"no compiler at {nvcc}")
    match = re.search(r"release (\d+\.\d+)", _output([nvcc, "--version"]))
    if match is None:
        return Toolkit(home, problem=f"{nvcc} --version names no release")
    target = os.path.join(home, "targets", f"{platform.machine()}-linux")
    includes = [os.path.join(home, "include"), os.path.join(target, "include")]
    libraries = [
        os.path.join(home, "lib64"),
        os.path.join(home, "lib"),
        os.path.join(target, "lib"),
    ]
    include = _holding("cuda_runtime.h", includes)
    library = _holding("libcudart.so", libraries)
    problem = None
    if include is None:
        problem = f"no cuda_runtime.h in {' or '.join(includes)}"
    elif library is None:
        problem = f"no libcudart.so in {' or '.join(libraries)}"
    return Toolkit(home, match.group(1), include, library, problem)


def decide_cuda(env: Mapping[str, str], torch_cuda: str | None, toolkit: Toolkit) -> Decision:
    """Build `_C_cuda`? Raises CudaBuildError when EAGLE2_CUDA=1 and something is missing."""
    wish = env.get("EAGLE2_CUDA", "").strip().lower() or "auto"
    if wish not in ("auto", "1", "0"):
        raise ValueError(f"EAGLE2_CUDA: expected auto, 1 or 0, got {env['EAGLE2_CUDA']!r}")
    if wish == "0":
        return Decision(False, "EAGLE2_CUDA=0")
    missing = None
    if torch_cuda is None:
        missing = "the torch of this build is not a CUDA build (torch.version.cuda is None)"
    elif toolkit.problem is not None:
        missing = toolkit.problem
    elif _major(toolkit.version) != _major(torch_cuda):
        missing = (
            f"the toolkit at {toolkit.home} is CUDA {toolkit.version}, "
            f"torch was built with CUDA {torch_cuda}: the majors must agree"
        )
    if missing is None:
        return Decision(
            True, f"torch has CUDA {torch_cuda}, CUDA {toolkit.version} is at {toolkit.home}"
        )
    if wish == "1":
        raise CudaBuildError(f"EAGLE2_CUDA=1, but {missing}")
    return Decision(False, missing)


def arch_list(env: Mapping[str, str], known: str) -> str:
    """TORCH_CUDA_ARCH_LIST, else those of CUDA_ARCHS that ``nvcc --list-gpu-arch`` knows, PTX for
    what comes after.
    """
    if env.get("TORCH_CUDA_ARCH_LIST"):
        return env["TORCH_CUDA_ARCH_LIST"]
    listed = re.findall(r"compute_(\d+)\b", known)
    archs = [a for a in CUDA_ARCHS if a.replace(".", "") in listed] if listed else CUDA_ARCHS
    return ";".join(archs) + "+PTX" if archs else CUDA_ARCHS[0] + "+PTX"


def compiler_words(log: str, error: str) -> tuple[str, list[str]]:
    """The first complaint in a build log, else ``error``; and the log's end without commands."""
    said = [
        x for x in log.splitlines() if x.strip() and not re.search(r" -c | -shared |^FAILED", x)
    ]
    complaints = (x for x in said if re.search(r"error|fatal|undefined reference|cannot find", x))
    return next(complaints, error).strip(), said[-40:]


def max_jobs(cpus: int, free_bytes: int, cuda: bool) -> int:
    """Compilers at once.

    One per CPU, as far as memory reaches (about 3 GiB for an nvcc run, 1.5 GiB for g++).
    """
    return max(1, min(cpus, int(free_bytes // ((3 if cuda else 1.5) * GIB))))


def _major(version: str | None) -> str | None:
    return version.split(".")[0] if version else None


def _holding(name: str, folders: list[str]) -> str | None:
    return next((f for f in folders if os.path.exists(os.path.join(f, name))), None)


def _output(command: list[str]) -> str:
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{command[0]}: {error}"
    return run.stdout + run.stderr


def _free_bytes() -> int:
    """MemAvailable, or what the cgroup still allows where that is less."""
    free = 4 * GIB
    with contextlib.suppress(OSError, AttributeError):
        text = Path("/proc/meminfo").read_text()
        free = int(re.search(r"MemAvailable:\s+(\d+)", text).group(1)) * 1024  # type: ignore[union-attr]
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        group = Path("/sys/fs/cgroup")
        room = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        free = min(free, room)
    return free


@cache
def _toolkit() -> Toolkit:
    if os.environ.get("EAGLE2_CUDA", "").strip() == "0":
        return Toolkit(problem="not looked for")
    return probe_toolkit(os.environ)


@cache
def _decision() -> Decision:
    import torch

    decision = decide_cuda(os.environ, torch.version.cuda, _toolkit())
    print(f"eagle2_kernels: CUDA library {'yes' if decision.build else 'no'}: {decision.reason}")
    return decision


def _extension(
    name: str, sources: list[Path], libraries: list[str], **dirs: list[str]
) -> Extension:
    """A library on the stable ABI.

    Torch's headers are system headers: their warnings are not ours.
    """
    from torch.utils import cpp_extension

    system = [
        f
        for p in cpp_extension.include_paths() + dirs.get("include_dirs", [])
        for f in ("-isystem", p)
    ]
    defines = STABLE_ABI_FLAGS + (CUDA_FLAGS if "cudart" in libraries else [])
    return Extension(
        f"eagle2_kernels.{name}",
        # relative: absolute ones put the objects outside the build directory
        [str(s.relative_to(ROOT)) for s in sources],
        include_dirs=[str(ROOT / "csrc")],
        library_dirs=cpp_extension.library_paths() + dirs.get("library_dirs", []),
        libraries=libraries,
        language="c++",
        py_limited_api=True,
        extra_compile_args={
            "cxx": CXX_FLAGS + defines + system,
            "nvcc": NVCC_FLAGS + defines + system,
        },
        extra_link_args=LINK_FLAGS,
    )


def _cpu_extension() -> Extension:
    sources = sorted((ROOT / "csrc" / "cpu").glob("*.cpp"))
    if not sources:
        raise RuntimeError(
            f"no sources in {ROOT / 'csrc' / 'cpu'}: this copy of eagle2_kernels is incomplete"
        )
    return _extension("_C", sources, ["torch_cpu", "c10"])


def _cuda_extension(toolkit: Toolkit) -> Extension:
    folder = ROOT / "csrc" / "cuda"
    sources = sorted([*folder.glob("*.cu"), *folder.glob("*.cpp")])
    if not sources:
        raise RuntimeError(f"no sources in {folder}")
    assert toolkit.include_dir and toolkit.library_dir  # decide_cuda saw to it
    return _extension(
        "_C_cuda",
        sources,
        ["torch_cuda", "torch_cpu", "c10_cuda", "c10", "cudart"],
        include_dirs=[toolkit.include_dir],
        library_dirs=[toolkit.library_dir],
    )


@contextlib.contextmanager
def _recorded(into: list[str]) -> Iterator[None]:
    """Keep what compilers write to the real stdout and stderr, then show it.

    Pip hides it when the build goes on.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for copy, fd in zip(saved, (1, 2), strict=True):
                os.dup2(copy, fd)
                os.close(copy)
            log.seek(0)
            into.append(log.read().decode(errors="replace"))
            sys.stdout.write(into[-1])
            sys.stdout.flush()


class Build(build):
    """One build directory per flavour.

    A CPU wheel must not pick up the `_C_cuda` of an earlier CUDA build.
    """

    def initialize_options(self) -> None:
        super().initialize_options()
        if "build_ext" in self.distribution.cmdclass:
            import torch

            kind = f"cu{_major(torch.version.cuda)}" if _decision().build else "cpu"
            self.build_base = os.path.join("build", f"{kind}-torch{torch.__version__}")

    def run(self) -> None:
        # Objects live in build_temp and are reused; what goes into the wheel is collected afresh.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BdistWheel(bdist_wheel):
    """Tags the wheel for every CPython from 3.10 on: no library in it touches the interpreter."""

    def finalize_options(self) -> None:
        self.py_limited_api = "cp310"
        super().finalize_options()


def _build_ext() -> type[build_ext]:
    if shutil.which("ninja") is None:
        # pip run by path (.venv/bin/pip) leaves the environment's bin off PATH
        with contextlib.suppress(ImportError):
            import ninja

            os.environ["PATH"] = f"{ninja.BIN_DIR}{os.pathsep}{os.environ.get('PATH', '')}"
    home = _toolkit().home
    if home is not None:
        os.environ["CUDA_HOME"] = home  # torch guesses it from the path of nvcc, at import
    try:
        from torch.utils import cpp_extension
    except ImportError as error:
        return _build_ext_without_torch(error)
    cpp_extension.CUDA_HOME = home

    class BuildExt(cpp_extension.BuildExtension):
        """`_C`, then `_C_cuda`, which may fail under EAGLE2_CUDA=auto; then the record of both."""

        def build_extensions(self) -> None:
            decision = _decision()
            jobs = max_jobs(len(os.sched_getaffinity(0)), _free_bytes(), decision.build)
            os.environ.setdefault("MAX_JOBS", str(jobs))
            cpu, cuda = self.extensions
            vars(cpu).update(vars(_cpu_extension()))
            self.extensions = [cpu]
            super().build_extensions()
            record = {
                "torch": cpp_extension.torch.__version__,
                "torch_cuda": cpp_extension.torch.version.cuda,
                "eagle2_cuda": os.environ.get("EAGLE2_CUDA", "auto"),
                "cuda_built": False,
                "cuda_reason": decision.reason,
                "cuda_home": _toolkit().home,
                "cuda_toolkit": _toolkit().version,
                "cuda_archs": None,
                "compiler": _output([self.compiler.compiler_cxx[0], "--version"]).splitlines()[0],
                "cxx_flags": CXX_FLAGS + STABLE_ABI_FLAGS,
                "machine": platform.machine(),
                "libc": " ".join(platform.libc_ver()),
            }
            if decision.build:
                record.update(self._build_cuda(cuda))
            target = Path(self.get_ext_fullpath("eagle2_kernels._C")).parent / "_build_info.json"
            target.write_text(json.dumps(record, indent=1) + "\n")

        def _build_cuda(self, cuda: Extension) -> dict[str, object]:
            toolkit = _toolkit()
            known = _output([os.path.join(toolkit.home or "", "bin", "nvcc"), "--list-gpu-arch"])
            archs = os.environ["TORCH_CUDA_ARCH_LIST"] = arch_list(os.environ, known)
            built, log = self.extensions, []
            try:
                with _recorded(log):
                    vars(cuda).update(vars(_cuda_extension(toolkit)))
                    self.extensions = [cuda]
                    super().build_extensions()
            except Exception as error:
                # any failure of an optional library, whatever raised it: ninja, nvcc, the linker,
                # torch's own checks
                if os.environ.get("EAGLE2_CUDA", "").strip() == "1":
                    raise CudaBuildError(
                        f"EAGLE2_CUDA=1, but building _C_cuda failed: {error}"
                    ) from error
                cause, said = compiler_words("".join(log), str(error))
                print(f"eagle2_kernels: CUDA library NOT built, installing without it: {cause}")
                return {"cuda_reason": f"the build failed: {cause}", "cuda_log": said}
            finally:
                self.extensions = built
            built.append(cuda)
            return {"cuda_built": True, "cuda_archs": archs}

    return BuildExt


def _build_ext_without_torch(error: ImportError) -> type[build_ext]:
    class BuildExt(build_ext):
        """Metadata and sdist need no torch; libraries do."""

        def run(self) -> None:
            raise RuntimeError(
                "eagle2_kernels is built against torch >= 2.10, which this environment cannot "
                f"import ({error}): install torch first, or build without --no-build-isolation"
            )

    return BuildExt


def main() -> None:
    """The build backend runs this file as a script."""
    kernels = ["triton_kernels", *(f"triton_kernels.{p}" for p in find_packages("triton_kernels"))]
    setup(
        packages=[
            *find_packages(include=["eagle2_kernels", "eagle2_kernels.*"]),
            *(f"eagle2_kernels.{name}" for name in kernels),
        ],
        # at top level `triton_kernels` would shadow the package of that name that vLLM and others
        # use
        package_dir={"eagle2_kernels.triton_kernels": "triton_kernels"},
        # names only: the rest needs torch, which sdist and metadata do without
        ext_modules=[
            Extension(f"eagle2_kernels.{n}", [], py_limited_api=True) for n in ("_C", "_C_cuda")
        ],
        cmdclass={"build": Build, "build_ext": _build_ext(), "bdist_wheel": BdistWheel},
    )


if __name__ == "__main__":
    main()
