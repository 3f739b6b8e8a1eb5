"""What verification promises, proven: every small tree, every interval of the coins, many draws.

Laws are exact (integers and fractions) where enumeration reaches, chi-square beyond it.
"""

import itertools
import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from growth import all_trees, i32
from laws import chi_square

import eagle2_kernels as e2
from eagle2_kernels import reference

NEG_INF, NAN = float("-inf"), float("nan")
ENGINE = json.loads((Path(__file__).parent / "data" / "engine_cases.json").read_text())
ALMOST_ONE = 1 - 2.0**-24


def links(parents):
    """first_child and next_sibling [T, n] of parents [T, n]."""
    parents = i32(parents)
    b, n = parents.shape
    _, _, child, sibling, _ = e2.flatten_tree(parents, i32([n] * b), i32([0] * b))
    return child, sibling


def depths_of(parents):
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


# verify_tree: all trees, all targets


def assignments(parents, ids):
    """Every way to give the slots after the root tokens of ``ids`` with distinct siblings."""
    for tokens in itertools.product(ids, repeat=len(parents) - 1):
        if len({*zip(parents[1:], tokens, strict=True)}) == len(tokens):
            yield (0, *tokens)


def permuted(parents, start):
    """Siblings in turn get the ids 0, 1, 2 in an order that changes from node to node, then 3..."""
    orders = list(itertools.permutations(range(3)))
    children, tokens = [0] * len(parents), [0]
    for parent in parents[1:]:
        rank = children[parent]
        tokens.append(orders[(start + parent) % 6][rank] if rank < 3 else rank)
        children[parent] += 1
    return tuple(tokens)


def visited_slots(parents, draft, target, max_depth):
    """The walk without walking: a slot is visited when its path is the target's own choice.

    [T, n] trees and tokens, [A, n] targets; gives what verify_tree returns, [T * A, ...].
    """
    trees, n = parents.shape
    every = np.arange(len(target))
    visited = np.zeros((trees, len(target), n), bool)
    depth = np.zeros((trees, n), int)
    visited[..., 0] = True
    for slot in range(1, n):
        parent = parents[:, slot]
        depth[:, slot] = depth[np.arange(trees), parent] + 1
        chosen = target[:, parent].T == draft[:, slot, None]
        visited[..., slot] = visited[np.arange(trees), :, parent] & chosen
    visited &= (depth <= max_depth)[:, None]
    length = np.where(visited, depth[:, None], 0).max(-1)
    index = np.full((trees, len(target), max_depth + 1), -1)
    for slot in range(n):
        t, a = np.nonzero(visited[..., slot])
        index[t, a, depth[t, slot]] = slot
    last = np.take_along_axis(index, length[..., None], -1)[..., 0]
    bonus = target[every, last]
    return index.reshape(-1, max_depth + 1), length.reshape(-1), bonus.reshape(-1)


@pytest.mark.parametrize("n", range(1, 8))
def test_every_tree_and_every_target_token(n):
    """All parent arrays; all target tokens over 3 ids; all draft tokens too up to 5 nodes."""
    target = np.array(list(itertools.product(range(3), repeat=n)))
    cases = [
        (parents, tokens)
        for i, parents in enumerate(all_trees(n))
        for tokens in (assignments(parents, range(3)) if n <= 5 else [permuted(parents, i)])
    ]
    for first in range(0, len(cases), 240):
        part = cases[first : first + 240]
        parents, draft = (np.array(c) for c in zip(*part, strict=True))

        def rows(t):
            return torch.as_tensor(t)[:, None].expand(-1, len(target), -1).reshape(-1, n)

        args = (
            torch.from_numpy(target).repeat(len(part), 1),
            rows(draft),
            *(rows(t) for t in links(parents)),
        )
        for max_depth in {n, 1}:
            got = e2.verify_tree(*args, max_depth)
            for a, b in zip(got, visited_slots(parents, draft, target, max_depth), strict=True):
                assert np.array_equal(a.numpy(), b)


# both verifiers: the exact law of what is emitted

EIGHTHS, VOCAB = 8, 4


def random_case(parents, generator):
    """Distinct siblings, and a row per slot of probabilities in eighths, zeros among them."""
    n = len(parents)
    tokens = np.zeros(n, int)
    for node in range(n):
        children = [s for s in range(1, n) if parents[s] == node]
        tokens[children] = generator.permutation(VOCAB)[: len(children)]
    rows = [np.bincount(generator.integers(0, VOCAB, EIGHTHS), minlength=VOCAB) for _ in range(n)]
    return tokens, np.stack(rows)


def exact_law(parents, tokens, rows, max_depth):
    """{(last slot, bonus): probability}: the product of the target's probabilities on the way."""
    depths = depths_of(parents)
    path = [Fraction(1)]
    for slot in range(1, len(parents)):
        p = Fraction(int(rows[parents[slot], tokens[slot]]), EIGHTHS)
        path.append(path[parents[slot]] * p)
    law = {}
    for slot, depth in enumerate(depths):
        if depth > max_depth:
            continue
        children = {tokens[c] for c in range(1, len(parents)) if parents[c] == slot}
        for token in range(VOCAB):
            if depth == max_depth or token not in children:
                law[slot, token] = path[slot] * Fraction(int(rows[slot, token]), EIGHTHS)
    return {outcome: p for outcome, p in law.items() if p}, path


def tally(outcomes, weights):
    """{(last slot, bonus): the sum of its weights} of what a verifier returned."""
    index, length, bonus = outcomes
    last = index.gather(1, length.long()[:, None])[:, 0]
    law = {}
    keys = torch.stack([last.long(), bonus], 1).tolist()
    for (slot, token), weight in zip(keys, weights, strict=True):
        law[slot, token] = law.get((slot, token), 0) + weight
    return {outcome: p for outcome, p in law.items() if p}


def law_of_target_tokens(parents, tokens, rows, max_depth):
    """verify_tree over every token the target may draw at every node, each with its probability."""
    n = len(parents)
    targets = list(itertools.product(range(VOCAB), repeat=n))
    weights = np.ones(len(targets), int)
    for slot in range(n):
        weights *= rows[slot, [t[slot] for t in targets]]
    child, sibling = (t.expand(len(targets), -1) for t in links([parents]))
    draft = torch.tensor(tokens).expand(len(targets), -1)
    got = e2.verify_tree(torch.tensor(targets), draft, child, sibling, max_depth)
    counted = tally(got, weights.tolist())
    return {outcome: Fraction(w, EIGHTHS**n) for outcome, w in counted.items()}


def final_intervals(parents, tokens, rows):
    """Between neighbours of these numbers the final coin's draw is the same at any last node."""
    marks = {Fraction(0), Fraction(1)}
    for slot in range(len(parents)):
        children = [tokens[c] for c in range(1, len(parents)) if parents[c] == slot]
        for removed in ([], children):
            mass = rows[slot].copy()
            mass[removed] = 0
            if mass.sum():
                marks |= {Fraction(int(c), int(mass.sum())) for c in mass.cumsum()}
    return list(itertools.pairwise(sorted(marks)))


def law_of_coins(parents, tokens, rows, max_depth):
    """verify_tree_coins over one coin of every interval of every node, weighted by its length.

    Node coins take the lower end k / 8 of each interval, which belongs to it: the test is strict.
    """
    n = len(parents)
    inner = sorted(set(parents[1:]))
    finals = final_intervals(parents, tokens, rows)
    grid = list(itertools.product(range(EIGHTHS), repeat=len(inner)))
    count = len(grid) * len(finals)
    coins = torch.full((len(grid), n), NAN)  # a leaf's coin must not matter
    coins[:, inner] = torch.tensor(grid, dtype=torch.float32) / EIGHTHS
    middles = torch.tensor([float(a + b) / 2 for a, b in finals], dtype=torch.float64)
    child, sibling = (t.expand(count, -1) for t in links([parents]))
    got = e2.verify_tree_coins(
        (torch.from_numpy(rows) / EIGHTHS).expand(count, -1, -1),
        torch.tensor(tokens).expand(count, -1),
        child,
        sibling,
        coins.repeat_interleave(len(finals), 0),
        middles.repeat(len(grid)),
        max_depth,
    )
    # Integers over a common denominator are summed faster than fractions.
    scale = math.lcm(*(m.denominator for interval in finals for m in interval))
    lengths = [int((b - a) * scale) for a, b in finals]
    counted = tally(got, lengths * len(grid))
    return {outcome: Fraction(w, scale * len(grid)) for outcome, w in counted.items()}


VERIFIERS = {"target_tokens": law_of_target_tokens, "coins": law_of_coins}


@pytest.mark.parametrize("n", range(1, 6))
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_the_emitted_law_is_the_product_of_target_probabilities(verifier, n):
    generator = np.random.default_rng(n)
    for parents in all_trees(n):
        tokens, rows = random_case(parents, generator)
        for max_depth in {0, 1, max(depths_of(parents))}:
            want, _ = exact_law(parents, tokens, rows, max_depth)
            assert sum(want.values()) == 1
            assert VERIFIERS[verifier](parents, tokens, rows, max_depth) == want


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_accepted_drafts_are_the_mass_of_the_paths(verifier):
    """E[accepted] over every coin = the sum of path probabilities = expected_accept_length."""
    generator = np.random.default_rng(9)
    for parents in all_trees(5)[::3]:
        tokens, rows = random_case(parents, generator)
        depths = depths_of(parents)
        law = VERIFIERS[verifier](parents, tokens, rows, max(depths))
        mean = sum(p * depths[slot] for (slot, _), p in law.items())
        _, path = exact_law(parents, tokens, rows, max(depths))
        assert mean == sum(path[1:])
        probs = torch.from_numpy(rows)[None] / EIGHTHS
        assert float(e2.expected_accept_length(probs, draft_tree([parents], [tokens]))) == mean


def draft_tree(parents, tokens, counts=None):
    parents = i32(parents)
    b, n = parents.shape
    counts = i32([n] * b if counts is None else counts)
    prefix = i32([3] * b)
    depths, positions, child, sibling, mask = e2.flatten_tree(parents, counts, prefix)
    used = torch.arange(n) < counts[:, None]
    return e2.DraftTree(
        torch.where(used, torch.as_tensor(np.array(tokens)), 0),
        torch.where(used, parents, -1).int(),
        depths,
        positions,
        torch.where(used, 0.0, NEG_INF),
        child,
        sibling,
        mask,
        counts,
    )


# expected_accept_length beyond the enumeration


def path_mass(probs, tree, r):
    total = 0.0
    for paths in [tree.paths(leaves_only=False)[r]]:
        for path in paths:
            node, p = 0, 1.0
            for slot, token in zip(path.slots, path.tokens, strict=True):
                p *= float(probs[r, node, token]) if token < probs.shape[2] else 0.0
                node = slot
            total += p
    return total


@pytest.mark.parametrize("n", [1, 2, 9, 33, 64, 100])
def test_expected_length_of_random_trees(n):
    generator = np.random.default_rng(n)
    parents = [[-1, *(int(generator.integers(max(0, s - 4), s)) for s in range(1, n))]] * 3
    # Distinct everywhere, the last few outside the vocabulary.
    tokens = np.arange(3 * n).reshape(3, n) % n
    tree = draft_tree(parents, tokens, [n, n // 2, 0])
    probs = torch.rand(3, n, max(n - 3, 2), generator=torch.Generator().manual_seed(n)) * 0.9
    for dtype in (torch.float32, torch.float64, torch.float16):
        row = probs.to(dtype)
        got = e2.expected_accept_length(row, tree)
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        for r in range(3):
            assert float(got[r]) == pytest.approx(path_mass(row, tree, r), rel=1e-5)
    assert float(got[2]) == 0


def test_expected_length_ignores_what_is_not_a_probability():
    probs = torch.tensor([[[NAN, -1.0, 0.5, 0.5]] * 4])
    tree = draft_tree([[-1, 0, 0, 0]], [[3, 0, 1, 2]])
    assert e2.expected_accept_length(probs, tree).tolist() == [0.5]
    padding = draft_tree([[-1, 0, 0, 0]], [[3, 0, 1, 2]], [3])
    assert e2.expected_accept_length(probs, padding).tolist() == [0]


def test_expected_length_of_slots_that_hang_in_the_air():
    """A cycle, or a branch under an orphan, is on no path from the root."""
    probs = torch.full((1, 6, 2), 0.5)
    tree = draft_tree([[-1] * 6], [[0, 0, 1, 0, 1, 0]])._replace(
        parents=i32([[-1, 0, -1, 2, 5, 4]])
    )
    assert e2.expected_accept_length(probs, tree).tolist() == [0.5]


def test_expected_length_has_the_gradient_of_its_formula():
    probs = torch.full((1, 3, 2), 0.25, requires_grad=True)
    tree = draft_tree([[-1, 0, 1]], [[0, 0, 1]])
    e2.expected_accept_length(probs, tree).sum().backward()
    assert probs.grad.tolist() == [[[1.25, 0], [0, 0.25], [0, 0]]]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target_probs": torch.zeros(1, 3, 2).long()}, TypeError, "target_probs: expected dtype"),
        ({"target_probs": torch.zeros(3, 2)}, ValueError, r"target_probs: .*\[B, N, V\]"),
        ({"target_probs": torch.zeros(1, 3, 0)}, ValueError, "V of at least 1"),
        ({"target_probs": torch.zeros(1, 4, 2)}, ValueError, "tree.draft_tokens: expected shape"),
        ({"tree": None}, TypeError, "tree: expected a DraftTree, got NoneType"),
        (
            {"target_probs": torch.zeros(1, 3, 2, device="meta")},
            ValueError,
            "tree.draft_tokens: expected a tensor on meta, got one on cpu",
        ),
        ({"target_probs": torch.full((1, 3, 2), 0.4), "validate": True}, ValueError, "sums to 1"),
        (
            {"tree": draft_tree([[-1, 0, 0]], [[0, 1, 1]]), "validate": True},
            ValueError,
            "repeat a token",
        ),
    ],
    ids=["dtype", "rank", "vocabulary", "slots", "no_tree", "device", "rows", "siblings"],
)
def test_expected_length_names_wrong_arguments(change, error, message):
    right = {
        "target_probs": torch.full((1, 3, 2), 0.5),
        "tree": draft_tree([[-1, 0, 0]], [[0, 1, 0]]),
    }
    e2.expected_accept_length(**right, validate=True)
    with pytest.raises(error, match=message):
        e2.expected_accept_length(**(right | change))


# edges of the coins


def one_node(row, children, coin, final, dtype=torch.float32, max_depth=1):
    """verify_tree_coins of a root with these children: (accepted token or None, bonus)."""
    n = len(children) + 1
    row = torch.as_tensor(row, dtype=dtype)
    child = i32([[1 if children else -1, *[-1] * (n - 1)]])
    sibling = i32([[-1, *range(2, n), -1][:n]])
    index, length, bonus = e2.verify_tree_coins(
        row.expand(1, n, -1),
        torch.tensor([[0, *children]]),
        child,
        sibling,
        torch.full((1, n), coin),
        torch.tensor([final]),
        max_depth,
    )
    assert index[0, 0] == 0 and 0 <= int(bonus) < row.shape[-1]
    return (children[int(index[0, 1]) - 1] if int(length) else None), int(bonus)


EVERY_COIN = [0.0, 2.0**-149, 0.25, 0.5, ALMOST_ONE, 1.0, 2.0, -1.0, NAN, math.inf]


@pytest.mark.parametrize("coin", EVERY_COIN)
@pytest.mark.parametrize("drafted", [True, False], ids=["drafted", "not_drafted"])
def test_one_hot_rows_emit_their_token_whatever_the_coins(coin, drafted):
    for hot in range(3):
        row = [0.0] * 3
        row[hot] = 1.0
        children = [t for t in (2, 0, 1) if drafted or t != hot]
        for final in EVERY_COIN:
            accepted, bonus = one_node(row, children, coin, final)
            assert accepted == (hot if drafted else None) and bonus == hot


@pytest.mark.parametrize("final", EVERY_COIN)
@pytest.mark.parametrize("coin", EVERY_COIN)
def test_a_token_of_probability_zero_is_never_emitted(coin, final):
    row = [0.0, 0.25, 0.0, 0.5, 0.25, 0.0]
    for children in ([], [0], [0, 1, 2], [5, 3], [1, 3, 4, 0], [5, 2, 0]):
        accepted, bonus = one_node(row, children, coin, final)
        assert row[bonus] > 0
        assert accepted is None or row[accepted] > 0


@pytest.mark.parametrize("case", ENGINE["coin_edges"]["cases"], ids=lambda case: case["name"])
def test_coin_edges_of_other_engines(case):
    if "residual" in case:
        _, bonus = one_node(case["residual"], [], 0.5, case["coin"])
        assert bonus in case["must_be_in"]
    else:
        accepted, bonus = one_node(case["target"], case["children"], case["coin"], case["coin"])
        assert accepted is not None and case["target"][accepted] > 0 < case["target"][bonus]
        assert accepted not in case.get("must_reject", [])
        assert accepted == case.get("must_accept", accepted)


def test_the_comparison_is_strict():
    row = [0.25, 0.25, 0.5]
    assert one_node(row, [0, 1], 0.25, 0.0) == (1, 0)
    assert one_node(row, [0, 1], 0.5, 0.0) == (None, 2)
    # The rest is 1/4, 1/2, 1/4 (of a whole row: 1/2 child, 1/8, 1/4, 1/8).
    row = [0.5, 0.125, 0.25, 0.125]
    assert [one_node(row, [0], 0.5, f)[1] for f in (0.0, 0.25, 0.7, 0.75)] == [1, 2, 2, 3]


def test_the_rest_is_renormalised():
    """Without it a final coin above the rest's mass would find no token, or always the last."""
    row = [0.9, 0.05, 0.05, 0.0]
    assert one_node(row, [0], 0.95, 0.3) == (None, 1)
    assert one_node(row, [0], 0.95, 0.7) == (None, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("coin", [ALMOST_ONE, 1.0, NAN])
def test_children_that_leave_nothing_accept_the_last_possible_one(dtype, coin):
    """Rows that rounding keeps below 1: all their mass is drafted, and the coin lies above it."""
    row = torch.tensor([0.0, *[0.0999] * 10, 0.0]).to(dtype)
    children = [0, *range(1, 11), 11]
    for final in EVERY_COIN:
        accepted, bonus = one_node(row, children, coin, final, dtype)
        assert accepted == 10 and 1 <= bonus <= 10


def test_float16_softmax_of_a_peaked_row():
    row = torch.softmax(torch.tensor([30.0, 1.0, 0.0, -40.0]).half(), 0)
    assert row.tolist() == [1, 0, 0, 0]
    for coin, final in itertools.product(EVERY_COIN, EVERY_COIN):
        assert one_node(row, [0], coin, final, torch.float16) == (0, 0)
        assert one_node(row, [1, 2], coin, final, torch.float16) == (None, 0)


@pytest.mark.parametrize("row", [[NAN] * 4, [0.0] * 4, [-1.0] * 4, [NAN, -1.0, 0.0, -0.0]], ids=str)
def test_rows_without_probability_emit_the_lowest_id(row):
    for coin, final in itertools.product(EVERY_COIN, EVERY_COIN):
        assert one_node(row, [2, 0], coin, final) == (None, 0)


def test_nan_counts_as_nothing_beside_probabilities():
    for coin in (0.0, 0.7, ALMOST_ONE):
        accepted, bonus = one_node([NAN, 0.25, 0.75, NAN], [0, 3], coin, coin)
        assert accepted is None and bonus == (1 if coin == 0 else 2)


def test_an_unnormalised_row_still_emits_what_it_has():
    for row in ([0.0, 1e-30, 3e38, 0.0], [0.0, math.inf, math.inf, 0.0]):
        for dtype, final in itertools.product((torch.float32, torch.float64), EVERY_COIN):
            assert one_node(row, [], 0.5, final, dtype)[1] in (1, 2)


def test_a_repeated_sibling_counts_once():
    """The law holds whatever the siblings are: the second copy of a token adds nothing."""
    assert one_node([0.25, 0.25, 0.5], [0, 0, 1], 0.3, 0.0) == (1, 0)
    assert one_node([0.25, 0.25, 0.5], [0, 0, 0], 0.3, 0.0) == (None, 1)


def test_an_early_end_draws_from_the_whole_row():
    """At max_depth the children have not been looked at: their tokens may be drawn."""
    row = [0.5, 0.25, 0.25]
    assert one_node(row, [0], 0.75, 0.0, max_depth=1) == (None, 1)
    child, sibling = i32([[1, -1]]), i32([[-1, -1]])
    _, length, bonus = e2.verify_tree_coins(
        torch.tensor(row).expand(1, 2, -1),
        torch.zeros(1, 2).long(),
        child,
        sibling,
        torch.full((1, 2), 0.75),
        torch.zeros(1),
        0,
    )
    assert length.tolist() == [0] and bonus.tolist() == [0]


@pytest.mark.parametrize("vocab", [1023, 1024, 1025, 3000])
def test_the_final_draw_across_chunks(vocab):
    """One of the chunks a row is summed in may be empty, or hold the one token there is."""
    row = torch.zeros(1, 1, vocab)
    spots = sorted({0, vocab // 2, vocab - 1})
    row[..., spots] = 1 / len(spots)
    for i, spot in enumerate(spots):
        for final in (i / len(spots) + 0.01, (i + 1) / len(spots) - 0.01):
            assert one_node(row[0, 0], [], 0.0, final) == (None, spot)
    row[...] = 0
    row[..., -1] = 0.125
    assert one_node(row[0, 0], [], 0.0, ALMOST_ONE) == (None, vocab - 1)


# edges of the filters: every one of these leaves the greedy token

SHARP = {
    "top_p_0": {"temperature": 1.0, "top_p": 0.0},
    "top_k_1": {"temperature": 1.0, "top_k": 1},
    "min_p_1": {"temperature": 1.0, "min_p": 1.0},
    "temperature_1e-6": {"temperature": 1e-6},
    "temperature_1e-30": {"temperature": 1e-30},
}


def agreeing_tree(generator, vocab=12, n=20, batch=8):
    """Random trees, and logits whose argmax is often a child."""
    parents = [
        [-1, *(int(generator.integers(max(0, s - 5), s)) for s in range(1, n))]
        for _ in range(batch)
    ]
    tokens = np.zeros((batch, n), int)
    logits = torch.from_numpy(generator.normal(size=(batch, n, vocab))).float()
    for r, row in enumerate(parents):
        for node in range(n):
            children = [s for s in range(1, n) if row[s] == node]
            tokens[r, children] = generator.permutation(vocab)[: len(children)]
            if children:
                logits[r, node, tokens[r, generator.choice(children)]] += 2
    return draft_tree(parents, tokens), logits


@pytest.mark.parametrize("name", SHARP)
def test_sharp_filters_are_greedy_whatever_the_seed(name):
    tree, logits = agreeing_tree(np.random.default_rng(1))
    structure = (tree.draft_tokens, tree.first_child, tree.next_sibling, 6)
    want = e2.sample_and_verify(logits, tree.position_ids, 0, *structure)
    assert (want[2] > 0).any()
    for seed in (0, 1, 2**40):
        got = e2.sample_and_verify(logits, tree.position_ids, seed, *structure, **SHARP[name])
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("temperature", [1e-6, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_sharp_probabilities_are_greedy_whatever_the_coins(dtype, temperature):
    tree, logits = agreeing_tree(np.random.default_rng(2))
    structure = (tree.draft_tokens, tree.first_child, tree.next_sibling)
    want = e2.sample_and_verify(logits, tree.position_ids, 0, *structure, 6)[1:]
    probs = torch.softmax(logits.double() / temperature, -1).to(dtype)
    b, n = tree.draft_tokens.shape
    for coin, final in itertools.product(EVERY_COIN, repeat=2):
        coins, finals = torch.full((b, n), coin), torch.full((b,), final)
        got = e2.verify_tree_coins(probs, *structure, coins, finals, 6)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("filters", [{}, *SHARP.values()], ids=["greedy", *SHARP])
def test_logits_of_minus_infinity_emit_one_token_in_range(filters):
    tree, logits = agreeing_tree(np.random.default_rng(3))
    structure = (tree.draft_tokens, tree.first_child, tree.next_sibling, 6)
    emitted, _, length, bonus = e2.sample_and_verify(
        torch.full_like(logits, NEG_INF), tree.position_ids, 5, *structure, **filters
    )
    assert ((emitted[:, 0] == 0) & (bonus == 0)).all()
    assert (emitted >= 0).sum(1).tolist() == (length + 1).tolist()


# a filter's edge: kernel and oracle keep the same tokens to the last bit


def loud_token(vocab, margin):
    """(seed, position, token): its noise there is above every other's by ``margin``."""
    for position in range(10_000):
        noise = reference.gumbel_noise(3, position, vocab)
        top = noise.topk(2)
        if float(top.values[0] - top.values[1]) > margin:
            return 3, position, int(top.indices[0])
    raise AssertionError("no such position")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("top_k", [0, 250], ids=["whole_row", "after_top_k"])
@pytest.mark.parametrize("vocab", [2, 300])
def test_top_p_at_the_last_bit(vocab, top_k, dtype):
    """A token too loud to lose is emitted if and only if it is kept; top_p is put on its edge."""
    seed, position, loud = loud_token(vocab, 2.2)
    generator = torch.Generator().manual_seed(vocab)
    count, kept = 60, 0
    logits = -2 * torch.rand(count, 1, vocab, generator=generator, dtype=torch.float64)
    logits[:, :, loud] = -1 - 0.2 * torch.rand(count, 1, generator=generator, dtype=torch.float64)
    logits = logits.to(dtype)
    edge = torch.empty(count)
    for r, row in enumerate(logits[:, 0]):
        ranked, order = (row.double() - row.max()).exp().sort(descending=True)
        place = int((order == loud).nonzero())
        edge[r] = ranked[:place].sum() / ranked[: top_k or vocab].sum()
    for top_p in (edge, edge.nextafter(torch.ones(1)), edge.nextafter(torch.zeros(1))):
        got = e2.sample_tokens(
            logits,
            torch.full((count, 1), position),
            torch.full((count,), seed),
            temperature=1.0,
            top_k=top_k,
            top_p=top_p,
        )
        for r, row in enumerate(logits[:, 0]):
            order, _, keep = reference.kept_tokens(row, 1.0, top_k, float(top_p[r]), 0.0)
            want = bool(keep[order == loud])
            assert (int(got[r]) == loud) == want
            kept += want
    assert 0.2 < kept / (3 * count) < 0.8, "one side of the edge is not met"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("after_top_k", [False, True], ids=["whole_row", "after_top_k"])
def test_top_p_sums_small_masses_exactly(after_top_k, dtype):
    """The best token has exactly half of the counted mass: at top_p 0.5 it stays alone.

    The other half is many small masses, whose unrounded sum lies a little beside it.
    """
    vocab = 40
    seed, position, loud = loud_token(vocab, 2.2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        values = -7 - 12 * torch.rand(vocab, generator=generator, dtype=torch.float64)
        best, filler, *fine = [t for t in range(vocab) if t != loud][:5]
        values[best], values[loud], values[filler] = 0, -0.5, -100  # top_k drops the filler
        values = values.to(dtype)
        small = [t for t in range(vocab) if t not in (best, *fine)]
        left = 1 - float(counted_mass(values[small]).sum())
        for token in fine:
            values[token] = math.log(left) - 2**-20 if left > 0 else -100
            left -= float(counted_mass(values[token]))
        others = [t for t in range(vocab) if t != best]
        assert float(counted_mass(values[others]).sum()) == 1
        args = (values[None, None], torch.tensor([[position]]), torch.tensor([seed]))
        filters = {"temperature": 1.0, "top_k": vocab - 1 if after_top_k else 0}
        assert int(e2.sample_tokens(*args, **filters, top_p=0.5)) == best
        assert int(e2.sample_tokens(*args, **filters, top_p=0.5 + 2**-24)) != best


def counted_mass(scaled):
    """e^x of scaled logits as top-p counts it: a multiple of 2**-33."""
    return torch.round(reference._exp(scaled).double() * 2**33) / 2**33


# chi-square: 200 000 draws against opposed draft and target logits

DRAWS, WIDTH, LEVELS, CHILDREN = 200_000, 16, 3, 6


def opposed_tree():
    """Children are the draft's best, which the target likes least; a row of logits per depth."""
    logits = torch.stack([torch.linspace(-1.0, 1.0, WIDTH).roll(5 * d) for d in range(LEVELS)])
    best_drafts = (-logits).topk(CHILDREN).indices
    parents, tokens, depths = [-1], [0], [0]
    for node in itertools.count():
        if depths[node] == LEVELS - 1:
            break
        for token in best_drafts[depths[node]].tolist():
            parents.append(node)
            tokens.append(token)
            depths.append(depths[node] + 1)
    return draft_tree([parents], [tokens]), logits


def draws_by_seed(tree, logits):
    rows = logits[tree.depths[0].long()].expand(DRAWS, -1, -1)
    links_ = tree.draft_tokens, tree.first_child, tree.next_sibling
    structure = (t.expand(DRAWS, -1) for t in links_)
    return e2.sample_and_verify(
        rows,
        tree.position_ids.expand(DRAWS, -1),
        torch.arange(DRAWS),
        *structure,
        LEVELS,
        temperature=1.0,
    )[0]


def draws_by_coins(tree, logits):
    rows = logits.softmax(-1)[tree.depths[0].long()].expand(DRAWS, -1, -1)
    links_ = tree.draft_tokens, tree.first_child, tree.next_sibling
    draft, child, sibling = (t.expand(DRAWS, -1) for t in links_)
    generator = torch.Generator().manual_seed(5)
    coins = torch.rand(DRAWS, rows.shape[1], generator=generator)
    final_coins = torch.rand(DRAWS, generator=generator)
    index, length, bonus = e2.verify_tree_coins(
        rows, draft, child, sibling, coins, final_coins, LEVELS
    )
    emitted = torch.full((DRAWS, LEVELS + 1), -1)
    path = draft.gather(1, index[:, 1:].clamp(min=0).long())
    emitted[:, :-1] = torch.where(index[:, 1:] >= 0, path, -1)
    return emitted.scatter(1, length.long()[:, None], bonus[:, None])


@pytest.mark.parametrize("draw", [draws_by_seed, draws_by_coins], ids=["seeds", "coins"])
def test_draws_follow_the_target_at_each_depth(draw):
    tree, logits = opposed_tree()
    emitted = draw(tree, logits)
    for depth in range(LEVELS):
        seen = emitted[:, depth]
        seen = seen[seen >= 0]
        assert len(seen) > 4000
        assert chi_square(seen, torch.softmax(logits[depth].double(), 0)) < 1
    # The second token does not depend on which child the first one was.
    second = emitted[emitted[:, 1] >= 0]
    for token in second[:, 0].unique().tolist():
        after = second[second[:, 0] == token][:, 1]
        assert chi_square(after, torch.softmax(logits[1].double(), 0)) < 1
