"""The target: a Hugging Face causal LM, unchanged, over a slot cache and tree attention.

Transformers lets a library register an attention function by name. Ours stores the new keys and
values behind each request's prefix and calls `tree_attention`; everything else (embedding,
rotation, norms, projections, lm_head) is the model's own code. What the forward needs to know about
this call travels in one keyword argument, so there is no global state, and the model's attention
implementation is what it was whenever no forward of ours is running.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ..attention import tree_attention
from ..cache import write_kv
from .compiled_layers import KEYWORD, CompiledLayers, TracedCall
from .fused import Attention, FusedModel
from .packed import PackedLinears, in_use, one_at_a_time, pack_linear

__all__ = ["SlotCache", "TargetModel", "load_target_model"]

# The forward's attention has no entry in AttentionMaskInterface: transformers then builds no mask
# (and skips a check for packed sequences that reads positions back to the host). The probe's
# attention has one, which sees what mask every layer asks for.
_ATTENTION = "eagle2_slots"
_PROBE = "eagle2_probe"

# Row counts that `row_invariant_rows` compares with 32, largest first.
_PROBED_ROWS = (31, 24, 20, 17, 16, 15, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1)

# Rows of the forward that fused operators are compared in, and how far they may be off: this many
# roundings of a value, growing with the root of the number of layers.
_COMPARED_ROWS = 5
_COMPARED_EPS = 8

# Arguments of attention functions that say nothing `tree_attention` would have to honour.
_HARMLESS = frozenset(
    {"dropout", "scaling", "position_ids", "use_cache", "cache_position", "output_attentions"}
    | {"output_hidden_states", "is_causal", "sliding_window", "softcap", "s_aux", "return_dict"}
    | {KEYWORD}
)


@dataclass
class _Layer:
    """What one layer's attention is, as the probe saw it."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    softcap: float
    window: int | None


@dataclass
class SlotCache:
    """Keys and values of all layers, [B, S, Hkv, D] each: slot s of request b holds position s.

    ``tensors`` lists k and v of layer 0, then of layer 1, ...: what `compact_kv` takes.
    """

    k: list[Tensor]
    v: list[Tensor]
    tensors: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = [t for pair in zip(self.k, self.v, strict=True) for t in pair]

    @property
    def batch(self) -> int:
        """Requests the cache has room for."""
        return self.k[0].shape[0]

    @property
    def capacity(self) -> int:
        """Slots per request."""
        return self.k[0].shape[1]

    def narrow(self, batch: int) -> SlotCache:
        """The first ``batch`` requests, as views."""
        return SlotCache([k[:batch] for k in self.k], [v[:batch] for v in self.v])


@dataclass
class _Call:
    """One forward's context, handed to every layer's attention function."""

    layers: list[_Layer]
    cache: SlotCache
    prefix_lens: Tensor
    tree_mask: Tensor | None
    depths: Tensor | None
    lengths: Tensor | None

    def attend(
        self, i: int, query: Tensor, key: Tensor, value: Tensor, s_aux: Tensor | None = None
    ) -> Tensor:
        """Layer i's attention: q, k, v [B, H, N, D] -> [B, N, Hq, D]."""
        layer, k, v = self.layers[i], self.cache.k[i], self.cache.v[i]
        rows = key.transpose(1, 2), value.transpose(1, 2)
        write_kv(k, v, *rows, self.prefix_lens, self.lengths)
        return tree_attention(
            query.transpose(1, 2),
            k,
            v,
            self.prefix_lens,
            self.tree_mask,
            depths=None if layer.window is None else self.depths,
            sm_scale=layer.scaling,
            softcap=layer.softcap,
            window=layer.window,
            sinks=s_aux,
        )


def _tree_attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    eagle2: _Call | TracedCall | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if eagle2 is None:
        raise RuntimeError(
            f"attention {_ATTENTION!r} runs inside TargetModel only: it needs the call's slot cache"
        )
    i: int = module.layer_idx  # type: ignore[assignment]
    return eagle2.attend(i, query, key, value, s_aux), None


class TargetModel:
    """A Hugging Face causal LM that decodes trees.

    ::

        token_ids, position_ids [B, N]  --model, K/V to slots prefix_lens + j-->  features [B, N, H]
        features [.., H]                --lm_head (softcap, scale)------------->  logits [.., V]

    ``features`` are the last hidden states after the final norm. The model is used as it is: same
    weights, same code, no change to its attention implementation outside `forward`. One forward of
    two tokens at construction shows how each layer attends; what this library does not honour (see
    Raises) is refused there.

    Forwards are for inference: call them under ``torch.inference_mode()``. Those of one model wait
    for each other, whatever threads they come from; nothing else may run the model meanwhile.

    Args:
        hf_model: a causal LM of transformers whose attention goes through `AttentionInterface`.
        pack_weights: keep a second copy of the linear layers' weights in the layout of
            `packed_linear` (bfloat16 on CPU; nothing elsewhere): same values, less time per
            forward. See `PackedLinears`.
        fuse_layers: on a CPU, run layers of known code (Llama, Mistral, Qwen2 and Qwen3 as
            transformers has them) by few operators of this library; see `fused.py`. Values differ
            from the modules' by the order of sums in norms. A forward is compared with the modules'
            here, and they run wherever it differs by more, nothing is known of the code, gradients
            are asked for, or a weight, a module or a hook was changed since. Python values inside
            the layers are read once.

    Raises:
        TypeError: ``hf_model`` is no transformers model.
        ValueError: it is in training mode, an encoder-decoder, keeps state that is no K/V cache,
            shares K/V between layers, or has a V head dim that differs from K's, masks that are
            neither causal nor sliding windows, an attention argument unknown to this library, or
            logits that are not its lm_head of the last hidden state.
    """

    def __init__(
        self, hf_model: nn.Module, *, pack_weights: bool = False, fuse_layers: bool = True
    ) -> None:
        config = getattr(hf_model, "config", None)
        if config is None or not hasattr(hf_model, "get_output_embeddings"):
            raise TypeError(
                f"hf_model: expected a transformers causal LM, got {type(hf_model).__name__}"
            )
        self.hf_model: Any = hf_model
        self.config = config.get_text_config()
        self._name = type(hf_model).__name__
        self._check_kind()
        model: Any = hf_model
        base = getattr(model, model.base_model_prefix, None)
        self._base: Any = model.get_decoder() if base is None else base
        self._lm_head: Any = model.get_output_embeddings()
        if self._lm_head is None:
            raise ValueError(f"hf_model: expected a model with an lm_head, {self._name} has none")
        with one_at_a_time(hf_model):
            self._layers, self._configs = self._probe()
        self._blocks = _find_blocks(self._base, [layer.module for layer in self._layers])
        self._finish_logits = self._probe_logits()
        self._row_invariant: tuple[int | None] | None = None
        self.pack_weights = pack_weights
        self._packed_base = PackedLinears(*([self._base] if pack_weights else []))
        self._packed_head = PackedLinears(*([self._lm_head] if pack_weights else []))
        self._compiled: CompiledLayers | None = None
        self.fuse_layers = fuse_layers
        self._is_settled = False
        self._twin: TargetModel | None = None
        self._fused = self._fuse() if fuse_layers else None

    def __getstate__(self) -> dict[str, Any]:
        # A copy has weights of its own: it is neither compiled nor fused, as it is not packed.
        return self.__dict__ | {"_compiled": None, "_fused": None, "_twin": None}

    @property
    def hidden_size(self) -> int:
        """Width of the features."""
        return self._lm_head.weight.shape[1]

    @property
    def vocab_size(self) -> int:
        """Rows of the lm_head."""
        return self._lm_head.weight.shape[0]

    @property
    def max_positions(self) -> int | None:
        """Length of the position table (max_position_embeddings); None when there is none.

        Of a model with longrope it is the length it was first trained for: behind it the rotation
        of a row would depend on the other rows of its forward, so on how it is decoded.
        """
        return min(
            _first_lengths(self.config),
            default=getattr(self.config, "max_position_embeddings", None),
        )

    @property
    def num_layers(self) -> int:
        """Layers with a K/V cache."""
        return len(self._layers)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights, features and cache."""
        return self._lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._lm_head.weight.device

    def eos_token_ids(self) -> list[int]:
        """The ids that end a text: generation_config's, else the configuration's."""
        for source in (getattr(self.hf_model, "generation_config", None), self.config):
            ids = getattr(source, "eos_token_id", None)
            if ids is not None:
                return list(ids) if isinstance(ids, (list, tuple)) else [int(ids)]
        return []

    def new_cache(self, batch: int, capacity: int) -> SlotCache:
        """An empty cache of ``capacity`` slots for ``batch`` requests."""
        kwargs: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        shapes = [(batch, capacity, layer.num_kv_heads, layer.head_dim) for layer in self._layers]
        return SlotCache(
            [torch.zeros(s, **kwargs) for s in shapes], [torch.zeros(s, **kwargs) for s in shapes]
        )

    def forward(
        self,
        cache: SlotCache,
        token_ids: Tensor,
        position_ids: Tensor,
        prefix_lens: Tensor,
        *,
        tree_mask: Tensor | None = None,
        depths: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Features of N new tokens per request; their K/V go to slots prefix_lens + 0 .. N - 1.

        Args:
            cache: slots of B requests; ``prefix_lens`` [B] int32 of each are filled.
            token_ids: [B, N] int64.
            position_ids: [B, N] int64, prefix_lens + depth of each token.
            prefix_lens: [B] int32; not changed.
            tree_mask: [B, N, ceil(N / 64)] int64 words, or None for a causal chain.
            depths: [B, N] int32 with ``tree_mask`` (sliding windows go by position, not slot).
            lengths: [B] int32; rows from there on are padding, their K/V are not stored.

        Returns:
            [B, N, H], rows of padding unspecified.
        """
        return self._forward(
            (), cache, token_ids, position_ids, prefix_lens, tree_mask, depths, lengths
        )[0]

    def _forward(
        self,
        taps: Sequence[int],
        cache: SlotCache,
        token_ids: Tensor,
        position_ids: Tensor,
        prefix_lens: Tensor,
        tree_mask: Tensor | None = None,
        depths: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Features, and the outputs of the layers ``taps``; arguments of `forward`."""
        with one_at_a_time(self.hf_model):
            if self.is_fused:
                assert self._fused is not None
                rows = prefix_lens, tree_mask, depths, lengths
                return self._fused(token_ids, position_ids, cache.k, cache.v, *rows, taps)
            call = _Call(self._layers, cache, prefix_lens, tree_mask, depths, lengths)
            seen: dict[int, Tensor] = {}
            handles = [self._blocks[i].register_forward_hook(_keep_output(seen, i)) for i in taps]
            try:
                return self._run_modules(call, token_ids, position_ids), seen
            finally:
                for handle in handles:
                    handle.remove()

    def _run_modules(self, call: _Call, token_ids: Tensor, position_ids: Tensor) -> Tensor:
        """A forward by the model's own code."""
        before = [config._attn_implementation_internal for config in self._configs]
        for config in self._configs:
            config._attn_implementation_internal = _ATTENTION
        try:
            with self._fast_layers(call):
                return self._base(
                    input_ids=token_ids, position_ids=position_ids, use_cache=False, eagle2=call
                ).last_hidden_state
        finally:
            for config, name in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = name

    def _fast_layers(self, call: _Call) -> AbstractContextManager[Any]:
        if self._compiled is None or torch.compiler.is_compiling():
            return in_use(self._packed_base)
        return self._compiled.over(call.attend)

    @property
    def is_fused(self) -> bool:
        """Whether a forward, called here and now, would run by fused operators."""
        return (
            self._fused is not None
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and self._fused.is_current(sample=self._is_settled)
        )

    def settled(self) -> TargetModel:
        """A twin over the same model for a loop of forwards, which looks for changes less closely.

        It sees hooks, `train`, and what changes in the first or the last layer: all that touches
        the whole model. Looking at every layer of a small model, which the weights have driven out
        of the caches, takes some percent of a forward. This target itself, where it is not fused.
        """
        if self._is_settled or not self.is_fused:
            return self
        if self._twin is None:
            self._twin = copy.copy(self)
            self._twin._fused, self._twin._is_settled = self._fused, True
        return self._twin

    @torch.inference_mode()
    def _fuse(self) -> FusedModel | None:
        """The model by fused operators, where its code is known and a forward says the same."""
        if self.device.type != "cpu" or not self._blocks:
            return None
        attentions = [
            Attention(x.num_heads, x.num_kv_heads, x.head_dim, x.scaling, x.softcap, x.window)
            for x in self._layers
        ]
        fused = FusedModel.of(self._base, attentions, self._packed_base)
        if fused is None or not fused.is_current():
            return None
        tokens = torch.arange(_COMPARED_ROWS)[None] * 7919 % self.vocab_size
        positions = torch.arange(_COMPARED_ROWS)[None]
        rows = torch.zeros(1, dtype=torch.int32), None, None, None
        ours, theirs = (self.new_cache(1, _COMPARED_ROWS) for _ in range(2))
        got, _ = fused(tokens, positions, ours.k, ours.v, *rows)
        with one_at_a_time(self.hf_model):
            want = self._run_modules(_Call(self._layers, theirs, *rows), tokens, positions)
        eps = max(torch.finfo(t).eps for t in (self.dtype, torch.float32))
        bound = _COMPARED_EPS * eps * len(attentions) ** 0.5
        pairs = zip([got, *ours.tensors], [want, *theirs.tensors], strict=True)
        return fused if all(_distance(a, b) <= bound for a, b in pairs) else None

    @property
    def is_compiled(self) -> bool:
        """Whether this is what `compiled` returned."""
        return self._compiled is not None

    @torch.inference_mode()
    def compiled(self) -> TargetModel:
        """A twin of this target, over the same model, whose decoder layers are fused kernels.

        Layers of the same code are compiled once, for any number of requests and rows. The twin's
        numbers are those of a compiled forward: close to this one's, not bit-equal. Weights may be
        changed afterwards, but neither their dtype and device nor the modules that hold them (a
        forward then raises ValueError); Python values inside the layers were read for good. A copy
        (`copy.deepcopy`, pickle) of the twin is not compiled.

        Raises:
            ValueError: the model is not on a CPU, or its layers cannot be told apart, are not plain
                code (hooks, forwards put in place, weights of their own kind) or cannot be traced:
                the message names the layer.
            RuntimeError: Inductor found no C++ compiler.
        """
        if self.is_compiled:
            return self
        if self.device.type != "cpu":
            raise ValueError(
                f"compile: expected the target on a CPU, got {self.device}; cuda_graph is for GPUs"
            )
        if not self._blocks:
            raise ValueError(f"compile: {self._name} keeps its layers in no list")
        sizes = (2, 3), (5, 7)
        with one_at_a_time(self.hf_model):
            calls = [self._layer_arguments(*size) for size in sizes]
            implementations = [config._attn_implementation_internal for config in self._configs]
            twin = copy.copy(self)
            twin._row_invariant, twin._fused = None, None
            try:
                for config in self._configs:
                    config._attn_implementation_internal = _ATTENTION
                twin._compiled = CompiledLayers(
                    self._name, self._blocks, calls, sizes, self._packed_base
                )
            finally:
                for config, name in zip(self._configs, implementations, strict=True):
                    config._attn_implementation_internal = name
        return twin

    def _layer_arguments(self, batch: int, rows: int) -> list[tuple[Any, Any]]:
        """What the model passes to each layer in a forward of this size."""
        seen: dict[int, tuple[Any, Any]] = {}

        def record(i: int, module: nn.Module, args: Any, kwargs: Any) -> None:
            seen[i] = args, {k: v for k, v in kwargs.items() if k != KEYWORD}

        handles = [
            block.register_forward_pre_hook(partial(record, i), with_kwargs=True)
            for i, block in enumerate(self._blocks)
        ]
        try:
            positions = torch.arange(rows, device=self.device).repeat(batch, 1)
            prefix_lens = torch.zeros(batch, dtype=torch.int32, device=self.device)
            self.forward(self.new_cache(batch, rows), positions * 0, positions, prefix_lens)
        finally:
            for handle in handles:
                handle.remove()
        return [seen[i] for i in range(len(self._blocks))]

    def forward_tapped(
        self, taps: Sequence[int], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """`forward`, and what the layers ``taps`` put out on the way: what EAGLE-3 heads read.

        ::

            taps (1, n // 2 - 1, n - 4) -> features [B, N, H], tapped [B, N, len(taps) * H]

        A layer's output is the hidden state behind its residual sum, before any norm; layers count
        from 0. The other arguments are `forward`'s. Raises ValueError for a layer that the model
        does not have, or when its layers cannot be told apart.
        """
        if not self._blocks:
            raise ValueError(f"taps: {self._name} keeps its layers in no list to look into")
        strange = [i for i in taps if not 0 <= i < len(self._blocks)]
        if strange:
            raise ValueError(f"taps: expected layers in [0, {len(self._blocks)}), got {strange}")
        features, outputs = self._forward(taps, *args, **kwargs)
        return features, torch.cat([outputs[i] for i in taps], dim=-1)

    def logits(self, features: Tensor) -> Tensor:
        """The model's logits [.., V] of features [.., H]."""
        with one_at_a_time(self.hf_model), in_use(self._packed_head):
            out = self._lm_head(features)
        return out if self._finish_logits is None else self._finish_logits(out)

    @torch.inference_mode()
    def row_invariant_rows(self) -> int | None:
        """Find the smallest R in (1, 2, 4, 8) such that R .. 32 rows give a row the same bits.

        Measured on linear layers of this model's shapes and dtype; None when a row's bits change
        with the row count even past 8. Plain decoding padded to R rows is then bit-identical to the
        decoding of trees of up to 32 nodes (all requests together).
        """
        if self._row_invariant is None:
            self._row_invariant = (self._measure_rows(),)
        return self._row_invariant[0]

    def _measure_rows(self) -> int | None:
        most = 32
        shapes = set()
        for m in self.hf_model.modules():
            if isinstance(m, nn.Linear):
                columns = self._packed_columns(m)
                size = m.out_features if columns is None else columns, m.in_features
                kind = m.weight.dtype, m.weight.device, m.bias is None
                shapes.add((*size, *kind, columns is not None))
        smallest = 1
        for out_features, in_features, dtype, device, no_bias, packed in shapes:
            x, weight = (t.to(device, dtype) for t in _cancelling(most, in_features, out_features))
            bias = None if no_bias else torch.zeros(out_features, dtype=dtype, device=device)
            linear = (
                pack_linear(weight, bias) if packed else partial(F.linear, weight=weight, bias=bias)
            )
            full = linear(x[None])
            for n in (n for n in _PROBED_ROWS if n >= smallest):
                if not torch.equal(linear(x[None, :n]), full[:, :n]):
                    smallest = n + 1
                    break
        return next((r for r in (1, 2, 4, 8) if r >= smallest), None)

    @property
    def packed_lm_head(self) -> PackedLinears:
        """The lm_head's packed weight, where it is packed."""
        return self._packed_head

    def is_packed(self, linear: nn.Linear) -> bool:
        """Whether this layer of the model runs from packed weights in `forward` and `logits`."""
        return self._packed_columns(linear) is not None

    def _packed_columns(self, linear: nn.Linear) -> int | None:
        base = self._packed_base.out_features(linear)
        return self._packed_head.out_features(linear) if base is None else base

    def _check_kind(self) -> None:
        model, config = self.hf_model, self.config
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"hf_model: expected a decoder, {self._name} is an encoder-decoder")
        if getattr(model, "_is_stateful", False):
            raise ValueError(
                f"hf_model: {self._name} keeps a recurrent state, which cannot be rolled back to "
                "an accepted path; expected a model with a K/V cache in every layer"
            )
        if getattr(config, "num_kv_shared_layers", 0):
            raise ValueError(f"hf_model: {self._name} shares K/V between layers: not supported")
        if model.training:
            raise ValueError(
                "hf_model: expected a model in eval mode, got training mode (dropout); "
                "call hf_model.eval()"
            )

    @torch.inference_mode()
    def _probe(self) -> tuple[list[_Layer], list[Any]]:
        """Run two tokens through the model and record what each layer asks of its attention."""
        seen: dict[int, _Layer] = {}
        configs = {id(c): c for c in (self.hf_model.config, self._base.config)}

        def record(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
        ) -> None:
            index = getattr(module, "layer_idx", None)
            if not isinstance(index, int) or index in seen:
                raise ValueError(
                    f"hf_model: expected one attention call per layer, {self._name} made another "
                    f"in layer {index} ({type(module).__name__}: cross attention?)"
                )
            configs.setdefault(id(module.config), module.config)
            seen[index] = self._layer(module, query, key, value, mask, kwargs)

        self._run_probe(configs, lambda: self._base(**self._probe_inputs(), eagle2=record))
        expected = getattr(self.config, "num_hidden_layers", len(seen))
        if sorted(seen) != list(range(expected)) or not seen:
            raise ValueError(
                f"hf_model: expected {expected} layers whose attention goes through transformers' "
                f"AttentionInterface, {self._name} has them in layers {sorted(seen)}"
            )
        return [seen[i] for i in range(expected)], list(configs.values())

    def _layer(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        kwargs: dict[str, Any],
    ) -> _Layer:
        where = f"hf_model: layer {module.layer_idx} of {self._name}"
        strange = {k: v for k, v in kwargs.items() if k not in _HARMLESS and v is not None}
        if strange:
            raise ValueError(f"{where} asks its attention for {sorted(strange)}: not supported")
        if not getattr(module, "is_causal", True):
            raise ValueError(f"{where} is not causal: not supported")
        if value.shape != key.shape or query.shape[-1] != key.shape[-1]:
            raise ValueError(
                f"{where}: expected one head dim for Q, K and V, got "
                f"{query.shape[-1]}, {key.shape[-1]}, {value.shape[-1]}"
            )
        if query.shape[2] != key.shape[2]:
            raise ValueError(f"{where}: expected as many new keys as queries (no cross attention)")
        scaling = kwargs.get("scaling")
        return _Layer(
            module=module,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[-1],
            scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            softcap=float(kwargs.get("softcap") or 0.0),
            window=_read_marker(mask, where),
        )

    def _probe_inputs(self) -> dict[str, Any]:
        tokens = torch.tensor([[0, 1]], device=self.device)
        return {"input_ids": tokens, "position_ids": tokens, "use_cache": False}

    def _run_probe(self, configs: dict[int, Any], run: Callable[[], Any]) -> Any:
        saved = {}
        try:
            for key, config in configs.items():
                saved[key] = config._attn_implementation_internal
                config._attn_implementation_internal = _PROBE
            return run()
        except TypeError as error:
            raise ValueError(
                f"hf_model: {self._name}'s forward does not pass keyword arguments on to its "
                f"attention ({error})"
            ) from error
        finally:
            for key, name in saved.items():
                configs[key]._attn_implementation_internal = name

    @torch.inference_mode()
    def _probe_logits(self) -> Callable[[Tensor], Tensor] | None:
        """What the model does to its lm_head's output, found by comparing with its own logits."""
        configs = {id(c): c for c in self._configs}
        inputs = self._probe_inputs()

        def ignore(*args: Any, **kwargs: Any) -> None:
            return None

        def run() -> tuple[Tensor, Tensor]:
            features = self._base(**inputs, eagle2=ignore).last_hidden_state
            return self.hf_model(**inputs, eagle2=ignore).logits, self._lm_head(features)

        expected, plain = self._run_probe(configs, run)
        finishes: list[Callable[[Tensor], Tensor] | None] = [None]
        cap = getattr(self.config, "final_logit_softcapping", None)
        if cap:
            finishes.append(lambda x: torch.tanh(x / cap) * cap)
        factor = getattr(self.config, "logit_scale", None)
        if factor:
            finishes.append(lambda x: x * factor)
        divisor = getattr(self.config, "logits_scaling", None)
        if divisor:
            finishes.append(lambda x: x / divisor)
        for finish in finishes:
            got = plain if finish is None else finish(plain)
            if torch.equal(got.to(expected.dtype), expected):
                return finish
        raise ValueError(
            "hf_model: expected logits that are the lm_head of the last hidden state (softcapped "
            f"or scaled), {self._name} computes something else"
        )


def _first_lengths(config: Any) -> Iterator[int]:
    """original_max_position_embeddings of every longrope in a configuration."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # some have one for each kind of layer
    for rope in [found, *(x for x in found.values() if isinstance(x, dict))]:
        if "longrope" in (rope.get("rope_type"), rope.get("type")):
            name = "original_max_position_embeddings"
            length = rope.get(name) or getattr(config, name, None)
            if length is not None:
                yield int(length)


def _keep_output(seen: dict[int, Tensor], i: int) -> Callable[[nn.Module, Any, Any], None]:
    """A forward hook that keeps a layer's output under its number."""

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        seen[i] = output if isinstance(output, Tensor) else output[0]

    return keep


def _distance(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|; infinite where either is not finite."""
    a, b = a.double(), b.double()
    distance = float((a - b).norm() / b.norm().clamp(min=1e-300))
    return distance if math.isfinite(distance) else math.inf


def _find_blocks(base: nn.Module, attentions: list[nn.Module]) -> list[nn.Module]:
    """The decoder layers around these attention modules; empty when no module lists them."""
    for module in base.modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == len(attentions)
            and all(
                any(m is attention for m in block.modules())
                for block, attention in zip(module, attentions, strict=True)
            )
        ):
            return list(module)
    return []


def _cancelling(rows: int, in_features: int, out_features: int) -> tuple[Tensor, Tensor]:
    """Rows x [R, K] and weight [N, K] whose products are sums of 0, but for rounding.

    What such a product leaves is the rounding of its partial sums, so any other order of summation
    shows, where random numbers would hide most of it under the last rounding.
    """
    g = torch.Generator().manual_seed(0)
    half = in_features // 2
    x = (
        torch.randn(rows, half, generator=g)
        * torch.randint(0, 14, (rows, half), generator=g).exp2()
    )
    w = torch.randn(min(out_features, 256), half, generator=g).sign()
    order = torch.randperm(half, generator=g)
    odd = in_features % 2
    x = torch.cat([x, x[:, order], torch.ones(rows, odd)], dim=1)
    w = torch.cat([w, -w[:, order], torch.ones(len(w), odd)], dim=1)
    return x, w.repeat(out_features // len(w) + 1, 1)[:out_features]


def _probe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    eagle2: Callable[..., None] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if eagle2 is None:
        raise TypeError(f"{KEYWORD} did not reach the attention function")
    eagle2(module, query, key, value, attention_mask, **kwargs)
    return value.new_zeros(*query.shape[:-1], value.shape[-1]).transpose(1, 2), None


# A mask of a kind this library does not know.
_UNKNOWN = -1.0


def _probe_mask(
    *args: Any, mask_function: Callable[..., Any], local_size: int | None = None, **kwargs: Any
) -> Tensor:
    """A marker in the mask's place: 0 for a causal mask, w for a sliding window of w keys.

    The kind is found by asking the mask function about positions around ``local_size``.
    """
    size = 1 if local_size is None else local_size
    points = sorted({0, 1, 2, 3, *(m * size + d for m in (1, 2) for d in (-1, 0, 1))})
    q, k = torch.tensor(points)[:, None], torch.tensor(points)[None, :]
    zero = torch.tensor(0)
    try:
        got = torch.as_tensor(mask_function(zero, zero, q, k)).expand(len(points), len(points))
    except Exception:
        # a mask function that needs more than indices is none of ours
        return torch.full((1, 1, 1, 1), _UNKNOWN)
    if torch.equal(got, k <= q):
        return torch.zeros(1, 1, 1, 1)
    if local_size is not None and torch.equal(got, (k <= q) & (q - k < local_size)):
        return torch.full((1, 1, 1, 1), float(local_size), dtype=torch.float64)
    return torch.full((1, 1, 1, 1), _UNKNOWN)


def _read_marker(mask: Any, where: str) -> int | None:
    if not isinstance(mask, Tensor) or mask.numel() != 1:
        raise ValueError(f"{where} does not build its mask with transformers' masking_utils")
    marker = float(mask)
    if marker < 0 or marker != int(marker):
        raise ValueError(
            f"{where} attends under a mask that is neither causal nor a sliding window: "
            "not supported"
        )
    return int(marker) or None


AttentionInterface.register(_ATTENTION, _tree_attention_function)
AttentionInterface.register(_PROBE, _probe_attention)
AttentionMaskInterface.register(_PROBE, _probe_mask)


def load_target_model(
    name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    pack_weights: bool = True,
    fuse_layers: bool = True,
) -> tuple[TargetModel, Any]:
    """Load a causal LM and its tokenizer from a directory or a hub name.

    ``pack_weights`` and ``fuse_layers`` are `TargetModel`'s, both on here: the model is ours alone.
    Returns the `TargetModel`
    and the tokenizer (None when there is none beside the weights). Raises FileNotFoundError for
    what can only be a path and leads to no directory.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(name)
    # What the hub would say of a mistyped path speaks of repository ids.
    local = path.is_absolute() or len(path.parts) > 2 or str(name).startswith(".")
    if local and not path.is_dir():
        raise FileNotFoundError(f"target: expected a model directory or a hub name, got {name}")
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype or "auto")
    if device is not None:
        model = model.to(device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        tokenizer = None
    target = TargetModel(model.eval(), pack_weights=pack_weights, fuse_layers=fuse_layers)
    return target, tokenizer
