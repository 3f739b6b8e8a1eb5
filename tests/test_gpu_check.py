"""The one script for a card, end to end without one: its smallest rows, through the same code."""

import csv
import importlib
import os
import sys
import types
from pathlib import Path

import pytest
import torch

import eagle2_kernels as ek
from eagle2_kernels import ops, reference

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(autouse=True)
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


@pytest.fixture
def gpu_check():
    return importlib.import_module("gpu_check")


@pytest.fixture
def report():
    return importlib.import_module("gpu_report").Report(600, None)


@pytest.fixture
def correct():
    return importlib.import_module("gpu_correct")


def run(gpu_check, path, *more):
    status = gpu_check.main(["--device", "cpu", "--budget", "1e9", "--csv", str(path), *more])
    with path.open(newline="") as file:
        return status, list(csv.DictReader(file))


def test_it_runs_without_a_card(gpu_check, tmp_path, capsys):
    """Every operator, stage and family has a row; what is not here says so."""
    status, rows = run(gpu_check, tmp_path / "rows.csv")
    out = capsys.readouterr().out
    assert status == 0, out
    seen = {row["op"] for row in rows if row["result"].startswith("ok")}
    assert {op.name.removesuffix("_out") for op in ops.OPS} <= seen
    assert {row["stage"] for row in rows} == {"import", *gpu_check.STAGES}
    results = {(row["op"], row["provider"]): row["result"] for row in rows}
    assert "left out: no card" in results["memcheck", "ours"]
    assert "eager run in their place" in results["EagleDecoder", "ours"]
    assert "not importable" in results["tree_attention", "FlashInfer"]
    timed = {(r["op"], r["provider"]) for r in rows if r["median_us"]}
    families = {"tree_attention", "expand_topk", "build_tree", "sample_and_verify", "compact_kv"}
    families |= {"write_kv", "step outside the models"}
    assert {(op, "ours") for op in families} <= timed
    assert {("whole step", "tree, eager"), ("whole step", "plain, eager")} <= timed
    assert all(int(r["bytes"]) > 0 for r in rows if r["median_us"] and r["op"] in families)
    assert {r["torch"] for r in rows} == {torch.__version__}
    assert f"{len(rows)} rows" in out


@pytest.mark.triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*", "ignore:.*Overriding a previously")
def test_it_runs_with_interpreted_kernels(tmp_path):
    """In a process of its own: the Triton kernels then serve CPU tensors to its end."""
    import subprocess

    path = tmp_path / "rows.csv"
    command = [sys.executable, str(BENCH / "gpu_check.py"), "--device", "cpu", "--interpret"]
    command += ["--budget", "1e9", "--csv", str(path)]
    package = str(Path(ek.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": package, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    by_op = {row["op"]: row["result"] for row in rows if row["stage"] == "import"}
    assert by_op["Triton"] == "ok (interpreted, for CPU tensors)"
    assert {row["stage"] for row in rows} >= {"ops", "attention", "time"}


def test_the_interpreter_serves_the_triton_rows(gpu_check, monkeypatch):
    """What is registered for CPU tensors are the launchers, by the op table."""
    served = []
    monkeypatch.setattr(ops, "use_triton", lambda library, op, key: served.append((op.name, key)))
    gpu_check.interpret_triton()
    assert served == [(op.name, "CPU") for op in ops.OPS if op.triton is not None]


def test_a_failing_row_is_told_and_the_next_one_runs(report, capsys):
    Row = importlib.import_module("gpu_report").Row

    def breaks():
        raise AssertionError("expected 1, got 2\nmore")

    assert not report.run(Row("ops", "first", ""), breaks)
    assert report.run(Row("ops", "second", ""), lambda: "fine")
    assert [row.result for row in report.rows] == [
        "FAILED: AssertionError: expected 1, got 2",
        "ok (fine)",
    ]
    assert report.summary() == 1
    assert "1 failed" in capsys.readouterr().out


def test_no_row_starts_when_the_time_is_over(tmp_path, capsys):
    gpu_report = importlib.import_module("gpu_report")
    report = gpu_report.Report(0, tmp_path / "rows.csv", {"card": "x"})
    report.run(gpu_report.Row("ops", "late", ""), lambda: pytest.fail("ran"))
    # nothing was checked: not a success
    assert report.summary() == 1 and "1 left out for lack of time" in capsys.readouterr().out
    report.add(gpu_report.Row("ops", "now", "", result="ok"))
    assert report.summary() == 0
    # On the disk at once.
    assert (tmp_path / "rows.csv").read_text().splitlines()[1].startswith("ops,now,")


def test_a_lost_device_is_taken_up_behind_the_row_that_lost_it(tmp_path, capsys):
    gpu_report = importlib.import_module("gpu_report")
    Row, path, ran = gpu_report.Row, tmp_path / "rows.csv", []

    class LostError(Exception):
        pass

    def process(skip, failures, fatal):
        report = gpu_report.Report(60, path, {"card": "x"}, failures=failures, skip=skip)
        alive = True

        def settle():
            if not alive:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

        def lost(report):
            raise LostError(report.attempts, report.failures)

        report.settle, report.lost = settle, lost
        for name in "abcd":

            def body(name=name):
                nonlocal alive
                ran.append(name)
                alive = alive and name not in fatal

            report.run(Row("ops", name, ""), body)
        return report.summary()

    with pytest.raises(LostError) as first:
        process(0, 0, "b")
    assert first.value.args == (2, 1)
    assert process(*first.value.args, "") == 1
    assert ran == list("abcd")
    lines = path.read_text().splitlines()
    assert [line.split(",")[1] for line in lines] == ["op", *"abcd"]
    assert "illegal memory access" in lines[2]


def test_a_new_process_gets_the_old_ones_arguments(gpu_check, report, monkeypatch):
    commands = []
    monkeypatch.setattr(os, "execv", lambda path, command: commands.append(command))
    monkeypatch.setattr(sys, "argv", ["x", "--quick", "--budget", "99", "--resume", "3,1"])
    report.attempts, report.failures = 7, 2
    gpu_check.take_up(report)
    (command,) = commands
    assert command[1:] == [
        *(str(BENCH / "gpu_check.py"), "--quick", "--resume", "7,2", "--budget", command[-1])
    ]
    assert gpu_check.parse(command[2:]).resume == "7,2" and 590 < float(command[-1]) <= 600


def test_an_operator_without_a_kernel_is_a_failure(report):
    """PyTorch raises NotImplementedError where a backend has no kernel: it must not pass here."""

    def missing():
        raise NotImplementedError("Could not run 'x' with arguments from the 'CUDA' backend")

    Row = importlib.import_module("gpu_report").Row
    assert not report.run(Row("ops", "x", ""), missing)
    assert "Could not run 'x'" in report.rows[0].result and report.failures == 1


# What the checks see


def wrong(monkeypatch, name, change):
    """The oracle of an operator, changed: to the check it is the kernel that is wrong."""
    op = next(op for op in ops.OPS if op.name == name)
    own = op.reference

    def other(*args, **kwargs):
        result = own(*args, **kwargs)
        return change(result, args, kwargs)

    object.__setattr__(op, "reference", other)
    monkeypatch.setattr(reference, name, other)
    return lambda: object.__setattr__(op, "reference", own)


def plus_one(result, args, kwargs):
    parts = result if isinstance(result, tuple) else (result,)
    return tuple(t + 1 if t.dtype != torch.bool else ~t for t in parts)


def changed_argument(result, args, kwargs):
    tensor = args[0][0] if isinstance(args[0], list) else args[0]
    tensor.view(-1)[:1].add_(1)
    return result


@pytest.mark.parametrize("name", [op.name for op in ops.OPS if op.name != "tree_attention_out"])
def test_a_wrong_result_of_each_operator_is_seen(name, correct, monkeypatch):
    from test_ops import example

    where = correct.Device(torch.device("cpu"))
    args, kwargs = example(name)
    correct.call_op(where, name, *example(name))
    op = correct.BY_NAME[name]
    restore = wrong(monkeypatch, name, plus_one if op.outs else changed_argument)
    try:
        with pytest.raises(AssertionError):
            correct.call_op(where, name, args, kwargs)
    finally:
        restore()


def test_wrong_attention_is_seen(correct, monkeypatch):
    where = correct.Device(torch.device("cpu"))
    case = correct.AttentionCase(9, (2, 1), 16, 40, batch=2)
    inputs = correct.attention_inputs(case, torch.float16)
    correct.attention_agrees(where, inputs)
    correct.poison_agrees(where, inputs)
    attend = correct.attend

    def off_by_a_bit(where, inputs, **changes):
        out, lse = attend(where, inputs, **changes)
        return out + 2 * torch.finfo(out.dtype).eps, lse

    monkeypatch.setattr(correct, "attend", off_by_a_bit)
    with pytest.raises(AssertionError, match="times the allowed one"):
        correct.attention_agrees(where, inputs)

    def leaks(where, inputs, **changes):
        out, lse = attend(where, inputs, **changes)
        return out + inputs.v_cache.sum().isnan() * 1e-3, lse

    monkeypatch.setattr(correct, "attend", leaks)
    with pytest.raises(AssertionError, match="a row changed that does not see the poison"):
        correct.poison_agrees(where, inputs)

    def heals(where, inputs, **changes):
        out, lse = attend(where, inputs, **changes)
        return out.nan_to_num(), lse

    monkeypatch.setattr(correct, "attend", heals)
    with pytest.raises(AssertionError, match="a row that sees NaN is finite"):
        correct.poison_agrees(where, inputs)

    def by_company(where, inputs, **changes):
        out, lse = attend(where, inputs, **changes)
        return out * (1 + 0.01 * (len(out) == 2)), lse

    monkeypatch.setattr(correct, "attend", by_company)
    with pytest.raises(AssertionError, match="other bits: request 0 alone"):
        correct.rows_do_not_depend_on_company(where, torch.float32, False)


def test_a_provider_with_a_wrong_result_is_not_timed(report):
    gpu_time = importlib.import_module("gpu_time")
    costs = importlib.import_module("costs")

    def check(name, got):
        assert got == 1

    def missing():
        raise gpu_time.NotHereError("not importable: x")

    timing = gpu_time.Timing(
        "op",
        "shape",
        costs.Cost(8),
        {"ours": lambda: lambda: 1, "liar": lambda: lambda: 2, "absent": missing},
        check,
    )
    clock = gpu_time.Clock(torch.device("cpu"))
    card = importlib.import_module("roofline").CARDS["H200"]
    gpu_time.run(report, clock, card, timing, quick=True)
    rows = {row.provider: row for row in report.rows}
    assert rows["liar"].result.startswith("FAILED") and rows["liar"].median_us is None
    assert rows["absent"].result == "not importable: x"
    assert rows["ours"].ratio == 1 and rows["ours"].median_us > 0
    assert rows["ours"].floor_us == pytest.approx(8 / 4.8e12 * 1e6)
    assert report.failures == 1


def test_sgl_kernel_is_called_as_its_adapter_documents(report, monkeypatch):
    """Our adapter has sgl-kernel's signatures: it stands for the package that is not here."""
    from eagle2_kernels.integrations import sglang

    gpu_time = importlib.import_module("gpu_time")
    shapes = importlib.import_module("shapes")
    stand_in = types.SimpleNamespace(verify_tree_greedy=sglang.verify_tree_greedy)
    monkeypatch.setitem(sys.modules, "sgl_kernel", stand_in)
    shape = shapes.Verify(2, 300, 6, 2, False)
    timing = gpu_time.verify(shape, torch.device("cpu"))
    clock = gpu_time.Clock(torch.device("cpu"))
    gpu_time.run(report, clock, None, timing, quick=True)
    assert {row.provider for row in report.rows if row.median_us} >= {"ours", "sgl-kernel"}
    assert report.failures == 0, [row.result for row in report.rows]


def test_a_machine_without_a_card_is_told_so(gpu_check, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    assert gpu_check.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        gpu_check.main(["--interpret"])
