"""Decoder layers of known code, run by few operators of this library instead of their own Python.

::

    [add, norm] -> q/k/v product -> [rotate, store] -> attention -> product
    -> [add, norm] -> gate/up product -> [silu, mul] -> product                  [..] one operator

Where all products of a layer are packed, all of it is one operator, `decoder_layer`.

Values are rounded where the modules round them, so that a forward differs from theirs by the order
of sums alone. On a CPU; the products are `packed.py`'s where there are such. Whatever is not known
to the last sub-module (another class, activation or dtype, a hook, an adapter, a forward put in
place, patched classes) runs its own code, and so does what was changed since.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from .. import _checks
from ..attention import tree_attention
from ..cache import rope_and_write_kv, write_kv
from ..layer import fused_add_rms_norm, rms_norm, silu_and_mul
from .packed import PackedLinears, PackedProduct

__all__ = ["Attention", "CacheRows", "FusedHead", "FusedModel", "are_plain"]

_ops = torch.ops.eagle2_kernels
# Checked calls where values are to be checked; they take the same arguments.
_norm: Callable[..., Tensor] = rms_norm if _checks.VALIDATE else _ops.rms_norm.default
_add_norm: Callable[..., None] = (
    fused_add_rms_norm if _checks.VALIDATE else _ops.fused_add_rms_norm.default
)
_layer = _ops.decoder_layer.default
_silu: Callable[..., Tensor] = silu_and_mul if _checks.VALIDATE else _ops.silu_and_mul.default
_rotate: Callable[..., Tensor] = (
    rope_and_write_kv if _checks.VALIDATE else _ops.rope_and_write_kv.default
)
_attend: Callable[..., Any] = (
    tree_attention if _checks.VALIDATE else _ops.tree_attention_out.default
)

Multiply = Callable[[Tensor], Tensor]


@dataclass
class CacheRows:
    """Attention of new rows over one layer's slot cache, where their keys and values go first.

    The new rows are the last of ``tree_len`` slots behind the prefix (None: all of them), of which
    ``lengths`` [B] are stored (None: all); the rest is `tree_attention`'s. Called with q, k, v
    [B, N, H, D].
    """

    k: Tensor
    v: Tensor
    lengths: Tensor | None
    prefix_lens: Tensor
    tree_mask: Tensor | None = None
    tree_len: int | None = None

    def first(self, rows: int) -> Tensor:
        """Cache slot [B] of the first of so many new rows."""
        if self.tree_len is None:
            return self.prefix_lens
        return self.prefix_lens + (self.tree_len - rows)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend by the checked operators: [B, N, Hq, D]."""
        write_kv(self.k, self.v, k, v, self.first(q.shape[1]), self.lengths)
        options = {} if self.tree_len is None else {"tree_len": self.tree_len}
        return tree_attention(q, self.k, self.v, self.prefix_lens, self.tree_mask, **options)


class Attention(NamedTuple):
    """How a layer attends, as the probe of `TargetModel` saw it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    softcap: float
    window: int | None


class FusedLayer(NamedTuple):
    """What the loop over layers reads: weights, products, how it attends."""

    norm: Tensor
    eps: float
    qkv: Multiply
    head_norms: dict[str, Any]
    options: int
    o: Multiply
    post_norm: Tensor
    post_eps: float
    gate_up: Multiply
    down: Multiply


class WholeLayer(NamedTuple):
    """What `decoder_layer` takes of a layer: ``qkv_packed`` to ``norm_weight``, and options."""

    weights: tuple[Any, ...]
    options: dict[str, Any]


def _whole(
    block: Any, norm: Any, num_heads: int, products: Iterable[PackedProduct], **options: Any
) -> WholeLayer | None:
    """A layer for `decoder_layer`; None where a product is not packed or values are checked."""
    attention, mlp, known = block.self_attn, block.mlp, {}
    for p in products:
        known[tuple(map(id, p.modules))] = p
    modules = {
        "qkv": (attention.q_proj, attention.k_proj, attention.v_proj),
        "o": (attention.o_proj,),
        "gate_up": (mlp.gate_proj, mlp.up_proj),
        "down": (mlp.down_proj,),
    }
    packed = {name: known.get(tuple(map(id, group))) for name, group in modules.items()}
    head_norms = _head_norms(attention)
    post_norm, eps = norm_of(block.post_attention_layernorm)
    first, first_eps = (None, eps) if norm is None else norm_of(norm)
    if _checks.VALIDATE or {eps, first_eps, head_norms.get("eps", eps)} != {eps}:
        return None
    weights: dict[str, Tensor] = {}
    for name, product in packed.items():
        if product is None:
            return None
        weights[name] = product.packed
        if product.bias is not None:
            options[f"{name}_bias"] = product.bias
    order = weights["qkv"], weights["o"], post_norm, weights["gate_up"], weights["down"]
    sizes = num_heads, mlp.gate_proj.out_features
    return WholeLayer((*order, *sizes, first), options | head_norms | {"eps": eps})


def merged(modules: Sequence[nn.Linear], products: Iterable[PackedProduct]) -> Multiply:
    """``x -> [m(x) for m in modules]`` side by side: one packed product, or the layers' own."""
    known = {tuple(map(id, p.modules)): p for p in products}
    whole = known.get(tuple(map(id, modules)))
    if whole is not None:
        return whole.multiply
    parts: list[Multiply] = []
    for m in modules:
        product = known.get((id(m),))
        parts.append(_plain(m) if product is None else product.multiply)
    if len(parts) == 1:
        return parts[0]
    return lambda x: torch.cat([part(x) for part in parts], dim=-1)


def _plain(linear: nn.Linear) -> Multiply:
    multiply, weight, bias = F.linear, linear.weight, linear.bias
    return lambda x: multiply(x, weight, bias)


class Watch:
    """Whether modules are still what they were: the same children, weights and code, no hooks.

    Weights of ``packed`` layers must not have been written to or moved either, for a copy of them
    is in use; others are read where they lie. What goes unnoticed there is what goes unnoticed by
    `PackedLinears`.
    """

    def __init__(
        self,
        roots: Iterable[nn.Module],
        packed: Iterable[nn.Module],
        hooks_of: Watch | None = None,
    ) -> None:
        """``hooks_of``: look for the hooks that another one looks for."""
        modules = list({id(m): m for root in roots for m in root.modules()}.values())
        # This runs at every forward, when the caches are full of weights: few passes in C, and as
        # little memory to look at as tells.
        self._modules = modules
        self._own = [vars(m) for m in modules]
        self._hooked: list[dict[str, Any]] = self._own if hooks_of is None else hooks_of._hooked
        self._sizes: list[int] = []
        self._types = [*map(type, modules)]
        self._classes: list[Any] = list(dict.fromkeys(self._types))
        self._code = [c.forward for c in self._classes]
        self._next_hook = -1
        self._tables = [t for m in modules for t in (m._modules, m._parameters) if t]
        self._values = self._now()
        here = set(map(id, modules))
        copied = [
            w for m in packed if id(m) in here for w in m._parameters.values() if w is not None
        ]
        self._copied = copied
        self._places = [w.data_ptr() for w in copied]
        # inference tensors count no versions
        self._counted = [w for w in copied if not w.is_inference()]
        self._versions = [w._version for w in self._counted]

    def is_current(self) -> bool:
        """Whether nothing has changed."""
        return (
            self._no_hooks()
            and self._own_code()
            and len(now := self._now()) == len(self._values)
            and all(map(is_, now, self._values))
            and [w._version for w in self._counted] == self._versions
            and [w.data_ptr() for w in self._copied] == self._places
        )

    def _now(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._tables))]

    def _no_hooks(self) -> bool:
        # every hook that was ever registered, anywhere, has a number
        count = RemovableHandle.next_id
        if count != self._next_hook:
            around = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
            if any(around) or any(
                [own["_forward_hooks"] or own["_forward_pre_hooks"] for own in self._hooked]
            ):
                return False
            self._next_hook = count
        return True

    def _own_code(self) -> bool:
        # a forward put in place is one attribute more
        sizes = [*map(len, self._own)]
        if sizes != self._sizes:
            if any(["forward" in own for own in self._own]):
                return False
            self._sizes = sizes
        # a class patched, or another one in its place
        return [c.forward for c in self._classes] == self._code and all(
            map(is_, map(type, self._modules), self._types)
        )


class FusedModel:
    """The base model of a causal LM (embedding, layers, final norm) by fused operators."""

    def __init__(
        self,
        base: Any,
        attentions: Sequence[Attention],
        packed: PackedLinears,
    ) -> None:
        self._base = base
        self._rotary = base.rotary_emb
        self._embedding = base.embed_tokens.weight
        self._final = norm_of(base.norm)
        products = [p for p in packed.inside(base) if p.is_current()]
        kinds = list(dict.fromkeys((a.scaling, a.softcap, a.window) for a in attentions))
        self._kinds = [_attention_options(*kind) for kind in kinds]
        self._layers = [
            _layer_of(block, kinds.index((a.scaling, a.softcap, a.window)), products)
            for block, a in zip(base.layers, attentions, strict=True)
        ]
        wholes = [
            _whole(
                *(block, block.input_layernorm, a.num_heads, products),
                **_attention_options(a.scaling, a.softcap, a.window),
            )
            for block, a in zip(base.layers, attentions, strict=True)
        ]
        self._wholes = [w for w in wholes if w is not None]
        if len(self._wholes) < len(wholes):
            self._wholes = []
        self._heads = attentions[0].num_heads, attentions[0].head_dim
        copied = [m for p in products for m in p.modules]
        ends = base.embed_tokens, base.norm
        self._watch = Watch([*ends, *base.layers], copied)
        self._sample = Watch([*ends, base.layers[0], base.layers[-1]], copied, self._watch)
        self._around = vars(base), base._modules, dict(base._modules)
        self._list = base.layers._modules, dict(base.layers._modules)

    @classmethod
    def of(
        cls, base: Any, attentions: Sequence[Attention], packed: PackedLinears
    ) -> FusedModel | None:
        """This model, where its code is known to the last module; else None."""
        return cls(base, attentions, packed) if _is_known(base, attentions) else None

    def is_current(self, *, sample: bool = False) -> bool:
        """Whether the model is still what was looked at here, and in eval mode.

        ``sample``: look into its first and last layer only, and for hooks in all.
        """
        own, children, before = self._around
        layers, layers_before = self._list
        return (
            not (
                own["training"]
                or own["_forward_hooks"]
                or own["_forward_pre_hooks"]
                or "forward" in own
                or children != before
                or layers != layers_before
                or not self._embedding.is_cpu
            )
            and (self._sample if sample else self._watch).is_current()
        )

    def __call__(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        k_caches: Sequence[Tensor],
        v_caches: Sequence[Tensor],
        prefix_lens: Tensor,
        tree_mask: Tensor | None,
        depths: Tensor | None,
        lengths: Tensor | None,
        taps: Collection[int] = (),
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Features behind the final norm, and the outputs of the layers ``taps``.

        Arguments are those of `TargetModel.forward`.
        """
        residual = torch.embedding(self._embedding, token_ids)
        cos, sin = self._rotary(residual, position_ids)
        tapped: dict[int, Tensor] = {}
        if self._wholes:
            run = _layer
            for i, (weights, options) in enumerate(self._wholes):
                if "window" in options:
                    options = options | {"depths": depths}
                k, v = k_caches[i], v_caches[i]
                run(
                    *(residual, cos, sin, k, v, prefix_lens, *weights, tree_mask, lengths),
                    **options,
                )
                if i in taps:
                    tapped[i] = residual.clone()
            return _norm(residual, *self._final), tapped
        heads, dim = self._heads
        b, n, _ = residual.shape
        # One layer reads it before the next one writes it.
        attended = residual.new_empty(b, n, heads, dim)
        flat = attended.view(b, n, heads * dim)
        kinds = [
            options | {"out": attended} | ({"depths": depths} if "window" in options else {})
            for options in self._kinds
        ]
        add_norm, rotate, attend, silu = _add_norm, _rotate, _attend, _silu
        x = None
        for i, layer in enumerate(self._layers):
            norm, eps, qkv, head_norms, kind, o, post_norm, post_eps, gate_up, down = layer
            if x is None:
                x = _norm(residual, norm, eps)
            else:
                add_norm(x, residual, norm, eps)
                if i - 1 in taps:
                    tapped[i - 1] = residual.clone()
            k, v = k_caches[i], v_caches[i]
            q = rotate(qkv(x), cos, sin, k, v, prefix_lens, lengths, None, **head_norms)
            attend(q, k, v, prefix_lens, tree_mask, **kinds[kind])
            x = o(flat)
            add_norm(x, residual, post_norm, post_eps)
            x = down(silu(gate_up(x)))
        assert x is not None
        add_norm(x, residual, *self._final)
        last = len(self._layers) - 1
        if last in taps:
            tapped[last] = residual
        return x, tapped


class FusedHead:
    """A draft head's layer over a slot cache by fused operators; see `EagleHead.advance`."""

    def __init__(self, head: Any) -> None:
        layer, config = head.layers[0], head.config
        attention, mlp = layer.self_attn, layer.mlp
        products = [p for p in head.packed.inside(head) if p.is_current()]
        self._head, self._buffers = head, head._buffers
        self._heads = config.num_attention_heads, config.head_dim
        self._weight = head.fc.weight
        self._eagle3 = hasattr(layer, "hidden_norm")
        self._fc = merged([head.fc], products)
        self._qkv = merged([attention.q_proj, attention.k_proj, attention.v_proj], products)
        self._head_norms = _head_norms(attention)
        self._o = merged([attention.o_proj], products)
        self._post_norm = norm_of(layer.post_attention_layernorm)
        self._gate_up = merged([mlp.gate_proj, mlp.up_proj], products)
        self._down = merged([mlp.down_proj], products)
        self._whole = _whole(layer, None, config.num_attention_heads, products)
        if self._eagle3:
            self._input_norm = norm_of(layer.input_layernorm)
            self._hidden_norm = norm_of(layer.hidden_norm)
            self._output_norm = norm_of(head.norm)
        self._watch = Watch([head], [m for p in products for m in p.modules])

    def is_current(self) -> bool:
        """Whether the head is still what was looked at here."""
        return self._watch.is_current()

    def norm(self, hidden: Tensor) -> Tensor:
        """An EAGLE-3 head's output norm."""
        return _norm(hidden, *self._output_norm)

    def advance(
        self, tokens: Tensor, features: Tensor, positions: Tensor, rows: CacheRows
    ) -> Tensor:
        """`EagleHead.advance` over a cache's rows."""
        buffers, config = self._buffers, self._head.config
        e = torch.embedding(buffers["embed_weight"], tokens)
        if self._head.embed_scale != 1.0:
            e = e * self._head.embed_scale
        e, features = e.to(self._weight.dtype), features.to(self._weight.dtype)
        if self._eagle3:
            normed = _norm(features, *self._hidden_norm)
            x = torch.cat((_norm(e, *self._input_norm), normed), dim=-1)
            # the residual stream is written to
            residual = (
                normed
                if config.norm_before_residual
                else features.clone(memory_format=torch.contiguous_format)
            )
        else:
            x = residual = self._fc(torch.cat((e, features), dim=-1))
        frequencies = buffers["inv_freq"]
        angles = positions[..., None].float() * torch.cat((frequencies, frequencies))
        cos, sin = angles.cos(), angles.sin()
        options: dict[str, Any] = {} if rows.tree_len is None else {"tree_len": rows.tree_len}
        if self._whole is not None:
            weights, own = self._whole
            if self._eagle3:
                options["attention_input"] = x
            where = rows.k, rows.v, rows.prefix_lens
            seen = rows.tree_mask, rows.lengths
            _layer(residual, cos, sin, *where, *weights, *seen, **options, **own)
            return self.norm(residual) if self._eagle3 and config.norm_output else residual
        first = rows.first(tokens.shape[1])
        q = _rotate(
            self._qkv(x), cos, sin, rows.k, rows.v, first, rows.lengths, None, **self._head_norms
        )
        attended = torch.empty_like(q)
        _attend(q, rows.k, rows.v, rows.prefix_lens, rows.tree_mask, out=attended, **options)
        x = self._o(attended.flatten(-2))
        _add_norm(x, residual, *self._post_norm)
        residual += self._down(_silu(self._gate_up(x)))
        return self.norm(residual) if self._eagle3 and config.norm_output else residual


def _attention_options(scaling: float, softcap: float, window: int | None) -> dict[str, Any]:
    options: dict[str, Any] = {"sm_scale": scaling}
    if softcap:
        options["softcap"] = softcap
    if window is not None:
        options["window"] = window
    return options


def _layer_of(block: Any, kind: int, products: Sequence[PackedProduct]) -> FusedLayer:
    attention, mlp = block.self_attn, block.mlp
    return FusedLayer(
        *norm_of(block.input_layernorm),
        merged([attention.q_proj, attention.k_proj, attention.v_proj], products),
        _head_norms(attention),
        kind,
        merged([attention.o_proj], products),
        *norm_of(block.post_attention_layernorm),
        merged([mlp.gate_proj, mlp.up_proj], products),
        merged([mlp.down_proj], products),
    )


def _head_norms(attention: Any) -> dict[str, Any]:
    """Norms of q and k, as `rope_and_write_kv` takes them."""
    if not hasattr(attention, "q_norm"):
        return {}
    (q_weight, eps), (k_weight, _) = norm_of(attention.q_norm), norm_of(attention.k_norm)
    return {"q_weight": q_weight, "k_weight": k_weight, "eps": eps}


def norm_of(norm: Any) -> tuple[Tensor, float]:
    """Weight and eps of a norm, of transformers or of a head."""
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return norm.weight, float(eps)


# Families of transformers whose layers are Llama's but for biases, head norms and windows, by the
# folder of their code.
_FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def _is_known(base: Any, attentions: Sequence[Attention]) -> bool:
    for folder, name in _FAMILIES.items():
        code = sys.modules.get(f"transformers.models.{folder}.modeling_{folder}")
        if code is not None and type(base) is getattr(code, f"{name}Model", None):
            break
    else:
        return False
    try:
        return _matches(base, code, name, attentions)
    except AttributeError:
        # other names in another transformers
        return False


def _matches(base: Any, code: Any, family: str, attentions: Sequence[Attention]) -> bool:
    from transformers.activations import SiLUActivation

    own = {part: getattr(code, family + part) for part in ("RMSNorm", "Attention", "MLP")}
    layer, norm = getattr(code, f"{family}DecoderLayer"), own["RMSNorm"]
    silu = SiLUActivation, nn.SiLU
    classes = [*own.values(), layer, type(base), nn.Linear, nn.Embedding, *silu]
    turn = code.apply_rotary_pos_emb
    if not all(map(_is_own, classes)) or inspect.unwrap(turn).__globals__ is not vars(code):
        return False
    embed = base.embed_tokens
    outer = {"embed_tokens": nn.Embedding, "norm": norm, "layers": nn.ModuleList}
    if not _has(base, outer, {"rotary_emb"}) or embed.max_norm is not None:
        return False
    dtype, size = embed.weight.dtype, embed.weight.shape[1]
    if dtype not in _checks.FLOATS or len(attentions) != len(base.layers):
        return False
    shapes = {base.norm: (size,), embed: tuple(embed.weight.shape)}
    q_and_k = {"q_norm": norm, "k_norm": norm} if family == "Qwen3" else {}
    linears = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), nn.Linear)
    first = attentions[0]
    for block, a in zip(base.layers, attentions, strict=True):
        attention, mlp = block.self_attn, block.mlp
        parts = {"self_attn": own["Attention"], "mlp": own["MLP"]}
        norms = {"input_layernorm": norm, "post_attention_layernorm": norm}
        gated = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), nn.Linear)
        if not (
            type(block) is layer
            and _has(block, parts | norms)
            and _has(attention, linears | q_and_k)
            and _has(mlp, gated, {"act_fn"})
            and type(mlp.act_fn) in silu
            and (a.num_heads, a.head_dim) == (first.num_heads, first.head_dim)
        ):
            return False
        q, kv, inner = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, mlp.gate_proj
        shapes |= {
            block.input_layernorm: (size,),
            block.post_attention_layernorm: (size,),
            attention.q_proj: (q, size),
            attention.k_proj: (kv, size),
            attention.v_proj: (kv, size),
            attention.o_proj: (size, q),
            mlp.gate_proj: (inner.out_features, size),
            mlp.up_proj: (inner.out_features, size),
            mlp.down_proj: (size, inner.out_features),
        }
        if q_and_k:
            shapes |= {attention.q_norm: (a.head_dim,), attention.k_norm: (a.head_dim,)}
            if attention.q_norm.variance_epsilon != attention.k_norm.variance_epsilon:
                return False
    return all(_has_weights(m, dtype, shape) for m, shape in shapes.items()) and all(
        _is_plain(m) for m in base.modules()
    )


def _is_own(cls: Any) -> bool:
    """Whether a class has the forward that was written for it, not one patched in."""
    home = vars(sys.modules[cls.__module__])
    return getattr(inspect.unwrap(cls.forward), "__globals__", None) is home


def _has(module: nn.Module, children: dict[str, Any], others: Collection[str] = ()) -> bool:
    """Whether a module has these children, by their exact class, and no more but ``others``."""
    found = module._modules
    return found.keys() == children.keys() | set(others) and all(
        type(found[name]) is cls for name, cls in children.items()
    )


def _has_weights(module: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return tuple(module.weight.shape) == shape and are_plain(module, dtype)


def are_plain(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a module's own weights are plain parameters of this dtype on a CPU."""
    return all(
        type(p) is nn.Parameter
        and p.dtype == dtype
        and p.device.type == "cpu"
        and p.is_contiguous()
        for p in module._parameters.values()
        if p is not None
    )


def _is_plain(module: nn.Module) -> bool:
    """Whether nothing but its class's code runs when a module is called."""
    return not ("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)
