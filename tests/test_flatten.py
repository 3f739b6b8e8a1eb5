"""build_tree, build_tree_from_marginals, flatten_tree, retrieve_indices and the mask words."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import DRAFT_CASES, draft_candidates
from growth import i32, random_parents
from hypothesis import given, settings
from hypothesis import strategies as st

import eagle2_kernels as e2
from eagle2_kernels import DraftTree, reference
from eagle2_kernels.tree import check_tree

NEG_INF, NAN = float("-inf"), float("nan")
OPS = torch.ops.eagle2_kernels
ENGINE = json.loads((Path(__file__).parent / "data" / "engine_cases.json").read_text())
SIZES = [1, 2, 31, 32, 33, 63, 64, 65, 128]


def assert_equal(got, want):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if b is not None:
            assert a.dtype == b.dtype and torch.equal(a, b), i


def build(tokens, scores, parents, max_nodes, limits=None, prefix=0, **kwargs) -> DraftTree:
    """build_tree for one request from plain lists."""
    return e2.build_tree(
        torch.tensor([100]),
        i32([prefix]),
        torch.tensor([tokens], dtype=torch.int64),
        torch.tensor([scores], dtype=torch.float32),
        i32([parents]),
        max_nodes,
        None if limits is None else i32([limits]),
        **kwargs,
    )


def random_candidates(m: int, generator: torch.Generator, ties: bool = False):
    """Tokens, scores that never rise towards a child, parents; siblings are distinct."""
    parents = [-1] + [int(torch.randint(-1, c, (1,), generator=generator)) for c in range(1, m)]
    steps = torch.rand(m, generator=generator)
    if ties:
        steps = (steps * 3).floor() / 4
    scores = []
    for c in range(m):
        scores.append((0.0 if parents[c] < 0 else scores[parents[c]]) - float(steps[c]))
    return list(range(m)), scores, parents


# build_tree


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_random_candidates_give_a_valid_tree_and_the_oracles(n, ties):
    generator = torch.Generator().manual_seed(n)
    for m in (1, n // 2 + 1, n + 40):
        tree = build(*random_candidates(m, generator, ties), n, prefix=11)
        check_tree(tree, i32([11]))
        assert int(tree.num_nodes[0]) == min(n, m + 1)
        args = (tree.parents.new_tensor([11]), *random_args(m, generator, ties))
        got = e2.build_tree(torch.tensor([7]), *args, n)
        assert_equal(got[:9], reference.build_tree(torch.tensor([7]), *args, n))


@pytest.mark.parametrize("case", DRAFT_CASES, ids=lambda c: c.name)
def test_draft_trees_equal_the_oracles(case):
    args = (torch.tensor([7]), i32([11]), *draft_candidates(case), case.max_nodes)
    assert_equal(e2.build_tree(*args)[:9], reference.build_tree(*args))


def random_args(m, generator, ties):
    tokens, scores, parents = random_candidates(m, generator, ties)
    return torch.tensor([tokens]), torch.tensor([scores]), i32([parents])


score = st.sampled_from([0.0, -0.0, -0.5, -1.0, -2.0, -3.0, NAN, NEG_INF, float("inf"), 1e30])


@st.composite
def hostile_candidates(draw):
    m = draw(st.integers(1, 40))
    scores = draw(st.lists(score, min_size=m, max_size=m))
    parents = [draw(st.one_of(st.integers(-1, c), st.integers(-5, m + 5))) for c in range(m)]
    limits = draw(st.none() | st.tuples(st.integers(-1, 50), st.integers(-1, 8)))
    return scores, parents, draw(st.integers(1, 70)), limits


@settings(max_examples=300, deadline=None, derandomize=True)
@given(hostile_candidates())
def test_hostile_candidates_equal_the_oracle(case):
    scores, parents, n, limits = case
    tree = build(list(range(len(scores))), scores, parents, n, limits, prefix=5)
    want = reference.build_tree(
        torch.tensor([100]),
        i32([5]),
        torch.arange(len(scores))[None],
        torch.tensor([scores]),
        i32([parents]),
        n,
        None if limits is None else i32([limits]),
    )
    assert_equal(tree[:9], want)
    check_tree(tree, i32([5]))


def test_a_child_never_outlives_its_parent_on_a_tie():
    # Candidate 0 has no parent; 1 is a child of 2's sibling with the very same score.
    tree = build([10, 11, 12, 13], [-1.0, -1.0, -1.0, -1.0], [-1, 0, 1, 2], 3)
    assert tree.draft_tokens.tolist() == [[100, 10, 11]]
    assert tree.parents.tolist() == [[-1, 0, 1]]


def test_a_child_that_scores_above_its_parent_waits_for_it():
    tree = build([10, 11, 12], [-3.0, -1.0, -0.5], [-1, -1, 0], 3)
    assert tree.draft_tokens.tolist() == [[100, 10, 11]]
    assert tree.scores[0].tolist() == [0.0, -3.0, -1.0]


def test_slots_are_sorted_by_depth_then_candidate():
    tree = build([1, 2, 3, 4], [-0.1, -0.2, -0.3, -0.4], [-1, 0, -1, 0], 5)
    assert tree.draft_tokens.tolist() == [[100, 1, 3, 2, 4]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1]]
    assert tree.first_child.tolist() == [[1, 3, -1, -1, -1]]
    assert tree.next_sibling.tolist() == [[-1, 2, -1, 4, -1]]


def test_minus_infinity_and_nan_shrink_the_tree():
    tree = build([1, 2, 3, 4], [-0.1, NAN, NEG_INF, -0.4], [-1, -1, 0, 1], 5, prefix=3)
    assert tree.num_nodes.tolist() == [2]
    assert tree.draft_tokens.tolist() == [[100, 1, 0, 0, 0]]
    assert tree.position_ids.tolist() == [[3, 4, 3, 3, 3]]
    check_tree(tree, i32([3]))


def test_both_zeros_tie():
    tree = build([1, 2], [-0.0, 0.0], [-1, -1], 2)
    assert tree.draft_tokens.tolist() == [[100, 1]]


def test_parents_past_the_row_do_not_reach_the_next_request():
    parents = i32([[-1, 2, 5, 0], [-1, -1, -1, -1]])
    tree = e2.build_tree(
        torch.tensor([8, 9]),
        i32([0, 0]),
        torch.arange(8).view(2, 4),
        torch.tensor([[-1.0] * 4, [0.0] * 4]),
        parents,
        6,
    )
    assert tree.num_nodes.tolist() == [3, 5]
    assert tree.draft_tokens[0, :3].tolist() == [8, 0, 3]


@pytest.mark.parametrize(
    ("limits", "slots", "depth"),
    [
        ((9, 9), 7, 3),
        ((4, 9), 4, 2),
        ((9, 2), 5, 2),
        ((9, 0), 1, 0),
        ((1, 9), 1, 0),
        ((2, 1), 2, 1),
    ],
    ids=lambda x: str(x),
)
def test_limits_bound_slots_and_depth(limits, slots, depth):
    scores = [-0.1, -0.2, -0.11, -0.12, -0.13, -0.14]
    tree = build([1, 2, 3, 4, 5, 6], scores, [-1, -1, 0, 0, 2, 2], 9, limits)
    check_tree(tree, i32([0]))
    assert int(tree.num_nodes[0]) == slots
    assert int(tree.depths.max()) == depth


@pytest.mark.parametrize("slots", [0, -3])
def test_no_slots_make_a_request_inactive(slots):
    tree = build([1], [-0.1], [-1], 4, (slots, 5), prefix=6)
    assert tree.num_nodes.tolist() == [0]
    assert tree.draft_tokens.tolist() == [[0] * 4] and tree.parents.tolist() == [[-1] * 4]
    check_tree(tree, i32([6]))


def test_each_request_has_its_own_limits():
    generator = torch.Generator().manual_seed(1)
    rows = [random_args(60, generator, False) for _ in range(3)]
    tokens, scores, parents = (torch.cat(part) for part in zip(*rows, strict=True))
    limits = i32([[64, 64], [0, 3], [7, 2]])
    args = (torch.tensor([1, 2, 3]), i32([5, 6, 7]), tokens, scores, parents, 33, limits)
    tree = e2.build_tree(*args)
    assert_equal(tree[:9], reference.build_tree(*args))
    assert tree.num_nodes.tolist() == [33, 0, 7]


def test_no_candidates_leave_the_root():
    tree = build([], [], [], 4, prefix=2)
    assert tree.num_nodes.tolist() == [1]
    assert tree.draft_tokens.tolist() == [[100, 0, 0, 0]]


def test_a_chain_is_a_chain():
    n = 65
    tree = build(list(range(n)), [-0.01 * c for c in range(n)], list(range(-1, n - 1)), n)
    assert tree.draft_tokens[0].tolist() == [100, *range(n - 1)]
    assert tree.parents[0].tolist() == list(range(-1, n - 1))
    rows = e2.unpack_tree_mask(tree.tree_mask, n)[0]
    assert torch.equal(rows, torch.ones(n, n).tril().bool())


def test_a_depth_one_tree_is_a_star():
    tree = build(list(range(40)), [-0.01 * c for c in range(40)], [-1] * 40, 33)
    assert tree.depths[0].tolist() == [0] + [1] * 32
    assert tree.next_sibling[0].tolist() == [-1, *range(2, 33), -1]


def test_many_candidates_and_slots():
    generator = torch.Generator().manual_seed(2)
    args = random_args(20_000, generator, ties=True)
    got = e2.build_tree(torch.tensor([1]), i32([0]), *args, 1024)
    assert_equal(got[:9], reference.build_tree(torch.tensor([1]), i32([0]), *args, 1024))


def test_a_long_chain_of_candidates():
    m = 16_384
    args = (torch.zeros(1, m).long(), -torch.arange(m)[None].float(), i32([range(-1, m - 1)]))
    tree = e2.build_tree(torch.tensor([1]), i32([0]), *args, 100)
    assert tree.depths[0].tolist() == list(range(100))


def test_strided_candidates():
    generator = torch.Generator().manual_seed(3)
    tokens, scores, parents = random_args(30, generator, False)
    wide = [torch.stack([x, x], dim=-1) for x in (tokens, scores, parents)]
    got = e2.build_tree(torch.tensor([1]), i32([0]), *(w[..., 0] for w in wide), 20)
    assert_equal(got[:9], OPS.build_tree(torch.tensor([1]), i32([0]), tokens, scores, parents, 20))


# build_tree_from_marginals


def from_marginals(tokens, log_probs, max_nodes, limits=None, **kwargs) -> DraftTree:
    """build_tree_from_marginals for one request from plain lists."""
    return e2.build_tree_from_marginals(
        torch.tensor([100]),
        i32([7]),
        torch.as_tensor(tokens)[None],
        torch.as_tensor(log_probs, dtype=torch.float32)[None],
        max_nodes,
        None if limits is None else i32([limits]),
        **kwargs,
    )


def random_marginals(depth, k, seed, ties=False):
    """Distinct tokens and descending log-probabilities [depth, k] of each position."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.stack([torch.randperm(3 * k + 1, generator=g)[:k] for _ in range(depth)])
    logits = torch.randn(depth, k, generator=g) * 2
    log_probs = (logits.log_softmax(-1) * 2).round() / 2 if ties else logits.log_softmax(-1)
    return tokens, log_probs.sort(-1, descending=True).values


def best_prefixes_by_brute_force(log_probs, count):
    """Every prefix of ranks above -inf, sorted by (score, depth, rank, the parent's own place)."""
    depth, k = log_probs.shape
    keys = {(): ()}
    rows = log_probs.numpy()
    for d in range(1, depth + 1):
        for path in itertools.product(range(k), repeat=d):
            score = np.float32(0)
            for level, rank in enumerate(path):
                score = np.float32(score + rows[level, rank])
            keys[path] = (-float(score), d, path[-1], keys[path[:-1]])
    del keys[()]
    alive = [path for path in keys if keys[path][0] < float("inf")]
    return sorted(alive, key=keys.get)[:count], keys


MARGINALS = [(1, 1), (1, 6), (6, 1), (2, 2), (2, 7), (3, 4), (4, 3), (7, 2)]


@pytest.mark.parametrize("n", [1, 2, 3, 8, 33, 65, 400])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize(("depth", "k"), MARGINALS, ids=lambda x: str(x))
def test_marginals_give_the_best_of_all_prefixes(depth, k, ties, n):
    tokens, log_probs = random_marginals(depth, k, depth * 31 + k, ties)
    tree = from_marginals(tokens, log_probs, n)
    check_tree(tree, i32([7]))
    paths, keys = best_prefixes_by_brute_force(log_probs, n - 1)
    kept = sorted(paths, key=lambda path: (len(path), keys[path]))
    assert int(tree.num_nodes[0]) == len(kept) + 1
    slot = {(): 0} | {path: i for i, path in enumerate(kept, start=1)}
    for path in kept:
        at = slot[path]
        assert int(tree.parents[0, at]) == slot[path[:-1]]
        assert int(tree.draft_tokens[0, at]) == int(tokens[len(path) - 1, path[-1]])
        assert float(tree.scores[0, at]) == -keys[path][0]


def test_marginals_of_certain_and_impossible_tokens():
    tree = from_marginals(
        [[5, 6, 7], [8, 9, 3]], [[0.0, NEG_INF, NEG_INF], [-1.0, -1.0, NAN]], 9, validate=True
    )
    assert tree.num_nodes.tolist() == [4]
    assert tree.draft_tokens[0, :4].tolist() == [100, 5, 8, 9]
    assert tree.scores[0, :4].tolist() == [0.0, 0.0, -1.0, -1.0]


def test_marginals_with_equal_scores_go_by_depth_then_rank_then_parent():
    # Every log-probability is 0: all prefixes tie, so the order of taking is (depth, rank, parent).
    tree = from_marginals([[1, 2], [3, 4], [5, 6]], [[0.0] * 2] * 3, 8)
    assert tree.draft_tokens[0].tolist() == [100, 1, 2, 3, 3, 4, 4, 5]
    assert tree.parents[0].tolist() == [-1, 0, 0, 1, 2, 1, 2, 3]


def test_marginals_with_one_choice_are_a_chain():
    n = 65
    log_probs = -torch.arange(n)[:, None].float() / 64
    tree = from_marginals(torch.arange(n)[:, None], log_probs, n)
    assert tree.draft_tokens[0].tolist() == [100, *range(n - 1)]
    assert tree.parents[0].tolist() == list(range(-1, n - 1))


entry = st.sampled_from([0.0, -0.0, -0.25, -1.0, -3.0, 2.0, NAN, NEG_INF, float("inf"), -3e38])


@st.composite
def hostile_marginals(draw):
    b, depth, k = draw(st.integers(0, 3)), draw(st.integers(0, 5)), draw(st.integers(0, 5))
    count = b * depth * k
    log_probs = draw(st.lists(entry, min_size=count, max_size=count))
    limit = st.tuples(st.integers(-1, 40), st.integers(-1, 6))
    limits = draw(st.none() | st.lists(limit, min_size=b, max_size=b))
    tokens = torch.arange(count).view(b, depth, k)
    shaped = torch.tensor(log_probs, dtype=torch.float32).view(b, depth, k)
    return tokens, shaped, draw(st.integers(1, 70)), limits


@settings(max_examples=300, deadline=None, derandomize=True)
@given(hostile_marginals())
def test_hostile_marginals_equal_the_oracle(case):
    """Unsorted, positive, infinite and NaN entries; no position, no choice, no request."""
    tokens, log_probs, n, limits = case
    b = len(tokens)
    args = (
        torch.arange(b),
        i32([4] * b),
        tokens,
        log_probs,
        n,
        None if limits is None else i32(limits).view(b, 2),
    )
    tree = e2.build_tree_from_marginals(*args)
    assert_equal(tree[:9], reference.build_tree_from_marginals(*args))
    check_tree(tree, i32([4] * b))


@pytest.mark.parametrize("n", [*SIZES, 600, 1024])
def test_marginals_of_any_size_equal_the_oracle(n):
    rows = [random_marginals(8, 32, n + seed, ties=seed == 1) for seed in range(2)]
    tokens, log_probs = (torch.stack(part) for part in zip(*rows, strict=True))
    args = (torch.tensor([1, 2]), i32([5, 6]), tokens, log_probs, n)
    assert_equal(
        e2.build_tree_from_marginals(*args)[:9], reference.build_tree_from_marginals(*args)
    )


def test_marginals_and_build_tree_agree_on_the_whole_tree_of_candidates():
    """The candidates of every prefix, re-ranked, are the prefixes found best-first."""
    depth, k, n = 4, 3, 20
    tokens, log_probs = random_marginals(depth, k, 5)
    listed, scores, parents = [()], [0.0], [-1]
    for path in listed:
        if len(path) < depth:
            for rank in range(k):
                above = 0.0 if not path else scores[listed.index(path)]
                scores.append(float(np.float32(above + log_probs[len(path), rank].item())))
                parents.append(listed.index(path) - 1)
                listed.append((*path, rank))
    ids = [int(tokens[len(path) - 1, path[-1]]) for path in listed[1:]]
    built = build(ids, scores[1:], parents[1:], n, prefix=7)
    found = from_marginals(tokens, log_probs, n)
    key = [(p.tokens, p.probability) for p in built.paths(leaves_only=False)[0]]
    assert [(p.tokens, p.probability) for p in found.paths(leaves_only=False)[0]] == key


# invariants


def assert_invariants(tree, prefix):
    """What every DraftTree promises, stated over whole arrays (check_tree goes slot by slot)."""
    b, n = tree.draft_tokens.shape
    slot = torch.arange(n).expand(b, n)
    used = slot < tree.num_nodes[:, None]
    inner = used & (slot > 0)
    bits = e2.unpack_tree_mask(tree.tree_mask, n)
    above = tree.parents.clamp(min=0).long()
    # padding is exact
    assert (tree.draft_tokens[~used] == 0).all() and (tree.parents[~used] == -1).all()
    assert (tree.depths[~used] == 0).all() and (tree.scores[~used] == NEG_INF).all()
    assert (tree.first_child[~used] == -1).all() and (tree.next_sibling[~used] == -1).all()
    assert (tree.tree_mask[~used] == 0).all()
    assert torch.equal(tree.position_ids, prefix[:, None] + tree.depths)
    # one root, parents first, slots sorted by depth
    assert (tree.parents[:, 0] == -1).all() and (tree.scores[used & (slot == 0)] == 0).all()
    assert (tree.parents[inner] >= 0).all() and (tree.parents < slot)[inner].all()
    assert torch.equal(tree.depths[inner], (tree.depths.gather(1, above) + 1)[inner])
    assert (tree.depths[:, 1:] >= tree.depths[:, :-1])[inner[:, 1:]].all()
    # a row is its parent's row and its own bit: popcount is depth + 1
    assert torch.equal(bits.sum(-1)[used], (tree.depths[used] + 1).long())
    own = torch.eye(n, dtype=torch.bool).expand(b, n, n)
    grown = bits.gather(1, above[..., None].expand(b, n, n)) | own
    assert torch.equal(bits[inner], grown[inner])
    # links list each slot's children once, ascending, tokens distinct
    for r in range(b):
        listed = []
        for s in range(int(tree.num_nodes[r])):
            children, at = [], int(tree.first_child[r, s])
            while at >= 0:
                children.append(at)
                at = int(tree.next_sibling[r, at])
            assert children == sorted(children)
            assert (tree.parents[r, children] == s).all()
            assert len(set(tree.draft_tokens[r, children].tolist())) == len(children)
            listed += children
        assert sorted(listed) == list(range(1, int(tree.num_nodes[r])))


@st.composite
def candidate_batches(draw):
    """Siblings with distinct tokens, families that share tokens; orphans and -inf among them."""
    b, m = draw(st.integers(1, 3)), draw(st.integers(0, 30))
    tokens, parents = [], []
    for _ in range(b):
        row = [draw(st.integers(-1, c - 1) | st.just(c + 3)) for c in range(m)]
        parents.append(row)
        tokens.append([row[:c].count(up) for c, up in enumerate(row)])
    scores = draw(st.lists(score, min_size=b * m, max_size=b * m))
    limit = st.tuples(st.integers(0, 40), st.integers(0, 6))
    limits = draw(st.none() | st.lists(limit, min_size=b, max_size=b))
    return (
        torch.tensor(tokens, dtype=torch.int64).view(b, m),
        torch.tensor(scores, dtype=torch.float32).view(b, m),
        i32(parents).view(b, m),
        draw(st.integers(1, 70)),
        None if limits is None else i32(limits),
    )


@settings(max_examples=80, deadline=None, derandomize=True)
@given(candidate_batches())
def test_every_built_tree_keeps_the_invariants(case):
    b = len(case[0])
    prefix = torch.arange(b).int() * 5
    assert_invariants(e2.build_tree(torch.arange(b), prefix, *case), prefix)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(hostile_marginals())
def test_every_tree_of_marginals_keeps_the_invariants(case):
    tokens, log_probs, n, limits = case
    b = len(tokens)
    prefix = torch.arange(b).int() * 5
    limits = None if limits is None else i32(limits).view(b, 2)
    tree = e2.build_tree_from_marginals(torch.arange(b), prefix, tokens, log_probs, n, limits)
    assert_invariants(tree, prefix)


# flatten_tree


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(-3, 70), min_size=1, max_size=70),
    st.integers(-2, 75),
    st.booleans(),
)
def test_any_parents_equal_the_oracle(parents, count, rooted):
    parents = [p if p < 0 else p % len(parents) for p in parents]
    if rooted:
        parents[0] = -1
    args = (i32([parents]), i32([count]), i32([9]))
    got = e2.flatten_tree(*args)
    assert_equal(got, reference.flatten_tree(*args))
    depths, positions, first_child, next_sibling, mask = got
    bits = e2.unpack_tree_mask(mask, len(parents))[0]
    for slot in range(len(parents)):
        depth = int(depths[0, slot])
        in_tree = slot < count and depth >= 0
        assert int(bits[slot].sum()) == (depth + 1 if in_tree else 0)
        assert int(positions[0, slot]) == 9 + max(depth, 0)
    for links in (first_child, next_sibling):
        assert links.min() >= -1 and links.max() < len(parents)


@pytest.mark.parametrize("n", SIZES)
def test_parents_in_any_slot_order(n):
    """Renaming the slots of a tree renames what flatten_tree says about it."""
    generator = torch.Generator().manual_seed(n)
    parents = random_parents(n, generator)
    order = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(n - 1)])
    place = torch.argsort(order)
    moved = torch.where(parents[order] < 0, -1, place[parents[order].clamp(min=0).long()]).int()
    depths, _, _, _, mask = e2.flatten_tree(parents[None], i32([n]), i32([0]))
    moved_depths, _, child, sibling, moved_mask = e2.flatten_tree(moved[None], i32([n]), i32([0]))
    assert torch.equal(moved_depths[0], depths[0][order])
    bits, moved_bits = (e2.unpack_tree_mask(m, n)[0] for m in (mask, moved_mask))
    assert torch.equal(moved_bits, bits[order][:, order])
    for node in range(n):
        chain, at = [], int(child[0, node])
        while at >= 0:
            chain.append(at)
            at = int(sibling[0, at])
        assert chain == (moved == node).nonzero()[:, 0].tolist()


def test_orphans_and_cycles_are_marked_with_depth_minus_one_and_empty_rows():
    parents = i32([[-1, 2, 1, 0, 3, 9, 4, 7]])
    depths, positions, first_child, next_sibling, mask = e2.flatten_tree(
        parents, i32([8]), i32([20])
    )
    assert depths.tolist() == [[0, -1, -1, 1, 2, -1, 3, -1]]
    assert positions.tolist() == [[20, 20, 20, 21, 22, 20, 23, 20]]
    assert first_child.tolist() == [[3, -1, -1, 4, 6, -1, -1, -1]]
    assert (next_sibling == -1).all()
    assert mask[0, :, 0].tolist() == [1, 0, 0, 0b1001, 0b11001, 0, 0b1011001, 0]


def test_a_slot_zero_with_a_parent_is_no_root():
    depths, _, first_child, _, mask = e2.flatten_tree(i32([[1, 0, 0]]), i32([3]), i32([0]))
    assert depths.tolist() == [[-1, -1, -1]]
    assert (first_child == -1).all() and (mask == 0).all()


def test_children_behind_num_nodes_do_not_count():
    parents = i32([[-1, 0, 0, 1], [-1, 0, 0, 1]])
    _, _, first_child, next_sibling, _ = e2.flatten_tree(parents, i32([2, 0]), i32([0, 0]))
    assert first_child.tolist() == [[1, -1, -1, -1], [-1] * 4]
    assert (next_sibling == -1).all()


def engine_parents(case, row):
    """Slots' parents as the engine means them: a parent is named by the index of its choice."""
    selected, listed = case["selected_index"][row], case["parent_list"][row]
    parents = [-1]
    for choice in selected:
        group = choice // ENGINE["build_tree_malformed"]["topk"]
        if group == 0:
            parents.append(0)
        else:
            parents.append(1 + selected.index(listed[group]) if listed[group] in selected else 99)
    return parents


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("case", ENGINE["build_tree_malformed"]["cases"], ids=lambda c: c["name"])
def test_engine_trees(case, row):
    """Where an engine's tree is whole we agree with it; a slot cut off from the root is empty."""
    depth_limit = ENGINE["build_tree_malformed"]["depth"]
    prefix = ENGINE["build_tree_malformed"]["seq_lens"][row]
    parents = engine_parents(case, row)
    depths, positions, _, _, mask = e2.flatten_tree(i32([parents]), i32([4]), i32([prefix]))
    rows = e2.unpack_tree_mask(mask, 4)[0].int().tolist()
    want = case["derived"]
    for slot in range(4):
        if depths[0, slot] >= 0:
            assert depths[0, slot] <= depth_limit
            assert int(positions[0, slot]) == want["positions"][4 * row + slot]
            assert rows[slot] == want["tree_mask_qlen_only"][row][slot]
            assert int(mask[0, slot, 0]) == want["bitpacked"][row][slot]
        else:
            assert rows[slot] == [0, 0, 0, 0]
    if (case["name"], row) in (("valid_chain", 0), ("valid_chain", 1), ("max_valid_depth", 1)):
        assert (depths >= 0).all()


def test_published_ancestor_matrix():
    case = ENGINE["ancestor_matrix"]
    n = len(case["parents"])
    *_, mask = e2.flatten_tree(i32([case["parents"]]), i32([n]), i32([0]))
    assert e2.unpack_tree_mask(mask, n)[0].int().tolist() == case["derived"]


# retrieve_indices


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(-2, 40), min_size=1, max_size=40), st.integers(-1, 45), st.integers(0, 6)
)
def test_leaf_paths_equal_the_oracle(parents, count, max_depth):
    parents = [-1] + [p if p < 0 else p % (i + 2) for i, p in enumerate(parents[1:])]
    args = (i32([parents]), i32([count]), max_depth)
    got = e2.retrieve_indices(*args)
    assert_equal([got], [reference.retrieve_indices(*args)])


def test_leaf_paths_of_a_small_tree():
    paths = e2.retrieve_indices(i32([[-1, 0, 0, 1, 3]]), i32([5]), 2)
    assert paths[0].tolist() == [[0, 2, -1], [0, 1, 3], *[[-1] * 3] * 3]


def test_a_lone_root_is_a_leaf_and_an_inactive_request_has_none():
    paths = e2.retrieve_indices(i32([[-1, -1], [-1, -1]]), i32([1, 0]), 1)
    assert paths.tolist() == [[[0, -1], [-1, -1]], [[-1, -1], [-1, -1]]]


# mask words


@pytest.mark.parametrize("m", [0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 600])
def test_packing_round_trips(m):
    mask = torch.rand(2, 3, m, generator=torch.Generator().manual_seed(m)) < 0.5
    words = e2.pack_tree_mask(mask)
    assert words.shape == (2, 3, (m + 63) // 64)
    assert_equal([words], [reference.pack_tree_mask(mask)])
    assert torch.equal(e2.unpack_tree_mask(words, m), mask)
    padded = e2.unpack_tree_mask(words, words.shape[-1] * 64)
    assert not padded[..., m:].any()


def test_packing_is_little_endian():
    for case in ENGINE["segment_packbits_little"]["cases"]:
        word = e2.pack_tree_mask(torch.tensor(case["bits"], dtype=torch.bool))
        assert word.tolist() == case["bytes"]
    assert e2.pack_tree_mask(torch.arange(64) == 63).tolist() == [-(2**63)]


def test_packing_masks_whose_bytes_are_not_0_and_1():
    mask = torch.tensor([[2, 0, 255, 1]], dtype=torch.uint8).view(torch.bool)
    assert e2.pack_tree_mask(mask).tolist() == [[0b1101]]


def test_packing_strided_masks():
    mask = torch.rand(70, 5, 2, generator=torch.Generator().manual_seed(1)) < 0.5
    assert_equal(
        [e2.pack_tree_mask(mask.permute(2, 1, 0))],
        [e2.pack_tree_mask(mask.permute(2, 1, 0).contiguous())],
    )
    words = torch.randint(-(2**62), 2**62, (3, 4, 2)).transpose(0, 1)
    assert torch.equal(e2.unpack_tree_mask(words, 70), e2.unpack_tree_mask(words.contiguous(), 70))


# CUDA


@pytest.mark.cuda
@pytest.mark.parametrize("n", [*SIZES, 600, 6000])
def test_cuda_equals_the_cpu_bit_for_bit(n):
    generator = torch.Generator().manual_seed(n)
    rows = [random_args(2 * n + 5, generator, ties) for ties in (False, True, True)]
    tokens, scores, parents = (torch.cat(part) for part in zip(*rows, strict=True))
    scores[2, ::7], parents[2, 3::11] = NAN, 10**6
    limits = i32([[n, n], [0, 1], [n // 2 + 1, 3]])
    args = (torch.tensor([1, 2, 3]), i32([5, 6, 7]), tokens, scores, parents)
    want = OPS.build_tree(*args, n, limits)
    got = OPS.build_tree(*(a.cuda() for a in args), n, limits.cuda())
    assert_equal([t.cpu() for t in got], want)
    hostile = torch.randint(-2, n + 2, (3, n), generator=generator).int()
    hostile[:, 0] = -1
    for tree in (want[1], hostile):
        flat = (tree, i32([n, n // 2, n + 3]), args[1])
        got = OPS.flatten_tree(*(a.cuda() for a in flat))
        assert_equal([t.cpu() for t in got], OPS.flatten_tree(*flat))


# the contract around them


def test_bits_do_not_depend_on_threads():
    generator = torch.Generator().manual_seed(4)
    rows = [random_args(3000, generator, True) for _ in range(5)]
    args = [torch.cat(part) for part in zip(*rows, strict=True)]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(OPS.build_tree(torch.arange(5), i32([0] * 5), *args, 128))
    finally:
        torch.set_num_threads(before)
    assert_equal(*results)


def out_calls():
    generator = torch.Generator().manual_seed(5)
    tokens, scores, parents = random_args(40, generator, True)
    tree = random_parents(20, generator)[None]
    return {
        "build_tree": (torch.tensor([1]), i32([4]), tokens, scores, parents, 70, i32([[30, 4]])),
        "build_tree_from_marginals": (
            torch.tensor([1]),
            i32([4]),
            *(x[None] for x in random_marginals(5, 6, 1, ties=True)),
            70,
            i32([[30, 4]]),
        ),
        "flatten_tree": (tree, i32([15]), i32([4])),
        "retrieve_indices": (tree, i32([15]), 3),
        "pack_tree_mask": (torch.rand(3, 70) < 0.5,),
        "unpack_tree_mask": (torch.randint(0, 2**60, (3, 2)), 70),
    }


@pytest.mark.parametrize("name", sorted(out_calls()))
def test_out_twins_overwrite_poison(name):
    args = out_calls()[name]
    op = next(op for op in e2.ops.OPS if op.name == name)
    want = getattr(OPS, name)(*args)
    want = want if isinstance(want, tuple) else (want,)
    outs = [torch.full_like(w, 77) for w in want]
    getattr(OPS, name + "_out")(*args, **dict(zip(op.outs, outs, strict=True)))
    assert_equal(outs, want)
    bad = [torch.empty(*w.shape, 2, dtype=w.dtype)[..., 0] for w in want]
    with pytest.raises(RuntimeError, match="contiguous"):
        getattr(OPS, name + "_out")(*args, **dict(zip(op.outs, bad, strict=True)))
    bad = [torch.empty(*w.shape, 2, dtype=w.dtype) for w in want]
    with pytest.raises(RuntimeError, match="dimensions|shape"):
        getattr(OPS, name + "_out")(*args, **dict(zip(op.outs, bad, strict=True)))


BUILD = {
    "root_tokens": torch.tensor([1]),
    "prefix_lens": i32([0]),
    "candidate_tokens": torch.tensor([[1, 2]]),
    "candidate_scores": torch.tensor([[-1.0, -2.0]]),
    "candidate_parents": i32([[-1, 0]]),
    "max_nodes": 4,
}
MARGINAL = {
    "root_tokens": torch.tensor([1]),
    "prefix_lens": i32([0]),
    "tokens": torch.tensor([[[3, 4], [5, 6]]]),
    "log_probs": torch.tensor([[[-0.5, -1.0], [-0.2, -2.0]]]),
    "max_nodes": 4,
}
FLATTEN = {"parents": i32([[-1, 0]]), "num_nodes": i32([2]), "prefix_lens": i32([0])}
RETRIEVE = {"parents": i32([[-1, 0]]), "num_nodes": i32([2]), "max_depth": 2}


@pytest.mark.parametrize(
    ("function", "base", "change", "error", "message"),
    [
        ("build_tree", BUILD, {"root_tokens": i32([1])}, TypeError, "root_tokens: .* int64"),
        (
            "build_tree",
            BUILD,
            {"prefix_lens": torch.tensor([0])},
            TypeError,
            "prefix_lens: .*int32",
        ),
        ("build_tree", BUILD, {"prefix_lens": i32([0, 0])}, ValueError, r"\[B\] = \(1\), got"),
        ("build_tree", BUILD, {"candidate_scores": torch.zeros(1, 3)}, ValueError, r"\(1, 3\)"),
        ("build_tree", BUILD, {"candidate_parents": i32([[0]])}, ValueError, "candidate_parents"),
        ("build_tree", BUILD, {"max_nodes": 0}, ValueError, "max_nodes: expected at least 1"),
        ("build_tree", BUILD, {"limits": i32([[1]])}, ValueError, r"limits: .*\(1, 2\)"),
        (
            "build_tree_from_marginals",
            MARGINAL,
            {"tokens": torch.tensor([[3, 4]])},
            ValueError,
            r"tokens: expected shape \[B, D, K\]",
        ),
        (
            "build_tree_from_marginals",
            MARGINAL,
            {"tokens": i32([[[3, 4], [5, 6]]])},
            TypeError,
            "tokens: expected dtype int64",
        ),
        (
            "build_tree_from_marginals",
            MARGINAL,
            {"log_probs": torch.zeros(1, 2, 3)},
            ValueError,
            r"log_probs: .* = \(1, 2, 2\), got \(1, 2, 3\)",
        ),
        (
            "build_tree_from_marginals",
            MARGINAL,
            {"log_probs": torch.zeros(1, 2, 2).double()},
            TypeError,
            "log_probs: expected dtype float32, got float64",
        ),
        (
            "build_tree_from_marginals",
            MARGINAL,
            {"max_nodes": 0},
            ValueError,
            "max_nodes: expected at least 1, got 0",
        ),
        (
            "build_tree_from_marginals",
            MARGINAL,
            {"limits": i32([1, 2])},
            ValueError,
            r"limits: expected shape \[B, 2\]",
        ),
        ("flatten_tree", FLATTEN, {"parents": i32([-1])}, ValueError, r"parents: .*\[B, N\]"),
        ("flatten_tree", FLATTEN, {"num_nodes": torch.tensor([2])}, TypeError, "num_nodes"),
        ("flatten_tree", FLATTEN, {"prefix_lens": i32([])}, ValueError, "prefix_lens"),
        ("retrieve_indices", RETRIEVE, {"max_depth": -1}, ValueError, "max_depth: .* at least 0"),
        ("retrieve_indices", RETRIEVE, {"num_nodes": None}, TypeError, "num_nodes: .*NoneType"),
        ("pack_tree_mask", {}, {"mask": torch.zeros(3)}, TypeError, "mask: expected dtype bool"),
        ("pack_tree_mask", {}, {"mask": torch.tensor(True)}, ValueError, "at least 1 dimension"),
        (
            "unpack_tree_mask",
            {"words": torch.zeros(2, 1, dtype=torch.int64)},
            {"num_keys": 65},
            ValueError,
            "num_keys: expected 0 to 64, got 65",
        ),
    ],
)
def test_wrong_arguments_are_named(function, base, change, error, message):
    with pytest.raises(error, match=message):
        getattr(e2, function)(**(base | change))


@pytest.mark.parametrize(
    ("function", "base", "change", "message"),
    [
        ("build_tree", BUILD, {"candidate_parents": i32([[-1, 1]])}, r"parents\[0, 1\]: .* got 1"),
        (
            "build_tree",
            BUILD,
            {"candidate_tokens": torch.tensor([[3, 3]]), "candidate_parents": i32([[-1, -1]])},
            "siblings to differ, got token 3 of candidate 0",
        ),
        ("build_tree", BUILD, {"prefix_lens": i32([-1])}, r"prefix_lens\[0\]: .* got -1"),
        ("build_tree", BUILD, {"limits": i32([[4, -1]])}, r"limits\[0, 1\]: .* got -1"),
        (
            "build_tree",
            BUILD,
            {"candidate_scores": torch.tensor([[-1.0, 0.6]])},
            r"candidate_scores\[0, 1\]: expected a value from -inf to .*, got 0\.6",
        ),
        (
            "build_tree_from_marginals",
            MARGINAL,
            {"log_probs": torch.tensor([[[-0.5, -1.0], [-0.2, -0.1]]])},
            r"log_probs\[0, 1, 1\]: expected descending order in a position, got -0\.1",
        ),
        (
            "build_tree_from_marginals",
            MARGINAL,
            {"log_probs": torch.tensor([[[0.5, -1.0], [-0.2, -2.0]]])},
            r"log_probs\[0, 0, 0\]: expected a value from -inf to .*, got 0\.5",
        ),
        (
            "build_tree_from_marginals",
            MARGINAL,
            {"tokens": torch.tensor([[[3, 4], [5, 5]]])},
            r"tokens\[0, 1, 1\]: expected distinct tokens in a position, got 5",
        ),
        (
            "build_tree_from_marginals",
            MARGINAL,
            {"prefix_lens": i32([-1])},
            r"prefix_lens\[0\]: .* got -1",
        ),
        (
            "build_tree_from_marginals",
            MARGINAL,
            {"limits": i32([[-2, 1]])},
            r"limits\[0, 0\]: .* got -2",
        ),
        ("flatten_tree", FLATTEN, {"prefix_lens": i32([-3])}, r"prefix_lens\[0\]: .* got -3"),
        ("flatten_tree", FLATTEN, {"parents": i32([[-1, 5]])}, r"parents\[0, 1\]: .* got 5"),
        ("flatten_tree", FLATTEN, {"parents": i32([[-1, 1]])}, "no cycle"),
        ("flatten_tree", FLATTEN, {"parents": i32([[0, 0]])}, r"parents\[0, 0\]: expected -1"),
        ("flatten_tree", FLATTEN, {"num_nodes": i32([3])}, r"num_nodes\[0\]: .* 0 to 2, got 3"),
        ("retrieve_indices", RETRIEVE, {"parents": i32([[-1, -1]])}, r"parents\[0, 1\]"),
    ],
)
def test_validation_names_the_bad_value(function, base, change, message):
    getattr(e2, function)(**base, validate=True)
    getattr(e2, function)(**(base | change))
    with pytest.raises(ValueError, match=message):
        getattr(e2, function)(**(base | change), validate=True)


def test_scores_that_require_grad_are_refused():
    with pytest.raises(ValueError, match="candidate_scores: .*does not require grad"):
        e2.build_tree(**(BUILD | {"candidate_scores": torch.zeros(1, 2, requires_grad=True)}))
    with pytest.raises(ValueError, match="log_probs: .*does not require grad"):
        e2.build_tree_from_marginals(
            **(MARGINAL | {"log_probs": torch.zeros(1, 2, 2, requires_grad=True)})
        )
