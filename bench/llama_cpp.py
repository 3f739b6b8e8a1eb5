"""The demo's decoding beside llama.cpp's, on the weights of the same GGUF file, in one run.

    python bench/llama_cpp.py --python VENV/bin/python --save

Greedy, the first turns of MT-bench in the chat template, every way in turn for each prompt. Ours
are plain and tree decoding in bfloat16, with and without `compile=True`; llama.cpp's are plain
decoding and the binding's prompt lookup, of the file as it is (matrices in Q4_1, embedding and head
in Q8_0: about a third of the bytes of bfloat16) and of a copy in bfloat16, which compares like with
like. A rate is tokens after the first one by the time after it: prompts are not in it.

llama.cpp runs in an environment of its own, in a process that waits between its turns. The flags
name what this CPU has (no AMX): of the default, -march=native, came a library that died of an
illegal instruction on a machine of this kind.

    python -m venv VENV && VENV/bin/pip install gguf scikit-build-core
    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON
        -DGGML_AVX512_BF16=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_OPENSSL=OFF"
        VENV/bin/pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
THREADS = 2
THEIRS = ("plain", "prompt lookup")
COLUMNS = ("way", "weights", "prompts", "new_tokens", "tokens_per_second", "ratio_to_our_plain")


def bfloat16_copy(source: str, target: Path) -> None:
    """The same metadata and, dequantised, the same weights."""
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value: Any = field.contents()
        if field.name == "general.file_type":
            value = int(gguf.LlamaFileType.MOSTLY_BF16)
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], inner)
    matrix = gguf.GGMLQuantizationType.BF16
    for tensor in reader.tensors:
        data = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if data.ndim > 1:
            writer.add_tensor(tensor.name, gguf.quantize(data, matrix), raw_dtype=matrix)
        else:
            writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve(files: list[str]) -> None:
    """Answers lines of JSON: [file, way, prompt's ids, tokens wanted] -> [tokens, seconds]."""
    from importlib.metadata import version

    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    def load(file: str, way: str) -> Llama:
        # 2 is what the binding's documentation advises on a CPU.
        draft = LlamaPromptLookupDecoding(num_pred_tokens=2) if way == "prompt lookup" else None
        return Llama(
            file,
            n_ctx=1024,
            n_threads=THREADS,
            n_threads_batch=THREADS,
            draft_model=draft,
            verbose=False,
        )

    models = {(file, way): load(file, way) for file in files for way in THEIRS}
    print(json.dumps(version("llama-cpp-python")), flush=True)
    for line in sys.stdin:
        file, way, prompt, wanted = json.loads(line)
        model = models[file, way]
        model.reset()
        times, tokens = [], []
        for token in model.generate(prompt, top_k=1, temp=0.0):
            times.append(time.perf_counter())
            tokens.append(token)
            if len(tokens) == wanted or token == model.token_eos():
                break
        print(json.dumps([tokens, times[-1] - times[0]]), flush=True)


def prompts(tokenizer: Any, path: Path, every: int) -> list[list[int]]:
    lines = path.read_text().splitlines()[::every]
    chats = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        for chat in chats
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", help="the interpreter that has llama-cpp-python and gguf")
    parser.add_argument(
        "--prompts", type=Path, default=ROOT.parent / "shared/prompts/mt_bench.jsonl"
    )
    parser.add_argument("--every", type=int, default=20, help="of the prompts")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--work", type=Path, default=ROOT / "build", help="for the bfloat16 copy")
    parser.add_argument("--save", action="store_true", help="write bench/results/llama_cpp.csv")
    parser.add_argument("--copy", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.copy:
        bfloat16_copy(options.copy[0], Path(options.copy[1]))
        return 0
    if options.serve:
        serve(options.serve)
        return 0
    if not options.python:
        parser.error("--python: expected the interpreter that has llama-cpp-python")

    import runner
    import torch

    from eagle2_kernels import demo

    torch.set_num_threads(THREADS)
    # -P: this file has the name of the package it imports there
    other = [options.python, "-P", __file__]
    quantised, copy = str(demo._find_gguf()), options.work / "smollm2-135m-instruct-bf16.gguf"
    if not copy.exists():
        options.work.mkdir(parents=True, exist_ok=True)
        subprocess.run([*other, "--copy", quantised, str(copy)], check=True)
    server = subprocess.Popen(
        [*other, "--serve", quantised, str(copy)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None and server.stdout is not None
    version = json.loads(server.stdout.readline())
    decoder = demo.load_demo(torch.bfloat16)
    compiled = demo.load_demo(torch.bfloat16, compile=True)
    wanted = options.new_tokens

    def ours(generate: Callable[..., Any]) -> Callable[[list[int]], tuple[list[int], float]]:
        def run(prompt: list[int]) -> tuple[list[int], float]:
            result = generate(prompt, max_new_tokens=wanted)
            seconds = result.stats.seconds
            return result.token_ids, seconds["total"] - seconds["prefill"]

        return run

    def theirs(file: str, way: str) -> Callable[[list[int]], tuple[list[int], float]]:
        def run(prompt: list[int]) -> tuple[list[int], float]:
            server.stdin.write(json.dumps([file, way, prompt, wanted]) + "\n")
            server.stdin.flush()
            tokens, seconds = json.loads(server.stdout.readline())
            return tokens, seconds

        return run

    ways = {
        ("eagle2_kernels plain", "BF16"): ours(decoder.generate_plain),
        ("eagle2_kernels tree", "BF16"): ours(decoder.generate),
        ("eagle2_kernels plain, compiled", "BF16"): ours(compiled.generate_plain),
        ("eagle2_kernels tree, compiled", "BF16"): ours(compiled.generate),
    } | {
        (f"llama.cpp {way}", weights): theirs(file, way)
        for weights, file in (("BF16", str(copy)), ("Q4_1", quantised))
        for way in THEIRS
    }
    texts = prompts(decoder.tokenizer, options.prompts, options.every)
    for run in ways.values():
        run(texts[0])
    tokens, seconds = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0.0)
    for prompt in texts:
        for way, run in ways.items():
            got, took = run(prompt)
            tokens[way] += len(got) - 1
            seconds[way] += took
    server.stdin.close()
    server.wait()

    plain = next(iter(ways))
    rows = []
    for way in ways:
        rate = tokens[way] / seconds[way]
        ratio = rate / (tokens[plain] / seconds[plain])
        print(f"{way[0]:32} {way[1]:5} {rate:7.1f} tokens/s  {ratio:5.2f}")
        values = (*way, len(texts), tokens[way], f"{rate:.1f}", f"{ratio:.2f}")
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    if options.save:
        extra = runner.provenance() | {"llama_cpp_python": version}
        path = runner.RESULTS / "llama_cpp.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*COLUMNS, *extra], lineterminator="\n")
            writer.writeheader()
            writer.writerows(row | extra for row in rows)
        print(f"saved {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
