"""SGLang's operators over ours: their arguments, their in-place writes, their published cases."""

import itertools
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle2_kernels.integrations import sglang

ENGINE = json.loads((Path(__file__).parent / "data" / "engine_cases.json").read_text())
MALFORMED = ENGINE["build_tree_malformed"]
MODES = list(sglang.TreeMaskMode)
DTYPES = [torch.int32, torch.int64]


def integers(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


def item_bytes(n):
    """Bytes of a bit-packed row: SGLang's 1, 2 or 4, whole words beyond."""
    return 1 if n <= 8 else 2 if n <= 16 else 4 if n <= 32 else 8 * ((n + 63) // 64)


def mask_buffer(n, seq_lens, mode):
    """A buffer for the mask, every place of it wrong."""
    if mode == sglang.TreeMaskMode.QLEN_ONLY_BITPACKING:
        return torch.full((len(seq_lens) * n * item_bytes(n),), 0xA5, dtype=torch.uint8)
    if mode == sglang.TreeMaskMode.QLEN_ONLY:
        return torch.rand(len(seq_lens) * n * n) < 0.5
    return torch.rand(sum((s + n) * n for s in seq_lens)) < 0.5


def decode_mask(buffer, n, seq_lens, mode):
    """Bool [B, n, n], and the prefix columns that a full mask has besides."""
    b = len(seq_lens)
    if mode == sglang.TreeMaskMode.QLEN_ONLY:
        return buffer.view(b, n, n), []
    if mode == sglang.TreeMaskMode.QLEN_ONLY_BITPACKING:
        bits = np.unpackbits(buffer.numpy(), bitorder="little").reshape(b, n, -1)
        assert not bits[:, :, n:].any(), "bits behind the last column"
        return torch.from_numpy(bits[:, :, :n].astype(bool)), []
    rows, prefixes, at = [], [], 0
    for length in seq_lens:
        block = buffer[at : at + n * (length + n)].view(n, length + n)
        rows.append(block[:, length:])
        prefixes.append(block[:, :length])
        at += block.numel()
    return torch.stack(rows), prefixes


def build(parent_list, selected, seq_lens, top_k, depth, mode, dtype=torch.int64):
    """(mask [B, n, n], positions, retrieve_index, next_token, next_sibling), outputs poisoned."""
    b, n = len(selected), len(selected[0]) + 1
    mask = mask_buffer(n, seq_lens, mode)
    before = decode_mask(mask.clone(), n, seq_lens, mode)[1] if mode == 0 else []
    positions = torch.full((b * n,), 77, dtype=dtype)
    index, child, sibling = torch.full((3, b, n), 77, dtype=dtype)
    sglang.build_tree_kernel_efficient(
        integers(parent_list, dtype).view(b, -1),
        integers(selected, dtype).view(b, n - 1),
        integers(seq_lens, dtype),
        mask,
        positions,
        index,
        child,
        sibling,
        top_k,
        depth,
        n,
        int(mode),
    )
    decoded, prefixes = decode_mask(mask, n, seq_lens, mode)
    for was, now in zip(before, prefixes, strict=True):
        assert torch.equal(was, now), "the prefix's columns belong to the caller"
    return decoded, positions, index, child, sibling


def expected_tree(parents, seq_len):
    """(mask, positions, first children, next siblings) of a whole tree, slot by slot."""
    n = len(parents)
    mask = torch.zeros(n, n, dtype=torch.bool)
    positions, child, sibling = [], [-1] * n, [-1] * n
    for slot in range(n):
        at = slot
        while at >= 0:
            mask[slot, at] = True
            at = parents[at]
        positions.append(seq_len + int(mask[slot].sum()) - 1)
        of_same = [s for s in range(slot + 1, n) if parents[s] == parents[slot] and slot]
        sibling[slot] = min(of_same, default=-1)
        child[slot] = min((s for s in range(n) if parents[s] == slot), default=-1)
    return mask, positions, child, sibling


def test_every_engine_case_is_used_here():
    named = {
        "_about",
        *(name for name in ENGINE if f'ENGINE["{name}"]' in Path(__file__).read_text()),
    }
    assert named == set(ENGINE)


@pytest.mark.parametrize("dtype", DTYPES, ids=["int32", "int64"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("case", MALFORMED["cases"], ids=lambda case: case["name"])
def test_malformed_trees_end_as_published(case, mode, dtype):
    want = case["derived"]
    mask, positions, index, child, sibling = build(
        case["parent_list"],
        case["selected_index"],
        MALFORMED["seq_lens"],
        MALFORMED["topk"],
        MALFORMED["depth"],
        mode,
        dtype,
    )
    assert mask.int().tolist() == want["tree_mask_qlen_only"]
    assert positions.tolist() == want["positions"]
    assert index.tolist() == want["retrieve_index"]
    assert child.tolist() == want["retrieve_next_token"]
    assert sibling.tolist() == want["retrieve_next_sibling"]
    assert positions.dtype == child.dtype == dtype
    weights = 1 << torch.arange(mask.shape[-1])
    assert (mask * weights).sum(-1).tolist() == want["bitpacked"]


def draft(b, top_k, steps, vocab, seed, scale=3.0):
    """Run the drafting half: the arguments of organize_draft_results, and probabilities by path."""
    g = torch.Generator().manual_seed(seed)
    lists = [], [], []
    hidden, scores, states = torch.arange(b).float()[:, None], None, None
    for i in range(steps):
        rows = b if i == 0 else b * top_k
        probs = torch.softmax(torch.randn(rows, vocab, generator=g) * scale, -1)
        p, ids = probs.topk(top_k)
        _, states, scores, info = sglang.select_top_k_tokens(
            i, p, ids, hidden if i == 0 else states, scores, top_k
        )
        assert torch.equal(states.view(b, top_k), torch.arange(b).float()[:, None].expand(b, top_k))
        for entries, entry in zip(lists, info, strict=True):
            entries.append(entry)
    return lists


@pytest.mark.parametrize(
    ("top_k", "steps", "n"),
    [
        *((1, 1, 2), (1, 5, 6), (4, 1, 5), (2, 3, 4), (4, 3, 17), (8, 5, 31), (8, 5, 32)),
        *((8, 5, 33), (10, 6, 63), (10, 6, 64), (10, 6, 65), (10, 7, 130)),
    ],
)
def test_a_drafted_tree_is_the_one_its_candidates_say(top_k, steps, n):
    b, seq_lens = 3, [5, 0, 12]
    scores, tokens, groups = draft(b, top_k, steps, 50, seed=n)
    parent_list, selected, chosen = sglang.organize_draft_results(scores, tokens, groups, n)
    flat = torch.cat([s.flatten(1) for s in scores], 1)
    assert torch.equal(selected, flat.topk(n - 1).indices.sort().values)
    assert torch.equal(chosen, torch.cat(tokens, 1).gather(1, selected))
    assert parent_list.shape == (b, top_k * (steps - 1) + 1 if steps > 1 else 0)
    for mode in MODES:
        mask, positions, index, child, sibling = build(
            parent_list.tolist(), selected.tolist(), seq_lens, top_k, steps, mode
        )
        assert index.flatten().tolist() == list(range(b * n))
        for r in range(b):
            ids = selected[r].tolist()
            parents = [-1]
            for c in ids:
                up = 0 if c < top_k else ids.index(int(parent_list[r, c // top_k])) + 1
                parents.append(up)
            want = expected_tree(parents, seq_lens[r])
            assert torch.equal(mask[r], want[0])
            assert positions[r * n : (r + 1) * n].tolist() == want[1]
            assert child[r].tolist() == want[2] and sibling[r].tolist() == want[3]


def test_frontier_of_a_later_step():
    """Two requests, K = 2: products, the best of them, whose parents' states go on."""
    scores = torch.tensor([[0.5, 0.25], [0.5, 0.5]])
    p = torch.tensor([[0.5, 0.25], [0.75, 0.25], [0.5, 0.5], [0.5, 0.5]])
    ids = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
    states = torch.arange(4.0)[:, None]
    tokens, states, best, info = sglang.select_top_k_tokens(2, p, ids, states, scores, 2)
    # 0.25 0.125 | 0.1875 0.0625, and four times 0.25: the first ones.
    assert tokens.tolist() == [1, 3, 5, 6]
    assert states.flatten().tolist() == [0, 1, 2, 2]
    assert best.tolist() == [[0.25, 0.1875], [0.25, 0.25]]
    assert torch.equal(info[0], (scores[:, :, None] * p.view(2, 2, 2)))
    assert info[1].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert info[2].tolist() == [[6, 8], [6, 7]]  # K + (i - 1) K^2 = 6
    without = sglang.select_top_k_tokens(2, p, ids, None, scores, 2)
    assert without[1] is None and torch.equal(without[0], tokens)


def test_a_candidate_is_never_chosen_without_its_parent():
    """Child as good as its parent, which loses the tie under a plain top-k; NaN is never chosen."""
    scores = [torch.tensor([[[0.25, 0.5]]]), torch.tensor([[[0.25, 0.0], [0.5, 0.5]]])]
    tokens = [torch.tensor([[1, 2]]), torch.tensor([[3, 4, 5, 6]])]
    groups = [torch.tensor([[-1, 0, 1]]), torch.tensor([[4, 5]])]
    _, chosen, ids = sglang.organize_draft_results(scores, tokens, groups, 4)
    assert chosen.tolist() == [[1, 4, 5]] and ids.tolist() == [[2, 5, 6]]
    scores[0][0, 0, 1] = torch.nan  # and so what hangs under it
    _, chosen, ids = sglang.organize_draft_results(scores, tokens, groups, 5)
    assert chosen.tolist() == [[0, 0, 2, 3]] and ids.tolist() == [[1, 1, 3, 4]]
    with pytest.raises(ValueError, match="num_draft_token: expected 1 to 7, got 8"):
        sglang.organize_draft_results(scores, tokens, groups, 8)
    with pytest.raises(ValueError, match="parents_list: expected 3 entries"):
        sglang.organize_draft_results(scores, tokens, [groups[1], groups[1]], 4)


def test_a_chain_deeper_than_the_steps_is_walked_that_far():
    """Candidates 0, 2, 4, 6 of K = 2, one under the other, after three steps."""
    mask, positions, _, child, sibling = build(
        [[-1, 0, 2, 4, 0]], [[0, 2, 4, 6]], [5], 2, 3, sglang.TreeMaskMode.QLEN_ONLY
    )
    assert positions.tolist() == [5, 6, 7, 8, 8]
    assert mask[0, 3].tolist() == [True] * 4 + [False]
    assert mask[0, 4].tolist() == [True, False, True, True, True]
    assert child.tolist() == [[1, 2, 3, 4, -1]] and sibling.tolist() == [[-1] * 5]


def test_hostile_candidates_stay_in_their_row():
    """Numbers out of every range: no read past a row, every output written, links in range."""
    g = torch.Generator().manual_seed(0)
    for trial in range(50):
        selected = torch.randint(-9, 30, (2, 7), generator=g)
        parent_list = torch.randint(-9, 40, (2, 9), generator=g)
        mask, positions, _, child, sibling = build(
            parent_list.tolist(), selected.tolist(), [3, 4], 4, 3, MODES[trial % 3]
        )
        depth = positions.view(2, 8) - integers([[3], [4]])
        assert depth.min() >= 0 and depth.max() <= 3
        assert mask[:, :, 0].all() and mask.diagonal(dim1=1, dim2=2).all()
        for links in (child, sibling):
            assert links.min() >= -1 and links.max() < 8


def test_bitpacked_items_too_small_are_refused():
    n, b = 33, 1
    arguments = [integers([[-1]]), torch.arange(n - 1)[None], integers([4])]
    outputs = [torch.zeros(b * n, dtype=torch.int64), *torch.zeros(3, b, n, dtype=torch.int64)]
    with pytest.raises(ValueError, match="33 items of the same size, 5 bytes or more, got 132"):
        sglang.build_tree_kernel_efficient(
            *arguments, torch.zeros(n, dtype=torch.uint32), *outputs, n, 1, n, 2
        )
    words = torch.zeros(n, 2, dtype=torch.int32)
    sglang.build_tree_kernel_efficient(*arguments, words, *outputs, n, 1, n, 2)
    assert words[:, 0].tolist() == [1, *(1 + 2**s for s in range(1, 31)), 1 - 2**31, 1]
    assert words[:, 1].tolist() == [0] * 32 + [1]


# verification


def outputs(b, width, total, dtype=torch.int32):
    return (
        torch.full((total,), -1, dtype=dtype),
        torch.full((b, width), -1, dtype=dtype),
        torch.full((b,), 9, dtype=dtype),
    )


@pytest.mark.parametrize("spelling", ["retrive", "retrieve"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["int32", "int64"])
def test_published_greedy_walk(dtype, spelling):
    case = ENGINE["verify_tree_greedy"]
    predicts, accept_index, accept_num = outputs(2, case["accept_width"], 12, dtype)
    sglang.verify_tree_greedy(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=accept_num,
        candidates=integers(case["candidates"], dtype),
        target_predict=integers(case["target_predict"], dtype),
        **{
            f"{spelling}_{name}": integers(case[f"retrieve_{name}"], dtype)
            for name in ("index", "next_token", "next_sibling")
        },
    )
    assert predicts.tolist() == case["expected"]["predicts"]
    assert accept_index.tolist() == case["expected"]["accept_index"]
    assert accept_num.tolist() == case["expected"]["accept_token_num"]


def test_two_spellings_of_one_argument_are_refused():
    with pytest.raises(TypeError, match="retrieve_index: expected one spelling"):
        sglang.verify_tree_greedy(retrive_index=1, retrieve_index=1)


def random_trees(b, n, vocab, seed):
    """Parents, links, tokens, and a shuffled retrieve_index."""
    g = torch.Generator().manual_seed(seed)
    parents = [
        [-1, *(int(torch.randint(0, s, (1,), generator=g)) for s in range(1, n))] for _ in range(b)
    ]
    links = [expected_tree(row, 0)[2:] for row in parents]
    child, sibling = (integers([pair[side] for pair in links]) for side in (0, 1))
    tokens = torch.randint(0, vocab, (b, n), generator=g)
    return parents, child, sibling, tokens, torch.randperm(b * n, generator=g).view(b, n), g


@pytest.mark.parametrize("seed", range(6))
def test_greedy_walk_against_the_rule(seed):
    b, n, width = 3, 20, 1 + 3 * seed % 7
    parents, child, sibling, tokens, index, g = random_trees(b, n, 3, seed)
    target = torch.randint(0, 3, (b * n,), generator=g)
    predicts, accept_index, accept_num = outputs(b, width, b * n)
    sglang.verify_tree_greedy(
        predicts, accept_index, accept_num, tokens, index, child, sibling, target
    )
    want_predicts = [-1] * (b * n)
    for r in range(b):
        path = [0]
        while True:
            wanted = int(target[index[r, path[-1]]])
            want_predicts[int(index[r, path[-1]])] = wanted
            good = [s for s in range(n) if parents[r][s] == path[-1] and tokens[r, s] == wanted]
            if not good or len(path) == width:
                break
            path.append(good[0])
        padded = index[r, path].tolist() + [-1] * (width - len(path))
        assert accept_index[r].tolist() == padded
        assert int(accept_num[r]) == len(path) - 1
    assert predicts.tolist() == want_predicts


@pytest.mark.parametrize("d", ENGINE["chain_identities"]["D"])
def test_published_chain_identities(d):
    rules = ENGINE["chain_identities"]["rules"]
    assert len(rules) == 5
    candidates, index = torch.arange(d)[None], torch.arange(d)[None]
    child = torch.tensor([[*range(1, d), -1]])
    sibling = torch.full((1, d), -1)
    target = torch.full((1, d), d)
    target[:, :-1] = candidates[:, 1:]
    for predict, accepted in ((target, d - 1), (torch.zeros(1, d, dtype=torch.int64), 0)):
        predicts, accept_index, accept_num = outputs(1, d, d)
        sglang.verify_tree_greedy(
            predicts, accept_index, accept_num, candidates, index, child, sibling, predict
        )
        assert accept_num.tolist() == [accepted]
    probs = torch.softmax(torch.randn(1, d, 16, generator=torch.Generator().manual_seed(d)), -1)
    for coin, thresholds in ((0.0, (0.0, 0.0)), (0.999, (0.0, 1.0))):
        predicts, accept_index, accept_num = outputs(1, d, d)
        sglang.tree_speculative_sampling_target_only(
            predicts,
            accept_index,
            accept_num,
            candidates,
            index,
            child,
            sibling,
            torch.full((1, d), coin),
            torch.zeros(1),
            probs,
            torch.zeros_like(probs),
            *thresholds,
        )
        assert accept_num.tolist() == [d - 1]
        assert accept_index.tolist() == [list(range(d))]
        assert predicts[:-1].tolist() == list(range(1, d))


def emitted(target, children, coin, final_coin, **kwargs):
    """The token of one step: a root with ``children``, all of them leaves; every row is target."""
    n, dtype = len(children) + 1, kwargs.pop("dtype", torch.float32)
    predicts, accept_index, accept_num = outputs(1, 2, n)
    sglang.tree_speculative_sampling_target_only(
        predicts,
        accept_index,
        accept_num,
        integers([[0, *children]]),
        torch.arange(n)[None],
        integers([[1 if children else -1] + [-1] * len(children)]),
        integers([[-1, *range(2, n), -1][:n]]),
        torch.full((1, n), coin, dtype=torch.float64),
        torch.full((1,), final_coin, dtype=torch.float64),
        torch.tensor(target, dtype=dtype).expand(1, n, -1),
        **kwargs,
    )
    accepted = int(accept_num)
    assert accept_index[0, 1].item() == (-1 if not accepted else predicts_slot(children, predicts))
    return int(predicts[0])


def predicts_slot(children, predicts):
    return children.index(int(predicts[0])) + 1


def law(target, children, **kwargs):
    """Exact law of the emitted token: the step is constant between the cells of a fine grid."""
    cells = 100
    found = torch.zeros(len(target), dtype=torch.float64)
    for i in range(cells):
        coin = (i + 0.5) / cells
        first = emitted(target, children, coin, 0.0, dtype=torch.float64, **kwargs)
        if first in children:
            found[first] += 1 / cells
            continue
        for j in range(20):
            found[emitted(target, children, coin, (j + 0.5) / 20, dtype=torch.float64)] += (
                1 / cells / 20
            )
    return found


def test_the_law_is_the_targets():
    case = ENGINE["verify_rule_laws"]
    found = law(case["target"], case["children_topk"])
    assert torch.allclose(found, torch.tensor(case["laws"]["target_only"]).double(), atol=1e-7)
    for name in ("independent_siblings", "multiround_with_topk_children"):
        assert (found - torch.tensor(case["laws"][name])).abs().max() > 0.05
    case = ENGINE["lossless_counterexample_independent_siblings"]
    found = law(case["target"], case["children"])
    assert torch.allclose(found, torch.tensor(case["expected_law"]).double(), atol=1e-7)


@pytest.mark.parametrize("case", ENGINE["coin_edges"]["cases"], ids=lambda case: case["name"])
def test_coin_edges(case):
    target = case.get("target", case.get("residual"))
    if "residual" in case:
        assert emitted(target, [], 0.5, case["coin"]) in case["must_be_in"]
        return
    for final in (0.0, 0.5, 1.0):
        token = emitted(target, case["children"], case["coin"], final)
        assert target[token] > 0
        assert token == case.get("must_accept", token) and token not in case.get("must_reject", [])


@pytest.mark.parametrize(
    ("single", "acc"), [(1.0, 1.0), (0.3, 1.0), (1.0, 0.5), (0.2, 0.7), (0.0, 1.0), (0.05, 0.9)]
)
def test_thresholds_accept_by_the_engines_rule(single, acc):
    b, n, vocab, width = 4, 24, 6, 5
    parents, child, sibling, tokens, index, g = random_trees(b, n, vocab, 5)
    for row, up in zip(tokens, parents, strict=True):  # siblings differ, as far as there are ids
        for s in range(1, n):
            row[s] = sum(1 for earlier in range(1, s) if up[earlier] == up[s]) % vocab
    coins, finals = torch.rand(b, n, generator=g), torch.rand(b, generator=g)
    probs = torch.softmax(torch.randn(b, n, vocab, generator=g), -1)
    stale = torch.full_like(probs, torch.nan)
    predicts, accept_index, accept_num = outputs(b, width, b * n)
    sglang.tree_speculative_sampling_target_only(
        *(predicts, accept_index, accept_num, tokens, index, child, sibling, coins, finals, probs),
        *(stale, single, acc),
    )
    assert stale.isnan().all()
    for r in range(b):
        path, p = [0], probs[r].double()
        while len(path) < width:
            total, seen = 0.0, set()
            for s in (s for s in range(n) if parents[r][s] == path[-1]):
                token = int(tokens[r, s])
                mass = 0.0 if token in seen else float(p[path[-1], token])
                seen.add(token)
                total += mass
                if mass > 0 and (total > float(coins[r, path[-1]]) * acc or mass >= single):
                    path.append(s)
                    break
            else:
                break
        assert accept_index[r].tolist()[: len(path)] == index[r, path].tolist()
        assert accept_index[r, len(path) :].tolist() == [-1] * (width - len(path))
        assert int(accept_num[r]) == len(path) - 1
        for here, following in itertools.pairwise(path):
            assert predicts[index[r, here]] == tokens[r, following]
        under = {int(tokens[r, s]) for s in range(n) if parents[r][s] == path[-1]}
        bonus = int(predicts[index[r, path[-1]]])
        assert 0 <= bonus < vocab and (len(path) == width or bonus not in under)
    untouched = set(range(b * n)) - set(accept_index[accept_index >= 0].tolist())
    assert {int(predicts[i]) for i in untouched} == {-1}


def test_thresholds_are_not_draft_probs():
    zeros = torch.zeros(1, 1, dtype=torch.int64)
    arguments = (
        *outputs(1, 1, 1),
        *[zeros] * 4,
        zeros.float(),
        torch.zeros(1),
        torch.ones(1, 1, 1),
    )
    with pytest.raises(TypeError, match="draft_probs: expected a tensor or None, got float"):
        sglang.tree_speculative_sampling_target_only(*arguments, 1.0, 1.0)
    with pytest.raises(ValueError, match="threshold_single: expected a value from 0 to 1"):
        sglang.tree_speculative_sampling_target_only(*arguments, threshold_single=1.5)


def test_an_idle_batch_passes_every_operator():
    none = torch.zeros(0, 4, dtype=torch.int64)
    sglang.verify_tree_greedy(*outputs(0, 3, 0), none, none, none, none, none)
    coins, probs = torch.zeros(0, 4), torch.zeros(0, 4, 7)
    sglang.tree_speculative_sampling_target_only(
        *outputs(0, 3, 0), none, none, none, none, coins, coins[:, 0], probs
    )
    for mode in MODES:
        dtype = torch.uint8 if mode == 2 else torch.bool
        sglang.build_tree_kernel_efficient(
            *(none, none[:, :3], none[:, 0], torch.zeros(0, dtype=dtype), none, none, none, none),
            *(4, 2, 4, mode),
        )


# masks


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 63, 64, 65, 130])
def test_a_tree_comes_back_from_its_mask(n):
    b, seq_lens = 2, [9, 0]
    parents = random_trees(b, n, 3, n)[0]
    want = [expected_tree(row, length) for row, length in zip(parents, seq_lens, strict=True)]
    mask = torch.stack([w[0] for w in want])
    positions = torch.full((b * n,), 77)
    index, child, sibling = torch.full((3, b, n), 77)
    sglang.reconstruct_indices_from_tree_mask(
        mask.flatten(), integers(seq_lens), positions, index, child, sibling, b, n
    )
    assert positions.tolist() == [p for w in want for p in w[1]]
    assert index.flatten().tolist() == list(range(b * n))
    assert child.tolist() == [w[2] for w in want]
    assert sibling.tolist() == [w[3] for w in want]


def test_ancestors_of_a_published_tree():
    case = ENGINE["ancestor_matrix"]
    n = len(case["parents"])
    mask = torch.tensor(case["derived"], dtype=torch.bool)
    positions = torch.zeros(n, dtype=torch.int64)
    index, child, sibling = torch.zeros(3, 1, n, dtype=torch.int64)
    sglang.reconstruct_indices_from_tree_mask(
        mask.flatten(), integers([0]), positions, index, child, sibling, 1, n
    )
    _, depth, first, following = expected_tree(case["parents"], 0)
    assert positions.tolist() == depth
    assert child[0].tolist() == first and sibling[0].tolist() == following


def test_a_slot_that_sees_no_root_counts_what_it_sees():
    """Slot 2 is a second root with child 3: linked among themselves, out of any walk's reach."""
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]], dtype=torch.bool)
    positions = torch.zeros(4, dtype=torch.int64)
    index, child, sibling = torch.zeros(3, 1, 4, dtype=torch.int64)
    sglang.reconstruct_indices_from_tree_mask(
        mask, integers([5]), positions, index, child, sibling, 1, 4
    )
    assert positions.tolist() == [5, 6, 5, 6]
    assert child.tolist() == [[1, -1, 3, -1]] and sibling.tolist() == [[-1, -1, -1, -1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=["int32", "int64"])
def test_segments_are_packed_little_endian(dtype):
    for case in ENGINE["segment_packbits_little"]["cases"]:
        y = torch.full((len(case["bytes"]),), 99, dtype=torch.uint8)
        bits = torch.tensor(case["bits"], dtype=torch.bool)
        ends = integers([0, len(case["bits"])], dtype), integers([0, len(case["bytes"])], dtype)
        sglang.segment_packbits(bits, *ends, y, 1)
        assert y.tolist() == case["bytes"]
    rng = np.random.default_rng(0)
    lengths = [0, 1, 7, 8, 9, 0, 64, 65, 130]
    bits = rng.random(sum(lengths) + 3) < 0.5  # three bits behind the last segment
    starts = np.concatenate([[0], np.cumsum(lengths)])
    sizes = [(length + 7) // 8 + 1 for length in lengths]  # a byte of room after each
    places = np.concatenate([[2], 2 + np.cumsum(sizes)])
    y = torch.full((int(places[-1]) + 4,), 99, dtype=torch.uint8)
    want = y.numpy().copy()
    for begin, length, place in zip(starts, lengths, places, strict=False):
        packed = np.packbits(bits[begin : begin + length], bitorder="little")
        want[place : place + len(packed)] = packed
    sglang.segment_packbits(
        torch.from_numpy(bits), integers(starts, dtype), integers(places, dtype), y, len(lengths)
    )
    assert y.tolist() == want.tolist()


# a live SGLang


@pytest.fixture
def live(monkeypatch):
    """Modules shaped like SGLang's: a kernel package, and a user that imported names from it."""
    for name in [m for m in sys.modules if m.split(".")[0] in ("sglang", "sgl_kernel")]:
        monkeypatch.delitem(sys.modules, name)

    def module(name, **names):
        made = types.ModuleType(name)
        made.__path__ = []
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    def theirs(name):
        def call(*args, **kwargs):
            raise AssertionError(f"SGLang's own {name} was called")

        return call

    kernels = {
        name: theirs(name)
        for name in ("build_tree_kernel_efficient", "verify_tree_greedy", "segment_packbits")
    }
    kernel = module("sgl_kernel", **kernels)
    for parent in ("sglang", "sglang.srt", "sglang.srt.speculative"):
        module(parent)
    utils = module(
        "sglang.srt.speculative.eagle_utils",
        sgl_build_tree_kernel_efficient=kernels["build_tree_kernel_efficient"],
        build_tree_kernel_efficient=theirs("the function with other arguments"),
        organize_draft_results=theirs("organize_draft_results"),
    )
    worker = module(
        "sglang.srt.speculative.eagle_worker", organize_draft_results=utils.organize_draft_results
    )
    yield kernel, utils, worker
    sglang.unregister()


def test_register_replaces_every_import_of_a_function(live):
    kernel, utils, worker = live
    other, own = utils.build_tree_kernel_efficient, kernel.verify_tree_greedy
    assert sglang.register() == [
        "sgl_kernel.build_tree_kernel_efficient",
        "sgl_kernel.segment_packbits",
        "sgl_kernel.verify_tree_greedy",
        "sglang.srt.speculative.eagle_utils.organize_draft_results",
        "sglang.srt.speculative.eagle_utils.sgl_build_tree_kernel_efficient",
        "sglang.srt.speculative.eagle_worker.organize_draft_results",
    ]
    assert kernel.verify_tree_greedy is sglang.verify_tree_greedy
    assert utils.sgl_build_tree_kernel_efficient is sglang.build_tree_kernel_efficient
    assert utils.build_tree_kernel_efficient is other
    assert worker.organize_draft_results is sglang.organize_draft_results
    assert sglang.register() == []  # twice is once
    sglang.unregister()
    assert kernel.verify_tree_greedy is own
    assert utils.sgl_build_tree_kernel_efficient is kernel.build_tree_kernel_efficient


def test_register_without_sglang_says_so(monkeypatch):
    for name in ("sglang", "sgl_kernel"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="SGLang cannot be imported here: sgl_kernel"):
        sglang.register()


def test_register_with_a_stranger_says_so(live, monkeypatch):
    kernel, utils, worker = live
    for name in list(vars(kernel)):
        if not name.startswith("_"):
            monkeypatch.delattr(kernel, name)
    monkeypatch.delattr(utils, "organize_draft_results")
    monkeypatch.delattr(worker, "organize_draft_results")
    with pytest.raises(RuntimeError, match="none of the functions"):
        sglang.register()
