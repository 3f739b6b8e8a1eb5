"""Draft heads: small networks that guess the target's next features and tokens.

A head sits between two target forwards. It reads what the target computed at the last position and
the last committed token, predicts the next feature, and an lm_head turns that into logits.
Attention is left to the caller: training runs plain SDPA over a whole sequence (`forward_train`),
the decode loop runs `tree_attention` between `project_qkv` and `finish`. Files are the business of
`checkpoint.py`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _checks
from .compiled import Attend, CompiledPart, Kernels, TensorSpec, refuse_modules
from .fused import CacheRows, FusedHead, are_plain
from .packed import PackedLinears, can_pack, in_use, pack_linear, weight_state

__all__ = ["Eagle3Head", "EagleConfig", "EagleHead"]


@dataclass
class EagleConfig:
    """Shape of a head; field names follow Hugging Face Llama configurations."""

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
    rope_scaling: dict[str, Any] | None = None
    """{"rope_type": "linear" | "llama3", "factor": ...} with Llama's further keys, or None."""
    max_position_embeddings: int | None = None
    fc_bias: bool = True
    attention_bias: bool = False
    """Whether q, k and v have biases."""
    qk_norm: bool = False
    """Whether every head of q and k goes through an RMSNorm before the rotation."""
    own_lm_head: bool = False
    """Whether the head has an lm_head of its own; otherwise it takes the target's."""
    final_logit_softcapping: float | None = None
    target_hidden_size: int | None = None
    """Width of the target's hidden states where it is not `hidden_size` (EAGLE-3)."""
    aux_layers: tuple[int, ...] | None = None
    """Target layers whose outputs an EAGLE-3 head reads; None for 1, n // 2 - 1 and n - 4."""
    norm_before_residual: bool = False
    """EAGLE-3: the residual starts from hidden_norm(h), not from h."""
    norm_before_fc: bool = False
    """EAGLE-3: one RMSNorm over the concatenated target features, before fc."""
    fc_norm: bool = False
    """EAGLE-3: an RMSNorm for each tapped layer, before fc."""
    norm_output: bool = False
    """EAGLE-3: recursive steps feed the output after `norm`, not before it."""

    @classmethod
    def from_target(cls, config: Any, draft_vocab_size: int | None = None) -> EagleConfig:
        """Shape of an EAGLE-1/2 head for a target with this Hugging Face configuration.

        Raises ValueError naming the keys that a configuration of another family lacks.
        """
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        data = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        missing = sorted(name for name in needed if data.get(name) is None)
        if missing:
            raise ValueError(f"model: expected {sorted(needed)} in its config, missing {missing}")
        heads = data["num_attention_heads"]
        # The head is a model of its own: it takes the target's rotation base, not its long-context
        # scaling, and the eps of its norms.
        rope = data.get("rope_parameters") or {}
        return cls(
            **{name: data[name] for name in needed},
            num_key_value_heads=data.get("num_key_value_heads") or heads,
            head_dim=data.get("head_dim") or data["hidden_size"] // heads,
            draft_vocab_size=draft_vocab_size,
            rms_norm_eps=data.get("rms_norm_eps") or cls.rms_norm_eps,
            rope_theta=data.get("rope_theta") or rope.get("rope_theta") or cls.rope_theta,
            max_position_embeddings=data.get("max_position_embeddings"),
            # Qwen2 has q/k/v biases without saying so in its configuration.
            attention_bias=bool(data.get("attention_bias") or data.get("model_type") == "qwen2"),
            final_logit_softcapping=data.get("final_logit_softcapping"),
        )


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
    def __init__(self, c: EagleConfig, width: int, **kwargs: Any) -> None:
        super().__init__()
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(width, q, bias=c.attention_bias, **kwargs)
        self.k_proj = nn.Linear(width, kv, bias=c.attention_bias, **kwargs)
        self.v_proj = nn.Linear(width, kv, bias=c.attention_bias, **kwargs)
        self.o_proj = nn.Linear(q, c.hidden_size, bias=False, **kwargs)
        if c.qk_norm:
            self.q_norm = _RMSNorm(c.head_dim, c.rms_norm_eps, **kwargs)
            self.k_norm = _RMSNorm(c.head_dim, c.rms_norm_eps, **kwargs)


class _MLP(nn.Module):
    def __init__(self, c: EagleConfig, **kwargs: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False, **kwargs)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False, **kwargs)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, c: EagleConfig, width: int, **kwargs: Any) -> None:
        super().__init__()
        self.self_attn = _Attention(c, width, **kwargs)
        self.mlp = _MLP(c, **kwargs)
        self.post_attention_layernorm = _RMSNorm(c.hidden_size, c.rms_norm_eps, **kwargs)


class EagleHead(nn.Module):
    """EAGLE-1/2 head: g_i = layer(fc([e(t_{i+1}); f_i])), logits = lm_head(g_i).

    `f_i` is the target's feature at position i (last hidden state after the final norm), `e` the
    target's embedding; `g_i` predicts `f_{i+1}`, so its logits predict token i + 2. The decoder
    layer is Llama's without input_layernorm: h = x + attn(x); g = h + mlp(norm(h)). A recursive
    step feeds `g` where the target's feature would go.

    The embedding and the lm_head belong to the target: `bind` shares them. A checkpoint may bring
    its own of each. With a draft vocabulary, `draft_to_target` [Vd] int64 lists its target ids
    (absolute, distinct), and `bind` copies those lm_head rows once, contiguous.

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
        fc_width, attention_width = self._widths()
        self.fc = nn.Linear(fc_width, size, bias=config.fc_bias, **kwargs)
        self.layers = nn.ModuleList([_Layer(config, attention_width, **kwargs)])
        expected = config.draft_vocab_size
        got = None if draft_to_target is None else draft_to_target.numel()
        if expected != got:
            raise ValueError(
                f"draft_to_target: expected {expected} ids (config.draft_vocab_size), got {got}"
            )
        if config.own_lm_head:
            self.lm_head = nn.Linear(size, expected or config.vocab_size, bias=False, **kwargs)
        if draft_to_target is not None:
            if not draft_to_target.is_meta:
                _checks.vocabulary_map("draft_to_target", draft_to_target, config.vocab_size)
            draft_to_target = draft_to_target.to(device=device, dtype=torch.int64)
        self.register_buffer("draft_to_target", draft_to_target)
        self.register_buffer("embed_weight", None, persistent=False)
        self.register_buffer("lm_head_weight", None, persistent=False)
        self.register_buffer("lm_head_bias", None, persistent=False)
        self.register_buffer("inv_freq", _inverse_frequencies(config, device), persistent=False)
        self.embed_scale = 1.0
        self.own_embedding = False
        self.packed = PackedLinears()
        self._compiled: CompiledPart | None = None
        self._fused: FusedHead | None = None
        self._packed_lm_head: tuple[Tensor, tuple[int, ...], Callable[[Tensor], Tensor]] | None = (
            None
        )

    def __getstate__(self) -> dict[str, Any]:
        # A copy is neither packed, see PackedLinears, nor compiled, nor fused.
        own = {"_packed_lm_head": None, "_compiled": None, "_fused": None}
        return self.__dict__ | own

    def _widths(self) -> tuple[int, int]:
        """Inputs of fc, and of q, k and v."""
        return 2 * self.config.hidden_size, self.config.hidden_size

    def _apply(self, fn: Any, recurse: bool = True) -> EagleHead:
        # Module.to(bfloat16) would round the rotation frequencies: they stay float32.
        super()._apply(fn, recurse)
        self.inv_freq = _inverse_frequencies(self.config, self.fc.weight.device)
        return self

    @property
    def feature_size(self) -> int:
        """Width of the target features that the head reads."""
        return self.config.target_hidden_size or self.config.hidden_size

    def taps(self, num_layers: int) -> tuple[int, ...] | None:
        """Layers of a target of `num_layers` whose outputs are the head's features, side by side.

        None for an EAGLE-1/2 head: it reads the last hidden state after the final norm. Raises
        ValueError when the target has no such layers.
        """
        return None

    @classmethod
    def from_target(
        cls,
        model: nn.Module,
        draft_vocab: Sequence[int] | Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        **variant: Any,
    ) -> EagleHead:
        """Build an untrained head of the right shape for a Hugging Face causal LM, bound to it.

        `draft_vocab`: target ids the head may propose (any order, distinct), or None for all of
        them. `dtype` defaults to the target's. `variant`: fields of `EagleConfig` that are to
        differ from the kind's usual ones. Raises TypeError for a bare count, ValueError for
        repeated or out-of-range ids, and for a target the head cannot read.
        """
        table = None
        if draft_vocab is not None:
            if isinstance(draft_vocab, int):
                raise TypeError(
                    "draft_vocab: expected target ids or None, got a bare int "
                    "(which ids to keep cannot be told from a count)"
                )
            table = torch.as_tensor(draft_vocab).to(torch.int64).reshape(-1).clone()
        shape = cls._shape_for(model.config, None if table is None else table.numel())
        shape = replace(shape, **variant)
        if table is not None:
            _checks.vocabulary_map("draft_vocab", table, shape.vocab_size)
        weight = model.get_input_embeddings().weight
        dtype = weight.dtype if dtype is None else dtype
        head = cls(shape, table, dtype=dtype, device=weight.device)
        head.reset_parameters(seed)
        head.bind(model)
        if shape.own_lm_head:
            rows = model.get_output_embeddings().weight.detach()
            if head.draft_to_target is not None:
                rows = rows[head.draft_to_target.to(rows.device)]
            with torch.no_grad():
                head.lm_head.weight.copy_(rows)
        return head

    @classmethod
    def _shape_for(cls, config: Any, draft_vocab_size: int | None) -> EagleConfig:
        return EagleConfig.from_target(config, draft_vocab_size)

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

        What the head has of its own stays, but for `fuse_layer` and `compile_layer`. Call again
        after the target's or the head's weights were moved to another device or dtype. Raises
        ValueError when the target's sizes are not the head's, or it lacks the layers that the head
        reads.
        """
        embedding, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        problems = self.target_problems(model)
        if problems:
            raise ValueError("model: " + "; ".join(problems))
        self._compiled = self._fused = None
        if not self.own_embedding:
            self.embed_weight = embedding.weight.detach()
            # Gemma multiplies embeddings by a constant inside the module.
            self.embed_scale = float(getattr(embedding, "embed_scale", 1.0))
        if self.config.own_lm_head:
            return self
        weight = lm_head.weight.detach()
        bias = getattr(lm_head, "bias", None)
        bias = None if bias is None else bias.detach()
        if self.draft_to_target is not None:
            weight = weight[self.draft_to_target.to(weight.device)].contiguous()
            if bias is not None:
                bias = bias[self.draft_to_target.to(bias.device)].contiguous()
        self.lm_head_weight, self.lm_head_bias = weight, bias
        return self

    @torch.no_grad()
    def pack_weights(self, *others: PackedLinears) -> EagleHead:
        """Keep packed copies of the linear layers, for ``with head.packed:`` and `logits`; self.

        Call it after `bind`, which brings another lm_head. See `PackedLinears`; an lm_head that
        ``others`` have packed already, the target's own, is not packed again.
        """
        self.packed = PackedLinears(self)
        weight, bias = self._logits_weight(), self.lm_head_bias
        if can_pack(weight):
            found = (packed.multiply_by(weight, bias) for packed in (self.packed, *others))
            linear = next(filter(None, found), None) or pack_linear(weight.detach(), bias)
            self._packed_lm_head = weight, weight_state(weight, bias), linear
        return self

    def fuse_layer(self) -> EagleHead:
        """Let `advance` run by few operators over a slot cache on a CPU, see `fused.py`; self.

        Call it after `bind` and `pack_weights`. A head that carries hooks, modules of other classes
        or dtypes, or is none of these two classes itself runs as it is, and so does one that was
        changed since.
        """
        dtype = self.fc.weight.dtype
        known = all(type(m) in _KNOWN and are_plain(m, dtype) for m in self.modules())
        known = known and dtype in _checks.FLOATS and self.embed_weight is not None
        fused = FusedHead(self) if known else None
        self._fused = fused if fused is not None and fused.is_current() else None
        return self

    @torch.inference_mode()
    def compile_layer(self) -> EagleHead:
        """Let `advance` run in fused kernels; self. Call it after `bind` and `pack_weights`.

        See `compiled.py`. Raises as `TargetModel.compiled`.
        """
        name = f"the {type(self).__name__}"
        refuse_modules(name, self)
        dtype = self.fc.weight.dtype

        def advance(attend: Attend, *inputs: Tensor) -> Tensor:
            tokens, features, positions = inputs
            return self._advance(tokens, features, positions, partial(attend, 1))

        self._compiled = CompiledPart(
            name,
            advance,
            self,
            self.packed.inside(self),
            [
                TensorSpec(("B", "N"), torch.int64),
                TensorSpec(("B", "N", self._fused_size()), dtype),
                TensorSpec(("B", "N"), torch.int64),
            ],
            Kernels(),
        )
        return self

    def _fused_size(self) -> int:
        """Width of what `fuse` gives."""
        return self.feature_size

    def target_problems(self, model: nn.Module) -> list[str]:
        """Why the head cannot be bound to this Hugging Face causal LM; empty when it can."""
        c, problems = self.config, []
        lm_head = model.get_output_embeddings().weight
        widths = {"lm_head": (lm_head, self.config.target_hidden_size or c.hidden_size)}
        if not self.own_embedding:
            widths["embedding"] = (model.get_input_embeddings().weight, c.hidden_size)
        for name, (weight, width) in widths.items():
            if list(weight.shape) != [c.vocab_size, width]:
                problems.append(
                    f"expected an {name} of [{c.vocab_size}, {width}], got {list(weight.shape)}"
                )
        if not c.own_lm_head and c.target_hidden_size not in (None, c.hidden_size):
            problems.append(
                f"expected an lm_head of width {c.hidden_size} to share, got {lm_head.shape[1]}"
            )
        try:
            self.taps(model.config.get_text_config().num_hidden_layers)
        except ValueError as error:
            problems.append(str(error))
        return problems

    @torch.no_grad()
    def set_embedding(self, weight: Tensor) -> None:
        """Use an embedding [V, H] of the head's own instead of the target's."""
        self.embed_weight = weight.to(device=self.fc.weight.device, dtype=self.fc.weight.dtype)
        self.embed_scale = 1.0
        self.own_embedding = True

    def save(self, directory: str | os.PathLike[str], *, embedding: bool = False) -> None:
        """Write config.json and model.safetensors, keys and dtypes as public heads have them.

        Weights are bfloat16. `embedding` writes the target's embedding too, which the strict loader
        of the EAGLE repository wants of an EAGLE-1/2 head; an embedding of its own is always
        written.
        """
        from .checkpoint import save_head

        save_head(self, directory, embedding=embedding)

    @classmethod
    def from_pretrained(
        cls,
        directory: str | os.PathLike[str],
        target: nn.Module | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> EagleHead:
        """Load a head (folder or hub name), saved here or public, and bind it to `target`.

        The checkpoint decides the kind: an `EagleHead` or an `Eagle3Head`. `dtype` defaults to the
        target's, else to the file's. What is read and refused: `checkpoint.load_head`.
        """
        from .checkpoint import load_head

        head = load_head(directory, target, dtype=dtype)
        if not isinstance(head, cls):
            raise ValueError(f"directory: expected an EAGLE-3 head, {directory} holds an EAGLE-1/2")
        return head

    def embed(self, tokens: Tensor) -> Tensor:
        """e(t): tokens [...] int64 (target ids) -> [..., H] in the embedding's dtype."""
        if self.embed_weight is None:
            raise RuntimeError("EagleHead is not bound to a target: call head.bind(model) first")
        e = F.embedding(tokens, self.embed_weight)
        return e if self.embed_scale == 1.0 else e * self.embed_scale

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [..., F] (F = `feature_size`) -> what a recursive step's output replaces.

        An EAGLE-1/2 head takes them as they are.
        """
        return features

    def fuse_packed(self, features: Tensor) -> Tensor:
        """`fuse` from packed weights, where the head has them."""
        return features

    def inputs(self, tokens: Tensor, features: Tensor) -> Tensor:
        """`x = fc([e(t); f])`: tokens [...], features [..., H] -> the layer's input [..., W].

        tokens[i] is the token AFTER the position whose feature is features[i]; features come from
        `fuse`, or are the head's own output.
        """
        e = self.embed(tokens).to(self.fc.weight.dtype)
        return self.fc(torch.cat((e, features.to(e.dtype)), dim=-1))

    def advance(
        self, tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Return `g` of rows that attend to each other as `attend` says: all of a draft step.

        tokens and positions [B, N] int64; features [B, N, H] from `fuse`, or the head's own output;
        attend(q [B, N, Hq, D], k, v [B, N, Hkv, D]) -> [B, N, Hq, D] stores k and v too. From
        packed weights and in fused kernels, where the head has them; by fused operators where
        `attend` is a `CacheRows`.
        """
        compiled = self._compiled
        if compiled is None or torch.compiler.is_compiling() or torch.is_grad_enabled():
            if isinstance(attend, CacheRows) and self.is_fused:
                assert self._fused is not None
                return self._fused.advance(tokens, features, positions, attend)
            with in_use(self.packed):
                return self._advance(tokens, features, positions, attend)
        compiled.refresh()
        given = tokens, features.to(self.fc.weight.dtype), positions
        return compiled(attend, [given[i] for i in compiled.used])

    @property
    def is_fused(self) -> bool:
        """Whether `advance`, called here and now on a slot cache, would run by fused operators."""
        return (
            self._fused is not None
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and self._fused.is_current()
        )

    def _advance(
        self, tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        x = self.inputs(tokens, features)
        return self.finish(x, attend(*self.project_qkv(x, positions)))

    def project_qkv(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v = rope(W_q x), rope(W_k x), W_v x.

        x [..., W] from `inputs`, positions [...] int64 (broadcastable to x's leading shape) ->
        q [..., Hq, D], k and v [..., Hkv, D].
        """
        c, attn = self.config, self.layers[0].self_attn
        lead = x.shape[:-1]
        q = attn.q_proj(x).view(*lead, c.num_attention_heads, c.head_dim)
        k = attn.k_proj(x).view(*lead, c.num_key_value_heads, c.head_dim)
        v = attn.v_proj(x).view(*lead, c.num_key_value_heads, c.head_dim)
        if c.qk_norm:
            q, k = attn.q_norm(q), attn.k_norm(k)
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
        """`h = x + W_o attn; g = h + mlp(norm(h))`: x [..., W], attn [..., Hq, D] -> [..., H]."""
        layer = self.layers[0]
        h = x + layer.self_attn.o_proj(attn.flatten(-2))
        return h + layer.mlp(layer.post_attention_layernorm(h))

    def logits(self, hidden: Tensor) -> Tensor:
        """`lm_head(g)`: hidden [..., H] -> [..., Vd] (draft ids; V without draft vocabulary)."""
        w, packed = self._logits_weight(), self._packed_lm_head
        if (
            packed is not None
            and not torch.is_grad_enabled()
            and packed[0] is w
            and packed[1] == weight_state(w, self.lm_head_bias)
        ):
            out = packed[2](hidden.to(w.dtype))
        else:
            out = F.linear(hidden.to(w.dtype), w, self.lm_head_bias)
        cap = self.config.final_logit_softcapping
        return out if cap is None else torch.tanh(out / cap) * cap

    def _logits_weight(self) -> Tensor:
        w = self.lm_head.weight if self.config.own_lm_head else self.lm_head_weight
        if w is None:
            raise RuntimeError("EagleHead is not bound to a target: call head.bind(model) first")
        return w

    def forward_train(self, tokens: Tensor, features: Tensor, steps: int = 1) -> list[Tensor]:
        """Predicted features of every position, for 1 .. `steps` recursive draft levels.

        Level 1 row i: g1_i = head(t_i, f_i) over the keys of rows <= i. Level s row i feeds the
        previous level's own output in place of the feature, gs_i = head(t_i, g(s-1)_{i-1}), and
        sees what a draft at depth s sees: level-1 keys of rows <= i - s + 1, then the keys of
        levels 2 .. s of rows i - s + 2 .. i, one each. The tokens are the true path's.

        tokens [B, T] int64 (already shifted: tokens[:, i] follows features[:, i]), features
        [B, T, F] -> `steps` tensors [B, T, H]. Rows i < s - 1 of level s have no such history:
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
        feed = self.fuse(features)
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


class Eagle3Head(EagleHead):
    """EAGLE-3 head: h_i = fc([a_i; b_i; c_i]), g_i = layer(e(t_{i+1}), h_i), logits = W norm(g_i).

    `a_i`, `b_i`, `c_i` are the target's hidden states at position i behind layers 1, n // 2 - 1 and
    n - 4 (no norm), side by side. In the layer, q, k and v read [input_layernorm(e);
    hidden_norm(h)] and the residual is h: h' = h + attn; g = h' + mlp(norm(h')). A recursive step
    feeds `g` in place of `h`: fc sees target features only. The lm_head `W` [Vd, H] is the head's
    own (unless the checkpoint has none), so g need not resemble a feature of the target.

    Everything else is as in `EagleHead`; `fuse` is the fc. Source: arXiv 2503.01840. The
    configuration's norm flags are the variants of later public heads.
    """

    def __init__(
        self,
        config: EagleConfig,
        draft_to_target: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(config, draft_to_target, dtype=dtype, device=device)

        def norm(size: int) -> _RMSNorm:
            return _RMSNorm(size, config.rms_norm_eps, dtype=dtype, device=device)

        layer: Any = self.layers[0]
        layer.input_layernorm = norm(config.hidden_size)
        layer.hidden_norm = norm(config.hidden_size)
        self.norm = norm(config.hidden_size)
        if config.norm_before_fc:
            self.input_norm = norm(self.feature_size)
        if config.fc_norm:
            count = self._num_taps()
            self.fc_norm = nn.ModuleList(norm(self.feature_size // count) for _ in range(count))

    def _fused_size(self) -> int:
        return self.config.hidden_size

    def _num_taps(self) -> int:
        return 3 if self.config.aux_layers is None else len(self.config.aux_layers)

    def _widths(self) -> tuple[int, int]:
        return self.feature_size, 2 * self.config.hidden_size

    @property
    def feature_size(self) -> int:
        """Width of the target features that the head reads: all tapped layers side by side."""
        return self._num_taps() * (self.config.target_hidden_size or self.config.hidden_size)

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Layers of a target of `num_layers` whose outputs are the head's features."""
        chosen = self.config.aux_layers
        if chosen is None:
            if num_layers < 7:
                raise ValueError(
                    "expected at least 7 layers (an EAGLE-3 head reads the outputs of layers 1, "
                    f"n // 2 - 1 and n - 4, which are not distinct below 7), got {num_layers}"
                )
            return 1, num_layers // 2 - 1, num_layers - 4
        if max(chosen) >= num_layers:
            raise ValueError(
                f"expected layers {list(chosen)} (the head's aux_layers), got {num_layers} layers"
            )
        return chosen

    @classmethod
    def _shape_for(cls, config: Any, draft_vocab_size: int | None) -> EagleConfig:
        shape = EagleConfig.from_target(config, draft_vocab_size)
        return replace(
            shape,
            fc_bias=False,
            attention_bias=False,
            own_lm_head=True,
            final_logit_softcapping=None,
        )

    def fuse(self, features: Tensor) -> Tensor:
        """`h = fc(f)`: the tapped layers' outputs side by side [..., F] -> [..., H]."""
        x = features.to(self.fc.weight.dtype)
        if self.config.norm_before_fc:
            x = self.input_norm(x)
        if self.config.fc_norm:
            parts = x.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            x = torch.cat(normed, dim=-1)
        return self.fc(x)

    def fuse_packed(self, features: Tensor) -> Tensor:
        """`fuse` from packed weights, where the head has them."""
        with in_use(self.packed):
            return self.fuse(features)

    def inputs(self, tokens: Tensor, features: Tensor) -> Tensor:
        """`x = [input_layernorm(e(t)); h]`: tokens [...], features [..., H] -> [..., 2H]."""
        e = self.layers[0].input_layernorm(self.embed(tokens).to(self.fc.weight.dtype))
        return torch.cat((e, features.to(e.dtype)), dim=-1)

    def project_qkv(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of y = [input_layernorm(e); hidden_norm(h)], rotated; see `EagleHead`."""
        e, h = x.chunk(2, dim=-1)
        y = torch.cat((e, self.layers[0].hidden_norm(h)), dim=-1)
        return super().project_qkv(y, positions)

    def finish(self, x: Tensor, attn: Tensor) -> Tensor:
        """`h' = h + W_o attn; g = h' + mlp(norm(h'))`: x [..., 2H] from `inputs` -> [..., H]."""
        h = x.chunk(2, dim=-1)[1]
        if self.config.norm_before_residual:
            h = self.layers[0].hidden_norm(h)
        g = super().finish(h, attn)
        return self.norm(g) if self.config.norm_output else g

    def logits(self, hidden: Tensor) -> Tensor:
        """`lm_head(norm(g))`: hidden [..., H] -> [..., Vd]."""
        if not self.config.norm_output:
            fused = self._fused if self.is_fused else None
            hidden = self.norm(hidden) if fused is None else fused.norm(hidden)
        return super().logits(hidden)


# What `fuse_layer` knows the code of.
_KNOWN = {EagleHead, Eagle3Head, _Layer, _Attention, _MLP, _RMSNorm, nn.Linear, nn.ModuleList}


def _inverse_frequencies(c: EagleConfig, device: Any) -> Tensor:
    """theta^(-2j/D) [D/2], stretched for long contexts where the checkpoint says so."""
    exponents = torch.arange(0, c.head_dim, 2, dtype=torch.float32, device=device) / c.head_dim
    inv_freq = c.rope_theta**-exponents
    if c.rope_scaling is None:
        return inv_freq
    factor = c.rope_scaling["factor"]
    if c.rope_scaling["rope_type"] == "linear":
        return inv_freq / factor
    # Llama 3: wavelengths past original / low are stretched, those below original / high are not,
    # with a linear passage (in turns per context) between.
    low, high = c.rope_scaling["low_freq_factor"], c.rope_scaling["high_freq_factor"]
    turns = c.rope_scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * (keep + (1 - keep) / factor)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Llama's rotate-half: x cos + [-x2; x1] sin in float32, back in x's dtype."""
    x32 = x.float()
    first, second = x32.chunk(2, dim=-1)
    return (x32 * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
