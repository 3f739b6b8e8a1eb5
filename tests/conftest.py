"""Helpers beside the tests (`cases.py`, `tiny_models.py`) are importable under importlib mode."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def core(tmp_path_factory):
    """csrc/tree.h itself, without torch in the way."""
    from native_core import load_core

    return load_core(tmp_path_factory.mktemp("core"))
