"""Tiny random causal LMs, one per attention feature, for the tests of the models and the loop."""

import torch

BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Large enough for greedy text that does not fall into one repeated token at once.
    "initializer_range": 0.3,
}
GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "final_logit_softcapping": 5.0,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

# name -> (config class, model class, settings beside BASE)
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 5}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", GEMMA | {"attn_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", GEMMA),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {"logits_scaling": 3.0}),
    "cohere": ("CohereConfig", "CohereForCausalLM", {"logit_scale": 0.3}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    # positions are a table of weights
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}),
}


def tiny_model(name="llama", seed=0, dtype=torch.float64, **settings):
    """A random model of a kind, in eval mode; norms and biases are random too."""
    import transformers

    config_name, model_name, extra = MODELS[name]
    config = getattr(transformers, config_name)(**(BASE | extra | settings))
    return randomized(getattr(transformers, model_name)(config), seed).to(dtype).eval()


@torch.no_grad()
def randomized(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        std = 0.3 if parameter.ndim > 1 else 0.1
        noise = torch.randn(parameter.shape, generator=generator) * std
        # Gemma's norms multiply by 1 + weight, the others by weight.
        is_norm = parameter.ndim == 1 and not name.endswith("bias")
        gemma = "Gemma" in type(model).__name__
        parameter.copy_(noise + (1.0 if is_norm and not gemma else 0.0))
    return model


def tiny_head(model, draft_vocab=None, seed=0, kind="EagleHead"):
    """An untrained head: its drafts are rarely right, which a lossless loop must not mind."""
    from eagle2_kernels.models import heads

    return getattr(heads, kind).from_target(model, draft_vocab, seed=seed).eval()


@torch.no_grad()
def copycat_decoder(attention=0.0):
    """A decoder whose drafts are often right: the target's MLPs are switched off and its attention
    is turned down, so its next token depends mostly on the last one, and the head passes the
    embedding on to the lm_head. Without attention it does not look at its cache at all.
    """
    from eagle2_kernels import EagleDecoder

    model = tiny_model(tie_word_embeddings=False)
    head = tiny_head(model)
    for layer in (*model.model.layers, *head.layers):
        layer.mlp.down_proj.weight.zero_()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(attention)
    head.layers[0].self_attn.o_proj.weight.zero_()
    model.model.norm.weight.fill_(1.0)
    width = head.config.hidden_size
    head.fc.weight.zero_()
    head.fc.weight[:, :width].copy_(torch.eye(width))
    head.fc.bias.zero_()
    return EagleDecoder(model, head)
