"""The build's decisions, and what the installed package and the source distribution hold."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest
import torch

import eagle2_kernels
from eagle2_kernels import _library

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = Path(eagle2_kernels.__file__).parent


@pytest.fixture(scope="module")
def rules():
    """setup.py as a module: it builds nothing unless run as a script."""
    spec = importlib.util.spec_from_file_location("eagle2_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def toolkit_at(tmp_path):
    """Makes a toolkit of shell and empty files; ``without`` names what it lacks."""

    def make(without=(), release="13.0"):
        home = tmp_path / "cuda"
        for file in ("bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart.so"):
            if file not in without:
                (home / file).parent.mkdir(parents=True, exist_ok=True)
                (home / file).touch()
        nvcc = home / "bin" / "nvcc"
        if nvcc.exists():
            nvcc.write_text(
                f'#!/bin/sh\n[ "$1" = --dryrun ] && echo "#$ TOP={home}/bin/.." >&2\n'
                f'echo "Cuda compilation tools, release {release}, V{release}.1"\n'
            )
            nvcc.chmod(0o755)
        return home

    return make


@pytest.mark.parametrize(
    ("wish", "torch_cuda", "version", "problem", "build", "says"),
    [
        pytest.param(None, "13.0", "13.0", None, True, "13.0", id="auto"),
        pytest.param("", "13.0", "13.2", None, True, "13.2", id="auto-other-minor"),
        pytest.param("auto", None, "13.0", None, False, "not a CUDA build", id="auto-cpu-torch"),
        pytest.param("auto", "12.8", "13.0", None, False, "majors", id="auto-other-major"),
        pytest.param("auto", "13.0", None, "no nvcc", False, "no nvcc", id="auto-no-toolkit"),
        pytest.param("1", "13.0", "13.0", None, True, "13.0", id="forced"),
        pytest.param("0", "13.0", "13.0", None, False, "EAGLE2_CUDA=0", id="never"),
    ],
)
def test_cuda_decision(rules, wish, torch_cuda, version, problem, build, says):
    env = {} if wish is None else {"EAGLE2_CUDA": wish}
    toolkit = rules.Toolkit("/cuda", version, "/cuda/include", "/cuda/lib64", problem)
    decision = rules.decide_cuda(env, torch_cuda, toolkit)
    assert decision.build is build
    assert says in decision.reason


@pytest.mark.parametrize(
    ("torch_cuda", "version", "problem", "says"),
    [
        pytest.param(None, "13.0", None, "not a CUDA build", id="cpu-torch"),
        pytest.param("12.8", "13.0", None, "CUDA 12.8", id="other-major"),
        pytest.param("13.0", None, "no cuda_runtime.h in /x", "no cuda_runtime.h", id="half"),
    ],
)
def test_forced_cuda_build_fails_with_the_cause(rules, torch_cuda, version, problem, says):
    toolkit = rules.Toolkit("/cuda", version, problem=problem)
    with pytest.raises(rules.CudaBuildError, match=f"EAGLE2_CUDA=1, but .*{re.escape(says)}"):
        rules.decide_cuda({"EAGLE2_CUDA": "1"}, torch_cuda, toolkit)


def test_unknown_wish_is_refused(rules):
    with pytest.raises(ValueError, match="expected auto, 1 or 0, got 'yes'"):
        rules.decide_cuda({"EAGLE2_CUDA": "yes"}, "13.0", rules.Toolkit())


def test_toolkit_is_found_behind_a_wrapper(rules, toolkit_at, tmp_path):
    home = toolkit_at(release="13.1")
    wrapper = tmp_path / "local" / "bin" / "nvcc"
    wrapper.parent.mkdir(parents=True)
    wrapper.write_text(f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n')
    wrapper.chmod(0o755)
    found = rules.probe_toolkit({"PATH": f"{wrapper.parent}:/usr/bin:/bin"})
    assert found == rules.Toolkit(str(home), "13.1", f"{home}/include", f"{home}/lib64")


def test_cuda_home_is_believed_over_path(rules, toolkit_at):
    home = toolkit_at()
    assert rules.probe_toolkit({"CUDA_HOME": str(home), "PATH": "/nowhere"}).home == str(home)


@pytest.mark.parametrize("file", ["bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart.so"])
def test_half_a_toolkit_is_named(rules, toolkit_at, file):
    found = rules.probe_toolkit({"CUDA_HOME": str(toolkit_at(without=(file,)))})
    assert file in found.problem or Path(file).name in found.problem


def test_no_toolkit_is_said(rules):
    assert "no nvcc on PATH" in rules.probe_toolkit({"PATH": "/nowhere"}).problem


@pytest.mark.parametrize(
    ("env", "known", "expected"),
    [
        pytest.param({}, "", "8.0;9.0;10.0;12.0+PTX", id="default"),
        pytest.param({}, "compute_80\ncompute_90", "8.0;9.0+PTX", id="older-nvcc"),
        pytest.param({"TORCH_CUDA_ARCH_LIST": "8.6"}, "compute_90", "8.6", id="asked-for"),
    ],
)
def test_arch_list(rules, env, known, expected):
    assert rules.arch_list(env, known) == expected


@pytest.mark.parametrize(
    ("cpus", "gib", "cuda", "jobs"),
    [(64, 8, False, 5), (64, 8, True, 2), (4, 99, True, 4), (4, 0, False, 1)],
)
def test_jobs_fit_in_memory(rules, cpus, gib, cuda, jobs):
    assert rules.max_jobs(cpus, gib * rules.GIB, cuda) == jobs


def test_build_log_is_cut_to_what_was_said(rules):
    log = "[1/1] nvcc -c a.cu -o a.o\na.cu(3): error: expected a ;\n\nninja: build stopped"
    assert rules.compiler_words(log, "ninja failed") == (
        "a.cu(3): error: expected a ;",
        ["a.cu(3): error: expected a ;", "ninja: build stopped"],
    )
    assert rules.compiler_words("", "ninja failed") == ("ninja failed", [])


@pytest.mark.parametrize(
    ("built", "torch_cuda", "says"),
    [
        pytest.param("13.0", "13.2", None, id="same-major"),
        pytest.param("13.0", "12.8", "CUDA 12.8", id="other-major"),
        pytest.param("13.0", None, "not a CUDA build", id="cpu-torch"),
        pytest.param(None, "13.0", "not on record", id="no-record"),
    ],
)
def test_cuda_library_serves_its_own_major_only(built, torch_cuda, says):
    obstacle = _library.cuda_obstacle(built, torch_cuda)
    assert obstacle is None if says is None else says in obstacle


def test_broken_library_is_reported_with_path_and_cause(tmp_path):
    broken = tmp_path / "_C.abi3.so"
    broken.write_text("not a library" * 100)
    with pytest.warns(RuntimeWarning, match="does not load"):
        status = _library._load("_C", tmp_path)
    assert not status.loaded
    for part in (str(broken), "invalid ELF header", torch.__version__, "rebuild"):
        assert part in status.reason


def test_absent_library_gives_the_reason_of_the_build(tmp_path):
    (tmp_path / "_build_info.json").write_text(json.dumps({"cuda_reason": "no nvcc here"}))
    assert "no nvcc here" in _library._load("_C_cuda", tmp_path).reason
    assert "rebuild" in _library._load("_C", tmp_path).reason


def test_source_tree_is_told_from_an_installation(tmp_path):
    (tmp_path / "setup.py").touch()
    (tmp_path / "eagle2_kernels").mkdir()
    assert "source tree" in _library._load("_C", tmp_path / "eagle2_kernels").reason


def test_cpu_library_is_loaded_and_needs_torch_cpu_only():
    path = INSTALLED / "_C.abi3.so"
    assert path.exists(), f"{INSTALLED} is not an installation with a compiled library"
    dynamic = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True)
    needed = set(re.findall(r"NEEDED.*\[(.+?)\]", dynamic.stdout))
    system = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}
    assert needed - system <= {"libtorch_cpu.so", "libc10.so"}
    assert not re.search("RPATH|RUNPATH", dynamic.stdout)


def test_installed_as_one_wheel_for_every_python():
    tags = re.findall(
        r"^Tag: (.+)$", metadata.distribution("eagle2_kernels").read_text("WHEEL"), re.M
    )
    assert [t.rsplit("-", 1)[0] for t in tags] == ["cp310-abi3"]


def test_torch_is_a_floor_and_the_only_requirement():
    requirements = metadata.requires("eagle2_kernels")
    assert [r for r in requirements if "extra ==" not in r] == ["torch>=2.10"]


def test_version_is_stated_once():
    assert metadata.version("eagle2_kernels") == eagle2_kernels.__version__


def test_installation_holds_kernels_head_and_type_marker():
    files = {str(p.relative_to(INSTALLED)) for p in INSTALLED.rglob("*") if p.is_file()}
    assert {"py.typed", "triton_kernels/__init__.py", "_build_info.json"} <= files
    assert any(re.fullmatch(r"assets/.*\.safetensors", f) for f in files)


@pytest.mark.parametrize("backend", ["compiled", "reference"])
def test_env_report(backend, monkeypatch):
    monkeypatch.setenv("EAGLE2_BACKEND", backend)
    run = subprocess.run(
        [sys.executable, "-P", "-m", "eagle2_kernels.env", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(run.stdout)
    assert report["torch"]["version"] == torch.__version__
    assert report["build"]["cuda_reason"]
    expected = "loaded from" if backend == "compiled" else "not looked for"
    assert report["libraries"]["_C"].startswith(expected)


def test_sdist_holds_what_a_build_needs(tmp_path):
    tree = tmp_path / "tree"
    skip = shutil.ignore_patterns(
        ".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", "runs"
    )
    shutil.copytree(ROOT, tree, ignore=skip)
    command = "from setuptools.build_meta import build_sdist; build_sdist('out')"
    subprocess.run([sys.executable, "-c", command], cwd=tree, check=True, capture_output=True)
    (archive,) = (tree / "out").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        held = {name.partition("/")[2] for name in tar.getnames()}
    wanted = {"LICENSE", "README.md", "pyproject.toml", "setup.py", "eagle2_kernels/py.typed"}
    for pattern in (
        "csrc/**/*",
        "triton_kernels/**/*.py",
        "eagle2_kernels/**/*.py",
        "eagle2_kernels/assets/**/*",
    ):
        found = {str(p.relative_to(tree)) for p in tree.glob(pattern) if p.is_file()}
        assert found, f"{pattern} matches nothing in {ROOT}"
        wanted |= found
    assert wanted <= held
    assert not [name for name in held if name.endswith((".so", ".pyc"))]


def test_command_line_names_the_extra_it_lacks():
    script = (
        "import sys; sys.modules['typer'] = None; from eagle2_kernels.__main__ import main; main()"
    )
    run = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert run.returncode == 1
    assert "pip install 'eagle2_kernels[hf]'" in run.stderr
    assert "Traceback" not in run.stderr
