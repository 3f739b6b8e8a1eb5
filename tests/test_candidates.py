"""Trees from static choices, chains, merged continuations and prompt lookup."""

import math
from collections import Counter

import pytest
import torch
from growth import i32
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import eagle2_kernels as e2
from eagle2_kernels.tree import check_tree

# The choices Medusa's own examples use for a small tree.
MEDUSA = [[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0], [0, 2], [3], [0, 0, 1], [0, 1, 0]]


def tree_of(candidates, max_nodes, limits=None):
    b = candidates.tokens.shape[0]
    tree = e2.build_tree(
        torch.arange(100, 100 + b),
        i32([4] * b),
        *candidates,
        max_nodes,
        None if limits is None else i32([limits] * b),
        validate=True,
    )
    check_tree(tree, i32([4] * b))
    return tree


def node_paths(tree, r=0):
    """The token path of every drafted node of request r, in slot order."""
    paths = tree.paths(leaves_only=False)[r]
    return [tuple(p.tokens) for p in sorted(paths, key=lambda p: p.slots[-1])]


def head_tokens(b, depth, k, seed=0):
    g = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(4 * k, generator=g)[:k] for _ in range(b * depth)]
    logits = torch.randn(b, depth, k, generator=g).sort(-1, descending=True).values
    return torch.stack(rows).view(b, depth, k), logits.log_softmax(-1)


# choices


def test_choices_first_used_in_inference_or_fake_mode_serve_outside_it():
    """What is kept between calls must not be a tensor of the mode."""
    tokens, log_probs = head_tokens(1, 2, 3)
    with torch.inference_mode():
        e2.candidates_from_choices([[2], [2, 1]], tokens, log_probs)
    log_probs.requires_grad_()
    e2.candidates_from_choices([[2], [2, 1]], tokens, log_probs).scores.sum().backward()
    assert log_probs.grad.tolist() == [[[0, 0, 2], [0, 1, 0]]]
    with FakeTensorMode() as mode:
        e2.candidates_from_choices([[2], [1]], mode.from_tensor(tokens))
    candidates = e2.candidates_from_choices([[2], [1]], tokens)
    assert candidates.tokens.tolist() == [[tokens[0, 0, 2], tokens[0, 0, 1]]]


def test_what_is_no_sequence_of_ids_is_named():
    tokens, _ = head_tokens(1, 2, 3)
    for wrong in (0, [0.5], ["0"]):
        with pytest.raises(TypeError, match=r"^choices\[1\]: expected a sequence of integers, got"):
            e2.candidates_from_choices([[0], wrong], tokens)
    with pytest.raises(TypeError, match=r"^continuations\[0\]\[1\]: expected a sequence of int"):
        e2.candidates_from_continuations([[[1], [2.5]]])
    with pytest.raises(TypeError, match="^token_ids: expected a sequence of integers, got '1 2'"):
        e2.prompt_lookup("1 2")
    assert e2.prompt_lookup(torch.tensor([1, 2, 1])) == [[2, 1]]


def test_a_chain_on_two_devices_is_refused():
    tokens, log_probs = torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3, device="meta")
    with pytest.raises(ValueError, match="^log_probs: expected a tensor on cpu, got one on meta"):
        e2.candidates_from_chain(tokens, log_probs)
    with pytest.raises(ValueError, match="^lengths: expected a tensor on cpu, got one on meta"):
        e2.candidates_from_chain(tokens, lengths=torch.ones(1, dtype=torch.int32, device="meta"))


@pytest.mark.parametrize("scored", [False, True], ids=["places", "log_probs"])
def test_static_choices_give_the_listed_paths(scored):
    tokens, log_probs = head_tokens(2, 3, 4)
    candidates = e2.candidates_from_choices(MEDUSA, tokens, log_probs if scored else None)
    tree = tree_of(candidates, 16)
    for r in range(2):
        listed = [tuple(int(tokens[r, d, rank]) for d, rank in enumerate(p)) for p in MEDUSA]
        assert node_paths(tree, r) == sorted(listed, key=lambda p: (len(p), listed.index(p)))
        if scored:
            for path in tree.paths(leaves_only=False)[r]:
                ranks = MEDUSA[listed.index(tuple(path.tokens))]
                want = sum(float(log_probs[r, d, rank]) for d, rank in enumerate(ranks))
                assert math.log(path.probability) == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_a_static_tree_cut_short_keeps_the_first_choices(n):
    tokens, _ = head_tokens(1, 3, 4)
    tree = tree_of(e2.candidates_from_choices(MEDUSA, tokens), n)
    listed = [tuple(int(tokens[0, d, rank]) for d, rank in enumerate(p)) for p in MEDUSA]
    assert set(node_paths(tree)) == set(listed[: n - 1])


def test_a_static_tree_cut_short_keeps_the_most_probable_choices():
    tokens, log_probs = head_tokens(1, 3, 4, seed=3)
    tree = tree_of(e2.candidates_from_choices(MEDUSA, tokens, log_probs), 6)
    total = {
        tuple(p): sum(float(log_probs[0, d, rank]) for d, rank in enumerate(p)) for p in MEDUSA
    }
    best = sorted(total, key=total.get, reverse=True)[:5]
    want = {tuple(int(tokens[0, d, rank]) for d, rank in enumerate(p)) for p in best}
    assert set(node_paths(tree)) == want


def test_all_choices_with_log_probs_are_the_tree_of_the_marginals():
    tokens, log_probs = head_tokens(2, 3, 3, seed=4)
    ranks = [(), *((a,) for a in range(3))]
    ranks += [(a, b) for a in range(3) for b in range(3)]
    ranks += [(a, b, c) for a in range(3) for b in range(3) for c in range(3)]
    tree = tree_of(e2.candidates_from_choices(ranks[1:], tokens, log_probs), 17)
    other = e2.build_tree_from_marginals(
        torch.tensor([100, 101]), i32([4, 4]), tokens, log_probs, 17
    )
    for r in range(2):
        assert set(node_paths(tree, r)) == set(node_paths(other, r))
        got, want = (t.scores[r].sort().values for t in (tree, other))
        assert torch.equal(got, want)


def test_choices_may_list_a_prefix_late_and_candidates_still_come_after_their_parents():
    tokens, _ = head_tokens(1, 2, 2)
    candidates = e2.candidates_from_choices([[1, 0], [1], [0]], tokens)
    assert candidates.parents.tolist() == [[-1, -1, 0]]
    assert candidates.scores.tolist() == [[-2.0, -3.0, -1.0]]
    # The child waits for its parent, then comes before the next in the list.
    tree = tree_of(candidates, 3)
    assert node_paths(tree) == [(int(tokens[0, 0, 1]),), tuple(tokens[0, [0, 1], [1, 0]].tolist())]


def test_no_choices_leave_the_root():
    tokens, _ = head_tokens(2, 2, 2)
    tree = tree_of(e2.candidates_from_choices([], tokens), 4)
    assert tree.num_nodes.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([[0], [1, 0]], r"choices\[1\]: expected the prefix \[1\] of \[1, 0\] among the choices"),
        ([[0], [0]], r"choices\[1\]: expected distinct paths, got \[0\] again"),
        ([[0], [3]], r"choices\[1\]: expected 1 to 2 ranks from 0 to 2, got \[3\]"),
        ([[0], [-1]], r"choices\[1\]: .* got \[-1\]"),
        ([[]], r"choices\[0\]: .* got \[\]"),
        ([[0], [0, 0], [0, 0, 0]], r"choices\[2\]: expected 1 to 2 ranks"),
    ],
    ids=["no prefix", "twice", "rank", "negative", "empty", "too deep"],
)
def test_wrong_choices_are_named(choices, message):
    with pytest.raises(ValueError, match=message):
        e2.candidates_from_choices(choices, torch.zeros(1, 2, 3, dtype=torch.int64))


# chain


def test_a_chain_hangs_each_token_under_the_one_before():
    tokens = torch.tensor([[5, 6, 5], [7, 8, 9]])
    log_probs = torch.tensor([[-0.5, -0.25, -1.0], [0.0, -2.0, -0.5]])
    tree = tree_of(e2.candidates_from_chain(tokens, log_probs, i32([3, 1])), 5)
    assert tree.num_nodes.tolist() == [4, 2]
    assert tree.draft_tokens.tolist() == [[100, 5, 6, 5, 0], [101, 7, 0, 0, 0]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, -1], [-1, 0, -1, -1, -1]]
    assert tree.scores[0, :4].tolist() == [0.0, -0.5, -0.75, -1.75]


def test_a_chain_without_scores_is_cut_from_its_end():
    tokens = torch.arange(70)[None]
    tree = tree_of(e2.candidates_from_chain(tokens), 65)
    assert tree.draft_tokens.tolist() == [[100, *range(64)]]
    assert tree.depths.tolist() == [list(range(65))]
    assert tree_of(e2.candidates_from_chain(tokens), 65, (9, 3)).num_nodes.tolist() == [4]


# continuations


words = st.lists(st.integers(0, 3), max_size=5)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.tuples(words, st.integers(1, 4)), max_size=6), min_size=1, max_size=3))
def test_merged_continuations_are_the_set_of_their_prefixes(batch):
    """One node per distinct prefix; its probability is the share of the weight that passes it."""
    candidates = e2.candidates_from_continuations(
        [[w for w, _ in row] for row in batch], [[float(n) for _, n in row] for row in batch]
    )
    tree = tree_of(candidates, 100)
    for r, row in enumerate(batch):
        weight = Counter()
        for word, n in row:
            for i in range(1, len(word) + 1):
                weight[tuple(word[:i])] += n
        paths = tree.paths(leaves_only=False)[r]
        assert sorted(tuple(p.tokens) for p in paths) == sorted(weight)
        for path in paths:
            share = weight[tuple(path.tokens)] / sum(n for _, n in row)
            assert path.probability == pytest.approx(share, rel=1e-5)


def test_continuations_cut_short_keep_the_heaviest_prefixes():
    candidates = e2.candidates_from_continuations([[[1, 2, 3], [1, 2, 4], [5]]])
    assert node_paths(tree_of(candidates, 4)) == [(1,), (5,), (1, 2)]
    weighted = e2.candidates_from_continuations([[[1, 2, 3], [1, 2, 4], [5]]], [[1, 1, 9]])
    assert node_paths(tree_of(weighted, 2)) == [(5,)]


def test_a_request_without_continuations_keeps_its_root():
    candidates = e2.candidates_from_continuations([[], [[3]], [[]]])
    assert tree_of(candidates, 4).num_nodes.tolist() == [1, 2, 1]
    assert tree_of(e2.candidates_from_continuations([[]]), 4).num_nodes.tolist() == [1]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([[1.0]], r"weights: expected 2 requests, got 1"),
        ([[1.0], [1.0, 2.0]], r"weights\[1\]: expected 1 positive finite numbers"),
        ([[1.0], [0.0]], r"weights\[1\]: .* got \[0.0\]"),
        ([[math.nan], [1.0]], r"weights\[0\]: .* got \[nan\]"),
        ([[1.0], [math.inf]], r"weights\[1\]: .* got \[inf\]"),
    ],
    ids=["requests", "count", "zero", "nan", "infinite"],
)
def test_wrong_weights_are_named(weights, message):
    with pytest.raises(ValueError, match=message):
        e2.candidates_from_continuations([[[1]], [[2]]], weights)


# prompt lookup


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 2), max_size=30),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(0, 2),
)
def test_prompt_lookup_finds_what_followed_the_suffix(ids, length, limit, shortest, more):
    got = e2.prompt_lookup(
        ids, length=length, limit=limit, min_ngram=shortest, max_ngram=shortest + more
    )

    def matched(end):
        """Tokens before ``end`` that equal the last ones of the sequence, at most max_ngram."""
        n = 0
        while n < min(shortest + more, end) and ids[end - 1 - n] == ids[len(ids) - 1 - n]:
            n += 1
        return n

    ends = [e for e in range(1, len(ids)) if matched(e) >= shortest]
    ends.sort(key=lambda e: (-matched(e), -e))
    assert got == [ids[e : e + length] for e in ends[:limit]]


def test_prompt_lookup_feeds_a_tree():
    ids = [7, 1, 2, 3, 1, 2, 4, 1, 2]
    found = e2.prompt_lookup(ids, length=2)
    assert found == [[4, 1], [3, 1]]
    tree = tree_of(e2.candidates_from_continuations([found]), 8)
    assert node_paths(tree) == [(4,), (3,), (4, 1), (3, 1)]
    assert e2.prompt_lookup([1, 2, 3]) == [] and e2.prompt_lookup([]) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 0}, "length: expected at least 1, got 0"),
        ({"limit": 0}, "limit: expected at least 1, got 0"),
        ({"min_ngram": 0}, "min_ngram: expected at least 1, got 0"),
        ({"min_ngram": 4}, "max_ngram: expected at least 4, got 3"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_bounds_of_prompt_lookup_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        e2.prompt_lookup([1, 2, 1], **change)


# what every builder checks


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: e2.candidates_from_choices([[0]], torch.zeros(1, 2).long()),
            ValueError,
            r"tokens: expected shape \[B, D, K\]",
        ),
        (
            lambda: e2.candidates_from_choices(
                [[0]], torch.zeros(1, 2, 3).long(), torch.zeros(1, 2, 2)
            ),
            ValueError,
            r"log_probs: expected shape \[B, D, K\] = \(1, 2, 3\), got \(1, 2, 2\)",
        ),
        (
            lambda: e2.candidates_from_chain(i32([[1, 2]])),
            TypeError,
            "tokens: expected dtype int64, got int32",
        ),
        (
            lambda: e2.candidates_from_chain(torch.tensor([[1, 2]]), torch.zeros(1, 3)),
            ValueError,
            r"log_probs: expected shape \[B, D\] = \(1, 2\), got \(1, 3\)",
        ),
        (
            lambda: e2.candidates_from_chain(torch.tensor([[1, 2]]), None, i32([1, 2])),
            ValueError,
            r"lengths: expected shape \[B\] = \(1\), got \(2,\)",
        ),
        (
            lambda: e2.candidates_from_continuations([[5, 6], [7]]),
            TypeError,
            r"continuations\[0\]: expected a list of token id sequences, got \[5, 6\]",
        ),
        (
            lambda: e2.prompt_lookup([[5, 6], [7]]),
            TypeError,
            "token_ids: expected a sequence of integers",
        ),
    ],
    ids=[
        "choices rank",
        "choices log_probs",
        "chain dtype",
        "chain log_probs",
        "chain lengths",
        "one request's continuations",
        "two requests' tokens",
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
