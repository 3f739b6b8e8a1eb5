"""Run by test_allocations.py with the counter of native/count_allocations.cpp preloaded.

Prints, as JSON, how often the compiled library asked the heap for memory in one call of each
operator, after others of the same shape, and which Python functions of the package ran in it.
"""

import ctypes
import json
import sys
from collections.abc import Callable

import cases as table
import torch

import eagle2_kernels
from eagle2_kernels import _library, ops

CALL = getattr(torch.ops, ops.NAMESPACE)
# The stable ABI wraps each tensor that comes or goes in a counted handle of this size.
HANDLE = 32


def calls() -> dict[str, Callable[[], object]]:
    """By name: the operators of a step, large enough for whatever they might allocate to show."""
    result: dict[str, Callable[[], object]] = {}

    def add(name: str, *args: object, suffix: str = "", **kwargs: object) -> None:
        op = getattr(CALL, name).default
        result[f"{name} {suffix}".strip()] = lambda: op(*args, **kwargs)

    batch, k, depth = 2, 32, 8
    root, prefix_lens = torch.arange(batch), torch.full((batch,), 9, dtype=torch.int32)
    case = next(c for c in table.DRAFT_CASES if c.max_nodes == 512)
    candidates = [x.expand(batch, -1).contiguous() for x in table.draft_candidates(case)]
    add("build_tree", root, prefix_lens, *candidates, 512)
    draft, parents, *_, child, sibling, _, counts = result["build_tree"]()
    add("flatten_tree", parents, counts, prefix_lens)
    add("retrieve_indices", parents, counts, depth)
    add("verify_tree", draft, draft, child, sibling, 32, counts)
    words = torch.zeros(batch, k, 4, dtype=torch.int64)
    beam = torch.arange(k).expand(batch, -1).contiguous()
    add("extend_draft_tree", candidates[2].clone(), words, beam, 3)
    log_probs = torch.randn(batch, depth, k).sort(-1, descending=True).values.log_softmax(-1)
    ids = torch.arange(k).expand(batch, depth, -1).contiguous()
    add("build_tree_from_marginals", root, prefix_lens, ids, log_probs, 512)
    logits, scores = torch.randn(batch, 10, 9001) * 4, torch.zeros(batch, 10)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        suffix = str(dtype).removeprefix("torch.")
        add("expand_topk", logits.to(dtype), scores, 10, suffix=suffix)
    for case in table.VERIFY_CASES:
        x = table.verify_inputs(case)
        links = (x.draft_tokens, x.first_child, x.next_sibling, 32, x.num_nodes)
        draw = (x.logits, x.position_ids, x.seeds)
        add("sample_and_verify", *draw, *links, **x.filters, suffix=case.name)
        top_k = torch.full_like(x.seeds, 40)
        add(
            *("sample_and_verify", *draw, *links),
            **(x.filters | {"top_k": top_k, "temperature": torch.ones(len(x.seeds))}),
            suffix=f"{case.name}-k40",
        )
    caches = list(torch.randn(2, batch, 64, 3, 64))
    path = torch.tensor([[0, *range(2, 40, 2)]] * batch, dtype=torch.int32)
    length = torch.full((batch,), path.shape[1] - 1, dtype=torch.int32)
    add("compact_kv", caches, path, length, prefix_lens)
    add("write_kv", *caches, *torch.randn(2, batch, 16, 3, 64), prefix_lens)
    weight = torch.randn(200, 577).bfloat16()
    layer = torch.ops.eagle2_kernels.pack_linear_weight(weight)
    add("pack_linear_weight", weight)
    for rows in (1, 9, 200):
        x = torch.randn(rows, 2, 600).bfloat16()[..., :577]
        add("packed_linear", x, layer, 200, weight[:, 0].contiguous(), suffix=f"{rows} rows")
    pack = torch.ops.eagle2_kernels.pack_linear_weight
    size, inner, cos = 64, 96, torch.randn(batch, 40, 64).bfloat16()
    weights = [pack(torch.randn(*s).bfloat16()) for s in ((576, size), (size, 192))]
    weights += [torch.randn(size).bfloat16()]
    weights += [pack(torch.randn(*s).bfloat16()) for s in ((2 * inner, size), (size, inner))]
    for rows in (1, 40):
        hidden, tables = torch.randn(batch, rows, size).bfloat16(), [cos[:, :rows]] * 2
        add(
            *("decoder_layer", hidden, *tables, *(c.bfloat16() for c in caches), prefix_lens),
            *(*weights, 3, inner, weights[2]),
            suffix=f"{rows} rows",
        )
    # What is not packed is copied, which shows that the counter counts.
    add("verify_tree", draft.T.contiguous().T, *(draft, child, sibling, 32), suffix="strided")
    return result


def main() -> None:
    # One thread, so that the one which counts is the one which was warmed up.
    torch.set_num_threads(1)
    counter = ctypes.CDLL(None)
    counter.count_start.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
    counter.count_stop.restype = ctypes.c_long
    library = _library.load()["_C"].path.name.encode()
    package = eagle2_kernels.__path__[0]
    found = {}
    with torch.inference_mode():
        for name, call in calls().items():
            for _ in range(3):
                call()
            counter.count_start(library, HANDLE + 1)
            call()
            allocations = counter.count_stop()
            frames: list[str] = []
            sys.setprofile(lambda frame, *_, frames=frames: frames.append(frame.f_code.co_filename))
            call()
            sys.setprofile(None)
            found[name] = (allocations, sum(f.startswith(package) for f in frames))
    print(json.dumps(found))


main()
