"""`eagle2 tune`: its estimate is what decoding accepts, and the best row is the fastest."""

import json

import pytest
from tiny_models import copycat_decoder

from eagle2_kernels import TreeConfig, tune
from eagle2_kernels.tune import TuningRow, as_dict, plot
from eagle2_kernels.tune import tune as run

pytest.importorskip("transformers")

PROMPTS = [[3, 5, 7, 5], [4, 9, 4, 20], [11, 12, 13]]


@pytest.fixture(scope="module")
def decoder():
    return copycat_decoder(attention=0.1)


@pytest.fixture(scope="module")
def found(decoder):
    return run(
        decoder,
        PROMPTS,
        max_nodes=(1, 4, 9),
        top_k=(2, 3),
        max_depth=3,
        max_new_tokens=20,
        rounds=1,
    )


def test_accept_lengths_are_those_of_decoding(decoder, found):
    shapes = {(r.max_nodes, r.top_k, r.max_depth) for r in found.rows}
    # Every shape with more than a root and no more slots than candidates.
    assert shapes == {
        (n, k, d) for n in (4, 9) for k in (2, 3) for d in (1, 2, 3) if n <= 1 + k + (d - 1) * k * k
    }
    for row in found.rows:
        config = TreeConfig(row.max_nodes, row.top_k, row.max_depth)
        emitted = forwards = 0
        for prompt in PROMPTS:
            stats = decoder.generate(prompt, max_new_tokens=20, config=config).stats
            emitted += stats.new_tokens - 1
            forwards += stats.target_forwards
        assert row.accept_length == pytest.approx(emitted / forwards, abs=1e-4)
    assert max(r.accept_length for r in found.rows) > 1.5


def test_the_best_is_the_fastest_row(found):
    rates = [row.tokens_per_second for row in found.rows]
    assert rates == sorted(rates, reverse=True) and min(rates) > 0
    first = found.rows[0]
    assert found.best == TreeConfig(first.max_nodes, first.top_k, first.max_depth)
    assert found.speedup == pytest.approx(rates[0] * found.plain_seconds)


def test_a_step_costs_verification_and_draft(found):
    for row in found.rows:
        first, last = (found.draft_seconds[row.top_k, d] for d in (1, 3))
        draft = {1: first, 2: (first + last) / 2, 3: last}[row.max_depth]
        assert row.seconds == pytest.approx(found.verify_seconds[row.max_nodes] + draft)


def test_auto_is_the_best_shape(decoder, monkeypatch):
    rows = [TuningRow(7, 2, 3, 2.0, 0.1), TuningRow(4, 2, 2, 1.5, 0.1)]
    monkeypatch.setattr(tune, "tune", lambda d, p: tune.Tuning(rows, 0.1, {}, {}))
    assert TreeConfig.auto(decoder, PROMPTS) == TreeConfig(7, 2, 3)


def test_files(found, tmp_path):
    assert json.loads(json.dumps(as_dict(found)))["rows"][0]["max_nodes"] == found.best.max_nodes
    plot(found, str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_nodes": (1,)}, r"max_nodes: expected a count of 2 to 7, .* got \[1\]"),
        ({"top_k": (1,)}, r"max_nodes: expected a count of 2 to 3, .* got \[4\]"),
        ({"top_k": (2, 70)}, "top_k: expected at most the 61 tokens"),
        ({"prompts": "text"}, "prompts: expected a list of texts"),
        ({"top_k": (0, 2)}, "top_k: expected values of at least 1"),
        ({"prompts": []}, "prompts: expected at least one"),
        ({"prompts": ["text"]}, "prompts: expected token ids"),
        ({"rounds": 0}, "rounds: expected"),
        ({"max_new_tokens": 1}, "prompts: expected answers of at least three tokens"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(decoder, options, message):
    small = {"prompts": PROMPTS, "max_nodes": (4,), "top_k": (2,), "max_depth": 2, "rounds": 1}
    with pytest.raises((ValueError, TypeError), match=message):
        run(decoder, **small | options)
