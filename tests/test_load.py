"""A short run of bench/load.py: trees and plain decoding agree for long, and nothing piles up."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def load():
    path = Path(__file__).parent.parent / "bench" / "load.py"
    spec = importlib.util.spec_from_file_location("bench_load", path)
    module = importlib.util.module_from_spec(spec)
    # Where the module's dataclasses look their annotations up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_two_thousand_steps_of_random_requests(load):
    run = load.Load(seed=1)
    run.run(2000, samples=10)
    growth = run.growth()
    assert run.steps >= 2000 and run.requests > 300
    assert set(run.finished) == {"eos", "stop", "length", "positions"}
    # Drafts must be accepted, or the tree had nothing to get wrong.
    assert run.plain_steps > 1.3 * run.steps
    assert (growth.tensors, growth.files, growth.threads) == (0, 0, 0)
    assert growth.rss < 32e6


def test_another_token_is_seen(load, monkeypatch):
    """A path that is never moved to the end of the prefix: the next step reads its siblings."""
    monkeypatch.setattr("eagle2_kernels.step.compact_kv", lambda *args: None)
    with pytest.raises(AssertionError, match="other tokens"):
        load.Load().run(500)


def test_what_piles_up_is_seen(load, monkeypatch):
    kept, files = [], []
    generate = load.EagleDecoder.generate

    def leaky(self, *args, **kwargs):
        kept.append(torch.zeros(1))
        files.append(os.dup(1))
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(load.EagleDecoder, "generate", leaky)
    run = load.Load()
    try:
        run.run(300, samples=3)
    finally:
        for file in files:
            os.close(file)
    assert run.growth().tensors > 0 and run.growth().files > 0
