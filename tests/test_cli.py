"""The eagle2 command: what it prints, its exit codes, and errors a person can act on."""

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from eagle2_kernels import cli, evaluation, ops
from eagle2_kernels.compare import Comparison, Difference, first_difference
from eagle2_kernels.training.generate import DataConfig
from eagle2_kernels.training.trainer import TrainConfig

runner = CliRunner()


def invoke(*args: str):
    return runner.invoke(cli.app, list(args))


def test_version():
    from eagle2_kernels import __version__

    assert invoke("--version").stdout.strip() == __version__


def test_info_lists_the_libraries():
    result = invoke("info", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert "_C" in report["libraries"]
    assert report["torch"]["version"] == torch.__version__


def test_info_ops_is_the_table():
    assert invoke("info", "--ops").stdout == ops.describe()
    rows = json.loads(invoke("info", "--ops", "--json").stdout)
    assert [row["name"] for row in rows] == [op.name for op in ops.OPS]


@pytest.mark.parametrize(("command", "kind"), [("train", TrainConfig), ("data", DataConfig)])
def test_there_is_an_option_for_every_field_of_the_config(command, kind):
    options = invoke(command, "--help").stdout
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            assert "--" + field.name.replace("_", "-") in options, field.name


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "hi", "--compare", "--temperature", "1"], "--compare is greedy"),
        (["generate", "hi", "--compare", "--presence-penalty", "1"], "--compare decodes without"),
        (["generate", "hi", "--logit-bias", "3:1"], "--logit-bias: expected ID=VALUE"),
        (["generate", "hi", "--logprobs"], "--logprobs goes with --json"),
        (["generate", "hi", "--target", "somewhere"], "--target and --draft go together"),
        (["generate", "hi", "--dtype", "int8"], "--dtype: expected bfloat16"),
        (["generate", "   "], "expected some text"),
        (["generate", "hi", "--max-new-tokens", "0"], "greater than or equal to 1"),
        (["train"], "--data"),
        (["data"], "--output"),
        (["eval"], "--prompts"),
        (["eval", "--prompts", "p", "--csv", "/nowhere/x.csv"], "--csv: expected a file in"),
        (["eval", "--prompts", "p", "--plot", "/"], "--plot: expected a file in a directory"),
        (["tune", "--plot", "/nowhere/x.png"], "--plot: expected a file in a directory"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value),
)
def test_wrong_usage_is_exit_code_2(args, message):
    result = invoke(*args)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("command", ["generate", "tree"])
def test_a_target_without_a_tokenizer_is_named(command, monkeypatch):
    monkeypatch.setattr(
        cli, "_load", lambda *args: SimpleNamespace(tokenizer=None, draft_step=None)
    )
    result = invoke(command, "hi")
    assert result.exit_code == 2 and "expected a directory with a tokenizer" in result.output


def test_a_failure_is_one_line_and_exit_code_1():
    result = subprocess.run(
        [sys.executable, "-m", "eagle2_kernels.cli", "train", "--data", "/nowhere.jsonl"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith("eagle2: FileNotFoundError: data:")
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_generate_compare_json_on_the_demo():
    result = invoke(
        "generate", "Name two colours.", "-n", "12", "--compare", "--rounds", "1", "--json"
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    names = [row["name"] for row in report["rows"]]
    assert names == ["Hugging Face generate", "plain", "EAGLE-2 tree"]
    assert report["verdict"].startswith("identical:")
    plain, tree = report["rows"][1], report["rows"][2]
    assert plain["new_tokens"] == tree["new_tokens"]
    assert tree["target_forwards"] <= plain["target_forwards"]


@pytest.mark.slow
def test_streamed_text_is_the_generated_text():
    streamed = invoke("generate", "Name two colours.", "-n", "16")
    assert streamed.exit_code == 0, streamed.output
    whole = json.loads(invoke("generate", "Name two colours.", "-n", "16", "--json").stdout)
    assert streamed.stdout.strip() == whole["text"].strip()
    assert whole["stats"]["new_tokens"] == len(whole["token_ids"])


@pytest.mark.slow
def test_penalties_and_bans_reach_the_decoder():
    arguments = ["generate", "Name two colours.", "-n", "12", "--json", "--logprobs"]
    free = json.loads(invoke(*arguments).stdout)
    assert len(free["logprobs"]) == len(free["token_ids"])
    assert all(value <= 0 for value in free["logprobs"])
    bans = [f"--logit-bias={token}=-inf" for token in free["token_ids"]]
    banned = json.loads(invoke(*arguments, *bans, "--repetition-penalty", "1.3").stdout)
    assert not set(banned["token_ids"]) & set(free["token_ids"])


@pytest.mark.slow
def test_tree_draws_the_first_step():
    result = invoke("tree", "Name two colours.", "--max-nodes", "8")
    assert result.exit_code == 0, result.output
    assert "drafted tokens accepted" in result.stdout


@pytest.mark.parametrize(
    ("margin", "error", "padded", "lossless", "verdict"),
    [
        (0.1, 0.06, None, True, "identical: no, first difference at token 3: plain 7, tree 8"),
        (0.1, 0.04, None, False, "NOT explained by rounding"),
        (0.1, 0.06, False, False, "4-row forwards differs too"),
        (
            0.1,
            0.06,
            True,
            True,
            "identical: yes, bit for bit with plain decoding in 4-row forwards",
        ),
    ],
    ids=["tie", "real difference", "padded differs", "padded agrees"],
)
def test_a_difference_is_judged_by_its_margin(margin, error, padded, lossless, verdict):
    comparison = Comparison([], Difference(3, 7, 8, margin, error), 4, padded)
    assert comparison.lossless is lossless
    assert verdict in comparison.verdict


def test_no_difference_is_identical():
    assert first_difference(None, [1], [2, 3], [2, 3], 8) is None
    assert Comparison([], None, None, None).verdict == "identical: yes"


def test_the_evaluation_fits_a_terminal_of_80_columns(monkeypatch, capsys):
    rows = [
        evaluation.EvaluationRow(
            provider, temperature, category, 80, 10240, 123.4, 5120, 10240, different=3
        )
        for temperature in (0.0, 1.0)
        for category in ("humanities", "all")
        for provider in ("plain", "Hugging Face prompt lookup")
    ]
    shape = {"max_nodes": 8, "top_k": 4, "max_depth": 3}
    monkeypatch.setattr(cli, "console", cli.Console(width=80))
    cli._print_evaluation(
        evaluation.Evaluation(rows), {"file": "mt_bench.jsonl", "dtype": "bfloat16", **shape}
    )
    said = capsys.readouterr().out
    assert "…" not in said and said.count("temperature") == 2
    for category in ("humanities", "all"):
        assert sum(category in x for x in said.splitlines()) == 4
    assert all(len(x) <= 80 for x in said.splitlines()) and said.count("HF prompt lookup") == 4
