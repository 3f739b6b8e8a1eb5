"""README's examples run as written, and its op list is the op table's."""

import re
from pathlib import Path

import adapters
import pytest

from eagle2_kernels import ops

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_tree_attention_example():
    (code,) = (b for b in BLOCKS if "flatten_tree" in b)
    scope: dict = {}
    exec(compile(code, "README.md", "exec"), scope)
    assert scope["out"].shape == (1, 5, 8, 64)


def test_any_drafter_example():
    (code,) = (b for b in BLOCKS if "candidates_from_choices" in b)
    scope: dict = {}
    exec(compile("import torch, eagle2_kernels as ek\n" + code, "README.md", "exec"), scope)
    # After "5 6" came "7 5 6 8 5 6" and "8 5 6".
    assert scope["tree"].draft_tokens[0, :3].tolist() == [17, 8, 7]
    assert scope["tree"].num_nodes.tolist() == [10]


def test_step_example():
    scope: dict = {}
    blocks = [b for b in BLOCKS if "ek." in b]
    for code in blocks[:-1]:
        exec(compile(code, "README.md", "exec"), scope)
    (code,) = (b for b in BLOCKS if "sample_and_verify" in b)
    assert code is blocks[-1]
    # The target's logits agree with the tree's first path: 17, 8, 7, .. are at slots 0, 1, 2.
    told = code.replace("emitted, accept", "logits[0, 0, 8] = 99.0\nemitted, accept", 1)
    exec(compile(told, "README.md", "exec"), scope)
    length, path = scope["accept_length"].item(), scope["accept_index"][0]
    assert length >= 1 and path[:2].tolist() == [0, 1]
    emitted = scope["emitted"][0, : length + 1].tolist()
    assert emitted[0] == 8 and emitted[-1] == scope["root_tokens"].item()
    assert scope["prefix_lens"].tolist() == [600 + length + 1]
    kept = scope["k_cache"][0, 600 : 601 + length]
    assert kept.equal(scope["k"][0, path[: length + 1].long()])


@pytest.mark.slow
def test_generate_example(capsys):
    (code,) = (b for b in BLOCKS if "load_demo" in b)
    scope: dict = {}
    exec(compile(code, "README.md", "exec"), scope)
    assert 1 <= len(scope["result"].token_ids) <= 24
    assert capsys.readouterr().out.strip()


def test_op_list_is_the_table():
    (listed,) = re.findall(r"<!-- ops -->\n(.*?)<!-- /ops -->", README, re.DOTALL)
    assert listed == ops.describe()


def test_list_of_adapters_is_what_their_tests_are():
    (listed,) = re.findall(r"<!-- adapters -->\n(.*?)<!-- /adapters -->", README, re.DOTALL)
    assert listed == adapters.describe(), "paste what `python tests/adapters.py` prints"
    for adapter in adapters.ADAPTERS:
        assert any(not engine for engine in adapters.tests_of(adapter).values()), adapter.name


def test_kernels_for_cuda_are_there_and_tested_as_far_as_said():
    root = Path(__file__).parent.parent
    sources = "".join(path.read_text() for path in (root / "csrc" / "cuda").glob("*.cu"))
    tests = (root / "tests" / "test_triton.py").read_text()
    for op in ops.OPS:
        for name in (op.name, f"{op.name}_out") if op.outs else (op.name,):
            assert (f'm.impl("{name}"' in sources) == (op.name in ops.CUDA_CPP), name
        assert op.triton is None or f".{op.name}(" in tests, op.name


@pytest.mark.parametrize("target", ["demo", "test"])
def test_the_two_commands_are_targets_of_the_makefile(target):
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    assert f"make {target}" in README
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)
