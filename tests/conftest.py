"""Helpers beside the tests (`cases.py`, `tiny_models.py`) are importable under importlib mode."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
