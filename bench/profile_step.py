"""Where a decode step's time goes: the demo's tree and plain decoding, by three forwards.

"fused" is the default, layers by this library's operators; "modules" their own Python, "compiled"
kernels that Inductor makes of it. All ways are timed in turn, then run once under torch's profiler,
where the operators of a fused layer, which is one call, are called one by one.
A line is a kind of work, its milliseconds a step and its share of the step; operators are the
profiler's, "python and dispatch" is the rest of the step as timed alone (the profiler slows Python,
and small operators a little). The floor is what the matrix products alone would take: their weights
at the read bandwidth or their operations at the matmul rate, whichever is longer, both measured at
the start.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from runner import RESULTS, Machine, provenance
from torch.profiler import ProfilerActivity, profile

from eagle2_kernels import EagleDecoder
from eagle2_kernels.demo import load_demo

PROMPT = "Explain how a hash table works."
# The first kind that has a part of an operator's name takes it.
KINDS = {
    "matrix products": ("packed_linear", "mkldnn::", "aten::mm", "aten::addmm", "aten::bmm"),
    "norms, rotation, activation, residuals": (
        "rms_norm",
        "silu_and_mul",
        "rope_and_write_kv",
        "cpp_fused",
    ),
    "attention and cache": ("tree_attention", "write_kv", "compact_kv"),
    "tree building and verification": ("eagle2_kernels::",),
    "other operators of torch": ("aten::",),
}
REST = "python and dispatch"


def kind_of(name: str) -> str | None:
    """The first kind that has a part of this operator's name."""
    return next((k for k, parts in KINDS.items() if any(p in name for p in parts)), None)


def floor_of(decoder: EagleDecoder, tree: bool, machine: Machine) -> float:
    """Seconds of a step's matrix products at the ceiling."""
    rate = machine.matmul_rates.get(decoder.target.dtype, machine.matmul_rates[torch.float32])

    def product(elements: int, size: int, rows: int) -> float:
        return max(elements * size / machine.read_bandwidth, 2 * elements * rows / rate)

    def matrices(module: torch.nn.Module) -> int:
        linears = [m for m in module.modules() if isinstance(m, torch.nn.Linear)]
        return sum(m.weight.numel() for m in linears)

    size, config, head = decoder.target.dtype.itemsize, decoder.config, decoder.head
    # a tied lm_head is one of the linear layers too
    seconds = product(matrices(decoder.target.hf_model), size, config.max_nodes if tree else 1)
    if tree:
        lm_head = head.lm_head_weight
        own = matrices(head) + (0 if lm_head is None else lm_head.numel())
        # A step feeds accepted pairs again, then all levels but the first, from the root's row.
        seconds += product(own, size, config.max_depth + 1)
        seconds += (config.max_depth - 1) * product(own, size, config.top_k)
    return seconds


Way = Callable[[], Iterator[Any]]


def timed(decode: Way) -> float:
    """Milliseconds of a step, prefill left out."""
    steps = decode()
    next(steps)
    start = time.perf_counter()
    count = sum(1 for _ in steps)
    return (time.perf_counter() - start) / count * 1e3


@contextmanager
def operators_apart(decoder: EagleDecoder) -> Iterator[None]:
    """A fused layer is one call: here its operators are called one by one, to be told apart."""
    target, head = decoder.target._fused, decoder.head._fused
    wholes = target._wholes if target else [], head._whole if head else None
    if target:
        target._wholes = []
    if head:
        head._whole = None
    try:
        yield
    finally:
        if target:
            target._wholes = wholes[0]
        if head:
            head._whole = wholes[1]


def profiled(decode: Way, decoder: EagleDecoder) -> dict[str, float]:
    """Milliseconds a step by kind of work."""
    steps, spent = decode(), dict.fromkeys(KINDS, 0.0)
    next(steps)
    with (
        operators_apart(decoder),
        profile(activities=[ProfilerActivity.CPU]) as profiler,
    ):
        count = sum(1 for _ in steps)
    for event in profiler.key_averages():
        if kind := kind_of(event.key):
            spent[kind] += event.self_cpu_time_total / 1e3 / count
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--tokens", type=int, default=48, help="of each decoding (48)")
    parser.add_argument("--rounds", type=int, default=5, help="timed, each of all ways (5)")
    parser.add_argument("--eager", action="store_true", help="leave out the compiled decoder")
    parser.add_argument("--fused", action="store_true", help="the fused one alone")
    parser.add_argument("--save", action="store_true", help="write bench/results/profile_step.csv")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = Machine(torch.device("cpu"))
    demo = load_demo()
    chat = [{"role": "user", "content": PROMPT}]
    prompt = demo.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    decoders = {"fused": demo}
    if not options.fused:
        decoders["modules"] = load_demo(fuse_layers=False)
    if not (options.fused or options.eager):
        from torch._inductor import config

        # a name for each fused kernel in the profile
        config.cpp.enable_kernel_profile = True
        start = time.perf_counter()
        decoders["compiled"] = load_demo(compile=True)
        print(f"compiled in {time.perf_counter() - start:.0f} s, loading included")
    options_of = {"max_new_tokens": options.tokens, "token_ids": True, "eos_token_ids": ()}
    ways: dict[tuple[str, str], Way] = {
        (forward, decoding): partial(
            decoder.stream, prompt, plain=decoding == "plain", **options_of
        )
        for forward, decoder in decoders.items()
        for decoding in ("tree", "plain")
    }
    for decode in ways.values():
        timed(decode)
    times: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way, decode in ways.items():
            times[way].append(timed(decode))
    rows = []
    for (forward, decoding), decode in ways.items():
        step = statistics.median(times[forward, decoding])
        spent = profiled(decode, decoders[forward])
        spent[REST] = step - sum(spent.values())
        floor = floor_of(decoders[forward], decoding == "tree", machine) * 1e3
        print(
            f"\n{forward}, {decoding}: {step:.1f} ms a step, floor of its products {floor:.1f} ms"
        )
        for kind, milliseconds in spent.items():
            print(f"  {kind:48} {milliseconds:6.2f} ms  {milliseconds / step:6.1%}")
            rows.append(
                {
                    "forward": forward,
                    "decoding": decoding,
                    "kind": kind,
                    "ms": f"{milliseconds:.3f}",
                    "step_ms": f"{step:.2f}",
                    "floor_ms": f"{floor:.2f}",
                }
            )
    if options.save:
        extra = provenance() | {
            "read_gb_s": f"{machine.read_bandwidth / 1e9:.1f}",
            "matmul_bfloat16_gflop_s": f"{machine.matmul_rates[torch.bfloat16] / 1e9:.0f}",
        }
        with (RESULTS / "profile_step.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], *extra], lineterminator="\n")
            writer.writeheader()
            writer.writerows(row | extra for row in rows)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
