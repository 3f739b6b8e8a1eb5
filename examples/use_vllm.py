"""vLLM: installed beside it, our attention is its backend. Usage: use_vllm.py [MODEL]."""

import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
    # On a GPU also: attention_config={"backend": "CUSTOM"}
    engine = LLM(model, dtype="bfloat16", enforce_eager=True, max_model_len=1024)
    (result,) = engine.generate("A hash table is", SamplingParams(temperature=0, max_tokens=24))
    print(result.outputs[0].text)
