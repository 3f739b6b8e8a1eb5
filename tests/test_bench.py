"""bench/run.py on its smallest cases: every provider is checked, nothing is said about its time."""

import csv
import sys
from pathlib import Path

import pytest
import torch

import eagle2_kernels as ek

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture
def bench(monkeypatch):
    """(run, runner) of bench/, imported as its scripts import each other."""
    monkeypatch.syspath_prepend(str(BENCH))
    import run
    import runner

    return run, runner


@pytest.fixture(autouse=True)
def same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_smallest_cases_are_right_and_saved(bench, tmp_path, monkeypatch):
    run, runner = bench
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    rows = run.main(["--quick", "--rounds", "1", "--save"])
    assert {row.op for row in rows} == {op for name in run.FAMILIES for op in sys.modules[name].OPS}
    calls = {row.shape for row in rows if row.op == "call"}
    wrappers = {name.removesuffix("_out") for name in (op.name for op in ek.ops.OPS)}
    assert calls == wrappers
    assert all(row.median_us > 0 and row.ratio > 0 for row in rows)
    # Appending keeps what is there, and refuses a file of other columns.
    run.main(["--quick", "--rounds", "1", "--save", "--op", "build_tree$"])
    with (tmp_path / "cpu.csv").open() as file:
        saved = list(csv.DictReader(file))
    assert [row["op"] for row in saved] == [row.op for row in rows] + ["build_tree"] * 2
    assert saved[-1]["command"].startswith("python bench/run.py")
    (tmp_path / "cpu.csv").write_text("op,shape\n")
    with pytest.raises(SystemExit, match="expected the columns"):
        run.main(["--quick", "--rounds", "1", "--save", "--op", "build_tree$"])


def test_a_wrong_result_is_not_timed(bench, monkeypatch):
    run, _ = bench
    right = ek.build_tree

    def wrong(*args):
        tree = right(*args)
        tree.parents[0, -1] = 0
        return tree

    monkeypatch.setattr(ek, "build_tree", wrong)
    with pytest.raises(AssertionError, match="parents differs"):
        run.main(["--quick", "--op", "build_tree$"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_missing_card_is_said(bench, capsys):
    run, _ = bench
    with pytest.raises(SystemExit):
        run.main(["--device", "cuda"])
    assert "no CUDA device" in capsys.readouterr().err


def test_a_filter_that_matches_nothing_is_said(bench, capsys):
    run, _ = bench
    with pytest.raises(SystemExit):
        run.main(["--quick", "--op", "build_tree$", "--shape", "nothing"])
    assert "no case matches" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [["--op", "("], ["--shape", "["], ["--rounds", "0"], ["--threads", "-1"]],
    ids=" ".join,
)
def test_wrong_options_are_named(bench, capsys, option):
    with pytest.raises(SystemExit):
        bench[0].main(["--quick", *option])
    assert f"argument {option[0]}: expected" in capsys.readouterr().err


def test_charts_of_saved_rows(bench, tmp_path, monkeypatch):
    run, runner = bench
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    import plot

    monkeypatch.setattr(plot, "RESULTS", tmp_path)
    run.main(["--quick", "--rounds", "1", "--save", "--plot", "--op", "build_tree|merge"])
    for name in ("ratios_cpu.png", "roofline_cpu.png"):
        assert (tmp_path / name).stat().st_size > 5000
