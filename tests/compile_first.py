"""Compiled first calls, run as a script: a child process per operator, one JSON line each.

The parent imports PyTorch and the package and calls nothing; each child is forked from there, so
the compiled call is the first of its process, with the public names not yet resolved.
"""

import gc
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo
import torch._dynamo.backends.debugging
import torch._functorch.aot_autograd

# `python -P` leaves the script's directory out of the path, and with it what shadows the package.
sys.path.insert(0, str(Path(__file__).parent))

from test_ops import BY_NAME, NAMES, example, overload

import eagle2_kernels

# A pool of threads does not survive a fork: a child's first parallel region would wait for ever.
torch.set_num_threads(1)


def public_name(name):
    return name.removesuffix("_out")


def calls(name):
    """The public function, the op and its ``_out`` twin, each with a maker of its arguments."""

    def public(*args, **kwargs):
        return getattr(eagle2_kernels, public_name(name))(*args, **kwargs)

    found = [(public, lambda: example(name)), (overload(name), lambda: example(name))]
    if BY_NAME[name].outs:
        found.append((overload(f"{name}_out"), lambda: with_outs(name)))
    return found


def with_outs(name):
    """Arguments of the ``_out`` twin, shaped by the fake kernel: nothing real is called."""
    args, kwargs = example(name)
    meta_args, meta_kwargs = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t.to("meta"), (args, kwargs)
    )
    results = overload(name)(*meta_args, **meta_kwargs)
    results = (results,) if isinstance(results, torch.Tensor) else results
    outs = {
        key: torch.full(r.shape, 77, dtype=torch.int64).to(r.dtype)
        for key, r in zip(BY_NAME[name].outs, results, strict=True)
    }
    return args, kwargs | outs


def bits(tree):
    """Every leaf; of a tensor its dtype, shape and bytes."""
    return [
        (str(x.dtype), list(x.shape), x.contiguous().reshape(-1).view(torch.uint8).tolist())
        if isinstance(x, torch.Tensor)
        else x
        for x in torch.utils._pytree.tree_leaves(tree)
    ]


def problem_of(name):
    """What is wrong with the compiled calls of an operator: "" when they give the eager bits."""
    functions, makers = zip(*calls(name), strict=True)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def run(arguments):
        return [
            function(*args, **kwargs)
            for function, (args, kwargs) in zip(functions, arguments, strict=True)
        ]

    arguments, twins = [make() for make in makers], [make() for make in makers]
    with torch.no_grad():
        got = torch.compile(run, backend=count, fullgraph=True)(arguments)
        want = run(twins)
    if bits((got, arguments)) != bits((want, twins)):
        return f"compiled {(got, arguments)}, eager {(want, twins)}"
    if len(graphs) != 1:
        return f"expected one graph, got {len(graphs)}"
    ours = [n for n in graphs[0].graph.nodes if str(n.target).startswith("eagle2_kernels.")]
    if len(ours) != len(functions):
        return f"expected {len(functions)} nodes of ours in the graph, got {ours}"
    # Dynamo takes a read of a value into the graph where it can.
    reads = [n for n in graphs[0].graph.nodes if n.target in ("item", "tolist", "nonzero")]
    if reads:
        return f"expected no value read on the host, got {reads}"
    return ""


def main():
    gc.freeze()
    for name in sys.argv[1:] or NAMES:
        if os.fork() == 0:
            try:
                problem = problem_of(name)
            except BaseException:
                problem = traceback.format_exc()[-3000:]
            print(json.dumps([name, problem]), flush=True)
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    main()
