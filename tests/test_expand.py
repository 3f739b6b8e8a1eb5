"""expand_topk and extend_draft_tree: one level of the draft tree."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import EXPAND_CASES, expand_inputs
from growth import candidate_count, grow, hashed_head, i32
from hypothesis import given, settings
from hypothesis import strategies as st

import eagle2_kernels as e2
from eagle2_kernels import reference
from eagle2_kernels.tree import check_tree

NEG_INF = float("-inf")
OPS = torch.ops.eagle2_kernels
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
CASES = json.loads((Path(__file__).parent / "data" / "draft_trees.json").read_text())["cases"]
NAMES = ("candidate_tokens", "candidate_scores", "beam", "beam_tokens", "beam_scores", "beam_rows")


def dtype_id(dtype):
    return str(dtype).removeprefix("torch.")


def assert_same_expansion(got, logits, beam_scores, top_k, draft_to_target=None):
    """Tokens are the oracle's, scores are close to it, and the beam follows from the scores."""
    want = reference.expand_topk(logits, beam_scores, top_k, draft_to_target)
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, name
    tokens, scores, beam, beam_tokens, next_scores, rows = got
    assert torch.equal(tokens, want[0])
    torch.testing.assert_close(scores, want[1], atol=2e-5, rtol=2e-6)
    ranked, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    assert torch.equal(beam, order[:, :top_k])
    assert torch.equal(next_scores, ranked[:, :top_k])
    assert torch.equal(beam_tokens, tokens.gather(1, beam))
    assert torch.equal(rows, (beam // top_k).int())


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"seed{c['seed']}")
def test_public_trees_are_reproduced(case):
    levels = [torch.tensor(level) for level in case["levels"]]
    tokens, scores, parents = grow(
        lambda level, paths: levels[level], case["top_k"], case["max_depth"]
    )
    tree = e2.build_tree(
        torch.tensor([case["root_token"]]),
        i32([case["seq_len"]]),
        tokens,
        scores,
        parents,
        case["max_nodes"],
    )
    check_tree(tree, i32([case["seq_len"]]))
    expected = case["expected"]
    assert tree.draft_tokens[0].tolist() == expected["tokens"]
    assert tree.parents[0].tolist() == expected["parents"]
    assert tree.depths[0].tolist() == expected["depths"]
    assert tree.position_ids[0].tolist() == expected["position_ids"]
    bits = e2.unpack_tree_mask(tree.tree_mask[0], case["max_nodes"]).int().tolist()
    assert ["".join(map(str, row)) for row in bits] == expected["tree_mask"]

    def trimmed(paths):
        paths = paths[(paths >= 0).any(1)]
        return paths[:, (paths >= 0).any(0)].tolist()

    paths = e2.retrieve_indices(tree.parents, tree.num_nodes, case["max_depth"])[0]
    assert trimmed(paths) == trimmed(torch.tensor(expected["retrieve_indices"]))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", EXPAND_CASES, ids=lambda c: c.name)
def test_equals_the_oracle(dtype, case):
    logits, beam_scores = expand_inputs(case, dtype)
    got = e2.expand_topk(logits, beam_scores, case.top_k)
    assert_same_expansion(got, logits, beam_scores, case.top_k)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_ties_go_to_the_lowest_id(dtype):
    logits = torch.zeros(1, 1, 64, dtype=dtype)
    tokens, _, beam, *_ = e2.expand_topk(logits, torch.zeros(1, 1), 4)
    assert tokens.tolist() == [[0, 1, 2, 3]]
    assert beam.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("v", [100, 3000])
def test_tie_heavy_rows_equal_the_oracle(v):
    generator = torch.Generator().manual_seed(v)
    logits = torch.randint(-2, 3, (3, 5, v), generator=generator).to(torch.bfloat16)
    beam_scores = torch.randint(-2, 1, (3, 5), generator=generator).float()
    got = e2.expand_topk(logits, beam_scores, 7)
    assert_same_expansion(got, logits, beam_scores, 7)


def test_a_late_better_logit_beats_an_early_full_set():
    logits = torch.zeros(1, 1, 4096)
    logits[0, 0, 4000] = 1.0
    tokens, *_ = e2.expand_topk(logits, torch.zeros(1, 1), 3)
    assert tokens.tolist() == [[4000, 0, 1]]


def test_equal_scores_across_parents_go_to_the_lower_index():
    logits = torch.zeros(1, 3, 2)
    _, scores, beam, _, _, rows = e2.expand_topk(logits, torch.zeros(1, 3), 2)
    assert scores.unique().numel() == 1
    assert beam.tolist() == [[0, 1]] and rows.tolist() == [[0, 0]]


@pytest.mark.parametrize("stride", [1, 2], ids=["contiguous", "strided"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_nan_and_infinite_logits_in_long_rows(dtype, stride):
    """Whole chunks are read in place: what is not finite is met in another way than at the end."""
    logits = torch.randn(1, 4, 5000 * stride, generator=torch.Generator().manual_seed(5)).to(dtype)
    logits = logits[..., ::stride]
    logits[0, 0, [3, 2100, 4999]] = float("inf")
    logits[0, 1, :4700] = float("nan")
    logits[0, 2, 100:] = NEG_INF
    logits[0, 2, 7] = float("nan")
    logits[0, 3, 1::2] = -float("nan")
    got = e2.expand_topk(logits, torch.zeros(1, 4), 5)
    assert_same_expansion(got, logits, torch.zeros(1, 4), 5)
    assert got[0][0, :3].tolist() == [3, 2100, 4999]


def _hostile_row(kind, x):
    """Writes one row of what a sweep with a running sum could get wrong into the normal ``x``."""
    n = len(x)
    if kind == "ascending":
        x[:] = torch.linspace(-600, 600, n) + x / 4
    elif kind == "ascending within rounding":
        x[:] = torch.linspace(-30, 60, n)
    elif kind == "far above zero":
        x += 3000.0
    elif kind == "far below zero":
        x -= 3000.0
    elif kind == "near the end of the reach":
        x -= 2760.0
    elif kind.startswith("across the end"):
        x[:] = x / 8 - (86.0 if "short" in kind else 2836.0)
        x[: n // 2] -= 6.0
    elif kind == "beyond the reach":
        x[-8:] = 3e5 - torch.arange(8)
    elif kind == "masked start":
        x[: n // 2] = -1e4
    elif kind == "masked but a few":
        x[:] = -6e4
        x[[n // 3, n // 2, n - 1]] = torch.tensor([1.0, 2.0, 2.0])
    elif kind == "infinitely masked":
        x[torch.arange(n) % 7 != 3] = NEG_INF
    elif kind == "infinitely masked but a few":
        x[:] = NEG_INF
        x[[0, n // 2, n - 1]] = torch.tensor([1.0, 2.0, 2.0])
    elif kind == "one far above":
        x[n // 2] = 400.0
    elif kind == "all but one below what adds up":
        x[:] = x / 8 - 88.0
        x[n - 1] = 0.0
    elif kind == "spread":
        x *= 200.0
    elif kind == "float32's ends":
        x[::5] = -3e38
        x[1::5] = -1e15
    elif kind == "nan":
        x[::3] = float("nan")
        x[1::3] = -float("nan")
    elif kind == "one above nan":
        x[:] = -float("nan")
        x[n // 2] = 5.0


HOSTILE = [
    *("ascending", "ascending within rounding", "far above zero", "far below zero"),
    *("near the end of the reach", "across the end of the reach", "across the end of a short one"),
    *("beyond the reach", "masked start", "masked but a few", "infinitely masked"),
    *("infinitely masked but a few", "one far above", "all but one below what adds up", "spread"),
    *("float32's ends", "nan", "one above nan"),
]


@pytest.mark.parametrize("vocab", [63, 64, 600, 5000, 9001])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_a_hostile_row_equals_the_oracle(dtype, vocab):
    logits = torch.randn(1, len(HOSTILE), vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    for kind, row in zip(HOSTILE, logits[0], strict=True):
        _hostile_row(kind, row)
    logits, beam_scores = logits.to(dtype), torch.zeros(1, len(HOSTILE))
    assert_same_expansion(e2.expand_topk(logits, beam_scores, 6), logits, beam_scores, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("top_k", [1, 10, 300])
def test_a_long_row_equals_the_oracle_in_float64(dtype, top_k):
    """Scores within float32's rounding of logits of this size."""
    logits, beam_scores = torch.randn(1, 2, 20011) * 5 + 9, torch.zeros(1, 2)
    logits = logits.to(dtype)
    tokens, scores, *_ = e2.expand_topk(logits, beam_scores, top_k)
    want = logits.double().log_softmax(-1)[0].gather(1, tokens.view(2, -1))
    torch.testing.assert_close(scores.view(2, -1).double(), want, atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_a_certain_token_scores_exactly_zero(dtype):
    """Its exponential is the whole sum, whatever rounding the sweep gives to both."""
    logits = torch.randn(1, 3, 5000, generator=torch.Generator().manual_seed(1)) * 4
    logits[0, 0, 4321] = 300.0
    logits[0, 1, 0] = 77.7
    logits[0, 2] = NEG_INF
    logits[0, 2, 4999] = -1.3
    tokens, scores, *_ = e2.expand_topk(logits.to(dtype), torch.zeros(1, 3), 1)
    assert tokens.tolist() == [[4321, 0, 4999]]
    assert scores.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_nan_and_infinite_logits_keep_indices_in_range(dtype):
    logits = torch.randn(2, 4, 50, generator=torch.Generator().manual_seed(3)).to(dtype)
    logits[0, 0] = float("nan")
    logits[0, 1, :45] = float("nan")
    logits[0, 2, 7] = float("inf")
    logits[0, 3, 9] = NEG_INF
    logits[1, 0] = NEG_INF
    logits[1, 1, 3:5] = float("inf")
    beam_scores = torch.zeros(2, 4)
    beam_scores[1, 2], beam_scores[1, 3] = NEG_INF, float("nan")
    got = e2.expand_topk(logits, beam_scores, 6)
    assert_same_expansion(got, logits, beam_scores, 6)
    tokens, scores, beam, *_ = got
    assert not scores.isnan().any()
    assert ((tokens >= 0) & (tokens < 50)).all() and ((beam >= 0) & (beam < 24)).all()
    assert (tokens[scores == NEG_INF] == 0).all()
    assert scores[0, :6].tolist() == [NEG_INF] * 6
    assert tokens[0, 12] == 7 and tokens[1, 6:8].tolist() == [3, 4]
    assert (scores[1, 12:] == NEG_INF).all()


def test_top_k_past_the_vocabulary_pads():
    tokens, scores, beam, _, beam_scores, _ = e2.expand_topk(
        torch.tensor([[[0.0, 1.0]]]), torch.zeros(1, 1), 4
    )
    assert tokens.tolist() == [[1, 0, 0, 0]]
    assert scores[0, 2:].tolist() == [NEG_INF, NEG_INF]
    assert beam.tolist() == [[0, 1, 2, 3]]
    assert beam_scores[0, 2:].tolist() == [NEG_INF, NEG_INF]


def test_scores_are_log_probabilities_and_do_not_underflow():
    logits = torch.tensor([[[0.0, -1.0, -300.0]]])
    _, scores, *_ = e2.expand_topk(logits, torch.tensor([[-2000.0]]), 3)
    want = torch.log_softmax(logits[0, 0].double(), 0) - 2000
    torch.testing.assert_close(scores[0].double(), want, atol=3e-4, rtol=0)
    assert scores[0].unique().numel() == 3


def test_logits_of_the_largest_floats_do_not_overflow():
    logits = torch.full((1, 1, 5), 3.0e38)
    logits[0, 0, 4] = -3.0e38
    _, scores, *_ = e2.expand_topk(logits, torch.zeros(1, 1), 5)
    torch.testing.assert_close(scores[0, :4], torch.full((4,), -1.3862944))
    assert scores[0, 4] == NEG_INF


def test_draft_ids_are_mapped_and_ties_stay_on_draft_ids():
    draft_to_target = torch.tensor([90, 80, 70, 60])
    logits = torch.tensor([[[1.0, 1.0, 5.0, 1.0]]])
    tokens, *_ = e2.expand_topk(logits, torch.zeros(1, 1), 3, draft_to_target)
    assert tokens.tolist() == [[70, 90, 80]]
    assert_same_expansion(
        e2.expand_topk(logits, torch.zeros(1, 1), 3, draft_to_target),
        logits,
        torch.zeros(1, 1),
        3,
        draft_to_target,
    )


@pytest.mark.parametrize("layout", ["rows", "columns", "last_token_of_a_batch"])
def test_strided_logits(layout):
    generator = torch.Generator().manual_seed(5)
    base = torch.randn(4, 6, 40, generator=generator)
    logits = {
        "rows": base[::2, ::3],
        "columns": torch.randn(40, 6, 4, generator=generator).permute(2, 1, 0),
        "last_token_of_a_batch": base[:, -1:],
    }[layout]
    assert not logits.is_contiguous()
    beam_scores = torch.rand(2 * logits.shape[0], logits.shape[1], generator=generator)[::2]
    got = e2.expand_topk(logits, beam_scores, 3)
    for a, b in zip(got, e2.expand_topk(logits.contiguous(), beam_scores, 3), strict=True):
        assert torch.equal(a, b)


def test_bits_do_not_depend_on_threads_or_batch():
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(3, 8, 20000, generator=generator)
    beam_scores = -torch.rand(3, 8, generator=generator)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(e2.expand_topk(logits, beam_scores, 8))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    alone = e2.expand_topk(logits[1:2], beam_scores[1:2], 8)
    assert all(torch.equal(a[1:2], b) for a, b in zip(results[0], alone, strict=True))


def test_the_out_twin_overwrites_poison():
    logits, beam_scores = torch.randn(2, 3, 30), torch.zeros(2, 3)
    want = OPS.expand_topk(logits, beam_scores, 4)
    outs = [torch.full_like(w, 77) for w in want]
    names = [*NAMES[:4], "next_beam_scores", "beam_rows"]
    OPS.expand_topk_out(logits, beam_scores, 4, **dict(zip(names, outs, strict=True)))
    assert all(torch.equal(a, b) for a, b in zip(outs, want, strict=True))


def brute_force_tree(head, vocab, max_depth, count):
    """The ``count`` best of all token paths up to ``max_depth``: [(path, float32 score)], in order.

    Best is the greater score; among equals the smaller depth, then the place of the parent among
    its level, then the smaller token rank. Scores are summed from the root as expand_topk does.
    """
    place = {(): ()}
    score = {(): np.float32(0)}
    level = [()]
    for depth in range(max_depth):
        logits = head(depth, [list(path) for path in level]).numpy()
        children = []
        for path, row in zip(level, logits, strict=True):
            log_total = np.float32(np.log(np.exp(row.astype(np.float64) - row.max()).sum()))
            order = sorted(range(vocab), key=lambda token, row=row: -row[token])
            for rank, token in enumerate(order):
                child = (*path, token)
                score[child] = ((row[token] - row.max()) - log_total) + score[path]
                place[child] = (-score[child], place[path], rank)
                children.append(child)
        level = children
    del score[()]
    ranked = sorted(score, key=lambda p: (-score[p], len(p), place[p[:-1]], place[p][2]))
    return [(path, score[path]) for path in ranked[:count]], place


def shuffled_head(values, seed):
    """Every path permutes the same logits, so that scores tie in and across levels."""
    uniform = hashed_head(len(values), seed)
    return lambda level, paths: torch.tensor(values)[uniform(level, paths).argsort(-1)]


HEADS = {
    "distinct": lambda seed: hashed_head(6, seed, scale=2.5),
    "ties": lambda seed: shuffled_head([0.0, 0.0, -1.0, -1.0, -1.0, -3.0], seed),
    "all equal": lambda seed: shuffled_head([0.0] * 6, seed),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", sorted(HEADS))
@pytest.mark.parametrize(
    ("top_k", "max_depth", "n"), [(6, 4, 7), (5, 4, 6), (3, 4, 4), (6, 1, 7), (1, 4, 2)], ids=str
)
def test_expansion_equals_brute_force_best_first_search(kind, seed, top_k, max_depth, n):
    """A frontier of max_nodes - 1 loses none of the best nodes, and ties keep their order."""
    head = HEADS[kind](seed)
    tokens, scores, parents = grow(head, top_k, max_depth)
    tree = e2.build_tree(torch.tensor([9]), i32([5]), tokens, scores, parents, n)
    check_tree(tree, i32([5]))
    best, place = brute_force_tree(head, 6, max_depth, n - 1)
    kept = sorted(best, key=lambda item: (len(item[0]), place[item[0][:-1]], place[item[0]][2]))
    slot = {(): 0} | {path: i for i, (path, _) in enumerate(kept, start=1)}
    assert tree.draft_tokens[0].tolist() == [9, *(path[-1] for path, _ in kept)]
    assert tree.parents[0].tolist() == [-1, *(slot[path[:-1]] for path, _ in kept)]
    want = torch.tensor([0.0, *(float(score) for _, score in kept)])
    torch.testing.assert_close(tree.scores[0], want, atol=1e-5, rtol=0)


value = st.sampled_from([0.0, -0.0, 0.5, -1.0, 2.0, float("nan"), NEG_INF, float("inf")])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(value, min_size=9, max_size=9), min_size=1, max_size=4),
    st.integers(1, 11),
    st.sampled_from(DTYPES),
)
def test_top_k_of_ties_and_nan_equals_a_stable_sort(rows, k, dtype):
    logits = torch.tensor(rows, dtype=dtype)[None]
    tokens, scores, beam, *_ = e2.expand_topk(logits, torch.zeros(1, len(rows)), k)
    for p, row in enumerate(rows):
        known = [NEG_INF if x != x else x for x in row]
        got = tokens[0, p * k : (p + 1) * k].tolist()
        live = (scores[0, p * k : (p + 1) * k] > NEG_INF).tolist()
        order = [i for i in sorted(range(9), key=lambda i: -known[i]) if known[i] > NEG_INF][:k]
        # Beside +inf, the largest number there is, what is left rounds to -inf in some dtypes.
        if float("inf") in known:
            order = [i for i in order if known[i] == float("inf")]
            got, live = got[: len(order)], live[: len(order)]
        assert got == order + [0] * (len(got) - len(order))
        assert live == [True] * len(order) + [False] * (len(got) - len(order))
    listed = scores[0].tolist()
    assert beam[0].tolist() == sorted(range(len(listed)), key=lambda i: -listed[i])[:k]


def test_top_k_of_one_grows_the_greedy_chain():
    head = hashed_head(vocab=50, seed=9)
    tokens, scores, parents = grow(head, top_k=1, max_depth=6)
    path, want = [], 0.0
    for depth in range(6):
        logp = torch.log_softmax(head(depth, [path])[0], 0)
        path.append(int(logp.argmax()))
        want += float(logp.max())
    assert tokens[0].tolist() == path
    assert parents[0].tolist() == [-1, 0, 1, 2, 3, 4]
    assert float(scores[0, -1]) == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize(("k", "levels"), [(1, 4), (3, 4), (8, 5), (10, 14), (32, 3), (33, 4)])
def test_frontier_masks_hold_each_node_and_its_ancestors(k, levels):
    generator = torch.Generator().manual_seed(k)
    m = candidate_count(k, levels)
    parents = torch.full((2, m), -7, dtype=torch.int32)
    mask = torch.zeros(2, k, (levels * k + 63) // 64, dtype=torch.int64)
    want_parents, want_mask = parents.clone(), mask
    beam = torch.zeros(2, k, dtype=torch.int64)
    ancestors = {}
    for level in range(levels):
        want_mask = reference.extend_draft_tree(want_parents, want_mask, beam, level)
        mask = e2.extend_draft_tree(parents, mask, beam, level)
        assert torch.equal(mask, want_mask) and torch.equal(parents, want_parents)
        bits = e2.unpack_tree_mask(mask, levels * k)
        for b in range(2):
            previous, ancestors[b] = ancestors.get(b), []
            for j in range(k if level else 0):
                above = previous[int(beam[b, j]) // k] if level > 1 else set()
                ancestors[b].append(above | {(level - 1) * k + j})
                assert set(bits[b, j].nonzero()[:, 0].tolist()) == ancestors[b][j]
        choices = k if level == 0 else k * k
        beam = torch.stack([torch.randperm(choices, generator=generator)[:k] for _ in range(2)])


def test_level_zero_hangs_candidates_under_the_root_and_copies_the_mask():
    parents = torch.full((1, 6), 9, dtype=torch.int32)
    mask = torch.zeros(1, 2, 1, dtype=torch.int64)
    out = e2.extend_draft_tree(parents, mask, torch.zeros(1, 2, dtype=torch.int64), 0)
    assert parents.tolist() == [[-1, -1, 9, 9, 9, 9]]
    assert torch.equal(out, mask) and out.data_ptr() != mask.data_ptr()


def test_a_beam_entry_out_of_range_gives_no_tree_to_its_children():
    parents = torch.full((1, 6), -1, dtype=torch.int32)
    mask = torch.zeros(1, 2, 1, dtype=torch.int64)
    beam = torch.tensor([[2**40, -3]])
    out = e2.extend_draft_tree(parents, mask, beam, 1)
    assert out.tolist() == [[[1], [2]]]
    tree = e2.build_tree(
        torch.tensor([1]), i32([0]), torch.arange(6)[None], torch.zeros(1, 6), parents, 8
    )
    assert tree.num_nodes.tolist() == [3]
    with pytest.raises(ValueError, match=r"beam\[0, 0\]: expected a value from 0 to 1"):
        e2.extend_draft_tree(parents, mask, beam, 1, validate=True)
    with pytest.raises(ValueError, match=r"beam\[0, 1\]: .* got 1, which beam\[0, 0\] is too"):
        e2.extend_draft_tree(parents, mask, torch.tensor([[1, 1]]), 1, validate=True)
    e2.extend_draft_tree(parents, mask, torch.tensor([[1, 0]]), 1, validate=True)


def test_the_out_twin_of_extend_overwrites_poison_and_needs_its_own_memory():
    parents = torch.zeros(1, 6, dtype=torch.int32)
    mask, beam = torch.zeros(1, 2, 1, dtype=torch.int64), torch.tensor([[1, 0]])
    want = OPS.extend_draft_tree(parents, mask, beam, 1)
    out = torch.full_like(mask, 77)
    OPS.extend_draft_tree_out(parents, mask, beam, 1, next_draft_mask=out)
    assert torch.equal(out, want)
    with pytest.raises(RuntimeError, match="next_draft_mask: expected memory of its own"):
        OPS.extend_draft_tree_out(parents, mask, beam, 1, next_draft_mask=mask)


EXPAND = {
    "logits": torch.zeros(2, 3, 5),
    "beam_scores": torch.zeros(2, 3),
    "top_k": 2,
    "draft_to_target": None,
}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": torch.zeros(2, 5)}, ValueError, r"logits: expected shape \[B, P, V\]"),
        ({"logits": torch.zeros(2, 3, 5).int()}, TypeError, "logits: expected dtype float32"),
        ({"logits": torch.zeros(2, 3, 0)}, ValueError, "logits: expected P and V of at least 1"),
        ({"logits": torch.zeros(2, 0, 5)}, ValueError, "logits: expected P and V of at least 1"),
        ({"logits": [1.0]}, TypeError, "logits: expected a float32 .* tensor .*, got list"),
        ({"beam_scores": torch.zeros(2, 4)}, ValueError, r"beam_scores: .*\(2, 3\), got \(2, 4\)"),
        ({"beam_scores": torch.zeros(2, 3).double()}, TypeError, "beam_scores: expected dtype"),
        ({"top_k": 0}, ValueError, "top_k: expected at least 1, got 0"),
        ({"top_k": "2"}, TypeError, "top_k: expected an int, got str"),
        ({"draft_to_target": torch.arange(4)}, ValueError, r"draft_to_target: .*\(5\), got \(4,\)"),
        ({"draft_to_target": torch.arange(5).int()}, TypeError, "draft_to_target: expected dtype"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_arguments_are_named(change, error, message):
    with pytest.raises(error, match=message):
        e2.expand_topk(**(EXPAND | change))


@pytest.mark.parametrize(
    ("draft_to_target", "message"),
    [
        (
            torch.tensor([4, 1, 2, 2, 4]),
            r"draft_to_target\[3\]: expected distinct target ids, got 2, which "
            r"draft_to_target\[2\] is too \(2 repeated in all\)",
        ),
        (torch.tensor([0, 1, -2, 3, 4]), r"draft_to_target\[2\]: expected a value from 0"),
    ],
    ids=["repeated", "negative"],
)
def test_a_bad_vocabulary_map_is_found_by_validation(draft_to_target, message):
    with pytest.raises(ValueError, match=message):
        e2.expand_topk(**(EXPAND | {"draft_to_target": draft_to_target}), validate=True)


def test_beam_scores_that_are_no_log_probabilities_are_found_by_validation():
    good = torch.tensor([[0.0, NEG_INF, float("nan")]] * 2)
    e2.expand_topk(**(EXPAND | {"beam_scores": good}), validate=True)
    scores = torch.tensor([[0.0, -1.0, -2.0], [-1.0, 0.3, 0.5]])
    with pytest.raises(ValueError, match=r"beam_scores\[1, 1\]: .* from -inf to .*, got 0\.3"):
        e2.expand_topk(**(EXPAND | {"beam_scores": scores}), validate=True)


def test_gradients_are_refused_in_grad_mode_only():
    logits = torch.zeros(1, 1, 4, requires_grad=True)
    with pytest.raises(ValueError, match="logits: expected a tensor that does not require grad"):
        e2.expand_topk(logits, torch.zeros(1, 1), 2)
    with torch.no_grad():
        e2.expand_topk(logits, torch.zeros(1, 1), 2)


EXTEND = {
    "candidate_parents": torch.zeros(1, 6, dtype=torch.int32),
    "draft_mask": torch.zeros(1, 2, 1, dtype=torch.int64),
    "beam": torch.zeros(1, 2, dtype=torch.int64),
    "level": 1,
}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"candidate_parents": torch.zeros(1, 5, dtype=torch.int32)}, ValueError, "at least 6"),
        ({"candidate_parents": torch.zeros(1, 6)}, TypeError, "candidate_parents: expected dtype"),
        ({"draft_mask": torch.zeros(1, 2, dtype=torch.int64)}, ValueError, "draft_mask: expected"),
        ({"beam": torch.zeros(1, 3, dtype=torch.int64)}, ValueError, "beam: expected shape"),
        ({"beam": i32([[0, 0]])}, TypeError, "beam: expected dtype int64, got int32"),
        ({"level": -1}, ValueError, "level: expected at least 0, got -1"),
        (
            {
                "candidate_parents": torch.zeros(1, 6, dtype=torch.int32).expand(2, 6),
                "draft_mask": torch.zeros(2, 2, 1, dtype=torch.int64),
                "beam": torch.zeros(2, 2, dtype=torch.int64),
            },
            ValueError,
            "candidate_parents: expected a tensor to write to",
        ),
        # level * K^2 is 0 modulo 2^64
        ({"level": 2**62}, ValueError, "candidate_parents: expected at least"),
        (
            {
                "draft_mask": torch.zeros(1, 0, 1, dtype=torch.int64),
                "beam": torch.zeros(1, 0, dtype=torch.int64),
            },
            ValueError,
            "draft_mask: expected K of at least 1",
        ),
        (
            {
                "level": 33,
                "candidate_parents": torch.zeros(1, 134, dtype=torch.int32),
            },
            ValueError,
            "draft_mask: expected at least 2 words for level 33",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_arguments_of_extend_are_named(change, error, message):
    with pytest.raises(error, match=message):
        e2.extend_draft_tree(**(EXTEND | change))
