"""Choosing and building: one test per line of the table, named by its slug."""

import ast
from pathlib import Path

import pytest
import torch
from cases import FLOATS
from growth import candidate_count, grow, hashed_head

import eagle2_kernels as ek

INF, NAN = float("inf"), float("nan")
ROOT = Path(__file__).parents[2]


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def build(kernels, scores, parents, max_nodes, tokens=None, **options):
    """The tree of one request, root 9 behind 5 tokens; candidate c has token 10 + c."""
    count = len(scores)
    tokens = torch.arange(10, 10 + count) if tokens is None else torch.tensor(tokens)
    tree = kernels.build_tree(
        torch.tensor([9]),
        i32(5),
        tokens[None],
        torch.tensor(scores)[None],
        i32(*parents)[None],
        max_nodes,
        **options,
    )
    return ek.DraftTree(*tree[:9])


def ids(tree, request=0):
    """Tokens and parents of the slots in use."""
    n = int(tree.num_nodes[request])
    return tree.draft_tokens[request, :n].tolist(), tree.parents[request, :n].tolist()


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
def test_ties_take_the_lowest_index(kernels, dtype):
    tokens, _, beam, *_ = kernels.expand_topk(
        torch.zeros(1, 1, 64, dtype=dtype), torch.zeros(1, 1), 4
    )
    assert tokens.tolist() == beam.add(0).tolist() == [[0, 1, 2, 3]]
    # Few distinct values in a long row: as a stable sort has them, on both sides of a chunk's end.
    generator = torch.Generator().manual_seed(3)
    logits = torch.randint(-3, 3, (2, 3, 2100), generator=generator).to(dtype)
    want = torch.sort(logits, dim=-1, descending=True, stable=True).indices[..., :5]
    tokens, scores, beam, *_ = kernels.expand_topk(logits, torch.zeros(2, 3), 5)
    assert torch.equal(tokens.view(2, 3, 5), want)
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :5]
    assert torch.equal(beam, order)
    # The same across rows, in the re-rank and in the argmax.
    assert ids(build(kernels, [-1.0] * 6, [-1] * 6, 4))[0] == [9, 10, 11, 12]
    positions = torch.zeros(2, 3, dtype=torch.int64)
    assert torch.equal(
        kernels.sample_tokens(logits, positions, torch.zeros(2).long()), want[..., 0]
    )


def test_ties_take_the_lowest_index_of_independent_positions(kernels):
    """Equal prefixes: the shallower, then the better ranked, first."""
    log_probs, tokens = torch.zeros(1, 3, 2), torch.arange(6).view(1, 3, 2) + 10
    for nodes, want in ((2, [10]), (3, [10, 11]), (4, [10, 11, 12]), (6, [10, 11, 12, 12, 13])):
        tree = kernels.build_tree_from_marginals(
            torch.tensor([9]), i32(5), tokens, log_probs, nodes
        )
        assert ids(ek.DraftTree(*tree[:9]))[0] == [9, *want]


def test_ties_take_the_lowest_index_of_a_top_k_filter(kernels):
    """Ids past the k-th of equal logits are never drawn."""
    draws = kernels.sample_tokens(
        torch.zeros(1, 1, 64).expand(200, 1, 64),
        torch.arange(200)[:, None],
        torch.zeros(200).long(),
        temperature=torch.ones(200),
        top_k=torch.full((200,), 4, dtype=torch.int32),
    )
    assert draws.unique().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
def test_nan_draft_scores(kernels, dtype):
    logits = torch.tensor([[[NAN, 1.0, INF, NAN, -INF, 0.0], [NAN] * 6]], dtype=dtype)
    tokens, scores, beam, beam_tokens, _, rows = kernels.expand_topk(
        logits, torch.tensor([[-0.5, -0.1]]), 4
    )
    # +inf is the largest finite value; NaN and -inf are no candidates
    assert tokens.tolist() == [[2, *tokens[0, 1:3].tolist(), 0, 0, 0, 0, 0]]
    assert scores[0, 0] == -0.5 and scores[0, 3:].eq(-INF).all() and not scores.isnan().any()
    assert sorted(beam[0].tolist()) == beam[0].tolist() == [0, 1, 2, 3]
    assert beam_tokens[0, 0] == 2 and rows.tolist() == [[0, 0, 0, 0]]
    # A parent without a score has no children.
    _, scores, *_ = kernels.expand_topk(
        torch.zeros(1, 2, 6, dtype=dtype), torch.tensor([[NAN, -INF]]), 4
    )
    assert scores.eq(-INF).all()


def test_nan_draft_scores_in_the_rerank(kernels):
    tree = build(kernels, [NAN, -1.0, -0.5, -2.0, -INF], [-1, -1, 0, 1, 1], 6)
    assert ids(tree) == ([9, 11, 13], [-1, 0, 1])
    # Its own parent, a later one, none at all, one past the row.
    tree = build(kernels, [-1.0] * 6, [0, 2, -1, -2, 6, 2**31 - 1], 7)
    assert ids(tree) == ([9, 12], [-1, 0])


def test_nan_draft_scores_of_independent_positions(kernels):
    # NaN ends the choices of its position; what lies behind a NaN position is out of reach
    log_probs = torch.tensor([[[-0.5, NAN, -0.1], [-1.0, -2.0, -INF], [NAN, -0.1, -0.1]]])
    tokens = torch.arange(9).view(1, 3, 3) + 10
    tree = kernels.build_tree_from_marginals(torch.tensor([9]), i32(5), tokens, log_probs, 8)
    tree = ek.DraftTree(*tree[:9])
    assert ids(tree) == ([9, 10, 13, 14], [-1, 0, 1, 1])
    assert tree.scores[0, :4].tolist() == [0.0, -0.5, -1.5, -2.5]


def test_nan_draft_scores_leave_walks_bounded(kernels):
    # 1 is its own parent, 2 and 3 are each other's, 5 hangs under them
    parents = i32(-1, 1, 3, 2, 0, 3)[None]
    depths, positions, child, sibling, mask = kernels.flatten_tree(parents, i32(6), i32(7))
    assert depths.tolist() == [[0, -1, -1, -1, 1, -1]]
    assert positions.tolist() == [[7, 7, 7, 7, 8, 7]]
    assert child.tolist() == [[4, -1, -1, -1, -1, -1]] and sibling.eq(-1).all()
    assert mask.flatten().tolist() == [1, 0, 0, 0, 17, 0]
    assert kernels.retrieve_indices(parents, i32(6), 3)[0].tolist() == [
        [0, 4, -1, -1], *[[-1] * 4] * 5
    ]  # fmt: skip
    # Links that loop, and links out of range.
    looping = i32(1, 1, 2)[None], i32(-1, 2, 1)[None]
    index, length, _ = kernels.verify_tree(
        torch.tensor([[4, 8, 8]]), torch.tensor([[9, 5, 6]]), *looping, 3
    )
    assert (index.tolist(), length.tolist()) == ([[0, -1, -1, -1]], [0])
    # A path that runs in a circle ends at max_depth.
    index, length, _ = kernels.verify_tree(
        torch.tensor([[5, 5, 5]]), torch.tensor([[9, 5, 6]]), *looping, 3
    )
    assert (index.tolist(), length.tolist()) == ([[0, 1, 1, 1]], [3])
    # A child one past the row, where the next request's root carries the token.
    first, sibling = i32(3, -1, -1, -1, -1, -1).view(2, 3), i32(*[-1] * 6).view(2, 3)
    index, length, bonus = kernels.verify_tree(
        torch.full((2, 3), 5), torch.tensor([[9, 5, 5], [5, 5, 5]]), first, sibling, 3
    )
    assert index.tolist() == [[0, -1, -1, -1]] * 2
    assert (length.tolist(), bonus.tolist()) == ([0, 0], [5, 5])


def test_child_without_its_parent(kernels):
    # Candidates 1 and 2 tie; 2 is the child of 1.
    assert ids(build(kernels, [-2.0, -1.0, -1.0], [-1, -1, 1], 2)) == ([9, 11], [-1, 0])
    # A child that looks better than its parent waits for it, however the rest fares.
    scores, parents = [-0.4, -3.0, -0.1, -0.5], [-1, -1, 1, 0]
    assert ids(build(kernels, scores, parents, 2)) == ([9, 10], [-1, 0])
    assert ids(build(kernels, scores, parents, 3)) == ([9, 10, 13], [-1, 0, 1])
    assert ids(build(kernels, scores, parents, 4)) == ([9, 10, 11, 13], [-1, 0, 0, 1])
    assert ids(build(kernels, scores, parents, 5)) == ([9, 10, 11, 12, 13], [-1, 0, 0, 2, 1])
    # A child that looks worse keeps its own score.
    assert ids(build(kernels, [-0.8, -1.0, -0.9], [-1, 0, -1], 3)) == ([9, 10, 12], [-1, 0, 0])
    # The rule reaches through several levels.
    assert ids(build(kernels, [-9.0, -1.0, -1.0, -2.0], [-1, 0, 1, -1], 2)) == ([9, 13], [-1, 0])


def test_log_probabilities_are_added(kernels):
    # Products of these would be 0 in float32 from the fifth level on, and all levels tie.
    logits = torch.tensor([[[0.0, -25.0], [-25.0, 0.0]]])
    tokens, scores, beam, *_ = kernels.expand_topk(logits, torch.tensor([[-250.0, -225.0]]), 2)
    assert tokens.tolist() == [[0, 1, 1, 0]]
    torch.testing.assert_close(scores, torch.tensor([[-250.0, -275.0, -225.0, -250.0]]))
    assert beam.tolist()[0][0] == 2
    assert scores[0, 1] < scores[0, 0]
    chain = [-30.0 * (i + 1) for i in range(8)]
    tree = build(kernels, chain, range(-1, 7), 9)
    assert ids(tree) == ([9, *range(10, 18)], [-1, *range(8)])
    assert tree.scores[0, 1:].tolist() == chain
    assert ids(build(kernels, [-500.0, -499.0], [-1, -1], 2))[0] == [9, 11]


def test_parent_lookup_past_its_row(kernels):
    # Row 0's last candidates name what would be row 1's; row 1's name what would be row 0's.
    parents = i32(-1, 0, 3, 4, -1, 0, -2, -4).view(2, 4)
    tokens = torch.arange(8).view(2, 4) + 10
    tree = ek.DraftTree(
        *kernels.build_tree(
            torch.tensor([9, 8]), i32(5, 5), tokens, torch.full((2, 4), -1.0), parents, 5
        )[:9]
    )
    assert ids(tree, 0) == ([9, 10, 11], [-1, 0, 1])
    assert ids(tree, 1) == ([8, 14, 15], [-1, 0, 1])
    assert tree.parents[:, 3:].eq(-1).all() and tree.tree_mask[:, 3:].eq(0).all()
    rows = i32(-1, 0, 3, 0, -1, 0, -1, 1).view(2, 4)
    depths, *_ = kernels.flatten_tree(rows, i32(3, 4), i32(5, 5))
    assert depths.tolist() == [[0, 1, -1, 0], [0, 1, -1, 2]]
    # The frontier's parents come from the level before, and from nowhere else.
    candidates = torch.full((1, 2 + 4 + 4), -7, dtype=torch.int32)
    mask = torch.tensor([[[1], [2]]])
    got = kernels.extend_draft_tree(candidates, mask, torch.tensor([[3, 4]]), 2)
    assert candidates.tolist() == [[-7] * 6 + [2 + 3, 2 + 3, -2, -2]]
    assert got.tolist() == [[[2 | 4], [8]]]


@pytest.mark.parametrize("nodes", [1, 2, 31, 32, 33, 59, 60, 63, 64, 65, 128, 129])
def test_word_boundaries_of_packed_masks(kernels, nodes):
    words = (nodes + 63) // 64
    tree = build(kernels, [-float(i) for i in range(1, nodes)], range(-1, nodes - 2), nodes)
    assert tree.tree_mask.shape == (1, nodes, words)
    rows = kernels.unpack_tree_mask(tree.tree_mask, nodes)
    assert torch.equal(rows[0], torch.ones(nodes, nodes).tril().bool())
    assert torch.equal(kernels.pack_tree_mask(rows), tree.tree_mask)
    star = build(kernels, [-1.0] * (nodes - 1), [-1] * (nodes - 1), nodes)
    want = torch.eye(nodes, dtype=torch.bool)
    want[:, 0] = True
    assert torch.equal(kernels.unpack_tree_mask(star.tree_mask, nodes)[0], want)
    assert star.next_sibling[0].tolist() == [-1, *range(2, nodes), -1][:nodes]


def test_word_boundaries_of_packed_masks_of_the_draft(kernels):
    """A frontier of 33 rows: the third level's slots lie in the first two words."""
    k = 33
    parents = torch.zeros(1, candidate_count(k, 3), dtype=torch.int32)
    mask = torch.zeros(1, k, 2, dtype=torch.int64)
    beam = torch.arange(k).flip(0)[None]
    mask = kernels.extend_draft_tree(parents, mask, beam, 0)
    assert parents[0, :k].eq(-1).all() and mask.eq(0).all()
    mask = kernels.extend_draft_tree(parents, mask, beam, 1)
    assert parents[0, k : 2 * k].eq(k - 1).all()
    beam = torch.arange(k)[None] * k
    mask = kernels.extend_draft_tree(parents, mask, beam, 2)
    rows = kernels.unpack_tree_mask(mask, 2 * k)[0]
    assert [row.nonzero().flatten().tolist() for row in rows] == [[j, k + j] for j in range(k)]
    assert parents[0, k + k * k + 1] == k and parents[0, -1] == k + (k - 1) * k


@pytest.mark.parametrize("max_depth", [1, 2, 6])
def test_degenerate_trees(kernels, max_depth):
    """K = 1 is the greedy chain; one level is a star."""
    vocab = 50
    head = hashed_head(vocab, seed=7)
    tree = ek.DraftTree(
        *kernels.build_tree(torch.tensor([3]), i32(2), *grow(head, 1, max_depth), max_depth + 1)[:9]
    )
    path = []
    for level in range(max_depth):
        path.append(int(head(level, [path])[0].argmax()))
    assert ids(tree) == ([3, *path], [-1, *range(max_depth)])
    if max_depth > 1:
        return
    star = ek.DraftTree(*kernels.build_tree(torch.tensor([3]), i32(2), *grow(head, 5, 1), 6)[:9])
    best = head(0, [[]])[0].topk(5).indices.tolist()
    assert ids(star) == ([3, *best], [-1, 0, 0, 0, 0, 0])
    for slot, token in enumerate(best, start=1):
        target = torch.tensor([[token, 1, 1, 1, 1, 1]])
        got = kernels.verify_tree(target, star.draft_tokens, star.first_child, star.next_sibling, 1)
        assert [x.tolist() for x in got] == [[[0, slot]], [1], [1]]


def test_degenerate_trees_side_by_side(kernels):
    """A chain, a star and a root alone in one batch: nothing of one shows in the next."""
    parents = i32(-1, 0, 1, 2, -1, 0, 0, 0, -1, -1, -1, -1).view(3, 4)
    paths = kernels.retrieve_indices(parents, i32(4, 4, 1), 3)
    chain, star, root = ([row for row in rows if row != [-1] * 4] for rows in paths.tolist())
    assert chain == [[0, 1, 2, 3]]
    assert star == [[0, slot, -1, -1] for slot in (1, 2, 3)]
    assert root == [[0, -1, -1, -1]]


KERNEL_FILES = sorted((ROOT / "triton_kernels").glob("*.py"))


def jit_functions(path):
    """Functions a module compiles for the GPU."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            names = [ast.unparse(d) for d in node.decorator_list]
            if any(name.startswith("triton.jit") for name in names):
                yield node


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda p: p.stem)
def test_green_interpreter_is_not_a_green_gpu(path):
    """What the interpreter lets pass is not written, and every kernel is compiled for real too."""
    table = (ROOT / "triton_kernels" / "launch.py").read_text()
    assert "expected a power of two of at least 16" in table, "the smallest tile of tl.dot"
    for kernel in jit_functions(path):
        text = ast.unparse(kernel)
        assert "tl.sort" not in text, "loses elements beside NaN"
        assert "make_block_ptr" not in text, "addresses of 32 bits"
        if kernel.name.startswith("_"):
            continue  # inlined in the others
        assert f'"{kernel.name}"' in table, "no ahead-of-time compilation"
        # What is multiplied by a stride is 64 bits wide by then.
        wide, narrow = wide_names(kernel), []
        for node in ast.walk(kernel):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                sides = [ast.unparse(node.left), ast.unparse(node.right)]
                if sides[1] in STRIDES and not is_wide(sides[0], wide):
                    narrow.append(" * ".join(sides))
        assert not narrow


STRIDES = {
    f"{tensor}_{dim}"
    for tensor in (
        "q k v kc vc a b o la lb lo out lse mask depths table prefix lengths indptr logits beam "
        "draft parents nodes prompt counts bias value record tokens slots"
    ).split()
    for dim in "batch parent parents token row head page slot word entry dim node".split()
} | {"sinks_head"}


def is_wide(expression, wide):
    tree = ast.parse(expression)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load":
            node.args, node.keywords = [], []  # a wide address makes no wide value
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    return ".to(tl.int64)" in expression or bool(names & wide)


def wide_names(kernel):
    """Names a kernel assigns 64-bit values to: widened, or computed from such a name."""
    wide = set()
    for node in ast.walk(kernel):
        if isinstance(node, ast.Assign):
            targets = ast.walk(ast.Tuple(node.targets, ast.Store()))
            names = {n.id for n in targets if isinstance(n, ast.Name)}
            wide = wide | names if is_wide(ast.unparse(node.value), wide) else wide - names
    return wide
