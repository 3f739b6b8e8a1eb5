"""Draft heads: small networks that guess the target's next features and tokens.

A head sits between two target forwards. It reads the target's last feature and the last committed
token, predicts the next feature, and the target's own lm_head turns that feature into logits.
Attention is left to the caller: training runs plain SDPA over a whole sequence (`forward_train`),
the decode loop runs `tree_attention` between `project_qkv` and `finish`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _checks

__all__ = ["EagleConfig", "EagleHead"]

_WEIGHTS = "model.safetensors"
_CONFIG = "config.json"


@dataclass
class EagleConfig:
    """Shape of an EAGLE-1/2 head; field names follow Hugging Face Llama configurations."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int | None = None
    """Rows of `draft_to_target`; None means that the draft and the target share the vocabulary."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    fc_bias: bool = True
    attention_bias: bool = False
    final_logit_softcapping: float | None = None
    architecture: str = "eagle"

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> EagleConfig:
        """Read a head's or a Llama checkpoint's config.json; keys no head needs are skipped.

        Raises ValueError naming the missing keys.
        """
        known = {f.name for f in fields(cls)}
        kept = {k: v for k, v in data.items() if k in known and v is not None}
        heads = kept.get("num_attention_heads")
        kept.setdefault("num_key_value_heads", heads)
        if heads and "hidden_size" in kept:
            kept.setdefault("head_dim", kept["hidden_size"] // heads)
        rope = data.get("rope_parameters") or {}
        if "rope_theta" not in kept and "rope_theta" in rope:
            kept["rope_theta"] = rope["rope_theta"]
        needed = {"hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"}
        missing = sorted(needed - kept.keys())
        if missing:
            raise ValueError(f"head config: expected the keys {sorted(needed)}, missing {missing}")
        return cls(**kept)

    @classmethod
    def from_target(cls, config: Any, draft_vocab_size: int | None = None) -> EagleConfig:
        """Shape of a head for a target with this Hugging Face configuration (text part of it)."""
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        data = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        # The head is a model of its own: it takes the target's rotation base, not its long-context
        # scaling, and the eps of its norms.
        kept = cls.from_dict(data)
        kept.draft_vocab_size = draft_vocab_size
        # Qwen2 has q/k/v biases without saying so in its configuration.
        kept.attention_bias = bool(data.get("attention_bias") or data.get("model_type") == "qwen2")
        return kept


class _RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, computed in float32."""

    def __init__(self, size: int, eps: float, **kwargs: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, **kwargs))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x32.to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, c: EagleConfig, **kwargs: Any) -> None:
        super().__init__()
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, q, bias=c.attention_bias, **kwargs)
        self.k_proj = nn.Linear(c.hidden_size, kv, bias=c.attention_bias, **kwargs)
        self.v_proj = nn.Linear(c.hidden_size, kv, bias=c.attention_bias, **kwargs)
        self.o_proj = nn.Linear(q, c.hidden_size, bias=False, **kwargs)


class _MLP(nn.Module):
    def __init__(self, c: EagleConfig, **kwargs: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False, **kwargs)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False, **kwargs)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, c: EagleConfig, **kwargs: Any) -> None:
        super().__init__()
        self.self_attn = _Attention(c, **kwargs)
        self.mlp = _MLP(c, **kwargs)
        self.post_attention_layernorm = _RMSNorm(c.hidden_size, c.rms_norm_eps, **kwargs)


class EagleHead(nn.Module):
    """EAGLE-1/2 head: g_i = layer(fc([e(t_{i+1}); f_i])), logits = lm_head(g_i).

    `f_i` is the target's feature at position i (last hidden state after the final norm), `e` the
    target's embedding; `g_i` predicts `f_{i+1}`, so its logits predict token i + 2. The decoder
    layer is Llama's without input_layernorm: h = x + attn(x); g = h + mlp(norm(h)). A recursive
    step feeds `g` where the target's feature would go.

    The embedding and the lm_head belong to the target: `bind` shares them, `save` leaves them out.
    With a draft vocabulary, `draft_to_target` [Vd] int64 lists its target ids (absolute, distinct),
    and `bind` copies those lm_head rows once, contiguous.

    Shapes: tokens [...] int64, features and hidden [..., H] in the head's dtype, positions [...]
    int64 (draft position = target position - 1; the caller's bookkeeping).
    """

    draft_to_target: Tensor | None
    embed_weight: Tensor | None
    lm_head_weight: Tensor | None
    lm_head_bias: Tensor | None

    def __init__(
        self,
        config: EagleConfig,
        draft_to_target: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        kwargs: dict[str, Any] = {"dtype": dtype, "device": device}
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias, **kwargs)
        self.layers = nn.ModuleList([_Layer(config, **kwargs)])
        expected = config.draft_vocab_size
        got = None if draft_to_target is None else draft_to_target.numel()
        if expected != got:
            raise ValueError(
                f"draft_to_target: expected {expected} ids (config.draft_vocab_size), got {got}"
            )
        if draft_to_target is not None:
            _checks.vocabulary_map("draft_to_target", draft_to_target, config.vocab_size)
            draft_to_target = draft_to_target.to(device=device, dtype=torch.int64)
        self.register_buffer("draft_to_target", draft_to_target)
        self.register_buffer("embed_weight", None, persistent=False)
        self.register_buffer("lm_head_weight", None, persistent=False)
        self.register_buffer("lm_head_bias", None, persistent=False)
        inv_freq = _inverse_frequencies(config.head_dim, config.rope_theta, device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.embed_scale = 1.0
        self._own_embedding = False

    def _apply(self, fn: Any, recurse: bool = True) -> EagleHead:
        # Module.to(bfloat16) would round the rotation frequencies: they stay float32.
        super()._apply(fn, recurse)
        c = self.config
        device = self.fc.weight.device
        self.inv_freq = _inverse_frequencies(c.head_dim, c.rope_theta, device)
        return self

    @classmethod
    def from_target(
        cls,
        model: nn.Module,
        draft_vocab: Sequence[int] | Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> EagleHead:
        """Build an untrained head of the right shape for a Hugging Face causal LM, bound to it.

        `draft_vocab`: target ids the head may propose (any order, distinct), or None for all of
        them. `dtype` defaults to the target's. Raises TypeError for a bare count, ValueError for
        repeated or out-of-range ids.
        """
        config = model.config
        table = None
        if draft_vocab is not None:
            if isinstance(draft_vocab, int):
                raise TypeError(
                    "draft_vocab: expected target ids or None, got a bare int "
                    "(which ids to keep cannot be told from a count)"
                )
            table = torch.as_tensor(draft_vocab).to(torch.int64).reshape(-1).clone()
        shape = EagleConfig.from_target(config, None if table is None else table.numel())
        if table is not None:
            _checks.vocabulary_map("draft_vocab", table, shape.vocab_size)
        weight = model.get_input_embeddings().weight
        dtype = weight.dtype if dtype is None else dtype
        head = cls(shape, table, dtype=dtype, device=weight.device)
        head.reset_parameters(seed)
        return head.bind(model)

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """Draw every matrix from N(0, 1 / fan_in), biases 0, norms 1; same seed, same weights."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                noise = torch.randn(p.shape, generator=generator) / p.shape[1] ** 0.5
                p.copy_(noise)
            elif name.endswith("bias"):
                p.zero_()
            else:
                p.fill_(1.0)

    @torch.no_grad()
    def bind(self, model: nn.Module) -> EagleHead:
        """Share the target's embedding and take its lm_head (draft vocabulary rows only); self.

        Call again after the target's or the head's weights were moved to another device or dtype.
        Raises ValueError when the target's sizes are not the head's.
        """
        embedding, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        c = self.config
        for name, w in (("embedding", embedding.weight), ("lm_head", lm_head.weight)):
            if w.shape[1] != c.hidden_size or w.shape[0] < c.vocab_size:
                raise ValueError(
                    f"model: expected an {name} of [{c.vocab_size}, {c.hidden_size}], "
                    f"got {list(w.shape)}"
                )
        if not self._own_embedding:
            self.embed_weight = embedding.weight.detach()
        # Gemma multiplies embeddings by a constant inside the module.
        self.embed_scale = float(getattr(embedding, "embed_scale", 1.0))
        weight = lm_head.weight.detach()
        bias = getattr(lm_head, "bias", None)
        bias = None if bias is None else bias.detach()
        if self.draft_to_target is not None:
            weight = weight[self.draft_to_target.to(weight.device)].contiguous()
            if bias is not None:
                bias = bias[self.draft_to_target.to(bias.device)].contiguous()
        self.lm_head_weight, self.lm_head_bias = weight, bias
        return self

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write config.json and model.safetensors (weights in bfloat16, draft ids in int32)."""
        from safetensors.torch import save_file

        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        tensors = {k: v.detach().to("cpu", torch.bfloat16) for k, v in self.named_parameters()}
        if self.draft_to_target is not None:
            tensors["draft_to_target"] = self.draft_to_target.to("cpu", torch.int32)
        tensors = {k: v.contiguous() for k, v in tensors.items()}
        save_file(tensors, path / _WEIGHTS, metadata={"format": "pt"})
        # safetensors makes its file private to the user.
        (path / _WEIGHTS).chmod(0o644)
        text = json.dumps(asdict(self.config), indent=2, sort_keys=True)
        (path / _CONFIG).write_text(text + "\n")

    @classmethod
    def from_pretrained(
        cls,
        directory: str | os.PathLike[str],
        target: nn.Module | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> EagleHead:
        """Load a saved head (or a public EAGLE-1/2 checkpoint directory) and bind it to `target`.

        `dtype` defaults to the target's, else to the file's. Biases exist when the file has them;
        an embedding in the file is used instead of the target's. Raises FileNotFoundError without
        files, ValueError listing unknown keys, missing keys and wrong shapes.
        """
        path = Path(directory)
        if not (path / _CONFIG).is_file():
            raise FileNotFoundError(f"directory: expected a head's {_CONFIG} in {path}")
        state = _read_state(path)
        config = EagleConfig.from_dict(json.loads((path / _CONFIG).read_text()))
        if config.architecture != "eagle":
            raise ValueError(
                f"directory: expected an EAGLE-1/2 head, got architecture {config.architecture!r}"
            )
        config.fc_bias = "fc.bias" in state
        config.attention_bias = "layers.0.self_attn.q_proj.bias" in state
        table = state.pop("draft_to_target", None)
        embedding = state.pop("embed_tokens.weight", None)
        file_dtype = next((v.dtype for v in state.values()), torch.bfloat16)
        device = None
        if target is not None:
            weight = target.get_input_embeddings().weight
            device, file_dtype = weight.device, weight.dtype
        head = cls(config, table, dtype=dtype or file_dtype, device=device)
        _check_state(state, head, path)
        with torch.no_grad():
            for name, p in head.named_parameters():
                p.copy_(state[name])
        if embedding is not None:
            head.embed_weight = embedding.to(device=device, dtype=dtype or file_dtype)
            head._own_embedding = True
        return head if target is None else head.bind(target)

    def embed(self, tokens: Tensor) -> Tensor:
        """e(t): tokens [...] int64 (target ids) -> [..., H] in the embedding's dtype."""
        if self.embed_weight is None:
            raise RuntimeError("EagleHead is not bound to a target: call head.bind(model) first")
        e = F.embedding(tokens, self.embed_weight)
        return e if self.embed_scale == 1.0 else e * self.embed_scale

    def inputs(self, tokens: Tensor, features: Tensor) -> Tensor:
        """`x = fc([e(t); f])`: tokens [...], features [..., H] -> [..., H].

        tokens[i] is the token AFTER the position whose feature is features[i].
        """
        e = self.embed(tokens).to(self.fc.weight.dtype)
        return self.fc(torch.cat((e, features.to(e.dtype)), dim=-1))

    def project_qkv(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v = rope(W_q x), rope(W_k x), W_v x.

        x [..., H], positions [...] int64 (broadcastable to x's leading shape) ->
        q [..., Hq, D], k and v [..., Hkv, D].
        """
        c, attn = self.config, self.layers[0].self_attn
        lead = x.shape[:-1]
        q = attn.q_proj(x).view(*lead, c.num_attention_heads, c.head_dim)
        k = attn.k_proj(x).view(*lead, c.num_key_value_heads, c.head_dim)
        v = attn.v_proj(x).view(*lead, c.num_key_value_heads, c.head_dim)
        cos, sin = self.rope(positions)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`cos, sin` of position * theta^(-2j/D), j repeated for both halves: [..., 1, D] float32.

        positions [...] int64.
        """
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
        return angles.cos(), angles.sin()

    def finish(self, x: Tensor, attn: Tensor) -> Tensor:
        """`h = x + W_o attn; g = h + mlp(norm(h))`: x [..., H], attn [..., Hq, D] -> [..., H]."""
        layer = self.layers[0]
        h = x + layer.self_attn.o_proj(attn.flatten(-2))
        return h + layer.mlp(layer.post_attention_layernorm(h))

    def logits(self, hidden: Tensor) -> Tensor:
        """`lm_head(g)`: hidden [..., H] -> [..., Vd] (draft ids; V without draft vocabulary)."""
        if self.lm_head_weight is None:
            raise RuntimeError("EagleHead is not bound to a target: call head.bind(model) first")
        w = self.lm_head_weight
        out = F.linear(hidden.to(w.dtype), w, self.lm_head_bias)
        cap = self.config.final_logit_softcapping
        return out if cap is None else torch.tanh(out / cap) * cap

    def forward_train(self, tokens: Tensor, features: Tensor, steps: int = 1) -> list[Tensor]:
        """Predicted features of every position, for 1 .. `steps` recursive draft levels.

        Level 1 row i: g1_i = head(t_i, f_i) over the keys of rows <= i. Level s row i feeds the
        previous level's own output in place of the feature, gs_i = head(t_i, g(s-1)_{i-1}), and
        sees what a draft at depth s sees: level-1 keys of rows <= i - s + 1, then the keys of
        levels 2 .. s of rows i - s + 2 .. i, one each. The tokens are the true path's.

        tokens [B, T] int64 (already shifted: tokens[:, i] follows features[:, i]), features
        [B, T, H] -> `steps` tensors [B, T, H]. Rows i < s - 1 of level s have no such history:
        leave them out of a loss. Padding at the right end is harmless.
        """
        if steps < 1:
            raise ValueError(f"steps: expected at least 1, got {steps}")
        rows = torch.arange(tokens.shape[1], device=tokens.device)
        distance = rows[:, None] - rows[None, :]
        enable_gqa = self.config.num_key_value_heads != self.config.num_attention_heads
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs: list[Tensor] = []
        feed = features
        for step in range(steps):
            x = self.inputs(tokens, feed)
            q, k, v = (t.transpose(1, 2) for t in self.project_qkv(x, rows))
            keys.append(k)
            values.append(v)
            if step == 0:
                attn = F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=enable_gqa
                )
            else:
                # Level-1 keys up to distance `step`, then one diagonal per later level.
                parts = [distance >= step]
                parts += [distance == step - level for level in range(1, step + 1)]
                attn = F.scaled_dot_product_attention(
                    q,
                    torch.cat(keys, dim=2),
                    torch.cat(values, dim=2),
                    attn_mask=torch.cat(parts, dim=1),
                    enable_gqa=enable_gqa,
                )
            hidden = self.finish(x, attn.transpose(1, 2))
            outputs.append(hidden)
            feed = torch.cat((feed[:, :1].to(hidden.dtype), hidden[:, :-1]), dim=1)
        return outputs


def _inverse_frequencies(head_dim: int, theta: float, device: Any) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    return theta**-exponents


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Llama's rotate-half: x cos + [-x2; x1] sin in float32, back in x's dtype."""
    x32 = x.float()
    first, second = x32.chunk(2, dim=-1)
    return (x32 * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def _read_state(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    if (path / _WEIGHTS).is_file():
        return load_file(path / _WEIGHTS)
    pickled = path / "pytorch_model.bin"
    if pickled.is_file():
        return torch.load(pickled, map_location="cpu", weights_only=True)
    raise FileNotFoundError(f"directory: expected {_WEIGHTS} or pytorch_model.bin in {path}")


def _check_state(state: dict[str, Tensor], head: EagleHead, path: Path) -> None:
    expected = {k: tuple(v.shape) for k, v in head.named_parameters()}
    shared = expected.keys() & state.keys()
    wrong = [
        f"{k} (expected {list(expected[k])}, got {list(state[k].shape)})"
        for k in sorted(shared)
        if tuple(state[k].shape) != expected[k]
    ]
    problems = {
        "unknown keys": sorted(state.keys() - expected.keys()),
        "missing keys": sorted(expected.keys() - state.keys()),
        "wrong shapes": wrong,
    }
    found = [f"{name}: {', '.join(items)}" for name, items in problems.items() if items]
    if found:
        raise ValueError(f"head weights in {path} do not fit: " + "; ".join(found))
