"""sample_tokens, verify_tree, sample_and_verify and verify_tree_coins, case by case.

The proofs over all trees, all coins and many draws are in test_verify_laws.py.
"""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import VERIFY_CASES, verify_inputs
from growth import i32, random_parents
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import chi_square

import eagle2_kernels as e2
from eagle2_kernels import reference

NEG_INF, NAN, INF = float("-inf"), float("nan"), float("inf")
OPS = torch.ops.eagle2_kernels
DATA = Path(__file__).parent / "data"
ENGINE = json.loads((DATA / "engine_cases.json").read_text())
GOLDEN = json.loads((DATA / "gumbel_noise.json").read_text())
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def dtype_id(dtype):
    return str(dtype).removeprefix("torch.")


def draws(logits, count, seed=0, **filters):
    """``count`` draws from one row of logits, at positions 0, 1, ... under one seed."""
    rows = torch.as_tensor(logits).expand(1, count, -1)
    return e2.sample_tokens(rows, torch.arange(count)[None], torch.tensor([seed]), **filters)[0]


# noise


def numpy_philox(seed: int, position: int, token: int) -> int:
    """Philox4x32-10 once more, from its paper."""
    low = 0xFFFFFFFF
    key = [seed & low, seed >> 32 & low]
    counter = [position & low, position >> 32 & low, token // 4, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [b >> 32 ^ counter[1] ^ key[0], b & low, a >> 32 ^ counter[3] ^ key[1], a & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return counter[token % 4]


def test_golden_words_and_noise_of_the_oracle():
    for seed, position, token, word, bits in GOLDEN["rows"]:
        assert numpy_philox(seed, position, token) == word
        assert (
            int(reference.philox4x32(seed, position, torch.tensor([token // 4]))[0, token % 4])
            == word
        )
        noise = reference.gumbel_from_words(torch.tensor([word]))
        assert int(noise.view(torch.int32)) == bits
        v = min((word + 0.5) * 2.0**-32, 1 - 2.0**-24)
        assert float(noise) == pytest.approx(-math.log(-math.log1p(-v)), abs=2e-6, rel=2e-6)


@pytest.mark.parametrize("seed", sorted({row[0] for row in GOLDEN["rows"]}))
def test_kernel_noise_follows_the_golden_rows(seed):
    """Two tokens alone in a row, one logit apart from the difference of their golden noise."""
    rows = [r for r in GOLDEN["rows"] if r[0] == seed]
    for position in {r[1] for r in rows}:
        here = {r[2]: np.int32(r[4]).view(np.float32) for r in rows if r[1] == position}
        vocab = max(here) + 1
        for a, b in itertools.combinations(sorted(here), 2):
            logits = torch.full((1, 2, vocab), NEG_INF)
            gap = float(here[a]) - float(here[b])
            for i, nudge in enumerate((-2e-5, 2e-5)):
                logits[0, i, a], logits[0, i, b] = nudge, gap
            tokens = e2.sample_tokens(
                logits,
                torch.full((1, 2), position),
                torch.tensor([seed]),
                temperature=1.0,
                top_k=2,
            )
            assert tokens.tolist() == [[b, a]]


@pytest.mark.parametrize("vocab", [1, 3, 16, 255, 1025, 4999])
def test_flat_rows_yield_the_argmax_of_the_noise(vocab):
    positions = torch.tensor([[0, 3, 2**33, 77]])
    tokens = e2.sample_tokens(
        torch.zeros(1, 4, vocab), positions, torch.tensor([5]), temperature=1.0
    )
    want = [int(reference.gumbel_noise(5, p, vocab).argmax()) for p in positions[0].tolist()]
    assert tokens[0].tolist() == want


def test_the_draw_belongs_to_seed_and_position_alone():
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(300, generator=generator)
    alone = e2.sample_tokens(
        row[None, None], torch.tensor([[41]]), torch.tensor([9]), temperature=0.9
    )
    logits = torch.randn(3, 5, 300, generator=generator)
    logits[2, 3] = row
    positions = torch.randint(0, 100, (3, 5), generator=generator)
    positions[2, 3] = 41
    batch = e2.sample_tokens(logits, positions, torch.tensor([1, 2, 9]), temperature=0.9)
    assert batch[2, 3] == alone[0, 0]


def test_one_seed_counts_up_over_the_batch():
    logits, positions = torch.zeros(3, 1, 500), torch.zeros(3, 1, dtype=torch.int64)
    got = e2.sample_tokens(logits, positions, 7, temperature=1.0)
    assert torch.equal(
        got, e2.sample_tokens(logits, positions, torch.tensor([7, 8, 9]), temperature=1.0)
    )


# the law of a draw


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=dtype_id)
def test_draws_follow_the_softmax(dtype, temperature):
    # Large and small logits side by side, so that a misplaced word of noise shows.
    logits = torch.tensor([2.0, -1.5] * 8).to(dtype) * torch.linspace(1, 0.25, 16).to(dtype)
    tokens = draws(logits, 60_000, seed=3, temperature=temperature)
    probabilities = torch.softmax(logits.double() / temperature, 0)
    assert chi_square(tokens, probabilities) < 1


def test_draws_under_many_seeds_follow_the_softmax():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    count = 40_000
    tokens = e2.sample_tokens(
        logits.expand(count, 1, 5),
        torch.full((count, 1), 12),
        torch.arange(count),
        temperature=1.0,
    )
    assert chi_square(tokens[:, 0], torch.softmax(logits.double(), 0)) < 1


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_p": 0.75}, [0, 1, 2]),
        ({"top_p": 0.69}, [0, 1]),
        ({"min_p": 0.3}, [0, 1]),
        ({"top_k": 4, "top_p": 0.8}, [0, 1, 2]),
        ({"top_k": 2, "top_p": 0.99, "min_p": 0.01}, [0, 1]),
        ({"top_p": 0.0}, [0]),
        ({"top_k": 1}, [0]),
        ({"min_p": 1.0}, [0]),
    ],
    ids=str,
)
def test_filters_keep_what_they_say_and_renormalise(filters, kept):
    p = torch.tensor([0.4, 0.3, 0.1, 0.08, 0.07, 0.05])
    tokens = draws(p.log(), 20_000, seed=1, temperature=1.0, **filters)
    law = torch.zeros(6, dtype=torch.float64)
    law[kept] = p[kept].double() / p[kept].double().sum()
    if len(kept) == 1:
        assert tokens.unique().tolist() == kept
    else:
        assert chi_square(tokens, law) < 1


def test_top_p_takes_a_candidate_only_while_the_mass_before_it_is_below_p():
    # Four equal masses: exactly half is reached after two. The third must not come in.
    assert draws(torch.zeros(4), 500, temperature=1.0, top_p=0.5).unique().tolist() == [0, 1]
    assert draws(torch.zeros(4), 500, temperature=1.0, top_p=0.51).unique().tolist() == [0, 1, 2]
    ranked = draws(torch.zeros(8), 500, temperature=1.0, top_k=4, top_p=0.5)
    assert ranked.unique().tolist() == [0, 1]
    wide = draws(torch.zeros(1024), 4000, temperature=1.0, top_p=0.25)
    assert int(wide.max()) < 256 and len(wide.unique()) == 256


def test_top_p_counts_the_mass_that_top_k_left():
    p = torch.tensor([0.4, 0.2, 0.2, 0.1, 0.1])
    # Of the two kept, the first alone has 2/3.
    tokens = draws(p.log(), 500, temperature=1.0, top_k=2, top_p=0.6)
    assert tokens.unique().tolist() == [0]


def test_min_p_keeps_what_just_reaches_it():
    assert draws(torch.zeros(3), 500, temperature=1.0, min_p=1.0).unique().tolist() == [0, 1, 2]
    among = draws(torch.zeros(5), 500, temperature=1.0, min_p=1.0, top_k=3)
    assert among.unique().tolist() == [0, 1, 2]


def test_top_k_keeps_the_lowest_ids_among_equals():
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    assert draws(logits, 500, temperature=1.0, top_k=3).unique().tolist() == [1, 2, 3]
    assert draws(torch.zeros(3000), 20_000, temperature=1.0, top_k=700).max() == 699


def test_temperature_comes_before_the_other_filters():
    logits = torch.tensor([2.0, 0.0])
    # At temperature 4 the second has e^-0.5 = 0.61 of the first's mass; at 1 it has 0.14.
    assert 1 in draws(logits, 500, temperature=4.0, min_p=0.5)
    assert 1 not in draws(logits, 500, temperature=1.0, min_p=0.5)


@pytest.mark.parametrize("vocab", [50, 2000])
def test_filters_equal_the_warpers_of_transformers(vocab):
    warpers = pytest.importorskip("transformers.generation.logits_process")
    generator = torch.Generator().manual_seed(vocab)
    settings_ = itertools.product((0.7, 1.0, 1.6), (0, 1, 5, 40), (1.0, 0.9, 0.4), (0.0, 0.02, 0.3))
    for seed, (temperature, top_k, top_p, min_p) in enumerate(settings_):
        chain = [warpers.TemperatureLogitsWarper(temperature)]
        chain += [warpers.TopKLogitsWarper(top_k)] if top_k else []
        chain += [warpers.TopPLogitsWarper(top_p)] if top_p < 1 else []
        chain += [warpers.MinPLogitsWarper(min_p)] if min_p else []
        logits = torch.randn(1, 2, vocab, generator=generator) * 3
        warped = logits[0].clone()
        for warper in chain:
            warped = warper(None, warped)
        noise = torch.stack([reference.gumbel_noise(seed, p, vocab) for p in range(2)])
        got = e2.sample_tokens(
            logits,
            torch.arange(2)[None],
            torch.tensor([seed]),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
        )
        assert got[0].tolist() == (warped + noise).argmax(-1).tolist()


# against the oracle


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("vocab", [1, 7, 33, 1024, 1500])
def test_sampling_equals_the_oracle(dtype, vocab):
    generator = torch.Generator().manual_seed(vocab)

    def pick(*choices):
        index = torch.randint(0, len(choices), (3,), generator=generator).tolist()
        return torch.tensor([choices[i] for i in index])

    for round_ in range(12):
        logits = (torch.randn(3, 4, vocab, generator=generator) * 3).to(dtype)
        if round_ % 3 == 1:
            logits = logits.round()
        if round_ % 4 == 2:
            logits[0, 0, ::2] = NAN
            logits[0, 1] = NEG_INF
            logits[1, 0, -1] = INF
            logits[1, 1] = NAN
            logits[2, 0, : vocab // 2] = NEG_INF
        filters = {
            "temperature": pick(0.0, 0.3, 1.0, 3.0),
            "top_k": pick(0, 1, 4, 2000).int(),
            "top_p": pick(1.0, 0.9, 0.5, 0.0),
            "min_p": pick(0.0, 0.05, 0.5),
        }
        if round_ % 5 == 3:
            filters["top_k"] = filters["top_k"].long()
        if round_ % 2:
            words = (vocab + 31) // 32
            filters["allowed_mask"] = torch.randint(
                -(2**31), 2**31, (3, 4, words), generator=generator
            ).int()
        kept = {k: v for k, v in filters.items() if torch.rand(1, generator=generator) > 0.25}
        positions = torch.randint(0, 2**40, (3, 4), generator=generator)
        seeds = torch.randint(-(2**62), 2**62, (3,), generator=generator)
        got = e2.sample_tokens(logits, positions, seeds, **kept)
        assert torch.equal(got, reference.sample_tokens(logits, positions, seeds, **kept)), kept


# greedy rows and rows without a choice


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_greedy_takes_the_lowest_id_of_the_largest(dtype):
    logits = torch.zeros(1, 2, 3000, dtype=dtype)
    logits[0, 0, [1500, 2500]] = 1.0
    for temperature in (None, 0, 0.0, torch.zeros(1)):
        got = e2.sample_tokens(
            logits, torch.zeros(1, 2, dtype=torch.int64), 0, temperature=temperature
        )
        assert got.tolist() == [[1500, 0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("row", "token"),
    [
        ([NAN] * 5, 0),
        ([NEG_INF] * 5, 0),
        ([NAN, NEG_INF, NAN, -3.0, NAN], 3),
        ([0.0, INF, -INF, 1.0, NAN], 1),
    ],
    ids=["nan", "minus_infinity", "one_number", "infinity"],
)
def test_hopeless_rows_yield_an_id_in_range(row, token, temperature):
    assert draws(torch.tensor(row), 50, temperature=temperature).unique().tolist() == [token]


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_only_allowed_tokens_are_drawn(temperature):
    logits = torch.tensor([5.0, 4.0, 3.0, 2.0]).repeat(20)
    mask = torch.zeros(1, 200, 3, dtype=torch.int32)
    mask[..., 1] = 1 << 3  # token 35
    mask[..., 2] = 1 << 9 | 1 << 1  # tokens 73 and 65
    got = draws(logits, 200, temperature=temperature, allowed_mask=mask)
    assert got.unique().tolist() == ([65] if temperature == 0 else [35, 65, 73])
    banned = torch.full((80,), NEG_INF)
    got = draws(banned, 200, temperature=temperature, allowed_mask=mask)
    assert got.unique().tolist() == [35]
    got = draws(logits, 200, temperature=temperature, allowed_mask=torch.zeros_like(mask))
    assert got.unique().tolist() == [0]


def test_the_last_bit_of_a_mask_word_is_a_token():
    mask = i32([[[-(2**31)]]])
    got = e2.sample_tokens(
        torch.zeros(1, 1, 32), torch.zeros(1, 1, dtype=torch.int64), 0, allowed_mask=mask
    )
    assert got.tolist() == [[31]]


def test_a_token_of_probability_zero_is_never_emitted():
    logits = torch.tensor([NEG_INF, 0.0, 0.5])
    assert chi_square(draws(logits, 20_000, temperature=1.0), [0, 0.37754067, 0.62245933]) < 1
    peaked = torch.tensor([80.0, 0.0, 0.0], dtype=torch.float16)
    assert draws(peaked, 2_000, temperature=1.0, min_p=0.1).unique().tolist() == [0]


@pytest.mark.parametrize("temperature", [1e-30, 1e-45, INF, 3e38])
def test_extreme_temperatures(temperature):
    logits = torch.tensor([1.0, 3.0, 3.0, NEG_INF])
    got = draws(logits, 3000, temperature=temperature).unique().tolist()
    assert got == ([1, 2] if temperature < 1 else [0, 1, 2])


def test_a_filter_given_as_a_number_equals_the_tensor():
    logits = torch.randn(2, 3, 100, generator=torch.Generator().manual_seed(1))
    positions, seeds = torch.arange(6).view(2, 3), torch.tensor([1, 2])
    a = e2.sample_tokens(logits, positions, seeds, temperature=0.8, top_k=9, top_p=0.9, min_p=0.01)
    b = e2.sample_tokens(
        logits,
        positions,
        seeds,
        temperature=torch.tensor([0.8, 0.8]),
        top_k=i32([9, 9]),
        top_p=torch.tensor([0.9, 0.9]),
        min_p=torch.tensor([0.01, 0.01]),
    )
    assert torch.equal(a, b)


# the walk


link = st.integers(-3, 9)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(link, link, st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=7),
    st.integers(0, 9),
    st.integers(-1, 8),
)
def test_any_links_end_and_equal_the_oracle(slots, max_depth, count):
    child, sibling, draft, target = (torch.tensor([c]) for c in zip(*slots, strict=True))
    args = (target, draft, child.int(), sibling.int(), max_depth, i32([count]))
    for a, b in zip(e2.verify_tree(*args), reference.verify_tree(*args), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


probability = st.sampled_from([0.0, 0.25, 0.5, 1.0, 0.1, 1e-40, -1.0, NAN, INF])
coin = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 1 - 2.0**-24, 1.0, -1.0, NAN])


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            link, link, st.integers(-1, 4), coin, st.lists(probability, min_size=4, max_size=4)
        ),
        min_size=1,
        max_size=7,
    ),
    coin,
    st.integers(0, 9),
    st.integers(-1, 8),
    st.sampled_from(DTYPES),
)
def test_any_links_and_any_coins_end_and_equal_the_oracle(slots, final, max_depth, count, dtype):
    child, sibling, draft, coins, probs = (torch.tensor([c]) for c in zip(*slots, strict=True))
    probs = probs.to(dtype)
    args = (probs, draft, child.int(), sibling.int(), coins, torch.tensor([final]), max_depth)
    got = e2.verify_tree_coins(*args, i32([count]))
    for a, b in zip(got, reference.verify_tree_coins(*args, i32([count])), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    if count > 0:
        path = got[0][0, : int(got[1]) + 1].tolist()
        emitted = [*draft[0, path[1:]].tolist(), int(got[2])]
        for node, token in zip(path, emitted, strict=True):
            assert probs[0, node, token] > 0 or (token == 0 and not (probs[0, node] > 0).any())


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=dtype_id)
def test_coins_equal_the_oracle_on_long_rows(dtype, wide):
    generator = torch.Generator().manual_seed(16)
    logits, _, draft, child, sibling, deepest = tree_case(6, 20, 2500, generator)
    logits[1::2] *= 6  # rows whose tail rounds to nothing
    probs = logits.softmax(-1).to(dtype)
    coins = torch.rand(6, 20, generator=generator, dtype=wide)
    finals = torch.rand(6, generator=generator, dtype=wide)
    args = (probs, draft, child, sibling, coins, finals, deepest)
    got = e2.verify_tree_coins(*args)
    assert (got[1] > 0).any()
    for a, b in zip(got, reference.verify_tree_coins(*args), strict=True):
        assert torch.equal(a, b)
    strided = probs.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    every_second = torch.stack([coins, coins + 1], -1)[..., 0]
    got_strided = e2.verify_tree_coins(strided, *args[1:4], every_second, *args[5:])
    assert all(torch.equal(a, b) for a, b in zip(got, got_strided, strict=True))


def test_only_the_rows_of_visited_nodes_are_read_by_coins():
    generator = torch.Generator().manual_seed(17)
    logits, _, draft, child, sibling, deepest = tree_case(4, 20, 30, generator)
    probs, coins = logits.softmax(-1), torch.rand(4, 20, generator=generator)
    rest = (draft, child, sibling, coins, torch.rand(4, generator=generator), deepest)
    want = e2.verify_tree_coins(probs, *rest)
    poisoned = torch.full_like(probs, NAN)
    for r in range(4):
        visited = want[0][r][want[0][r] >= 0].long()
        poisoned[r, visited] = probs[r, visited]
    got = e2.verify_tree_coins(poisoned, *rest)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_inactive_requests_are_marked_by_coins():
    links, tokens = i32([[-1] * 3] * 2), torch.zeros(2, 3, dtype=torch.int64)
    index, length, bonus = e2.verify_tree_coins(
        torch.full((2, 3, 4), 0.25),
        tokens,
        links,
        links,
        torch.zeros(2, 3),
        torch.full((2,), 0.5),
        2,
        i32([0, 1]),
    )
    assert index.tolist() == [[-1, -1, -1], [0, -1, -1]]
    assert length.tolist() == [-1, 0] and bonus.tolist() == [-1, 2]


def test_inactive_requests_are_marked():
    tokens, links = torch.zeros(2, 3, dtype=torch.int64), i32([[-1] * 3] * 2)
    index, length, bonus = e2.verify_tree(tokens, tokens, links, links, 2, i32([0, 1]))
    assert index.tolist() == [[-1, -1, -1], [0, -1, -1]]
    assert length.tolist() == [-1, 0] and bonus.tolist() == [-1, 0]


def test_published_engine_walk():
    case = ENGINE["verify_tree_greedy"]
    draft = torch.tensor(case["candidates"])
    index, length, bonus = e2.verify_tree(
        torch.tensor(case["target_predict"]),
        draft,
        i32(case["retrieve_next_token"]),
        i32(case["retrieve_next_sibling"]),
        case["accept_width"] - 1,
    )
    expected = case["expected"]
    width = draft.shape[1]
    flat = [[-1 if s < 0 else s + row * width for s in index[row].tolist()] for row in range(2)]
    assert flat == expected["accept_index"]
    assert length.tolist() == expected["accept_token_num"]
    last = [max(row) for row in flat]
    assert bonus.tolist() == [expected["predicts"][slot] for slot in last]


@pytest.mark.parametrize("d", ENGINE["chain_identities"]["D"])
def test_published_chain_identities(d):
    draft = torch.arange(d)[None]
    child, sibling = i32([[*range(1, d), -1]]), i32([[-1] * d])
    target = torch.cat([draft[:, 1:], torch.tensor([[99]])], 1)
    index, length, bonus = e2.verify_tree(target, draft, child, sibling, d - 1)
    assert index.tolist() == [list(range(d))] and length.tolist() == [d - 1]
    assert bonus.tolist() == [99]
    _, length, bonus = e2.verify_tree(torch.zeros_like(draft), draft, child, sibling, d - 1)
    assert length.tolist() == [0] and bonus.tolist() == [0]


# both together


@pytest.mark.parametrize("case", [c for c in VERIFY_CASES if c.vocab == 1000], ids=lambda c: c.name)
def test_a_walk_to_the_last_leaf_equals_the_oracle(case):
    x = verify_inputs(case)
    links = (x.draft_tokens, x.first_child, x.next_sibling, x.max_depth, x.num_nodes)
    draw = (x.logits, x.position_ids, x.seeds)
    got = e2.sample_and_verify(*draw, *links, **x.filters)
    for a, b in zip(got, reference.sample_and_verify(*draw, *links, **x.filters), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(got[0], x.emitted) and got[1][0].tolist() == x.path


def tree_case(b, n, vocab, generator, dtype=torch.float32):
    """Random trees with distinct siblings, and logits that often agree with them."""
    parents = torch.stack([random_parents(n, generator) for _ in range(b)])
    depths, positions, child, sibling, _ = e2.flatten_tree(
        parents, i32([n] * b), i32([3 + r for r in range(b)])
    )
    draft = torch.randint(0, vocab, (b, 1), generator=generator).repeat(1, n)
    for r in range(b):
        for node in range(n):
            kids = (parents[r] == node).nonzero()[:, 0]
            draft[r, kids] = torch.randperm(vocab, generator=generator)[: len(kids)]
    logits = torch.randn(b, n, vocab, generator=generator)
    for r in range(b):
        for slot in range(1, n):
            logits[r, parents[r, slot], draft[r, slot]] += 3
    return logits.to(dtype), positions, draft, child, sibling, int(depths.max())


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.2, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=lambda f: "+".join(f) or "greedy",
)
def test_fused_equals_unfused_bit_for_bit(dtype, filters):
    generator = torch.Generator().manual_seed(11)
    logits, positions, draft, child, sibling, deepest = tree_case(4, 20, 30, generator, dtype)
    seeds, count = torch.tensor([1, 2, 3, 4]), i32([20, 20, 0, 20])
    got = e2.sample_and_verify(
        logits, positions, seeds, draft, child, sibling, deepest, count, **filters
    )
    targets = e2.sample_tokens(logits, positions, seeds, **filters)
    want = e2.verify_tree(targets, draft, child, sibling, deepest, count)
    assert all(torch.equal(a, b) for a, b in zip(got[1:], want, strict=True))
    emitted = torch.where(want[0] >= 0, targets.gather(1, want[0].clamp(min=0).long()), -1)
    assert torch.equal(got[0], emitted)
    assert (want[1] > 0).any() and want[1][2] == -1


def test_only_visited_nodes_are_read():
    generator = torch.Generator().manual_seed(12)
    logits, positions, draft, child, sibling, deepest = tree_case(2, 20, 30, generator)
    args = (positions, torch.tensor([5, 6]), draft, child, sibling, deepest)
    want = e2.sample_and_verify(logits, *args, temperature=1.0)
    poisoned = torch.full_like(logits, NAN)
    for r in range(2):
        visited = want[1][r][want[1][r] >= 0].long()
        poisoned[r, visited] = logits[r, visited]
    got = e2.sample_and_verify(poisoned, *args, temperature=1.0)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def context_logits(prefix, vocab):
    """A target: logits that depend on all tokens so far."""
    key = 17
    for token in prefix:
        key = (key * 1_000_003 + token + 1) % (2**62)
    return torch.randn(vocab, generator=torch.Generator().manual_seed(key)) * 1.5


@pytest.mark.parametrize(
    "filters",
    [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 4, "top_p": 0.9}],
    ids=["greedy", "sampled", "filtered"],
)
def test_tree_decoding_emits_what_plain_decoding_emits(filters):
    """Any tree, any draft quality: the tokens are those of one-by-one decoding under the seed."""
    vocab, seed, length = 6, torch.tensor([123]), 30
    plain = [0]
    while len(plain) < length:
        row = context_logits(plain, vocab)[None, None]
        at = torch.tensor([[len(plain) - 1]])
        plain.append(int(e2.sample_tokens(row, at, seed, **filters)))
    generator = torch.Generator().manual_seed(1)
    for n in (1, 2, 5, 12):
        tokens, steps = [0], 0
        while len(tokens) < length:
            parents = random_parents(n, generator)
            prefix = len(tokens) - 1
            _, positions, child, sibling, _ = e2.flatten_tree(
                parents[None], i32([n]), i32([prefix])
            )
            draft, paths = torch.zeros(1, n, dtype=torch.int64), [tokens]
            taken = {}
            for slot in range(1, n):
                parent = int(parents[slot])
                free = [t for t in range(vocab) if t not in taken.setdefault(parent, set())]
                token = (
                    free[int(torch.randint(0, len(free), (1,), generator=generator))]
                    if free
                    else vocab + slot
                )
                taken[parent].add(token)
                draft[0, slot] = token
                paths.append([*paths[parent], token])
            logits = torch.stack([context_logits(p, vocab) for p in paths])[None]
            emitted, _, accepted, _ = e2.sample_and_verify(
                logits, positions, seed, draft, child, sibling, n, **filters
            )
            tokens += emitted[0, : int(accepted) + 1].tolist()
            steps += 1
        assert tokens[:length] == plain
        assert n == 1 or steps < length - 1


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    ("target", "children"),
    [
        (ENGINE["verify_rule_laws"]["target"], ENGINE["verify_rule_laws"]["children_topk"]),
        (ENGINE["lossless_counterexample_independent_siblings"]["target"], [0, 1]),
        ([0.1, 0.6, 0.3], [1, 2]),
    ],
    ids=["verify_rule_laws", "independent_siblings", "shared_noise"],
)
def test_the_first_token_keeps_the_targets_law_whatever_the_children(target, children, temperature):
    """p/q acceptance of top-k children and sibling coins of their own emit other laws here."""
    logits = torch.tensor(target).log()
    count, n = 30_000, 3
    child, sibling = i32([[1, -1, -1]]), i32([[-1, 2, -1]])
    draft = torch.tensor([[9, *children]])
    emitted, _, accepted, _ = e2.sample_and_verify(
        logits.expand(count, n, len(target)),
        torch.tensor([[4, 5, 5]]).expand(count, -1),
        torch.arange(count),
        draft.expand(count, -1),
        child.expand(count, -1),
        sibling.expand(count, -1),
        1,
        temperature=temperature,
    )
    law = torch.softmax(logits.double() / temperature, 0)
    assert chi_square(emitted[:, 0], law) < 1
    rate = float(accepted.double().mean())
    assert rate == pytest.approx(float(law[children].sum()), abs=4 * 0.5 / math.sqrt(count))


def test_filters_and_bans_hold_at_every_node():
    """A banned token and one that min-p drops are not emitted at any depth, drafted or not."""
    vocab, count = 5, 400
    logits = torch.tensor([2.0, 1.9, 1.8, -2.0, 2.2]).expand(count, 4, vocab)
    chain = i32([[1, 2, 3, -1]]).expand(count, -1)
    draft = torch.tensor([[9, 4, 3, 4]]).expand(count, -1)
    mask = torch.full((count, 4, 1), 0b01111, dtype=torch.int32)
    emitted, _, accepted, _ = e2.sample_and_verify(
        logits,
        torch.arange(4).expand(count, -1),
        torch.arange(count),
        draft,
        chain,
        torch.full_like(chain, -1),
        3,
        temperature=1.0,
        min_p=0.1,
        allowed_mask=mask,
    )
    assert (accepted == 0).all()
    assert emitted[:, 0].unique().tolist() == [0, 1, 2]
    drafted = torch.tensor([[9, 0, 1, 2]]).expand(count, -1)
    emitted, _, accepted, _ = e2.sample_and_verify(
        logits,
        torch.arange(4).expand(count, -1),
        torch.arange(count),
        drafted,
        chain,
        torch.full_like(chain, -1),
        3,
        temperature=1.0,
        min_p=0.1,
        allowed_mask=mask,
    )
    assert int(accepted.max()) == 3
    assert emitted.unique().tolist() == [-1, 0, 1, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_a_step_over_nan_logits_still_emits_a_token(temperature):
    emitted, _, accepted, _ = e2.sample_and_verify(
        torch.full((1, 2, 7), NAN),
        torch.tensor([[3, 4]]),
        1,
        torch.tensor([[5, 6]]),
        i32([[1, -1]]),
        i32([[-1, -1]]),
        1,
        temperature=temperature,
    )
    assert accepted.tolist() == [0] and emitted.tolist() == [[0, -1]]


def test_a_draft_token_outside_the_targets_vocabulary_is_never_accepted():
    _, _, accepted, _ = e2.sample_and_verify(
        torch.zeros(50, 2, 3),
        torch.tensor([[3, 4]]).expand(50, -1),
        1,
        torch.tensor([[0, 3]]).expand(50, -1),
        i32([[1, -1]]).expand(50, -1),
        i32([[-1, -1]]).expand(50, -1),
        1,
        temperature=1.0,
    )
    assert (accepted == 0).all()


def test_accepted_length_is_the_mass_of_the_paths():
    """E[accepted drafts] = the sum over nodes of the target's probability of their path."""
    p = torch.tensor([0.5, 0.3, 0.2])
    # root -> 0, 1; 0 -> 0, 2
    child, sibling = i32([[1, 3, -1, -1, -1]]), i32([[-1, 2, -1, 4, -1]])
    draft = torch.tensor([[9, 0, 1, 0, 2]])
    count = 40_000
    _, _, accepted, _ = e2.sample_and_verify(
        p.log().expand(count, 5, 3),
        torch.tensor([[0, 1, 1, 2, 2]]).expand(count, -1),
        torch.arange(count) * 7919,
        draft.expand(count, -1),
        child.expand(count, -1),
        sibling.expand(count, -1),
        4,
        temperature=1.0,
    )
    want = 0.5 + 0.3 + 0.5 * 0.5 + 0.5 * 0.2
    assert float(accepted.double().mean()) == pytest.approx(want, abs=4 / math.sqrt(count))


def test_bits_do_not_depend_on_threads():
    generator = torch.Generator().manual_seed(13)
    logits, positions, draft, child, sibling, deepest = tree_case(3, 16, 3000, generator)
    args = (logits, positions, torch.tensor([1, 2, 3]))
    filters = {"temperature": 1.0, "top_p": 0.95}
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(
                (
                    e2.sample_tokens(*args, **filters),
                    *e2.sample_and_verify(*args, draft, child, sibling, deepest, **filters),
                )
            )
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_strided_logits():
    generator = torch.Generator().manual_seed(14)
    logits = torch.randn(40, 3, 2, generator=generator).permute(2, 1, 0)
    positions = torch.arange(6).view(3, 2).t()
    args = (positions, torch.tensor([1, 2, 3, 4])[::2])
    for filters in ({}, {"temperature": 1.0}):
        got = e2.sample_tokens(logits, *args, **filters)
        want = e2.sample_tokens(logits.contiguous(), *(a.contiguous() for a in args), **filters)
        assert torch.equal(got, want)


# the contract around them


def out_calls():
    generator = torch.Generator().manual_seed(15)
    logits, positions, draft, child, sibling, deepest = tree_case(2, 9, 20, generator)
    seeds, count = torch.tensor([1, 2]), i32([0, 9])
    links = (draft, child, sibling, deepest, count)
    coins = torch.rand(2, 9, generator=generator), torch.rand(2, generator=generator)
    return {
        "sample_tokens": (logits, positions, seeds),
        "verify_tree": (logits.argmax(-1), *links),
        "sample_and_verify": (logits, positions, seeds, *links),
        "verify_tree_coins": (logits.softmax(-1), *links[:3], *coins, deepest, count),
    }


@pytest.mark.parametrize("name", sorted(out_calls()))
def test_out_twins_overwrite_poison(name):
    args = out_calls()[name]
    op = next(op for op in e2.ops.OPS if op.name == name)
    want = getattr(OPS, name)(*args)
    want = want if isinstance(want, tuple) else (want,)
    outs = [torch.full_like(w, 77) for w in want]
    getattr(OPS, name + "_out")(*args, **dict(zip(op.outs, outs, strict=True)))
    assert all(torch.equal(a, b) for a, b in zip(outs, want, strict=True))
    bad = [torch.empty(*w.shape, 2, dtype=w.dtype)[..., 0] for w in want]
    with pytest.raises(RuntimeError, match="contiguous"):
        getattr(OPS, name + "_out")(*args, **dict(zip(op.outs, bad, strict=True)))


ZERO = torch.zeros(2, 3, dtype=torch.int64)
SAMPLE = {"logits": torch.zeros(2, 3, 40), "position_ids": ZERO, "seeds": torch.zeros(2).long()}
LINKS = {
    "draft_tokens": torch.tensor([[0, 1, 2]] * 2),
    "first_child": i32([[1, -1, -1]] * 2),
    "next_sibling": i32([[-1, 2, -1]] * 2),
    "max_depth": 2,
}
VERIFY = {"target_tokens": ZERO, **LINKS}
COINS = {
    "target_probs": torch.full((2, 3, 4), 0.25),
    "coins": torch.zeros(2, 3),
    "final_coins": torch.zeros(2),
    **LINKS,
}


@pytest.mark.parametrize(
    ("function", "base", "change", "error", "message"),
    [
        ("sample_tokens", SAMPLE, {"logits": ZERO}, TypeError, "logits: expected dtype float32"),
        ("sample_tokens", SAMPLE, {"logits": [[1.0]]}, TypeError, "logits: .* tensor .*got list"),
        ("sample_tokens", SAMPLE, {"logits": torch.zeros(2, 3)}, ValueError, r"\[B, N, V\]"),
        ("sample_tokens", SAMPLE, {"logits": torch.zeros(2, 3, 0)}, ValueError, "V of at least 1"),
        ("sample_tokens", SAMPLE, {"position_ids": i32(ZERO)}, TypeError, "position_ids: .* int64"),
        ("sample_tokens", SAMPLE, {"seeds": ZERO}, ValueError, r"seeds: .*\[B\] = \(2\)"),
        ("sample_tokens", SAMPLE, {"temperature": torch.ones(3)}, ValueError, "temperature: .*2"),
        ("sample_tokens", SAMPLE, {"temperature": "hot"}, TypeError, "temperature: .* got str"),
        ("sample_tokens", SAMPLE, {"temperature": -1.0}, ValueError, "temperature: .* got -1"),
        ("sample_tokens", SAMPLE, {"temperature": NAN}, ValueError, "temperature: .* got nan"),
        ("sample_tokens", SAMPLE, {"top_k": -2}, ValueError, "top_k: .* got -2"),
        ("sample_tokens", SAMPLE, {"top_k": 2**40}, ValueError, "top_k: expected a value from 0"),
        ("sample_tokens", SAMPLE, {"top_k": 2.7}, TypeError, "top_k: expected an int, got float"),
        ("sample_tokens", SAMPLE, {"top_p": 1.5}, ValueError, "top_p: .* from 0 to 1, got 1.5"),
        ("sample_tokens", SAMPLE, {"min_p": -0.1}, ValueError, "min_p: .* got -0.1"),
        ("sample_tokens", SAMPLE, {"seeds": 2**64}, ValueError, "seeds: expected a 64-bit"),
        ("sample_tokens", SAMPLE, {"top_k": torch.ones(2)}, TypeError, "top_k: .* int32 or int64"),
        ("sample_tokens", SAMPLE, {"top_p": torch.ones(2).double()}, TypeError, "top_p: .*float32"),
        ("sample_tokens", SAMPLE, {"min_p": torch.ones(2, 1)}, ValueError, "min_p: expected shape"),
        (
            "sample_tokens",
            SAMPLE,
            {"allowed_mask": torch.zeros(2, 3, 1).int()},
            ValueError,
            r"allowed_mask: .*\(2, 3, 2\)",
        ),
        ("verify_tree", VERIFY, {"target_tokens": i32(ZERO)}, TypeError, "target_tokens: .* int64"),
        (
            "verify_tree",
            VERIFY,
            {"draft_tokens": ZERO[:1]},
            ValueError,
            r"draft_tokens: .*\(2, 3\)",
        ),
        ("verify_tree", VERIFY, {"first_child": ZERO}, TypeError, "first_child: .*int32"),
        ("verify_tree", VERIFY, {"next_sibling": i32(ZERO[:, :2])}, ValueError, "next_sibling"),
        ("verify_tree", VERIFY, {"max_depth": -1}, ValueError, "max_depth: .* at least 0"),
        ("verify_tree", VERIFY, {"num_nodes": i32([1])}, ValueError, r"num_nodes: .*\(2\)"),
        (
            "sample_and_verify",
            SAMPLE | LINKS,
            {"draft_tokens": ZERO[:, :2]},
            ValueError,
            "draft_tokens",
        ),
        ("verify_tree_coins", COINS, {"target_probs": ZERO}, TypeError, "target_probs: .* float32"),
        (
            "verify_tree_coins",
            COINS,
            {"target_probs": torch.zeros(2, 3)},
            ValueError,
            r"target_probs: .*\[B, N, V\]",
        ),
        (
            "verify_tree_coins",
            COINS,
            {"target_probs": torch.zeros(2, 3, 0)},
            ValueError,
            "target_probs: expected V of at least 1",
        ),
        ("verify_tree_coins", COINS, {"coins": torch.zeros(2)}, ValueError, r"coins: .*\[B, N\]"),
        (
            "verify_tree_coins",
            COINS,
            {"coins": torch.zeros(2, 3).half()},
            TypeError,
            "coins: expected dtype float32 or float64, got float16",
        ),
        (
            "verify_tree_coins",
            COINS,
            {"final_coins": torch.zeros(2, 3)},
            ValueError,
            r"final_coins: .*\[B\]",
        ),
        ("verify_tree_coins", COINS, {"final_coins": 0.5}, TypeError, "final_coins: .* got float"),
        ("verify_tree_coins", COINS, {"first_child": ZERO}, TypeError, "first_child: .*int32"),
        ("verify_tree_coins", COINS, {"max_depth": -1}, ValueError, "max_depth: .* at least 0"),
        ("verify_tree_coins", COINS, {"num_nodes": i32([1])}, ValueError, r"num_nodes: .*\(2\)"),
    ],
)
def test_wrong_arguments_are_named(function, base, change, error, message):
    with pytest.raises(error, match=message):
        getattr(e2, function)(**(base | change))


@pytest.mark.parametrize(
    ("function", "base", "change", "message"),
    [
        (
            "sample_tokens",
            SAMPLE,
            {"temperature": torch.tensor([-1.0, 1.0])},
            r"temperature\[0\]: .* got -1",
        ),
        (
            "sample_tokens",
            SAMPLE,
            {"temperature": torch.tensor([NAN, 1.0])},
            r"temperature\[0\]: .* got nan",
        ),
        (
            "sample_tokens",
            SAMPLE,
            {"top_p": torch.tensor([1.5, 1.0])},
            r"top_p\[0\]: expected a value from 0 to 1",
        ),
        ("sample_tokens", SAMPLE, {"min_p": torch.tensor([-0.1, 0.0])}, r"min_p\[0\]"),
        ("sample_tokens", SAMPLE, {"top_k": i32([-2, 0])}, r"top_k\[0\]"),
        (
            "sample_tokens",
            SAMPLE,
            {"logits": torch.full((2, 3, 4), NAN)},
            r"logits\[0, 0\]: .*none",
        ),
        *(
            (function, base, change, message)
            for function, base in (
                ("verify_tree", VERIFY),
                ("sample_and_verify", SAMPLE | LINKS),
                ("verify_tree_coins", COINS),
            )
            for change, message in (
                ({"first_child": i32([[3, -1, -1]] * 2)}, r"first_child\[0, 0\]: .* to 2, got 3"),
                ({"first_child": i32([[-2, -1, -1]] * 2)}, r"first_child\[0, 0\]: .* got -2"),
                ({"next_sibling": i32([[-1, 3, -1]] * 2)}, r"next_sibling\[0, 1\]: .* got 3"),
                ({"next_sibling": i32([[-1, 2, 1]] * 2)}, "linked once, got slot 1"),
                ({"first_child": i32([[0, -1, -1]] * 2)}, "got slot 0 again"),
                ({"first_child": i32([[1, 2, -1]] * 2)}, "got slot 2 again"),
                (
                    {"first_child": i32([[-1, 2, 1]] * 2), "next_sibling": i32([[-1] * 3] * 2)},
                    r"first_child\[0, 1\]: expected -1 at a slot that the root does not reach",
                ),
                (
                    {"first_child": i32([[-1, -1, -1]] * 2)},
                    r"next_sibling\[0, 1\]: expected -1 at a slot",
                ),
                ({"draft_tokens": ZERO + 1}, "siblings to differ, got token 1 twice"),
                ({"num_nodes": i32([4, 3])}, r"num_nodes\[0\]: .* from 0 to 3, got 4"),
                ({"num_nodes": i32([3, 2])}, r"next_sibling\[1, 1\]: .* to 1, got 2"),
            )
        ),
        *(
            (function, base, {"draft_tokens": torch.tensor([[0, 1, token]] * 2)}, message)
            for function, base in (
                ("sample_and_verify", SAMPLE | {"logits": torch.zeros(2, 3, 4)} | LINKS),
                ("verify_tree_coins", COINS),
            )
            for token, message in (
                (4, r"draft_tokens\[0, 2\]: expected an id of the target, 0 to 3, got 4"),
                (-1, r"draft_tokens\[0, 2\]: .* got -1"),
            )
        ),
        *(
            ("verify_tree_coins", COINS, change, message)
            for change, message in (
                ({"coins": torch.tensor([[0, 0, 1.0]] * 2)}, r"coins\[0, 2\]: .*\[0, 1\), got 1"),
                ({"coins": torch.tensor([[0, NAN, 0]] * 2)}, r"coins\[0, 1\]: .* got nan"),
                ({"coins": torch.tensor([[0, 0, -0.1]] * 2)}, r"coins\[0, 2\]: .* got -0.1"),
                ({"final_coins": torch.tensor([0, 1.0])}, r"final_coins\[1\]: .* got 1"),
                (
                    {"target_probs": torch.tensor([0.5, -0.5, 0.5, 0.5]).expand(2, 3, 4)},
                    r"target_probs\[0, 0, 1\]: expected a probability, got -0.5",
                ),
                (
                    {"target_probs": torch.full((2, 3, 4), NAN)},
                    r"target_probs\[0, 0, 0\]: expected a probability, got nan",
                ),
                (
                    {"target_probs": torch.zeros(2, 3, 4)},
                    r"target_probs\[0, 0\]: expected a row that sums to 1, got 0",
                ),
                (
                    {"target_probs": torch.full((2, 3, 4), 0.24)},
                    r"target_probs\[0, 0\]: expected a row that sums to 1, got 0.9",
                ),
            )
        ),
    ],
)
def test_validation_names_the_bad_value(function, base, change, message):
    getattr(e2, function)(**base, validate=True)
    getattr(e2, function)(**(base | change))
    with pytest.raises(ValueError, match=message):
        getattr(e2, function)(**(base | change), validate=True)


def test_logits_that_require_grad_are_refused():
    logits = torch.zeros(2, 3, 4, requires_grad=True)
    with pytest.raises(ValueError, match="logits: .*does not require grad"):
        e2.sample_tokens(**(SAMPLE | {"logits": logits}))
    with pytest.raises(ValueError, match="logits: .*does not require grad"):
        e2.sample_and_verify(**(SAMPLE | LINKS | {"logits": logits}))
    with pytest.raises(ValueError, match="target_probs: .*does not require grad"):
        e2.verify_tree_coins(**(COINS | {"target_probs": logits}))


@pytest.mark.parametrize("function", ["verify_tree", "sample_and_verify", "verify_tree_coins"])
def test_validation_by_environment_reaches_the_verifiers(function, monkeypatch):
    base = {
        "verify_tree": VERIFY,
        "sample_and_verify": SAMPLE | LINKS,
        "verify_tree_coins": COINS,
    }[function]
    monkeypatch.setattr("eagle2_kernels._checks.VALIDATE", True)
    getattr(e2, function)(**base)
    with pytest.raises(ValueError, match="siblings to differ"):
        getattr(e2, function)(**(base | {"draft_tokens": ZERO + 1}))


@pytest.mark.parametrize("function", ["sample_and_verify", "verify_tree_coins"])
def test_validation_leaves_padding_alone(function):
    """Slots from num_nodes on may hold anything."""
    if function == "sample_and_verify":
        base = SAMPLE | LINKS | {"logits": torch.zeros(2, 3, 4)}
        base["logits"][:, 1:] = NEG_INF
    else:
        base = COINS | {"target_probs": torch.full((2, 3, 4), 0.25)}
        base["target_probs"][:, 1:] = NAN
        base["coins"] = torch.tensor([[0.5, NAN, 2.0]] * 2)
        base["final_coins"] = torch.tensor([0.5, NAN])
    base |= {
        "draft_tokens": torch.tensor([[0, 99, 99]] * 2),
        "first_child": i32([[-1, 7, 0]] * 2),
        "next_sibling": i32([[-1, 1, 1]] * 2),
    }
    getattr(e2, function)(**base, num_nodes=i32([1, 0]), validate=True)
    with pytest.raises(ValueError):
        getattr(e2, function)(**base, num_nodes=i32([2, 0]), validate=True)
