"""vLLM: installed beside it, our attention is its backend; a worker adds draft trees (on a CPU).

Usage: use_vllm.py [MODEL [HEAD]].
"""

import sys

from vllm import LLM, SamplingParams

TREES = "eagle2_kernels.integrations.vllm.trees"

if __name__ == "__main__":
    model, *head = sys.argv[1:] or ["HuggingFaceTB/SmolLM2-135M-Instruct"]
    # On a GPU, without the worker: attention_config={"backend": "CUSTOM"}
    engine = LLM(
        model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        worker_cls=f"{TREES}.TreeWorker",
        speculative_config={
            "method": "custom_class",
            "model": f"{TREES}.TreeProposer",
            "num_speculative_tokens": 15,
        },
        additional_config={"eagle2": {"head": head[0]}} if head else {},
        enable_prefix_caching=False,
    )
    (result,) = engine.generate("A hash table is", SamplingParams(temperature=0, max_tokens=24))
    print(result.outputs[0].text)
