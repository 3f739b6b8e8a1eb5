"""The operators of a decode step ask for no memory but their outputs', and run no Python."""

import json
import os
import subprocess
import sys
from pathlib import Path

from native_core import compile_native


def test_a_call_allocates_its_outputs_only_and_runs_no_python(tmp_path):
    counter = tmp_path / "count_allocations.so"
    compile_native("count_allocations.cpp", counter, "-shared", "-fPIC", "-ldl")
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("count_allocations.py"))],
        env=os.environ | {"LD_PRELOAD": str(counter)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    assert found.pop("verify_tree strided")[0] > 0
    assert {name: counts for name, counts in found.items() if counts != [0, 0]} == {}
