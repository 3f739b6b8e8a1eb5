"""The levels of csrc/cpu/isa.h: EAGLE2_CPU_ISA picks one, and each holds the same promises."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle2_kernels import _library

LEVELS = ["portable", "avx2", "avx512", "avx512_bf16"]


def level(wish: str | None = None, best: str | None = None) -> str:
    """The level that ``wish`` gives on a CPU whose best is ``best``, or the error's words."""
    choose = ctypes.CDLL(str(_library.load()["_C"].path)).eagle2_choose_isa
    choose.restype = ctypes.c_char_p
    choose.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    return choose(*(None if x is None else x.encode() for x in (wish, best))).decode()


HERE = LEVELS[: LEVELS.index(level()) + 1]


@pytest.mark.parametrize("name", HERE[:-1])
def test_tables_at_each_level(name):
    """The attention and top-k tables; the rest of the suite runs at the best level."""
    chosen = (
        "matches_oracle or (plain_decoding and seed0) or exponential or every_float8"
        " or shared_by_tasks or (invisible_slots and paged and nan) or (shows_it and tree and nan)"
        " or independent_of_layout or any_call or tie or equals_the_oracle or nan_and_infinite"
        " or brute_force or certain_token"
    )
    tests = [str(Path(__file__).with_name(f"test_{room}.py")) for room in ("attention", "expand")]
    pytest_run = "-P -m pytest --import-mode=importlib -p no:cacheprovider -q -x".split()
    run = subprocess.run(
        [sys.executable, *pytest_run, "-k", chosen, *tests],
        env=os.environ | {"EAGLE2_CPU_ISA": name, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:]


def test_the_report_names_the_level():
    run = subprocess.run(
        [sys.executable, "-P", "-m", "eagle2_kernels.env", "--json"],
        env=os.environ | {"EAGLE2_CPU_ISA": "portable"},
        capture_output=True,
        text=True,
    )
    assert json.loads(run.stdout)["cpu"]["kernels_isa"] == "portable"


def test_a_level_is_what_was_asked_for_or_an_error():
    for best in LEVELS:
        assert level("", best) == best
        for wish in LEVELS:
            if LEVELS.index(wish) <= LEVELS.index(best):
                assert level(wish, best) == wish
            else:
                assert level(wish, best) == (
                    f"EAGLE2_CPU_ISA: this CPU has no {wish}, its best level is {best}"
                )
    for wish in ("amx", "AVX2", "avx", "avx512_bf16 "):
        assert level(wish, "avx512_bf16") == (
            "EAGLE2_CPU_ISA: expected portable, avx2, avx512 or avx512_bf16 "
            f"(there are no kernels for AMX), got '{wish}'"
        )


def test_an_unknown_level_is_an_error_of_the_call():
    code = (
        "import torch, eagle2_kernels as ek\n"
        "k = torch.zeros(1, 4, 1, 8)\n"
        "ek.tree_attention(torch.zeros(1, 2, 1, 8), k, k, torch.tensor([1], dtype=torch.int32))\n"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | {"EAGLE2_CPU_ISA": "sse9"},
        capture_output=True,
        text=True,
    )
    assert "RuntimeError: EAGLE2_CPU_ISA: expected portable, avx2" in run.stderr
