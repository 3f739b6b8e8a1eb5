"""Transformers: model.generate decoded with draft trees, and our attention under its own loop."""

from eagle2_kernels.demo import load_demo
from eagle2_kernels.integrations.transformers import generate

decoder = load_demo()  # or EagleDecoder(model, EagleHead.from_pretrained(draft, model))
model, tokenizer = decoder.target.hf_model, decoder.tokenizer
chat = [{"role": "user", "content": "What is a hash table?"}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")

ids = model.generate(
    **inputs, max_new_tokens=24, do_sample=False, custom_generate=generate, draft=decoder
)
print(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :]))

model.set_attn_implementation("eagle2_tree")
plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
print(tokenizer.decode(plain[0, inputs["input_ids"].shape[1] :]))
