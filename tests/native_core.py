"""csrc/tree.h and csrc/address.h bound by pybind11: what the `core` fixture of conftest.py loads.

Free of torch, so that a sanitizer sees nothing but the code under test. ``EAGLE2_CORE_FLAGS`` adds
compiler flags (`make sanitize`); with it set a missing tool is an error, not a skip.
"""

import importlib.util
import os
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parent / "csrc"
NATIVE = HERE / "native"
FLAGS = os.environ.get("EAGLE2_CORE_FLAGS", "").split()


def compile_native(source: str, target: Path, *flags: str) -> None:
    """Compile tests/native/``source``; a failure shows what the compiler said."""
    command = ["c++", "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", *flags]
    # A preloaded sanitizer runtime belongs to the test process, not to its compiler.
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    run = subprocess.run(
        [*command, str(NATIVE / source), "-o", str(target)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert run.returncode == 0, run.stderr


def load_core(folder: Path) -> ModuleType:
    """Compile tree_core.cpp into ``folder`` and import it."""
    lacking = pytest.fail if FLAGS else pytest.skip
    if importlib.util.find_spec("pybind11") is None:
        lacking("pybind11 is not installed")
    import pybind11

    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").exists():
        lacking(f"no Python.h in {include}")
    target = folder / f"tree_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    headers = [f"-isystem{include}", f"-isystem{pybind11.get_include()}"]
    compile_native("tree_core.cpp", target, *headers, "-shared", "-fPIC", "-pthread", *FLAGS)
    spec = importlib.util.spec_from_file_location("tree_core", target)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
