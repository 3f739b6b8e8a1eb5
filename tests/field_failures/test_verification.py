"""Verification: one test per line of the table, named by its slug."""

import math

import pytest
import torch
from growth import grow, hashed_head
from tiny_models import copycat_decoder, tiny_head, tiny_model

import eagle2_kernels as ek
from eagle2_kernels import reference

INF, NAN = float("inf"), float("nan")


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def law_of(tokens, vocab):
    return torch.bincount(tokens.flatten(), minlength=vocab).double() / tokens.numel()


def assert_law(tokens, law, sigmas=4.5):
    """Frequencies within so many standard deviations; what has no probability never comes."""
    law = torch.as_tensor(law, dtype=torch.float64)
    seen = law_of(tokens, len(law))
    spread = (law * (1 - law) / tokens.numel()).sqrt()
    assert ((seen - law).abs() <= sigmas * spread).all(), (seen, law)


def star(children, count):
    """draft_tokens, first_child, next_sibling of ``count`` requests: a root with children."""
    n = len(children) + 1
    draft = torch.tensor([[9, *children]]).expand(count, -1)
    child = i32(1, *[-1] * (n - 1)).expand(count, -1)
    sibling = i32(-1, *range(2, n), -1).expand(count, -1)
    return draft, child, sibling


def verify_star(kernels, logits, children, count, **filters):
    """(emitted, accepted) of ``count`` seeds over a root with children."""
    n = len(children) + 1
    emitted, _, accepted, _ = kernels.sample_and_verify(
        logits.expand(count, n, -1),
        torch.tensor([[4] + [5] * (n - 1)]).expand(count, -1),
        torch.arange(count),
        *star(children, count),
        1,
        **{k: torch.full((count,), v) for k, v in filters.items()},
    )
    return emitted, accepted


def verify_coins(kernels, row, children, coin, final=0.5):
    """(slot taken or -1, bonus) at a root with children, all rows alike."""
    n = len(children) + 1
    index, length, bonus = kernels.verify_tree_coins(
        torch.as_tensor(row).expand(1, n, -1),
        *star(children, 1),
        torch.tensor([[coin] + [0.5] * (n - 1)]),
        torch.tensor([final]),
        1,
    )
    assert int(length) == int(index[0, 1] >= 0)
    return int(index[0, 1]), int(bonus)


def test_coins_at_zero_and_one(kernels):
    quarters = [0.25, 0.5, 0.0, 0.25]
    # Coin 0 takes the first child that can be; a coin on an edge belongs to what lies above it.
    assert verify_coins(kernels, quarters, [2, 1], 0.0)[0] == 2
    assert verify_coins(kernels, quarters, [0, 1], 0.25)[0] == 2
    assert verify_coins(kernels, quarters, [0], 0.25, 0.0) == (-1, 1)
    assert verify_coins(kernels, quarters, [0], 0.25, 0.9) == (-1, 3)
    # Above their own share, below their sum: children do not toss one by one.
    assert verify_coins(kernels, quarters, [0, 3], 0.3)[0] == 2
    # A repeated sibling is no second chance.
    assert verify_coins(kernels, quarters, [0, 0], 0.3, 0.0) == (-1, 1)
    # Final coins from one end to the other, and past both.
    row = [0.0, 0.5, 0.0, 0.5, 0.0]
    for final, bonus in ((0.0, 1), (0.5, 3), (1.0, 3), (2.0, 3), (-1.0, 1), (NAN, 3)):
        assert verify_coins(kernels, row, [2], 0.0, final) == (-1, bonus)
    # Coins of 1 and no number: the last child that can be, when the children are all there is.
    for coin in (1.0, 2.0, NAN):
        assert verify_coins(kernels, [0.5, 0.5, 0.0], [0, 1, 2], coin)[0] == 2
        assert verify_coins(kernels, [0.5, 0.25, 0.25], [0, 1], coin, 0.0) == (-1, 2)


def test_residual_mass_zero_with_coins(kernels):
    one_hot = torch.tensor([0.0, 1.0, 0.0, 0.0])
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for coin in (0.0, 0.999, 1.0):
            assert verify_coins(kernels, one_hot.to(dtype), [1], coin) == (1, 1)
            assert verify_coins(kernels, one_hot.to(dtype), [0, 3], coin) == (-1, 1)
        # What is left is scaled up to one, however little it is.
        peaked = torch.tensor([2.0**-14, 1.0 - 2.0**-6, 0.0, 2.0**-14]).to(dtype)
        assert verify_coins(kernels, peaked, [1], 0.9999, 0.4) == (-1, 0)
        assert verify_coins(kernels, peaked, [1], 0.9999, 0.6) == (-1, 3)
        # A row without any mass still ends in an id.
        for empty in (torch.zeros(4), torch.full((4,), NAN), torch.full((4,), -1.0)):
            assert verify_coins(kernels, empty.to(dtype), [1], 0.5) == (-1, 0)


def test_residual_mass_zero_of_no_uniform_number():
    """The words at both ends give finite noise: no uniform number is exactly 0 or 1."""
    words = torch.tensor([0, 1, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 1])
    noise = reference.gumbel_from_words(words)
    assert noise.isfinite().all() and noise.diff().le(0).all()
    torch.testing.assert_close(noise[[0, -1]], torch.tensor([22.8739, -2.8115]), rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_residual_mass_zero(kernels, dtype):
    """A peaked row whose likely token is no child: after rounding nothing else has mass."""
    logits = torch.tensor([30.0, -30.0, -30.0, -INF], dtype=dtype)
    for children, accepted_length in (([1, 2, 3], 0), ([0, 1], 1), ([3], 0)):
        emitted, accepted = verify_star(kernels, logits, children, 40, temperature=1.0)
        assert accepted.eq(accepted_length).all()
        assert emitted[:, : accepted_length + 1].eq(0).all()
    # No softmax in float16: what is left is spread over small ids and large ones.
    flat = torch.zeros(1024, dtype=dtype)
    flat[0] = 5.0
    emitted, _ = verify_star(kernels, flat, [0], 24, temperature=1.0)
    rest = emitted[:, 0][emitted[:, 0] > 0]
    assert len(rest) > 12 and rest.min() < 500 < rest.max()


def test_draft_and_verification_noise_apart():
    """Drafting draws nothing, and a verifier's noise is its own: 10/60/30 stays 10/60/30."""
    law, count = [0.1, 0.6, 0.3], 40_000
    logits = torch.tensor(law).log()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    tokens, *_ = grow(hashed_head(20, seed=1), 3, 2)
    emitted, _ = verify_star(ek, logits, [1, 2], count, temperature=1.0)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(grow(hashed_head(20, seed=1), 3, 2)[0], tokens)
    assert_law(emitted[:, 0], law)
    # One seed's draws at several positions are independent, and so are those of several seeds.
    draws = ek.sample_tokens(
        logits.expand(200, 200, 3), torch.arange(200).expand(200, -1).contiguous(),
        torch.arange(200) * 2**40, temperature=1.0,
    )  # fmt: skip
    joint = torch.outer(torch.tensor(law), torch.tensor(law)).flatten()
    assert_law(draws[:, 1:] * 3 + draws[:, :-1], joint)
    assert_law(draws[1:] * 3 + draws[:-1], joint)


@pytest.mark.parametrize("children", [[2, 0], [0, 1], [1, 3], [3]], ids=str)
def test_children_are_top_k_not_sampled(children):
    """Acceptance by p/q, or one coin per sibling, moves this law by up to a half."""
    law, count = torch.tensor([0.5, 0.3, 0.1, 0.1]), 20_000
    emitted, accepted = verify_star(ek, law.log(), children, count, temperature=1.0)
    assert_law(emitted[:, 0], law)
    rate = float(law[children].sum())
    spread = math.sqrt(rate * (1 - rate) / count)
    assert abs(float(accepted.double().mean()) - rate) < 4.5 * spread
    # What follows an accepted child has the law of the child's own row.
    assert_law(emitted[:, 1][accepted > 0], law)
    # The same by uniform coins.
    n = len(children) + 1
    generator = torch.Generator().manual_seed(1)
    _, accepted, bonus = ek.verify_tree_coins(
        law.expand(count, n, -1),
        *star(children, count),
        torch.rand(count, n, generator=generator),
        torch.rand(count, generator=generator),
        1,
    )
    assert abs(float(accepted.double().mean()) - rate) < 4.5 * spread
    assert_law(bonus[accepted > 0], law)
    rest = law.index_fill(0, torch.tensor(children), 0.0)
    assert_law(bonus[accepted == 0], rest / rest.sum())


CHAIN = (torch.tensor([[9, 0, 1, 0]]), i32(1, 2, 3, -1)[None], i32(-1, -1, -1, -1)[None])


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.7}, [0, 1]),
        ({"top_k": 3, "top_p": 0.46}, [0]),
        ({"top_k": 3, "top_p": 0.7}, [0, 1]),
        ({"min_p": 0.5}, [0, 1]),
        ({"allowed_mask": 0b01011}, [0, 1, 3]),
    ],
    ids=["top_k", "top_p", "top_p after top_k", "both keep two", "min_p", "banned"],
)
def test_filters_at_every_node(filters, kept):
    """At each depth the law is the filtered one, whatever the draft proposes there."""
    law = torch.tensor([0.44, 0.28, 0.2, 0.06, 0.02])
    count = 8_000
    options = dict(filters)
    if "allowed_mask" in options:
        options["allowed_mask"] = torch.full((count, 4, 1), 0b01011, dtype=torch.int32)
    for name in ("top_k", "top_p", "min_p"):
        if name in options:
            kind = torch.int32 if name == "top_k" else torch.float32
            options[name] = torch.full((count,), options[name], dtype=kind)
    arguments = (
        law.log().expand(count, 4, 5),
        torch.arange(4).expand(count, -1),
        torch.arange(count),
        *(t.expand(count, -1) for t in CHAIN),
    )
    options["temperature"] = torch.ones(count)
    emitted, _, accepted, _ = ek.sample_and_verify(*arguments, 3, **options)
    few = [t[:12] for t in arguments], {name: t[:12] for name, t in options.items()}
    oracle = reference.sample_and_verify(*few[0], 3, **few[1])
    assert torch.equal(oracle[0], emitted[:12])
    filtered = torch.zeros(5).index_copy(0, torch.tensor(kept), law[kept])
    for depth in range(4):
        there = emitted[:, depth][accepted >= depth]
        if len(there) > 20:
            assert_law(there, filtered / filtered.sum())


def test_filters_at_every_node_come_after_the_temperature(kernels):
    """At temperature 4 the row is flat enough for top-p to keep three; at 1 it keeps one."""
    logits = torch.tensor([4.0, 2.0, 1.9, -6.0])
    for temperature, kept in ((1.0, [0]), (4.0, [0, 1, 2])):
        emitted, _ = verify_star(kernels, logits, [0], 60, temperature=temperature, top_p=0.75)
        assert emitted[:, 0].unique().tolist() == kept


def test_filters_at_every_node_count_penalties_along_the_path(kernels):
    # 0 - 1 (token 1) - 3 (token 1), and 0 - 2 (token 2): a sibling's token is not the path's
    logits = torch.tensor([1.0, 1.0, -1.0, 1.0]).repeat(1, 4, 1)
    kernels.process_logits(
        logits,
        torch.tensor([[0, 1, 2, 1]]),
        i32(-1, 0, 0, 1)[None],
        i32(4),
        prompt_mask=i32(0b1001)[None],
        output_counts=i32(2, 0, 0, 0)[None],
        repetition_penalty=torch.tensor([2.0]),
        frequency_penalty=torch.tensor([0.25]),
        presence_penalty=torch.tensor([8.0]),
        bias_tokens=torch.tensor([[3]]),
        bias_values=torch.tensor([[3.0]]),
    )
    # Token 0 was generated twice, the root being the second; token 3 is the prompt's, biased.
    first, last = 0.5 - 0.5 - 8.0, 2.0
    assert logits[0].tolist() == [
        [first, 1.0, -1.0, last],
        [first, 0.5 - 0.25 - 8.0, -1.0, last],
        [first, 1.0, -2.0 - 0.25 - 8.0, last],
        [first, 0.5 - 0.5 - 8.0, -1.0, last],
    ]
    banned = torch.tensor([[[0.0, NAN, -INF, 1.0]]])
    kernels.process_logits(
        banned, bias_tokens=torch.tensor([[1, 2, 0]]), bias_values=torch.tensor([[-INF, 3.0, 1.0]])
    )
    assert banned.tolist() == [[[1.0, -INF, -INF, 1.0]]]


@pytest.mark.parametrize(
    "filters",
    [{}, {"temperature": 1.0, "top_k": 6, "top_p": 0.9, "min_p": 0.02, "seed": 4}],
    ids=["greedy", "sampled"],
)
def test_filters_at_every_node_in_the_loop(filters):
    """A banned id, a bias, penalties and filters: the tree's text is that of plain decoding."""
    decoder = copycat_decoder(attention=0.1)
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1}
    sampling = ek.SamplingParams(**filters, **penalties, logit_bias={5: -INF, 17: 0.5})
    settings = {"max_new_tokens": 40, "eos_token_ids": ()}
    tree = decoder.generate([[3, 4, 5, 6, 7]], sampling=sampling, **settings)
    plain = decoder.generate_plain([[3, 4, 5, 6, 7]], sampling=sampling, **settings)
    assert tree.token_ids == plain.token_ids and 5 not in tree.token_ids[0]
    assert tree.stats.accept_length > 1.1
    free = ek.SamplingParams(**filters)
    assert (
        decoder.generate([[3, 4, 5, 6, 7]], sampling=free, **settings).token_ids != tree.token_ids
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("row", [NAN, -INF, INF], ids=["nan", "-inf", "inf"])
def test_nan_target_row(kernels, temperature, row):
    logits = torch.full((3, 7), row)
    emitted, accepted = verify_star(kernels, logits, [5, 6], 20, temperature=temperature)
    assert emitted[:, 0].ge(0).all() and emitted[:, 0].lt(7).all()
    assert emitted.ge(0).sum(1).eq(accepted + 1).all()
    if row != INF:
        assert emitted[:, 0].eq(0).all()
    # NaN is -inf: the finite token wins, and no other is drawn.
    one = torch.full((7,), NAN)
    one[5] = -3.0
    emitted, accepted = verify_star(kernels, one, [5, 6], 20, temperature=temperature)
    assert emitted.eq(5).all() and accepted.eq(1).all()


def test_nan_target_row_under_a_mask(kernels):
    """The lowest allowed id, not the lowest."""
    got = kernels.sample_tokens(
        torch.full((1, 2, 7), NAN),
        torch.zeros(1, 2, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
        allowed_mask=i32(0b1010000, 0b1000).view(1, 2, 1),
    )
    assert got.tolist() == [[4, 3]]


def test_vocabularies_that_differ():
    target, other = tiny_model(), tiny_model(vocab_size=40)
    with pytest.raises(ValueError, match="vocab"):
        ek.EagleDecoder(target, tiny_head(other))
    for table in ([0, 1, 1], [0, 61], [-1, 3]):
        with pytest.raises(ValueError):
            tiny_head(target, table)
    with pytest.raises(ValueError, match="draft_to_target"):
        ek.expand_topk(torch.zeros(1, 1, 5), torch.zeros(1, 1), 2, torch.arange(4))
    # A draft id is mapped before it is compared with the target's.
    tokens, *_ = ek.expand_topk(
        torch.tensor([[[0.0, 3.0, 1.0]]]), torch.zeros(1, 1), 2, torch.tensor([7, 50, 12])
    )
    assert tokens.tolist() == [[50, 12]]
    # An id the target does not have is never accepted.
    emitted, accepted = verify_star(ek, torch.zeros(3), [3, -1], 50, temperature=1.0)
    assert accepted.eq(0).all() and emitted[:, 0].lt(3).all()
