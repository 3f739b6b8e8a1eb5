"""Attention and masks: one test per line of the table, named by its slug."""

import ctypes
import os
import subprocess
from pathlib import Path

import pytest
import torch
from cases import FLOATS, AttentionCase, attention_inputs, path_of
from tiny_models import copycat_decoder

import eagle2_kernels as ek
from eagle2_kernels import reference

INF, NAN = float("inf"), float("nan")
CSRC = Path(__file__).parents[2] / "csrc"


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tree_of(*parents):
    """(depths, mask words) of one tree."""
    rows = i32(*parents)[None]
    depths, _, _, _, mask = reference.flatten_tree(rows, i32(len(parents)), i32(0))
    return depths, mask


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
def test_row_that_sees_nothing(attend, dtype):
    k, v = normal(1, 8, 1, 16, dtype=dtype), normal(1, 8, 1, 16, seed=1, dtype=dtype)
    mask = torch.tensor([[[1], [0]]])
    out, lse = attend(normal(1, 2, 2, 16, dtype=dtype), k, v, i32(3), mask)
    assert out[0, 1].eq(0).all()
    assert lse[0, 1].eq(-INF).all()
    assert out[0, 0].isfinite().all() and lse[0, 0].isfinite().all()
    # Nothing before it, and no tree.
    out, lse = attend(normal(1, 1, 2, 16, dtype=dtype), k, v, i32(0), tree_len=0)
    assert out.eq(0).all() and lse.eq(-INF).all()
    # A sink is something to weigh, nothing to see.
    out, lse = attend(
        normal(1, 1, 2, 16, dtype=dtype), k, v, i32(0), tree_len=0, sinks=torch.tensor([0.5, -2.0])
    )
    assert out.eq(0).all()
    torch.testing.assert_close(lse, torch.tensor([[[0.5, -2.0]]]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
@pytest.mark.parametrize("poison", [NAN, INF], ids=["nan", "inf"])
@pytest.mark.parametrize("page_size", [None, 4], ids=["dense", "paged"])
def test_poison_in_an_invisible_slot(attend, dtype, poison, page_size):
    # root with two children, one child each; slots 8 and 9 are past the tree, page 5 is unused
    parents, prefix = [-1, 0, 0, 1, 2], 3
    _, mask = tree_of(*parents)
    q = normal(1, 5, 2, 16, dtype=dtype)
    k, v = (normal(6, 4, 1, 16, seed=s, dtype=dtype) for s in (1, 2))
    options = {"page_table": i32(4, 0, 2)[None]}
    if page_size is None:
        k, v, options = k.view(1, 24, 1, 16), v.view(1, 24, 1, 16), {}
    clean, clean_lse = attend(q, k, v, i32(prefix), mask, **options)
    place = (lambda s: (0, s)) if page_size is None else (lambda s: ((4, 0, 2)[s // 4], s % 4))
    for cache in (k, v):
        cache[place(8)] = cache[place(9)] = poison
        if page_size is not None:
            cache[5] = cache[1] = poison
    for node in range(5):
        kept = [cache[place(prefix + node)].clone() for cache in (k, v)]
        for cache in (k, v):
            cache[place(prefix + node)] = poison
        out, lse = attend(q, k, v, i32(prefix), mask, **options)
        blind = [i for i in range(5) if node not in path_of(parents, i)]
        assert torch.equal(out[:, blind], clean[:, blind])
        assert torch.equal(lse[:, blind], clean_lse[:, blind])
        seeing = [i for i in range(5) if i not in blind]
        assert not out[:, seeing].isfinite().any()
        for cache, row in zip((k, v), kept, strict=True):
            cache[place(prefix + node)] = row


def test_empty_part_in_a_merge(kernels, attend):
    q, k, v = normal(1, 2, 2, 8), normal(1, 4, 1, 8, seed=1), normal(1, 4, 1, 8, seed=2)
    part, lse = attend(q, k, v, i32(4), tree_len=0)
    empty, nothing = attend(q, k, v, i32(0), tree_len=0)
    assert nothing.eq(-INF).all()
    # Whatever the empty part's output holds, its weight is none.
    for other in (empty, torch.full_like(empty, NAN)):
        for pair in ((part, lse, other, nothing), (other, nothing, part, lse)):
            out, total = kernels.merge_attention_states(*pair)
            assert torch.equal(out, part) and torch.equal(total, lse)
        out, total = kernels.merge_attention_states(other, nothing, other, nothing)
        assert out.eq(0).all() and total.eq(-INF).all()


def test_two_branches_under_the_diagonal(seen_slots):
    # 0 - 1 .. 70 and 0 - 71 .. 140: every non-ancestor of the second branch has a smaller slot
    parents = [-1, *range(70), 0, *range(71, 140)]
    _, mask = tree_of(*parents)
    prefix = 2
    got = seen_slots(141, 143, prefix, mask)
    for node in (1, 31, 63, 70, 71, 72, 100, 140):
        path = [slot + prefix for slot in path_of(parents, node)]
        assert got[node] == {0, 1, *path}, node


def test_window_per_node_by_position(seen_slots):
    # a root with five children, the first of which has a chain of two behind it
    depths, mask = tree_of(-1, 0, 0, 0, 0, 0, 1, 6)
    got = seen_slots(8, 12, 4, mask, window=3, depths=depths)
    assert got[0] == {2, 3, 4}
    assert [got[i] for i in range(1, 6)] == [{3, 4, 4 + i} for i in range(1, 6)]
    assert got[6] == {4, 5, 10}
    assert got[7] == {5, 10, 11}
    assert seen_slots(8, 12, 4, mask, window=1, depths=depths) == [{4 + i} for i in range(8)]


@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_gqa_head_groups(attend, group):
    kv_heads = 2
    v = torch.arange(2.0).view(1, 1, 2, 1).expand(1, 3, 2, 8).contiguous()
    q, k = normal(1, 2, kv_heads * group, 8), normal(1, 3, kv_heads, 8, seed=1)
    out, _ = attend(q, k, v, i32(1))
    assert out[0, :, :, 0].round().tolist() == [[0.0] * group + [1.0] * group] * 2
    # The query is the head's own, too.
    v = normal(1, 3, kv_heads, 8, seed=2)
    out, _ = attend(q, k, v, i32(1))
    for head in range(kv_heads * group):
        keys, values = k[0, :, head // group], v[0, :, head // group]
        want = torch.softmax(keys @ q[0, 1, head] / 8**0.5, 0) @ values
        torch.testing.assert_close(out[0, 1, head], want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", ["interleaved pages", "interleaved", "heads first"])
def test_strided_kv_views(kernels, attend, layout):
    options = {}
    if layout == "interleaved pages":
        pool = torch.full((5, 2, 4, 2, 16), 7.0)  # [blocks, k and v, page size, heads, D]
        k, v = pool[:, 0], pool[:, 1]
        options = {"page_table": i32(3, 1, 4)[None]}
    elif layout == "interleaved":
        pool = torch.full((1, 12, 2, 2, 16), 7.0)
        k, v = pool[:, :, 0], pool[:, :, 1]
    else:
        pool = torch.full((2, 1, 2, 12, 16), 7.0)
        k, v = pool[0].transpose(1, 2), pool[1].transpose(1, 2)
    assert not k.is_contiguous()
    copies = k.contiguous(), v.contiguous()
    _, mask = tree_of(-1, 0, 0, 1)
    # Queries and new rows are views too: the projections of all heads lie side by side.
    q = normal(1, 4, 4, 32)[..., :16]
    new = normal(1, 12, 2, 32, seed=1)
    rows, values = new[..., :16], new[..., 16:]
    index = i32(0, 2, -1)[None]
    for caches in ((k, v), copies):
        kernels.write_kv(*caches, rows, values, i32(0), None, *options.values())
        kernels.compact_kv(list(caches), index, i32(1), i32(6), *options.values())
    assert torch.equal(k, copies[0]) and torch.equal(v, copies[1])
    slots = [*range(7), 8, *range(8, 12)]
    stored = k[[3, 1, 4]].flatten(0, 1)[None] if options else k
    assert torch.equal(stored[0, :12], rows[0, slots])
    out, lse = attend(q, k, v, i32(7), mask, **options)
    want, want_lse = attend(q, *copies, i32(7), mask, **options)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    plain = rows[:, slots].contiguous(), values[:, slots].contiguous()
    torch.testing.assert_close(out, attend(q, *plain, i32(7), mask)[0], rtol=0, atol=1e-6)


def test_offsets_past_32_bits_and_page_ids_past_16(kernels, attend, tmp_path):
    source, library = tmp_path / "address.cpp", tmp_path / "address.so"
    source.write_text(
        '#include "address.h"\n'
        'extern "C" int64_t offset(int64_t a, int64_t b, int64_t c, int64_t d, int64_t e,'
        " int64_t f) { return eagle2::cache_offset(a, b, c, d, e, f); }\n"
        'extern "C" int64_t block(int32_t page, int64_t position) { return'
        " eagle2::cache_slot(position, 0, &page, 1, 1, int64_t{1} << 40, 100000).block; }\n"
        'extern "C" int64_t slot(int64_t position) { int32_t page = 0; return'
        " eagle2::cache_slot(position, 0, &page, 1, 1, int64_t{1} << 40, 1).slot; }\n"
    )
    compiler = os.environ.get("CXX", "c++").split()
    command = [*compiler, "-std=c++17", "-shared", "-fPIC", f"-I{CSRC}", source, "-o", library]
    subprocess.run(command, check=True)
    address = ctypes.CDLL(str(library))
    address.offset.argtypes, address.offset.restype = [ctypes.c_int64] * 6, ctypes.c_int64
    address.block.argtypes, address.block.restype = [ctypes.c_int32, ctypes.c_int64], ctypes.c_int64
    address.slot.argtypes, address.slot.restype = [ctypes.c_int64], ctypes.c_int64
    assert address.offset(319, 7_864_320, 0, 0, 0, 0) == 2_508_718_080
    assert address.offset(0, 0, 2**20 + 1, 2**12, 0, 0) == 2**32 + 2**12
    assert address.offset(0, 0, 0, 0, 2**12, 2**20) == 2**32
    assert address.block(70_001, 5) == 70_001
    assert address.slot(2**33 + 5) == 2**33 + 5

    k, v = torch.zeros(70_002, 1, 1, 1), torch.zeros(70_002, 1, 1, 1)
    table = i32(70_001, 65_537)[None]
    row = torch.tensor([2.0, 3.0]).view(1, 2, 1, 1)
    kernels.write_kv(k, v, row, row, i32(0), None, table)
    assert k.nonzero()[:, 0].tolist() == [65_537, 70_001]
    out, _ = attend(torch.zeros(1, 1, 1, 1), k, v, i32(2), tree_len=0, page_table=table)
    assert out.item() == 2.5
    kernels.compact_kv([v], i32(1)[None], i32(0), i32(0), table)
    assert v[70_001].item() == v[65_537].item() == 3


def test_slot_is_not_position_after_second_sibling(kernels, seen_slots, attend):
    # the root's children are slots 1 and 2; the target takes the second, at position 3 + 1
    k, v = torch.zeros(1, 8, 1, 8), torch.zeros(1, 8, 1, 8)
    values = torch.eye(8)[None, :6, None].clone()
    kernels.write_kv(k, v, torch.zeros(1, 6, 1, 8), values, i32(0))
    index, length, bonus = kernels.verify_tree(
        torch.tensor([[5, 0, 7]]), torch.tensor([[4, 6, 5]]), i32(1, -1, -1)[None],
        i32(-1, 2, -1)[None], 2,
    )  # fmt: skip
    assert (index.tolist(), length.tolist(), bonus.tolist()) == ([[0, 2, -1]], [1], [7])
    kernels.compact_kv([k, v], index, length, i32(3))
    prefix = i32(3) + length + 1
    next_value = torch.eye(8)[None, 7:, None].clone()
    kernels.write_kv(k, v, torch.zeros(1, 1, 1, 8), next_value, prefix)
    out, _ = attend(torch.zeros(1, 1, 1, 8), k, v, prefix)
    # the prefix, the root, the second sibling and the new token; not the first sibling
    assert set(out.flatten().nonzero().flatten().tolist()) == {0, 1, 2, 3, 5, 7}
    # A parent behind its child: the two rows change places.
    k = torch.arange(8.0).view(1, 8, 1, 1)
    kernels.compact_kv([k], i32(0, 2, 1)[None], i32(2), i32(3))
    assert k.flatten().tolist() == [0, 1, 2, 3, 5, 4, 6, 7]


@pytest.mark.parametrize("batch", [1, 2])
def test_slot_is_not_position_after_second_sibling_in_the_loop(monkeypatch, batch):
    """Later siblings are taken, and the logits behind every token are those of plain decoding."""
    decoder, moves, compact = copycat_decoder(attention=0.1), [], ek.compact_kv

    def spy(caches, accept_index, accept_length, prefix_lens):
        moves.extend([slot for slot in row if slot >= 0] for row in accept_index.tolist())
        return compact(caches, accept_index, accept_length, prefix_lens)

    monkeypatch.setattr("eagle2_kernels.step.compact_kv", spy)
    settings = {"max_new_tokens": 40, "eos_token_ids": (), "keep_logits": True}
    prompts = [[3, 4, 5, 6, 7], [11]][:batch]
    for config in (ek.TreeConfig(16, 4, 4), ek.TreeConfig(33, 8, 5)):
        for tree, plain in zip(
            decoder.generate(prompts, config=config, **settings),
            decoder.generate_plain(prompts, **settings),
            strict=True,
        ):
            assert tree.token_ids == plain.token_ids
            torch.testing.assert_close(tree.logits, plain.logits, rtol=0, atol=1e-12)
    assert sum(path[1:] > list(range(1, len(path))) for path in moves) > 8


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(1, 3, 2, dtype=torch.int64),
        torch.ones(1, 2, 1, dtype=torch.int64),
        torch.ones(1, 1, 3, dtype=torch.int64),
        torch.ones(2, 3, 1, dtype=torch.int64),
        torch.ones(3, 1, dtype=torch.int64),
        torch.ones(1, 3, 3, dtype=torch.bool),
    ],
    ids=["too long", "too few rows", "transposed", "batch", "rank", "bool"],
)
def test_mask_of_the_wrong_length(mask):
    q, k = normal(1, 3, 2, 8), normal(1, 9, 1, 8)
    with pytest.raises((ValueError, TypeError), match="tree_mask: expected"):
        ek.tree_attention(q, k, k, i32(4), mask)
    # The op alone does not read out of bounds either.
    with pytest.raises(RuntimeError, match="tree_mask: expected"):
        torch.ops.eagle2_kernels.tree_attention_out(
            q, k, k, i32(4), mask, out=torch.empty(1, 3, 2, 8)
        )


def test_mask_of_the_wrong_length_for_the_tree():
    """65 slots want two words."""
    q, k, mask = normal(1, 1, 1, 8), normal(1, 70, 1, 8), torch.ones(1, 1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="tree_mask: expected"):
        ek.tree_attention(q, k, k, i32(4), mask, tree_len=65)


def test_tree_call_then_causal_call(attend):
    q, k, v = normal(1, 6, 2, 8), normal(1, 9, 1, 8, seed=1), normal(1, 9, 1, 8, seed=2)
    _, mask = tree_of(-1, 0, 0, 0, 0, 0)
    causal = attend(q, k, v, i32(3))[0]
    tree = attend(q, k, v, i32(3), mask)[0]
    assert torch.equal(attend(q, k, v, i32(3))[0], causal)
    assert torch.equal(attend(q, k, v, i32(3), mask)[0], tree)
    assert not torch.equal(causal, tree)
    for node in range(6):
        scores = q[0, node] @ k[0, : 4 + node, 0].T / 8**0.5
        want = torch.softmax(scores, -1) @ v[0, : 4 + node, 0]
        torch.testing.assert_close(causal[0, node], want, rtol=0, atol=1e-6)


def test_ragged_batch_has_its_own_positions(kernels, attend):
    prefix = i32(9, 2, 0)
    _, positions, *_ = kernels.flatten_tree(
        i32(-1, 0, 1).expand(3, 3).clone(), i32(3, 3, 3), prefix
    )
    assert positions.tolist() == [[9, 10, 11], [2, 3, 4], [0, 1, 2]]
    q, k, v = normal(3, 3, 2, 8), normal(3, 12, 1, 8, seed=1), normal(3, 12, 1, 8, seed=2)
    depths, mask = tree_of(-1, 0, 0)
    options = {"depths": depths.expand(3, -1), "window": 4}
    together, _ = attend(q, k, v, prefix, mask.expand(3, -1, -1), **options)
    for b, length in enumerate(prefix.tolist()):
        alone, _ = attend(
            q[b : b + 1], k[b : b + 1, : length + 3], v[b : b + 1, : length + 3],
            prefix[b : b + 1], mask, depths=depths, window=4,
        )  # fmt: skip
        assert torch.equal(together[b : b + 1], alone)


NODES = [1, 3, 31, 32, 33, 59, 60, 63, 64, 65, 128]


@pytest.mark.parametrize("nodes", NODES)
def test_odd_sizes(nodes):
    page_size = (None, 1, 5, 16, 24)[NODES.index(nodes) % 5]
    case = AttentionCase(nodes, (3, 1), 80, 600, page_size=page_size)
    inputs = attention_inputs(case, torch.float64, seed=nodes, any_order=True)
    want, got = torch.empty_like(inputs.q), torch.full_like(inputs.q, NAN)
    reference.tree_attention_out(*inputs.args, **inputs.kwargs, out=want)
    ek.tree_attention(*inputs.args, **inputs.kwargs, out=got)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
