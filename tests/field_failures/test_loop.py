"""The loop: one test per line of the table, named by its slug."""

import inspect

import pytest
import torch
from tiny_models import copycat_decoder, tiny_head, tiny_model

from eagle2_kernels import EagleDecoder, SamplingParams, TreeConfig
from eagle2_kernels.compare import first_difference
from eagle2_kernels.generation import Batch, make_requests

PROMPT, STOP = [3, 4, 5, 6, 7], 12
WIDE = TreeConfig(16, 4, 4)


@pytest.fixture(scope="module")
def copycat():
    """Accepts several drafts per step."""
    return copycat_decoder()


def requests(count=1, cap=5, eos=(STOP,), positions=None):
    return make_requests(
        [[1, 2]] * count,
        max_new_tokens=cap,
        max_positions=positions,
        eos_token_ids=eos,
        stop=(),
        tokenizer=None,
        follow_text=False,
    )


def inner_token(decoder):
    """A token that first comes up before the end of a step, and how many tokens end with it."""
    seen = []
    for step in decoder.stream(PROMPT, max_new_tokens=24, eos_token_ids=()):
        for i, token in enumerate(step[:-1]):
            if token not in seen + step[:i]:
                return token, len(seen) + i + 1
        seen += step
    raise AssertionError("no step of several tokens")


def test_eos_inside_the_accepted_path(copycat):
    (request,) = requests(cap=9)
    assert request.take([10, STOP, 20, 21], forward=True) == [10, STOP]
    assert (request.tokens, request.finish_reason) == ([10, STOP], "eos")
    assert request.histogram == [0, 1]
    assert request.take([30], forward=True) == [] and request.tokens == [10, STOP]

    token, count = inner_token(copycat)
    whole = copycat.generate_plain(PROMPT, max_new_tokens=24, eos_token_ids=(), keep_logits=True)
    settings = {"max_new_tokens": 24, "eos_token_ids": [token], "keep_logits": True}
    both = copycat.generate([PROMPT, [11]], **settings)
    for got in (copycat.generate(PROMPT, **settings), both[0]):
        assert got.token_ids == whole.token_ids[:count]
        assert got.finish_reason == "eos"
        assert got.stats.new_tokens == len(got.logits) == count
        torch.testing.assert_close(got.logits, whole.logits[:count], rtol=1e-6, atol=1e-6)
        assert sum((i + 1) * n for i, n in enumerate(got.stats.accept_histogram)) == count - 1
    # The other request goes on as if alone.
    alone = copycat.generate([11], **settings)
    assert both[1].token_ids == alone.token_ids
    assert both[1].stats.accept_histogram == alone.stats.accept_histogram


def test_stop_before_the_cap(copycat):
    (request,) = requests(cap=5)
    assert request.take([10, 11, STOP, 20, 21], forward=True) == [10, 11, STOP]
    assert (request.tokens, request.finish_reason) == ([10, 11, STOP], "eos")
    # Both in one token: it is the stop that ends it.
    (request,) = requests(cap=3)
    assert request.take([10, 11, STOP, 20, 21], forward=True) == [10, 11, STOP]
    assert request.finish_reason == "eos"
    (request,) = requests(cap=2)
    assert request.take([10, 11, STOP, 20, 21], forward=True) == [10, 11]
    assert request.finish_reason == "length"
    token, count = inner_token(copycat)
    for cap in (count, count + 1, count + 2):
        got = copycat.generate(PROMPT, max_new_tokens=cap, eos_token_ids=[token])
        assert (len(got.token_ids), got.token_ids[-1]) == (count, token)
        assert got.finish_reason == "eos"


def test_accept_length_counts_emitted_tokens(copycat):
    batch = Batch(requests(2, cap=6), False, SamplingParams(), False)
    batch.take([[10], [10]], forward=False)
    batch.take([[11, 13, STOP, 20, 21], [11]])
    batch.take([[], [14, 15, 16, 17, 18, 19]])
    first, second = batch.results()
    # Request 0 stopped at the third of five; request 1 was capped at the fourth of six.
    assert first.stats.accept_histogram == [0, 0, 1] and first.stats.accept_length == 3.0
    assert second.stats.accept_histogram == [1, 0, 0, 1] and second.stats.accept_length == 2.5
    assert first.stats.target_forwards == 1 and second.stats.target_forwards == 2
    assert batch.results().stats.target_forwards == 2
    assert batch.results().stats.accept_length == pytest.approx((3 + 5) / 3)

    got = copycat.generate(PROMPT, max_new_tokens=20, eos_token_ids=()).stats
    assert got.accept_length == pytest.approx(19 / got.target_forwards)
    assert sum(got.accept_histogram) == got.target_forwards
    assert got.accept_length > 1.5
    plain = copycat.generate_plain(PROMPT, max_new_tokens=20, eos_token_ids=()).stats
    assert (plain.target_forwards, plain.accept_length) == (19, 1.0)


@pytest.mark.parametrize("length", [1, 20, 30, 31])
def test_end_of_the_position_table(monkeypatch, length):
    model = tiny_model(max_position_embeddings=32)
    decoder = EagleDecoder(model, tiny_head(model))
    positions, nodes, forward = [], [], decoder.target.forward

    def spy(cache, token_ids, position_ids, prefix_lens, **options):
        positions.append(int(position_ids.max()))
        nodes.append(int(options["lengths"].max()))
        return forward(cache, token_ids, position_ids, prefix_lens, **options)

    monkeypatch.setattr(decoder.target, "forward", spy)
    settings = {"max_new_tokens": 100, "eos_token_ids": ()}
    got = decoder.generate(list(range(3, 3 + length)), config=WIDE, **settings)
    # The last token is emitted and never fed.
    assert max(positions) <= 30
    assert len(got.token_ids) == 32 - length and got.finish_reason == "positions"
    # Near the end the tree shrinks: nothing drafted that could not be emitted.
    assert length == 31 or nodes[-1] < WIDE.max_nodes
    plain = decoder.generate_plain(list(range(3, 3 + length)), **settings)
    assert got.token_ids == plain.token_ids and plain.finish_reason == "positions"
    with pytest.raises(ValueError, match="position"):
        decoder.generate([3] * 32)


@pytest.mark.parametrize("cap", [1, 2, 3, 4, 5, 6, 7, 8, 13])
def test_exact_number_of_tokens(copycat, cap):
    whole = copycat.generate_plain(PROMPT, max_new_tokens=13, eos_token_ids=()).token_ids
    for config in (WIDE, TreeConfig(5, 1, 6), TreeConfig(4, 1, 3), TreeConfig(1, 1, 1)):
        got = copycat.generate(PROMPT, max_new_tokens=cap, eos_token_ids=(), config=config)
        assert got.token_ids == whole[:cap]
        assert got.stats.new_tokens == cap and got.finish_reason == "length"
    # Chains were accepted to their last draft, bonus behind it.
    deep = copycat.generate(PROMPT, max_new_tokens=13, eos_token_ids=(), config=TreeConfig(4, 1, 3))
    assert len(deep.stats.accept_histogram) == 4


def test_transformers_caches_are_not_touched(monkeypatch):
    """Every class of transformers' cache module is out of order, past a window of 4 tokens."""
    import transformers.cache_utils as cache_utils

    model = tiny_model("mistral", sliding_window=4)
    prompt = torch.tensor([[*range(3, 12)]])
    want = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)
    want = want[0, 9:].tolist()

    def refuse(self, *args, **kwargs):
        raise AssertionError(f"{type(self).__name__} was used")

    for name, kind in inspect.getmembers(cache_utils, inspect.isclass):
        if kind.__module__ == cache_utils.__name__ and "Cache" in name:
            monkeypatch.setattr(kind, "__init__", refuse)
    with pytest.raises(AssertionError, match="was used"):
        model.generate(prompt, max_new_tokens=2, do_sample=False, eos_token_id=None)
    decoder = EagleDecoder(model, tiny_head(model))
    got = decoder.generate(prompt, max_new_tokens=12, eos_token_ids=(), config=WIDE)
    assert got.token_ids == [want]
    plain = decoder.generate_plain(prompt, max_new_tokens=12, eos_token_ids=())
    assert plain.token_ids == [want]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_ties_in_low_precision(dtype):
    """Ids 30 .. 59 tie with 0 .. 29 exactly: never a higher id, and a margin where texts part."""
    model = tiny_model(dtype=dtype, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[30:60] = model.lm_head.weight[:30]
    decoder = EagleDecoder(model, tiny_head(model))
    tree = decoder.generate(PROMPT, max_new_tokens=24, eos_token_ids=()).token_ids
    plain = decoder.generate_plain(PROMPT, max_new_tokens=24, eos_token_ids=()).token_ids
    assert all(token < 30 or token == 60 for token in tree + plain)
    difference = first_difference(decoder.target, PROMPT, plain, tree, 16)
    if dtype == torch.float64:
        assert difference is None
    assert difference is None or difference.legal
    # What parts for no reason is told apart: a token that is not among the best.
    worst = [*tree[:3], int(not tree[3]), *tree[4:]]
    found = first_difference(decoder.target, PROMPT, plain, worst, 16)
    assert found.index <= 3
    assert found.tree_token != found.plain_token
