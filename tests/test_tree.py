"""DraftTree: listing its paths, and the check that states its invariants."""

import math

import pytest
import torch

from eagle2_kernels import DraftTree, reference
from eagle2_kernels.tree import check_tree


def make_tree() -> DraftTree:
    """root -> (a: 10, b: 11); a -> (c: 12, d: 13); one padding slot."""
    tokens = torch.tensor([[10, 11, 12, 13]])
    scores = torch.tensor([[0.6, 0.3, 0.3, 0.12]]).log()
    parents = torch.tensor([[-1, -1, 0, 0]], dtype=torch.int32)
    return DraftTree(
        *reference.build_tree(
            torch.tensor([5]), torch.tensor([7], dtype=torch.int32), tokens, scores, parents, 6
        )
    )


def test_paths_list_leaves_by_probability():
    (paths,) = make_tree().paths()
    assert [p.tokens for p in paths] == [[11], [10, 12], [10, 13]]
    assert [p.depth for p in paths] == [1, 2, 2]
    assert paths[0].probability == pytest.approx(0.3)
    assert paths[2].probability == pytest.approx(0.12)


def test_paths_of_every_node():
    (paths,) = make_tree().paths(leaves_only=False)
    assert [p.slots for p in paths] == [[1], [2], [1, 3], [1, 4]]


def test_a_built_tree_keeps_the_invariants():
    check_tree(make_tree(), torch.tensor([7]))


@pytest.mark.parametrize(
    ("field", "index", "value"),
    [
        ("parents", 3, 4),
        ("parents", 0, 0),
        ("depths", 3, 1),
        ("position_ids", 2, 99),
        ("first_child", 0, 2),
        ("next_sibling", 1, -1),
        ("tree_mask", 3, 1),
        ("scores", 5, 0.0),
        ("draft_tokens", 2, 10),
        ("draft_tokens", 5, 3),
    ],
)
def test_a_broken_invariant_is_named(field, index, value):
    tree = make_tree()
    getattr(tree, field).view(-1)[index] = value
    with pytest.raises(ValueError, match=field if index != 5 else "padding slot"):
        check_tree(tree, torch.tensor([7]))


def test_shapes_are_checked_first():
    tree = make_tree()
    with pytest.raises(ValueError, match=r"tree_mask: expected shape \(1, 6, 1\), got \(1, 6, 2\)"):
        check_tree(tree._replace(tree_mask=tree.tree_mask.repeat(1, 1, 2)))


def test_probabilities_are_sums_of_logs_not_products():
    deep = 400
    tokens = torch.ones(1, deep, dtype=torch.int64)
    scores = torch.arange(1, deep + 1)[None] * math.log(1e-3)
    parents = torch.arange(-1, deep - 1, dtype=torch.int32)[None]
    tree = DraftTree(
        *reference.build_tree(
            torch.tensor([5]), torch.zeros(1, dtype=torch.int32), tokens, scores, parents, deep + 1
        )
    )
    assert int(tree.num_nodes) == deep + 1
    assert torch.isfinite(tree.scores).all()
