"""Tree against plain decoding over a prompt set: accept length, tokens per second, same tokens.

``python bench/end_to_end.py ../shared/prompts/mt_bench.jsonl`` reads one ``{"prompt": ...}`` a
line, wraps it in the chat template and decodes it greedily both ways, in turn. Accept length is
tokens emitted after the first / target forwards after prefill, over all prompts.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import sys
from pathlib import Path

import torch
from rich.progress import track
from runner import RESULTS, provenance

from eagle2_kernels.demo import load_demo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--limit", type=int, help="first N prompts only")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--max-nodes", type=int)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--max-depth", type=int)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-plain", action="store_true", help="accept length only")
    parser.add_argument("--save", metavar="NAME", help="append a line to bench/results/NAME.csv")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    decoder = load_demo()
    shape = {k: getattr(options, k) for k in ("max_nodes", "top_k", "max_depth")}
    decoder.config = dataclasses.replace(
        decoder.config, **{k: v for k, v in shape.items() if v is not None}
    )
    lines = options.prompts.read_text().splitlines()[: options.limit]
    chats = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]
    prompts = [
        decoder.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        for chat in chats
    ]
    rows = decoder.target.row_invariant_rows() or 1
    tokens = forwards = after_first = different = 0
    seconds = {"tree": 0.0, "plain": 0.0}
    decoder.generate(prompts[0], max_new_tokens=8)
    for prompt in track(prompts, disable=not sys.stderr.isatty()):
        tree = decoder.generate(prompt, max_new_tokens=options.max_new_tokens)
        tokens += tree.stats.new_tokens
        after_first += tree.stats.new_tokens - 1
        forwards += tree.stats.target_forwards
        seconds["tree"] += tree.stats.seconds["total"]
        if not options.no_plain:
            plain = decoder.generate_plain(prompt, max_new_tokens=options.max_new_tokens)
            seconds["plain"] += plain.stats.seconds["total"]
            if plain.token_ids != tree.token_ids:
                plain = decoder.generate_plain(
                    prompt, max_new_tokens=options.max_new_tokens, pad_rows=rows
                )
            different += plain.token_ids != tree.token_ids
    result = {
        "prompts": f"{options.prompts.name}[{len(prompts)}]",
        "dtype": str(decoder.target.dtype).removeprefix("torch."),
        **dataclasses.asdict(decoder.config),
        "max_new_tokens": options.max_new_tokens,
        "new_tokens": tokens,
        "target_forwards": forwards,
        "accept_length": round(after_first / forwards, 3),
        "tree_tokens_per_second": round(tokens / seconds["tree"], 2),
    }
    if not options.no_plain:
        result["plain_tokens_per_second"] = round(tokens / seconds["plain"], 2)
        result["speedup"] = round(seconds["plain"] / seconds["tree"], 3)
        result["plain_row_floor"] = rows
        result["prompts_with_other_tokens"] = different
    print(json.dumps(result, indent=2))
    if options.save:
        _append(RESULTS / f"{options.save}.csv", result | provenance())


def _append(path: Path, row: dict[str, object]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
