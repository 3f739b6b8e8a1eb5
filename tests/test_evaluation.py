"""`eagle2 eval`: rows add up, tokens are compared, and every way decodes the same prompts."""

import csv

import pytest
import torch
from tiny_models import copycat_decoder, tiny_model

from eagle2_kernels import evaluation
from eagle2_kernels.evaluation import PLAIN, TREE, Prompt, evaluate, read_prompts

pytest.importorskip("transformers")

PROMPTS = [([3, 5, 7, 5], "b"), ([4, 9, 4], "a"), ([11, 12, 13, 14, 15], "b")]


@pytest.fixture(scope="module")
def decoder():
    return copycat_decoder(attention=0.1)


@pytest.fixture(scope="module")
def found(decoder):
    assistant = tiny_model(seed=1)
    return evaluate(decoder, PROMPTS, max_new_tokens=10, assistant=assistant, seed=3)


def test_rows_are_what_the_calls_report(decoder, found):
    for temperature in (0.0, 1.0):
        for name, method in ((TREE, decoder.generate), (PLAIN, decoder.generate_plain)):
            for category in ("a", "b", "all"):
                mine = [
                    method(
                        ids,
                        max_new_tokens=10,
                        sampling=evaluation.SamplingParams(temperature=temperature, seed=3 + i),
                    ).stats
                    for i, (ids, kind) in enumerate(PROMPTS)
                    if category in (kind, "all")
                ]
                row = found.row(name, temperature, category)
                assert row.prompts == len(mine)
                assert row.new_tokens == sum(s.new_tokens for s in mine)
                assert row.target_forwards == sum(s.target_forwards for s in mine)
                emitted = sum(s.accept_length * s.target_forwards for s in mine)
                assert (row.accept_length or 0) * row.target_forwards == pytest.approx(emitted)
                assert sum(row.histogram) == row.target_forwards
                assert row.seconds > 0 and row.different == 0
    assert found.row(TREE, 0.0).accept_length > 1.2


def test_order_and_ratio(found):
    rows = found.as_dicts()
    assert [r["category"] for r in rows if r["provider"] == TREE] == ["b", "a", "all"] * 2
    ways = list(dict.fromkeys(r["provider"] for r in rows))
    assert ways == [
        PLAIN,
        TREE,
        "Hugging Face generate",
        "Hugging Face prompt lookup",
        "Hugging Face assisted",
    ]
    for row in rows:
        plain = found.row(PLAIN, row["temperature"], row["category"])
        mine = found.row(row["provider"], row["temperature"], row["category"])
        ratio = mine.tokens_per_second / plain.tokens_per_second
        assert row["speedup"] == pytest.approx(ratio, abs=1e-3)


def test_a_temperature_named_twice_counts_once(decoder):
    once = evaluate(
        decoder, PROMPTS[:1], max_new_tokens=3, temperatures=(0, 0.0), hugging_face=False
    )
    assert [row.prompts for row in once.rows] == [1] * 4


def test_hugging_face_says_the_same_greedily(found):
    # Float64: greedy tokens agree, so their number does.
    count = found.row(PLAIN, 0.0).new_tokens
    for name in ("Hugging Face generate", "Hugging Face prompt lookup", "Hugging Face assisted"):
        assert found.row(name, 0.0).new_tokens == count


def test_other_tokens_are_counted(decoder, monkeypatch):
    plain = decoder.generate_plain

    def other(ids, **options):
        result = plain(ids, **options)
        if ids == PROMPTS[1][0]:
            result.token_ids[-1] ^= 1
        return result

    monkeypatch.setattr(decoder, "generate_plain", other)
    found = evaluate(decoder, PROMPTS, max_new_tokens=6, temperatures=[0.0], hugging_face=False)
    assert [found.row(TREE, 0.0, c).different for c in ("a", "b", "all")] == [1, 0, 1]


def test_files(found, tmp_path):
    path = tmp_path / "rows.csv"
    evaluation.append_csv(found, path, {"file": "x"})
    evaluation.append_csv(found, path, {"file": "y"})
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["file"] for line in lines].count("y") == len(found.rows)
    assert lines[0]["torch"] == torch.__version__ and lines[0]["provider"] == PLAIN
    with pytest.raises(ValueError, match="csv: expected the columns"):
        evaluation.append_csv(found, path, {"other": "x"})
    evaluation.plot(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_prompts_come_from_lines(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "category": "c"}\n\n{"prompt": "b"}\n')
    assert read_prompts(path) == [Prompt("a", "c"), Prompt("b", "all")]
    path.write_bytes('{"prompt": "a\u2028\x85b"}\r\n'.encode())
    assert read_prompts(path) == [Prompt("a\u2028\x85b", "all")]
    for bad in ('["b"]', '{"prompt": [7, 8]}', '{"prompt": null}'):
        path.write_text(f'{{"prompt": "a"}}\n{bad}\n')
        with pytest.raises(ValueError, match="line 2: expected"):
            read_prompts(path)
    path.write_text("")
    with pytest.raises(ValueError, match="expected at least one"):
        read_prompts(path)
    with pytest.raises(FileNotFoundError, match=r"prompts: expected a \.jsonl file, got .*none"):
        read_prompts(tmp_path / "none")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "prompts: expected at least one"),
        ({"temperatures": []}, "temperatures: expected at least one"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected an integer >= 1"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(decoder, options, message):
    with pytest.raises(ValueError, match=message):
        evaluate(decoder, **{"prompts": PROMPTS} | options)
