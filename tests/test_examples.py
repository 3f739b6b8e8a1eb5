"""The examples run as they are, where their engine is there; one for each adapter."""

import ast
import importlib
import os
import runpy
import sys
from pathlib import Path

import pytest
from adapters import ADAPTERS

import eagle2_kernels

EXAMPLES = Path(__file__).parent.parent / "examples"
# Those that show our side alone run without their engine; these import it.
WITH_ENGINE = {"vllm", "xgrammar"}


def run(name, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [f"use_{name}.py", *arguments])
    return runpy.run_path(str(EXAMPLES / f"use_{name}.py"), run_name="__main__")


def test_every_adapter_has_one():
    package = Path(eagle2_kernels.__file__).parent / "integrations"
    there = {p.name.removesuffix(".py") for p in package.iterdir() if p.name[0] not in "_."}
    assert {adapter.name for adapter in ADAPTERS} == there
    assert {p.name for p in EXAMPLES.iterdir()} == {f"use_{a.name}.py" for a in ADAPTERS}


@pytest.mark.parametrize("name", ["sglang", "flashinfer", "flex_attention", "tensorrt_llm"])
def test_example_on_our_side(name, monkeypatch, capsys):
    run(name, monkeypatch)
    assert capsys.readouterr().out.strip()


def test_example_of_transformers(monkeypatch, capsys):
    scope = run("transformers", monkeypatch)
    assert scope["ids"].shape[1] > scope["inputs"]["input_ids"].shape[1]
    assert len(capsys.readouterr().out.splitlines()) >= 2


@pytest.mark.engine
@pytest.mark.parametrize("name", sorted(WITH_ENGINE))
def test_example_with_its_engine(name, monkeypatch, capsys):
    run(name, monkeypatch, *([os.environ["EAGLE2_VLLM_MODEL"]] if name == "vllm" else []))
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("name", sorted(WITH_ENGINE))
def test_example_names_what_there_is(name):
    """Of our package: the rest needs the engine."""
    tree = ast.parse((EXAMPLES / f"use_{name}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("eagle2_kernels"):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "ek":
            assert hasattr(eagle2_kernels, node.attr)
