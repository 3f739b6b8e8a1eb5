"""Trees in the layouts of FlashInfer, FlexAttention, TensorRT-LLM and XGrammar, and back."""

import importlib.util
import itertools
import sys
import types

import numpy as np
import pytest
import torch
from growth import i32, random_parents
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import eagle2_kernels as e2
from eagle2_kernels.integrations import flashinfer, tensorrt_llm, xgrammar
from eagle2_kernels.integrations import flex_attention as flex

SIZES = [1, 2, 31, 32, 33, 63, 64, 65, 130]
PREFIXES = [9, 0, 64, 3]


def make_tree(n: int, seed: int = 0):
    """Four requests with trees of n, about n / 2, 1 and no nodes."""
    g = torch.Generator().manual_seed(seed * 1000 + n)
    b, m = len(PREFIXES), max(n - 1, 1)
    parents = torch.stack([random_parents(m + 1, g)[1:] - 1 for _ in range(b)])
    scores = -torch.rand(b, m, generator=g).cumsum(-1)
    tokens = torch.randperm(500, generator=g)[:m].expand(b, m).contiguous()
    limits = i32([[n, 999], [(n + 1) // 2, 999], [1, 999], [0, 999]])
    prefix_lens = i32(PREFIXES)
    roots = torch.arange(b) + 600
    return e2.build_tree(roots, prefix_lens, tokens, scores, parents, n, limits), prefix_lens


def assert_same_tree(got, want):
    for field in want._fields:
        if field not in ("scores", "prefix_ids"):
            a, b = getattr(got, field), getattr(want, field)
            assert a.dtype == b.dtype and torch.equal(a, b), field
    live = want.scores > float("-inf")
    assert torch.equal(got.scores > float("-inf"), live & (torch.arange(live.shape[1]) == 0))
    assert torch.equal(got.scores.isnan(), live & (torch.arange(live.shape[1]) > 0))


def ancestors(tree, r, slot):
    found = [slot]
    while tree.parents[r, found[-1]] >= 0:
        found.append(int(tree.parents[r, found[-1]]))
    return found


def sees(tree, r, slot):
    """The keys that a slot sees, by walking: bools over prefix and tree."""
    count = int(tree.num_nodes[r])
    row = np.zeros(PREFIXES[r] + count, dtype=bool)
    row[: PREFIXES[r]] = True
    row[[PREFIXES[r] + a for a in ancestors(tree, r, slot)]] = True
    return row


def request_masks(tree):
    """Per request the flat mask of its nodes."""
    none = np.zeros(0, dtype=bool)
    return [
        np.concatenate([none, *(sees(tree, r, s) for s in range(int(tree.num_nodes[r])))])
        for r in range(len(PREFIXES))
    ]


# FlashInfer


@pytest.mark.parametrize("n", SIZES)
def test_flashinfer_masks(n):
    tree, prefix_lens = make_tree(n)
    want = request_masks(tree)
    mask = flashinfer.custom_mask(tree, prefix_lens)
    assert mask.dtype == torch.bool and mask.tolist() == np.concatenate(want).tolist()
    packed, mask_indptr = flashinfer.packed_custom_mask(tree, prefix_lens)
    parts = [np.packbits(bits, bitorder="little") for bits in want]
    assert packed.dtype == torch.uint8 and packed.tolist() == np.concatenate(parts).tolist()
    assert mask_indptr.dtype == torch.int32
    assert mask_indptr.tolist() == [0, *np.cumsum([len(p) for p in parts]).tolist()]
    indptr = flashinfer.qo_indptr(tree)
    assert indptr.tolist() == [0, *tree.num_nodes.cumsum(0).tolist()]
    flat = torch.cat([row[:c] for row, c in zip(tree.draft_tokens, tree.num_nodes, strict=True)])
    for stored in (mask, packed):
        for tokens in (tree.draft_tokens, flat):
            back = flashinfer.from_custom_mask(stored, indptr, prefix_lens, tokens)
            assert_same_tree(back, tree)


def test_flashinfer_segments():
    x = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1], dtype=torch.bool)
    packed, indptr = flashinfer.segment_packbits(x, torch.tensor([0, 4, 4, 7, 11]))
    assert packed.tolist() == [0b1101, 0b100, 0b1011] and indptr.tolist() == [0, 1, 1, 2, 3]
    packed, indptr = flashinfer.segment_packbits(x[:0], torch.tensor([0, 0]))
    assert packed.shape == (0,) and indptr.tolist() == [0, 0]
    with pytest.raises(ValueError, match="bitorder: expected \"little\", got 'big'"):
        flashinfer.segment_packbits(x, torch.tensor([0, 11]), "big")


def test_a_flashinfer_mask_too_short_is_refused():
    tree, prefix_lens = make_tree(33)
    mask = flashinfer.custom_mask(tree, prefix_lens)
    with pytest.raises(ValueError, match="mask: expected .* elements or more, got"):
        flashinfer.from_custom_mask(
            mask[:-1], flashinfer.qo_indptr(tree), prefix_lens, tree.draft_tokens
        )


def test_flashinfer_pages():
    table, kv_lens = i32([[7, 3, 99], [2, 99, 99], [99, 99, 99], [4, 5, 6]]), i32([5, 4, 0, 12])
    indptr, indices, last = flashinfer.paged_indptr(table, kv_lens, 4)
    assert indptr.tolist() == [0, 2, 3, 3, 6]
    assert indices.tolist() == [7, 3, 2, 4, 5, 6] and last.tolist() == [1, 4, 0, 4]
    back = flashinfer.page_table(indptr, indices)
    assert back.tolist() == [[7, 3, -1], [2, -1, -1], [-1, -1, -1], [4, 5, 6]]
    assert {t.dtype for t in (indptr, indices, last, back)} == {torch.int32}
    assert flashinfer.page_table(i32([0, 0]), indices[:0]).shape == (1, 0)
    with pytest.raises(ValueError, match=r"kv_lens\[3\]: expected at most 3 pages of 4 keys"):
        flashinfer.paged_indptr(table, i32([0, 0, 0, 13]), 4)


def test_flashinfer_log_sum_exp_is_base_2():
    """Merging two parts by the base-2 rule gives what our merge gives."""
    g = torch.Generator().manual_seed(0)
    outs = torch.randn(2, 1, 5, 3, 8, generator=g)
    lses = torch.randn(2, 1, 5, 3, generator=g) * 4
    lses[0, 0, 1] = lses[:, 0, 2] = float("-inf")
    base2 = flashinfer.lse_to_base2(lses)
    assert torch.equal(base2.isneginf(), lses.isneginf())
    weights = torch.exp2(base2)
    merged = (outs * weights[..., None]).sum(0) / weights.sum(0)[..., None]
    want, want_lse = e2.merge_attention_states(outs[0], lses[0], outs[1], lses[1])
    some = ~want_lse.isneginf()
    assert torch.allclose(merged[some], want[some], atol=1e-6)
    assert torch.allclose(
        flashinfer.lse_from_base2(torch.log2(weights.sum(0)))[some], want_lse[some], atol=1e-6
    )
    assert torch.allclose(flashinfer.lse_from_base2(base2), lses, atol=1e-6)


# FlexAttention


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("n", SIZES)
def test_flex_attention_gives_what_tree_attention_gives(n, window):
    tree, prefix_lens = make_tree(n)
    b, keys, heads, kv_heads, d = len(PREFIXES), max(PREFIXES) + n + 2, 4, 2, 16
    g = torch.Generator().manual_seed(n)
    q = torch.randn(b, n, heads, d, generator=g)
    k, v = torch.randn(2, b, keys, kv_heads, d, generator=g)
    mask_mod = flex.tree_mask_mod(tree, prefix_lens, window=window)
    got = flex_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        block_mask=create_block_mask(mask_mod, b, None, n, keys, device="cpu"),
        enable_gqa=True,
    ).transpose(1, 2)
    depths = tree.depths if window else None
    want = e2.tree_attention(q, k, v, prefix_lens, tree.tree_mask, window=window, depths=depths)
    live = (torch.arange(n) < tree.num_nodes[:, None])[..., None, None]
    assert torch.equal(got.masked_fill(live, 0), torch.zeros_like(got))  # padding sees nothing
    assert torch.allclose(got, want, atol=2e-6)


@pytest.mark.parametrize("n", SIZES)
def test_flex_mask_is_the_trees(n):
    tree, prefix_lens = make_tree(n)
    keys = max(PREFIXES) + n + 70  # keys behind the tree: past its last word too
    mask = create_mask(
        flex.tree_mask_mod(tree, prefix_lens), len(PREFIXES), 1, n + 3, keys, device="cpu"
    )[:, 0]
    for r, count in enumerate(tree.num_nodes.tolist()):
        for s in range(count):
            row = sees(tree, r, s)
            assert mask[r, s, : len(row)].tolist() == row.tolist()
            assert not mask[r, s, len(row) :].any()
        assert not mask[r, count:].any()
    back = flex.from_mask_mod(
        flex.tree_mask_mod(tree, prefix_lens), tree.draft_tokens, tree.num_nodes, prefix_lens
    )
    assert_same_tree(back, tree)


# TensorRT-LLM


@pytest.mark.parametrize("n", SIZES)
def test_tensorrt_llm_tensors(n):
    tree, prefix_lens = make_tree(n)
    tensors = tensorrt_llm.to_tensorrt_llm(tree)
    assert {t.dtype for t in tensors} == {torch.int32}
    assert tensors.packed_mask.shape == (len(PREFIXES), n, (n + 31) // 32)
    for r in range(len(PREFIXES)):
        for s in range(n):
            live = s < int(tree.num_nodes[r])
            bits = sum(1 << a for a in ancestors(tree, r, s)) if live else 0
            words = [w & 0xFFFFFFFF for w in tensors.packed_mask[r, s].tolist()]
            assert sum(w << (32 * i) for i, w in enumerate(words)) == bits
            depth = len(ancestors(tree, r, s)) - 1 if live else 0
            assert int(tensors.position_offsets[r, s]) == depth
            assert int(tensors.retrieve_index[r, s]) == (s if live else 0)
    assert torch.equal(tensors.generation_lengths, tree.num_nodes)
    assert torch.equal(tensors.retrieve_next_token, tree.first_child)
    assert torch.equal(tensors.retrieve_next_sibling, tree.next_sibling)
    for wide in (None, (n + 31) // 32 + 1, 7):
        packed = tensorrt_llm.to_tensorrt_llm(tree, wide).packed_mask
        back = tensorrt_llm.from_tensorrt_llm(
            packed, tree.num_nodes, tree.draft_tokens, prefix_lens
        )
        assert_same_tree(back, tree)


def test_tensorrt_llm_paths_and_sizes():
    tree, prefix_lens = make_tree(33)
    paths = tensorrt_llm.draft_paths(tree, 40)
    assert paths.dtype == torch.int32 and paths.shape == (4, 33, 40)
    listed = [[s for s in row if s >= 0] for row in paths[0].tolist() if row[0] >= 0]
    leaves = set(range(33)) - set(tree.parents[0].tolist())
    assert listed == [ancestors(tree, 0, leaf)[::-1] for leaf in sorted(leaves)]
    with pytest.raises(ValueError, match="words_per_row: expected at least 2, got 1"):
        tensorrt_llm.to_tensorrt_llm(tree, 1)
    with pytest.raises(ValueError, match="packed_mask: expected 2 words or more, got 1"):
        tensorrt_llm.from_tensorrt_llm(
            torch.zeros(4, 33, 1, dtype=torch.int32),
            tree.num_nodes,
            tree.draft_tokens,
            prefix_lens,
        )


# XGrammar


class EvenThenOdd:
    """A grammar over ids: each token has the other parity than the one before; 7 ends it."""

    def __init__(self, last: int, vocab: int):
        self.last, self.vocab = last, vocab

    def allowed(self, last):
        return [t for t in range(self.vocab) if last != 7 and t % 2 != last % 2]

    def traverse_draft_tree(self, next_token, next_sibling, tokens, bitmask):
        for given in (next_token, next_sibling, tokens):
            assert given.dtype == torch.int64 and given.dim() == 1 and given.is_contiguous()
        assert int(next_sibling[0]) == -1 and len(bitmask) == len(tokens)

        def visit(slot, last):
            bitmask[slot] = 0
            for t in self.allowed(last):
                word = int(bitmask[slot, t // 32]) & 0xFFFFFFFF | 1 << (t % 32)
                bitmask[slot, t // 32] = word - (1 << 32 if word >= 1 << 31 else 0)
            child = int(next_token[slot])
            while child != -1:
                if int(tokens[child]) in self.allowed(last):
                    visit(child, int(tokens[child]))
                child = int(next_sibling[child])

        visit(0, self.last)
        return True


class OldMatcher:
    """A matcher from before `traverse_draft_tree` was a method of it."""


@pytest.mark.parametrize("n", SIZES)
def test_xgrammar_links(n):
    tree, prefix_lens = make_tree(n)
    links = xgrammar.to_xgrammar(tree)
    assert {t.dtype for t in links} == {torch.int64} and all(t.is_contiguous() for t in links)
    assert links.retrieve_next_token.tolist() == tree.first_child.tolist()
    assert links.retrieve_next_sibling.tolist() == tree.next_sibling.tolist()
    assert torch.equal(links.draft_tokens, tree.draft_tokens)
    assert_same_tree(xgrammar.from_xgrammar(*links, prefix_lens, tree.num_nodes), tree)
    guessed = xgrammar.from_xgrammar(*links, prefix_lens)
    assert guessed.num_nodes.tolist() == tree.num_nodes.clamp(min=1).tolist()
    assert torch.equal(guessed.parents, tree.parents)


@pytest.mark.parametrize(
    ("next_token", "next_sibling", "slot"),
    [([1, 0, -1], [-1, -1, -1], 0), ([1, 2, -1], [-1, 2, -1], 2), ([1, 3, -1], [-1, -1, -1], 3)],
    ids=["cycle", "twice", "out of range"],
)
def test_xgrammar_links_that_are_no_tree_are_refused(next_token, next_sibling, slot):
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"linked once, got slot {slot}"):
        xgrammar.from_xgrammar(
            torch.tensor([next_token]), torch.tensor([next_sibling]), tokens, i32([0])
        )


def test_xgrammar_rows_are_the_allowed_masks_of_their_slots():
    """The token drawn at each visited node is one that the grammar allows after the node's path."""
    vocab, n = 70, 24
    b = len(PREFIXES)
    g = torch.Generator().manual_seed(0)
    parents = torch.stack([random_parents(n, g)[1:] - 1 for _ in range(b)])
    tokens = torch.randperm(vocab, generator=g)[: n - 1].expand(b, -1).contiguous()
    scores = -torch.rand(b, n - 1, generator=g).cumsum(-1)
    limits = i32([[n, 99], [n - 5, 99], [1, 99], [0, 99]])
    roots, prefix_lens = torch.tensor([8, 9, 10, 11]), i32(PREFIXES)
    tree = e2.build_tree(roots, prefix_lens, tokens, scores, parents, n, limits)
    matchers = [EvenThenOdd(8, vocab), None, EvenThenOdd(10, vocab), EvenThenOdd(11, vocab)]
    bitmask = torch.full((b * n, 3), 12345, dtype=torch.int32)
    allowed = xgrammar.fill_bitmask(tree, matchers, vocab, bitmask)
    assert allowed.shape == (b, n, 3) and allowed.data_ptr() == bitmask.data_ptr()
    assert (allowed[1] == -1).all() and (allowed[3] == -1).all() and (allowed[2, 1:] == -1).all()
    bits = np.unpackbits(allowed.numpy().view(np.uint8), axis=-1, bitorder="little")
    for r in (0, 2):
        for s in range(int(tree.num_nodes[r])):
            path = [int(tree.draft_tokens[r, a]) for a in ancestors(tree, r, s)[::-1]]
            legal = all(y in matchers[r].allowed(x) for x, y in itertools.pairwise(path))
            want = matchers[r].allowed(path[-1]) if legal else []
            assert np.flatnonzero(bits[r, s]).tolist() == want
    logits = torch.randn(b, n, vocab, generator=g)
    emitted, _, lengths, _ = e2.sample_and_verify(
        *(logits, tree.position_ids, 3, tree.draft_tokens, tree.first_child, tree.next_sibling, n),
        tree.num_nodes,
        temperature=1.5,
        allowed_mask=allowed,
    )
    drawn = [8, *emitted[0, : int(lengths[0]) + 1].tolist()]
    assert all(y in matchers[0].allowed(x) for x, y in itertools.pairwise(drawn))


def test_xgrammar_arguments_are_checked():
    tree, _ = make_tree(2)
    with pytest.raises(ValueError, match="matchers: expected 4, one per request, got 1"):
        xgrammar.fill_bitmask(tree, [None], 64)
    with pytest.raises(ValueError, match="bitmask: expected shape"):
        xgrammar.fill_bitmask(tree, [None] * 4, 65, torch.zeros(8, 2, dtype=torch.int32))
    wide = torch.zeros(8, 4, dtype=torch.int32)[:, ::2]
    with pytest.raises(ValueError, match="bitmask: expected a contiguous tensor"):
        xgrammar.fill_bitmask(tree, [None] * 4, 64, wide)


def test_an_old_xgrammar_is_asked_where_its_traversal_lived(monkeypatch):
    seen = []
    testing = types.ModuleType("xgrammar.testing")
    testing._traverse_draft_tree = lambda *given: seen.append(given)
    monkeypatch.setitem(sys.modules, "xgrammar", types.ModuleType("xgrammar"))
    monkeypatch.setitem(sys.modules, "xgrammar.testing", testing)
    tree, _ = make_tree(3)
    matcher = OldMatcher()
    xgrammar.fill_bitmask(tree, [matcher, None, None, matcher], 64)
    ((next_token, _, tokens, given, rows),) = seen  # the last request has no tree
    assert next_token.tolist() == tree.first_child[0].tolist() and given is matcher
    assert tokens.tolist() == tree.draft_tokens[0].tolist() and rows.shape == (3, 2)


@pytest.mark.engine
def test_xgrammar_itself():
    """Run with -m engine where xgrammar is installed: rows against its own one-token masks."""
    assert importlib.util.find_spec("xgrammar"), "xgrammar is not installed"
    import xgrammar as xgr

    vocab = ["a", "b", "c", "{", "}", '"', ":", ",", " ", "true", "false", "null", "1", "[", "]"]
    info = xgr.TokenizerInfo(vocab, vocab_size=len(vocab), stop_token_ids=[])
    compiled = xgr.GrammarCompiler(info).compile_builtin_json_grammar()
    g = torch.Generator().manual_seed(1)
    n = 40
    parents = random_parents(n, g)[None, 1:] - 1
    tokens = torch.zeros(1, n - 1, dtype=torch.int64)
    for s in range(n - 1):  # distinct siblings, some of them legal JSON
        used = {int(tokens[0, o]) for o in range(s) if parents[0, o] == parents[0, s]}
        free = [t for t in range(len(vocab)) if t not in used]
        tokens[0, s] = free[int(torch.randint(len(free), (1,), generator=g))]
    scores = -torch.arange(1.0, n)[None]
    root = vocab.index("[")
    tree = e2.build_tree(torch.tensor([root]), i32([1]), tokens, scores, parents, n)
    matcher = xgr.GrammarMatcher(compiled)
    assert matcher.accept_token(root)
    allowed = xgrammar.fill_bitmask(tree, [matcher], len(vocab))[0]
    reached = 0
    for s in range(n):
        path = [int(tree.draft_tokens[0, a]) for a in ancestors(tree, 0, s)[::-1]]
        alone = xgr.GrammarMatcher(compiled)
        want = torch.zeros(1, allowed.shape[1], dtype=torch.int32)
        if all(alone.accept_token(t) for t in path):
            alone.fill_next_token_bitmask(want)
            reached += 1
        keep = (1 << len(vocab)) - 1
        assert int(allowed[s]) & keep == int(want) & keep, path
    assert 3 < reached < n
