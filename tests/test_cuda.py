"""The kernels of csrc/cuda on a card, against the CPU's: `pytest -m cuda tests`."""

import pytest
import torch
from growth import i32, random_parents
from test_ops import BY_NAME, as_tuple, example, overload, with_outs

from eagle2_kernels import ops

pytestmark = pytest.mark.cuda
OPS = torch.ops.eagle2_kernels


def to(value, device):
    """Tensors of a call, in lists too, as fresh copies on ``device``."""
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if isinstance(value, list | tuple):
        return type(value)(to(v, device) for v in value)
    return value


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors_of(v)] if isinstance(value, list | tuple) else []


def assert_same_on_cuda(op, *args):
    """Results and arguments alike, since some are written; bit for bit."""
    for device in ("cpu", "cuda"):
        passed = to(args, device)
        found = [t.cpu() for t in tensors_of([as_tuple(op(*passed)), passed])]
        if device == "cpu":
            want = found
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a.nan_to_num(nan=7), b.nan_to_num(nan=7))


@pytest.mark.parametrize("name", ops.CUDA_CPP)
def test_the_example_of_each_op(name):
    assert_same_on_cuda(overload(name), *example(name)[0])


@pytest.mark.parametrize("name", ops.CUDA_CPP)
def test_a_captured_graph_gives_what_the_eager_call_gives(name):
    if BY_NAME[name].outs:
        op = getattr(OPS, f"{name}_out").default
        args, outs = with_outs(name)
    else:
        op, (args, outs) = overload(name), example(name)
    eager, captured = ((to(args, "cuda"), {k: v.cuda() for k, v in outs.items()}) for _ in "ab")
    op(*eager[0], **eager[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(*captured[0], **captured[1])
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(
        tensors_of([eager[0], list(eager[1].values())]),
        tensors_of([captured[0], list(captured[1].values())]),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("n", [1, 33, 64, 65, 600, 13_000])
def test_trees_of_any_size(n):
    generator = torch.Generator().manual_seed(n)
    parents = torch.stack([random_parents(n, generator) for _ in range(3)])
    parents[2, n // 2 :: 5] = n + 3
    counts, prefix = i32([n, n // 2, n + 7]), i32([5, 6, 7])
    assert_same_on_cuda(OPS.retrieve_indices, parents, counts, 6)
    _, _, child, sibling, words = OPS.flatten_tree(parents, counts, prefix)
    target, draft = torch.randint(3, (2, 3, n), generator=generator)
    assert_same_on_cuda(OPS.verify_tree, target, draft, child, sibling, 7, counts)
    if n <= 600:
        assert_same_on_cuda(OPS.unpack_tree_mask, words, n)
        mask = OPS.unpack_tree_mask(words, n)
        assert_same_on_cuda(OPS.pack_tree_mask, mask.transpose(1, 2))


@pytest.mark.parametrize("n", [1, 60, 700, 3000])
def test_trees_from_marginals_of_any_size(n):
    generator = torch.Generator().manual_seed(n)
    log_probs = torch.randn(2, 9, 20, generator=generator).log_softmax(-1)
    log_probs = (log_probs * 2).round().div(2).sort(-1, descending=True).values
    tokens = torch.arange(360).view(2, 9, 20)
    limits = i32([[n, 9], [n // 2, 5]])
    roots, prefix = torch.tensor([1, 2]), i32([3, 4])
    assert_same_on_cuda(OPS.build_tree_from_marginals, roots, prefix, tokens, log_probs, n, limits)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, 1024, 128_256])
def test_walks_by_coins(dtype, vocab):
    generator = torch.Generator().manual_seed(vocab)
    n, batch = 30, 8
    parents = torch.stack([random_parents(n, generator) for _ in range(batch)])
    counts = i32([n] * (batch - 1) + [0])
    _, _, child, sibling, _ = OPS.flatten_tree(parents, counts, counts)
    draft = torch.randint(min(vocab, 40), (batch, n), generator=generator)
    probabilities = torch.rand(batch, n, vocab, generator=generator) ** 8
    probabilities[:, :, :40] *= vocab / 40
    probabilities = (probabilities / probabilities.sum(-1, keepdim=True)).to(dtype)
    coins = torch.rand(batch, n, generator=generator)
    final = torch.rand(batch, generator=generator).double()
    assert_same_on_cuda(
        OPS.verify_tree_coins, probabilities, draft, child, sibling, coins, final, 6, counts
    )


@pytest.mark.parametrize("dim", [5, 8, 80, 128])
@pytest.mark.parametrize("layers", [1, 30, 500])
def test_many_layers_are_compacted_through_pages(layers, dim):
    generator = torch.Generator().manual_seed(layers)
    heads, page, batch = 3, 5, 2
    caches = [
        torch.randn(12, heads, page, dim, generator=generator).transpose(1, 2)
        for _ in range(layers)
    ]
    caches += [c[..., : dim // 2].clone() for c in caches[: layers // 2]]
    table = torch.randperm(12, generator=generator).view(batch, 6).int()
    index = torch.stack([torch.randperm(15, generator=generator)[:6] for _ in range(batch)]).int()
    index[1, 4:] = -1
    assert_same_on_cuda(OPS.compact_kv, caches, index, i32([5, 3]), i32([7, 11]), table)
