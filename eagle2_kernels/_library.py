"""Finds and loads the compiled libraries, and remembers why one is not there.

`_C` holds the CPU kernels, `_C_cuda` the compiled CUDA ones. Both register implementations for
schemas that `ops.py` has defined; without them the package imports, its fakes and its oracle work,
and an op says what is missing when it is called. `_C` serves every torch the package supports.
`_C_cuda` depends on the CUDA runtime, so it is loaded only beside a torch of the CUDA major it was
built with.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parent
LIBRARIES = ("_C", "_C_cuda")


@dataclass(frozen=True)
class LibraryStatus:
    """One library: its file (None when there is none), whether it is loaded, and if not, why."""

    name: str
    path: Path | None
    loaded: bool
    reason: str | None


_status: dict[str, LibraryStatus] = {}


def load() -> dict[str, LibraryStatus]:
    """Load what can be loaded, once per process; returns `status()`.

    A missing library is no error here. One that is there and refuses to load is warned about, with
    path and cause.
    """
    if not _status:
        for name in LIBRARIES:
            _status[name] = _load(name, PACKAGE)
    return status()


def status() -> dict[str, LibraryStatus]:
    """What `load` found, by library name; empty before the first `load`."""
    return dict(_status)


def build_info(folder: Path = PACKAGE) -> dict[str, Any]:
    """What setup.py wrote down about the build, {} where nothing was built."""
    try:
        return json.loads((folder / "_build_info.json").read_text())
    except FileNotFoundError:
        return {}


def cuda_obstacle(built_for: str | None, torch_cuda: str | None) -> str | None:
    """Why a `_C_cuda` built for CUDA ``built_for`` cannot serve a torch with ``torch_cuda``; None
    when it can.
    """
    if torch_cuda is None:
        return f"it was built for CUDA {built_for}, this torch is not a CUDA build"
    if built_for is None:
        return "the CUDA version it was built for is not on record"
    if built_for.split(".")[0] != torch_cuda.split(".")[0]:
        return f"it was built for CUDA {built_for}, this torch has CUDA {torch_cuda}"
    return None


def rebuild_command(cuda: bool) -> str:
    """The command that builds the library this environment lacks."""
    return (
        f"EAGLE2_CUDA={int(cuda)} pip install --no-build-isolation --no-deps --force-reinstall "
        "PATH_TO_EAGLE2_KERNELS_SOURCE"
    )


def _load(name: str, folder: Path) -> LibraryStatus:
    cuda = name == "_C_cuda"
    path = next(iter(sorted(folder.glob(f"{name}.*so"))), None)
    if path is None:
        return LibraryStatus(name, None, False, _absence(name, folder))
    if cuda:
        obstacle = cuda_obstacle(build_info(folder).get("torch_cuda"), torch.version.cuda)
        if obstacle is not None:
            hint = f"; rebuild: {rebuild_command(True)}" if torch.version.cuda else ""
            return LibraryStatus(name, path, False, f"{path} is not loaded: {obstacle}{hint}")
    try:
        torch.ops.load_library(str(path))
    except Exception as error:
        # torch wraps the loader's own words ("undefined symbol ...") in "Could not load"
        cause = error.__cause__ or error
        built = build_info(folder).get("torch", "an unknown version")
        reason = (
            f"{path} does not load: {cause} (built with torch {built}, "
            f"running {torch.__version__}); rebuild: {rebuild_command(cuda)}"
        )
        warnings.warn(f"eagle2_kernels: {reason}", RuntimeWarning, stacklevel=4)
        return LibraryStatus(name, path, False, reason)
    return LibraryStatus(name, path, True, None)


def _absence(name: str, folder: Path) -> str:
    if (folder.parent / "setup.py").exists() and not build_info(folder):
        return (
            f"no {name} in {folder}: this is the source tree, not an installation "
            "(run from elsewhere, or `pytest` in place of `python -m pytest`)"
        )
    if name == "_C_cuda":
        cause = build_info(folder).get("cuda_reason")
        because = f" ({cause})" if cause else ""
        hint = f"; rebuild: {rebuild_command(True)}" if torch.version.cuda else ""
        return f"this installation was built without CUDA{because}{hint}"
    return f"no {name} in {folder}; rebuild: {rebuild_command(False)}"
