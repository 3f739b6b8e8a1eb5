"""Where a decode step's time goes: the demo's tree and plain decoding under torch's profiler.

A line is a kind of work, its milliseconds a step and its share of the step. "python and dispatch"
is the time in which no operator ran; the profiler itself adds to it, so the step's length without
the profiler stands beside the sum.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.profiler import ProfilerActivity, profile

from eagle2_kernels.demo import load_demo

PROMPT = "Explain how a hash table works."
KINDS = {
    "matrix products": ("mkldnn::", "aten::mm", "aten::addmm", "aten::bmm"),
    "tree attention, write_kv, compact_kv": ("tree_attention", "write_kv", "compact_kv"),
    "tree building and verification": ("eagle2_kernels::",),
    "other operators (norms, rotation, activation, residuals)": ("aten::",),
}


def kind_of(name: str) -> str | None:
    """The first kind that has a part of this operator's name."""
    return next((k for k, parts in KINDS.items() if any(p in name for p in parts)), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    decoder = load_demo()
    chat = [{"role": "user", "content": PROMPT}]
    prompt = decoder.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    for name, decode in (("tree", decoder.generate), ("plain", decoder.generate_plain)):
        decode(prompt, max_new_tokens=8)
        start = time.perf_counter()
        steps = decode(prompt, max_new_tokens=options.tokens).stats.target_forwards
        alone = (time.perf_counter() - start) / steps * 1e3
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            start = time.perf_counter()
            decode(prompt, max_new_tokens=options.tokens)
            step = (time.perf_counter() - start) / steps * 1e3
        spent = dict.fromkeys(KINDS, 0.0)
        for event in profiler.key_averages():
            if kind := kind_of(event.key):
                spent[kind] += event.self_cpu_time_total / 1e3 / steps
        spent["python and dispatch"] = step - sum(spent.values())
        print(f"\n{name}: {steps} steps of {alone:.1f} ms, {step:.1f} ms under the profiler")
        for kind, milliseconds in spent.items():
            print(f"  {kind:58} {milliseconds:6.2f} ms  {milliseconds / step:6.1%}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
