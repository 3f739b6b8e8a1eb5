"""The levels of csrc/cpu/isa.h: EAGLE2_CPU_ISA picks one, and each holds the same promises."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from native_core import compile_native

from eagle2_kernels import _library

# The model of the matrix unit needs what avx512_bf16 needs; the unit itself may be missing there.
LEVELS = ["portable", "avx2", "avx512", "avx512_bf16", "amx_model", "amx"]


def level(wish: str | None = None, best: str | None = None) -> str:
    """The level that ``wish`` gives on a CPU whose best is ``best``, or the error's words."""
    choose = ctypes.CDLL(str(_library.load()["_C"].path)).eagle2_choose_isa
    choose.restype = ctypes.c_char_p
    choose.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    return choose(*(None if x is None else x.encode() for x in (wish, best))).decode()


PYTEST = [sys.executable, *"-P -m pytest --import-mode=importlib -p no:cacheprovider -q -x".split()]
HERE = [name for name in LEVELS if level(name) == name]


@pytest.mark.parametrize("name", [name for name in HERE if name != level()])
def test_tables_at_each_level(name):
    """The tables of vectorised rooms; the rest of the suite runs at the best level.

    The levels of the matrix unit differ from avx512_bf16 in linear layers, and in attention over
    bfloat16.
    """
    chosen = (
        "matches_oracle or (plain_decoding and seed0) or exponential or every_float8"
        " or shared_by_tasks or (invisible_slots and paged and nan) or (shows_it and tree and nan)"
        " or independent_of_layout or any_call or tie or equals_the_oracle or nan_and_infinite"
        " or brute_force or certain_token"
    )
    if name.startswith("amx"):
        chosen = f"({chosen}) and (bfloat16 or any_call or any_size or any_slot_order or latent)"
    chosen = f"test_linear or {chosen}"
    tests = [
        str(Path(__file__).with_name(f"test_{room}.py"))
        for room in ("attention", "expand", "layer", "linear")
    ]
    run = subprocess.run(
        [*PYTEST, "-k", chosen, *tests],
        env=os.environ | {"EAGLE2_CPU_ISA": name, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:]


@pytest.mark.parametrize("name", [name for name in HERE if name != level()])
def test_linear_layers_at_each_level(name):
    here = Path(__file__).parent
    bits = ("layer_is_its_operators_bit_for_bit", "trees_rows_are_those_of_plain_decoding")
    files = [str(here / "test_linear.py")]
    files += [f"{here / 'test_decoder_layer.py'}::test_a_{name}" for name in bits]
    run = subprocess.run(
        [*PYTEST, *files],
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
        here = LEVELS[: LEVELS.index(best) + 1]
        for wish in LEVELS:
            if wish in here or (wish, best) == ("amx_model", "avx512_bf16"):
                assert level(wish, best) == wish
            else:
                assert level(wish, best) == (
                    f"EAGLE2_CPU_ISA: this CPU has no {wish}, its best level is {best}"
                )
    for wish in ("AMX", "AVX2", "avx", "avx512_bf16 "):
        assert level(wish, "avx512_bf16") == (
            "EAGLE2_CPU_ISA: expected portable, avx2, avx512, avx512_bf16, amx_model or amx, "
            f"got '{wish}'"
        )


def test_the_matrix_unit_is_used_only_with_the_kernels_permission():
    """Asked in a fresh process: the CPU's flags, then what Linux says it lets the process use."""
    flags = Path("/proc/cpuinfo").read_text().split()
    code = (
        "import ctypes\nfrom eagle2_kernels import _library\n"
        "choose = ctypes.CDLL(str(_library.load()['_C'].path)).eagle2_choose_isa\n"
        "choose.restype, choose.argtypes = ctypes.c_char_p, (ctypes.c_char_p,) * 2\n"
        "best = choose(b'', None).decode()\n"
        "permitted = ctypes.c_ulong()\n"
        "ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(permitted))\n"  # ARCH_GET_XCOMP_PERM
        "print(best, permitted.value >> 18 & 1)\n"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    best, permitted = run.stdout.split()
    assert (best == "amx") == (permitted == "1" and {"amx_tile", "amx_bf16"} <= set(flags))


def test_the_model_of_the_matrix_unit(tmp_path):
    """Order of sums, roundings, flushed subnormals, shapes; a misuse ends the process."""
    compile_native("tile_model.cpp", tmp_path / "tile_model")
    run = subprocess.run([tmp_path / "tile_model"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    misuse = subprocess.run([tmp_path / "tile_model", "misuse"], capture_output=True)
    assert misuse.returncode == -signal.SIGABRT


BITS = {
    # A tree, odd sizes, subnormals among the values.
    "attention": (
        "from cases import AttentionCase, attention_inputs\n"
        "for case in (AttentionCase(40, (6, 2), 37, 120), AttentionCase(9, (4, 1), 128, 700)):\n"
        "    x = attention_inputs(case, torch.bfloat16)\n"
        "    x.v_cache[:, ::7] *= 2.0**-125\n"
        "    digest(ek.tree_attention(*x.args, **x.kwargs))\n"
    ),
    # One tile of rows and two, the last pairs of k fewer than a tile's; sums that cancel, so that
    # what is left is their rounding.
    "linear": (
        "for rows in (1, 16, 45):\n"
        "    x, weight = torch.randn(rows, 551).bfloat16(), torch.randn(70, 551).bfloat16()\n"
        "    x[:, ::5] *= 2.0**-127\n"
        "    packed = ek.pack_linear_weight(torch.cat([weight, -weight], 1))\n"
        "    digest(ek.packed_linear(torch.cat([x, x], 1), packed, 70))\n"
    ),
}


def bits(room: str, name: str) -> str:
    """A digest of bfloat16 results at a level."""
    code = (
        "import hashlib, torch, eagle2_kernels as ek\n"
        "torch.manual_seed(0)\n"
        "sha = hashlib.sha256()\n"
        "digest = lambda out: sha.update(out.view(torch.int16).numpy().tobytes())\n"
        f"{BITS[room]}print(sha.hexdigest())\n"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ
        | {"EAGLE2_CPU_ISA": name}
        | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="no tiles on other machines")
def test_the_library_has_the_products_of_the_matrix_unit():
    """TDPBF16PS of three registers, by its bytes: VEX.F3.0F38.W0 5C."""
    library = Path(_library.load()["_C"].path).read_bytes()
    assert re.search(rb"\xc4\xe2[BJRZbjrz]\x5c[\xc0-\xff]", library)


if "amx_model" in HERE:

    @pytest.mark.parametrize("room", BITS)
    def test_the_matrix_unit_sums_in_an_order_of_its_own(room):
        """So that the levels of the unit are seen to be in use."""
        assert bits(room, "amx_model") != bits(room, "avx512_bf16")


if "amx" in HERE:

    @pytest.mark.parametrize("room", BITS)
    def test_the_matrix_unit_and_its_model_give_the_same_bits(room):
        assert bits(room, "amx") == bits(room, "amx_model")


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
