"""The floors: the formulas of bench/costs.py against a count over real arguments and results."""

import csv
import importlib
import sys
from pathlib import Path

import pytest
import torch
from cases import ATTENTION_CASES, attention_inputs, visibility
from test_ops import BY_NAME, as_tuple, example, overload

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(scope="module", autouse=True)
def bench():
    sys.path.insert(0, str(BENCH))
    yield
    sys.path.remove(str(BENCH))


def load(name):
    return importlib.import_module(name)


def nbytes(*values):
    """Bytes of all tensors in these."""
    tensors = [t for t in torch.utils._pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]
    return sum(t.nbytes for t in tensors)


def counted(name):
    """All arguments in, all results out: what an op that reads everything once moves."""
    args, kwargs = example(name)
    return nbytes(args, kwargs), nbytes(as_tuple(overload(name)(*args, **kwargs)))


def test_expand_topk_reads_its_logits_and_of_the_map_what_it_keeps():
    read, written = counted("expand_topk")
    table = example("expand_topk")[0][3]
    cost = load("costs").expand_topk(2, 3, 11, 4, 4, mapped=True)
    assert cost.bytes == read - table.nbytes + 8 * 11 + written


@pytest.mark.parametrize("level", [0, 2])
def test_extend_draft_tree(level):
    b, k, words = 2, 3, 2
    parents = torch.zeros(b, k + 4 * k * k, dtype=torch.int32)
    beam, mask = torch.zeros(b, k, dtype=torch.int64), torch.zeros(b, k, words, dtype=torch.int64)
    before = parents.fill_(-9).clone()
    out = overload("extend_draft_tree")(parents, mask, beam, level)
    written = 4 * int((parents != before).sum()) + out.nbytes
    read = beam.nbytes + mask.nbytes if level else 0
    assert load("costs").extend_draft_tree(b, k, level, words).bytes == read + written


def test_build_tree_reads_only_the_tokens_it_keeps():
    args, _ = example("build_tree")
    root, prefix, tokens, scores, parents, nodes, _ = args
    written = nbytes(overload("build_tree")(root, prefix, tokens, scores, parents, nodes))
    read = nbytes(root, prefix, scores, parents) + 2 * 8 * (nodes - 1)
    assert load("costs").build_tree(2, tokens.shape[1], nodes).bytes == read + written


def test_build_tree_from_marginals_looks_at_two_entries_a_node():
    root, prefix, tokens, log_probs, nodes, _ = example("build_tree_from_marginals")[0]
    written = nbytes(overload("build_tree_from_marginals")(root, prefix, tokens, log_probs, nodes))
    read = nbytes(root, prefix) + 2 * (4 * 2 * nodes + 8 * (nodes - 1))
    cost = load("costs").build_tree_from_marginals(2, *tokens.shape[1:], nodes)
    assert cost.bytes == read + written


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("flatten_tree", (2, 5)),
        ("retrieve_indices", (2, 5, 2)),
        ("merge_attention_states", (2 * 5 * 4, 8, 4)),
        ("verify_tree", (2, 5, 2)),
    ],
)
def test_ops_that_move_all_they_are_given(name, sizes):
    assert getattr(load("costs"), name)(*sizes).bytes == sum(counted(name))


def test_mask_words():
    assert load("costs").tree_mask_words(3, 70).bytes == sum(counted("pack_tree_mask"))
    # One row of two words, of which the second has 6 keys.
    assert load("costs").tree_mask_words(1, 70).bytes == sum(counted("unpack_tree_mask"))


@pytest.mark.parametrize("case", ATTENTION_CASES[::3], ids=lambda c: c.name)
def test_tree_attention_counts_the_keys_that_are_seen(case):
    inputs = attention_inputs(case, torch.float32)
    seen = visibility(inputs)
    (heads, kv_heads), dim, dim_v = case.heads, case.head_dim, case.v_dim or case.head_dim
    lens = inputs.prefix_lens.tolist()
    keys = sum(length + case.nodes for length in lens)
    read = 4 * keys * kv_heads * (dim if case.latent else dim + dim_v)
    words = 8 * case.batch * case.nodes * ((case.nodes + 63) // 64)
    out = torch.empty(case.batch, case.nodes, heads, dim_v)
    cost = load("costs").tree_attention(
        lens,
        case.nodes,
        case.heads,
        dim,
        dim_v,
        4,
        seen=int(seen.sum()),
        latent=case.latent,
    )
    assert cost.bytes == read + nbytes(inputs.q, inputs.prefix_lens, out) + words
    products = sum((dim + dim_v) * int(row.sum()) for row in seen.flatten(0, 1))
    assert cost.flops == 2 * heads * products


def test_only_visited_rows_are_priced():
    args, kwargs = example("sample_tokens")
    logits, mask = args[0], kwargs["allowed_mask"]
    rows = logits.shape[0] * logits.shape[1]
    cost = load("costs").sample_rows(rows, logits.shape[2], 4, filtered=True, masked=True)
    tokens = overload("sample_tokens")(*args, **kwargs)
    assert cost.bytes == nbytes(logits, args[1], mask, tokens)
    one = load("costs").sample_rows(1, logits.shape[2], 4)
    assert one.bytes == 4 * logits.shape[2] + 16
    probabilities = load("costs").token_logprobs(4, 9, 4)
    assert probabilities.bytes == 4 * 9 * 4 + nbytes(
        example("token_logprobs")[0][1:], torch.empty(4)
    )


def test_moves_are_a_read_and_a_write_of_each_row():
    (caches, index, lengths, prefix), _ = example("compact_kv")
    before = [c.clone() for c in caches]
    overload("compact_kv")(caches, index, lengths, prefix)
    changed = sum(int((a != b).any(-1).any(-1).sum()) for a, b in zip(caches, before, strict=True))
    assert changed == 2
    assert load("costs").compact_kv(1, 2, 2, 8, 4).bytes == changed * 2 * caches[0][0, 0].nbytes
    (k_cache, _, k, v, _, counts), _ = example("write_kv")
    stored = nbytes(*(t[b, :n] for t in (k, v) for b, n in enumerate(counts.tolist())))
    cost = load("costs").write_kv(int(counts.sum()), 2, 8, 8, 4)
    assert cost.bytes == 2 * stored and k_cache.shape[2:] == (2, 8)


def test_process_logits_edits_in_place():
    args, kwargs = example("process_logits")
    cost = load("costs").process_logits(2, 5, 9, 4, counts=True, prompt=True)
    history = kwargs["output_counts"], kwargs["prompt_mask"]
    assert cost.bytes == 2 * args[0].nbytes + nbytes(history)


def test_every_timed_shape_is_an_operator_with_a_price():
    shapes = load("shapes").SHAPES
    priced = {shape.op.removesuffix("_out") for shape in shapes}
    assert {f"{name}_out" if name == "tree_attention" else name for name in priced} <= set(BY_NAME)
    for shape in shapes:
        cost = shape.cost()
        assert cost.bytes > 0 and len(f"{shape.op}{shape}") < 80
    assert len({(s.op, str(s)) for s in shapes}) == len(shapes)


def test_a_floor_is_the_slowest_of_three(capsys, tmp_path):
    roofline, costs = load("roofline"), load("costs")
    card = roofline.Card(bandwidth=10.0, matrix=100.0, vector=1.0, source="")
    assert card.floor(costs.Cost(30, 200, 1)) == 3.0
    assert card.floor(costs.Cost(10, 200, 1)) == 2.0
    assert card.floor(costs.Cost(10, 100, 7)) == 7.0
    assert card.floor(costs.Cost(10, 200, 1), matrix_units=False) == 200.0
    assert roofline.card_named("NVIDIA H200") is roofline.CARDS["H200"]
    assert roofline.card_named("NVIDIA GeForce RTX 4090") is roofline.CARDS["RTX 4090"]
    assert roofline.card_named("NVIDIA A100-SXM4-80GB") is roofline.CARDS["A100"]
    assert roofline.card_named("Tesla V100") is None
    roofline.main(["--cases", "--csv", str(tmp_path / "floors.csv")])
    with (tmp_path / "floors.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(load("shapes").SHAPES) + len(ATTENTION_CASES)
    committed = (BENCH / "results" / "roofline.csv").read_text()
    again = "run `python bench/roofline.py --cases --csv bench/results/roofline.csv`"
    assert (tmp_path / "floors.csv").read_text() == committed, again
    # By hand: 2.567 MB at 3.35 TB/s.
    row = next(r for r in table if r["shape"] == "B1-P10-V128256-K10")
    assert float(row["H100 floor_us"]) == pytest.approx(0.766, abs=1e-3)
    out = capsys.readouterr().out
    assert all(card.source in out for card in roofline.CARDS.values())
