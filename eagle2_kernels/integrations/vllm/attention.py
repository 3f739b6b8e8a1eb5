"""The attention backend that `register` names to vLLM; imports vLLM.

A page of vLLM's cache is [Hkv, page_size, K then V], whatever the order in memory: K and V go to
our operators as views of it, the block table is the page table, and a batch is ragged::

    query_start_loc [0, 5, 6, 7]   request 0: 5 rows of its prompt, 1 and 2: one row each
    seq_lens        [5, 93, 40]    prefix_lens = seq_lens - rows = [0, 92, 39]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
)
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from ...attention import tree_attention
from ...cache import write_kv


@dataclass
class TreeAttentionMetadata:
    """One batch, as `tree_attention` takes it.

    Attributes:
        num_actual_tokens: rows that are no padding.
        qo_indptr: int32 [B + 1], where each request's rows begin.
        prefix_lens: int32 [B], tokens of each request before its rows.
        page_table: int32 [B, max_pages].
        max_q: a bound on a request's rows.
        pages: int32 [tokens, 1], the page that each row's K and V go to, negative for none.
        places: int32 [tokens], the row of that page.
        causal: False where each row sees all of its request.
        tree_mask: int64 [tokens, ceil(max_q / 64)] where requests are trees; None: causal chains.
        depths: int32 [tokens], beside ``tree_mask``.
        stock: what vLLM's own kernel wants, where a layer of the group needs it.
    """

    num_actual_tokens: int
    qo_indptr: Tensor
    prefix_lens: Tensor
    page_table: Tensor
    max_q: int
    pages: Tensor
    places: Tensor
    causal: bool = True
    tree_mask: Tensor | None = None
    depths: Tensor | None = None
    stock: Any = None


def make_metadata(common: Any, page_size: int, stock: Any = None) -> TreeAttentionMetadata:
    """The metadata of a batch from vLLM's ``CommonAttentionMetadata``.

    Its slots are page * page_size + place, negative for rows that are not stored.

    Raises NotImplementedError where requests of one batch differ in causality.
    """
    if isinstance(common.causal, Tensor):
        raise NotImplementedError("causal: expected one value for the batch, got a tensor")
    b = common.num_reqs
    qo_indptr = common.query_start_loc[: b + 1].int()
    slots = common.slot_mapping[: common.num_actual_tokens]
    return TreeAttentionMetadata(
        num_actual_tokens=common.num_actual_tokens,
        qo_indptr=qo_indptr,
        prefix_lens=common.seq_lens[:b].int() - qo_indptr.diff(),
        page_table=common.block_table_tensor[:b].int(),
        max_q=common.max_query_len,
        pages=torch.div(slots, page_size, rounding_mode="floor").int()[:, None],
        places=(slots % page_size).int(),
        causal=bool(common.causal),
        stock=stock,
    )


def halves(kv_cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """K and V [pages, page_size, Hkv, D] of vLLM's view [pages, Hkv, page_size, D + Dv]."""
    pages = kv_cache.transpose(1, 2)
    return pages[..., :head_size], pages[..., head_size:]


def _forward(
    impl: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    metadata: TreeAttentionMetadata,
    output: Tensor,
) -> Tensor:
    """Store the batch's K and V [tokens, Hkv, D], then its rows of ``output`` [tokens, Hq, Dv]."""
    n = metadata.num_actual_tokens
    k_cache, v_cache = halves(kv_cache, query.shape[-1])
    if impl.kv_sharing_target_layer_name is None:
        write_kv(
            k_cache, v_cache, key[:n, None], value[:n, None], metadata.places, None, metadata.pages
        )
    window = impl.sliding_window
    prefix, tree_len = metadata.prefix_lens, None
    if not metadata.causal:
        if window is not None and window > 0:
            raise NotImplementedError("sliding_window: expected none where causal is False")
        prefix, tree_len = prefix + metadata.qo_indptr.diff(), 0
    tree_attention(
        query[:n],
        k_cache,
        v_cache,
        prefix,
        metadata.tree_mask,
        tree_len=tree_len,
        depths=metadata.depths,
        qo_indptr=metadata.qo_indptr,
        max_q=metadata.max_q,
        page_table=metadata.page_table,
        sm_scale=impl.scale,
        softcap=float(impl.logits_soft_cap or 0.0),
        window=window if window is not None and window > 0 else None,
        sinks=impl.sinks,
        out=output[:n].view(n, query.shape[1], -1),
    )
    return output


def _unsupported(alibi_slopes: Any, kv_cache_dtype: str, attn_type: str) -> str:
    """The argument that our kernel has no place for, or nothing."""
    if alibi_slopes is not None:
        return "alibi_slopes"
    if kv_cache_dtype not in ("auto", "float16", "bfloat16"):
        return "kv_cache_dtype"
    return "" if attn_type == AttentionType.DECODER else "attn_type"


class TreeAttentionImpl(AttentionImpl[TreeAttentionMetadata]):
    """One layer's attention, on any platform; arguments are those vLLM gives every backend."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        wrong = _unsupported(alibi_slopes, kv_cache_dtype, attn_type)
        if wrong:
            raise NotImplementedError(f"{wrong}: not supported by eagle2_kernels' attention")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sliding_window = sliding_window
        self.logits_soft_cap = logits_soft_cap
        self.sinks = sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TreeAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of the batch's rows [tokens, Hq, D], whose K and V join the cache first."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: this backend does not quantise its output")
        if attn_metadata is None:  # vLLM's profiling run
            return output
        return _forward(self, query, key, value, kv_cache, attn_metadata, output)


class TreeAttentionMetadataBuilder(AttentionMetadataBuilder[TreeAttentionMetadata]):
    """Makes a `TreeAttentionMetadata` per batch and cache group."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> TreeAttentionMetadata:
        """The metadata of this batch."""
        return make_metadata(common_attn_metadata, self.kv_cache_spec.block_size)


class TreeAttentionBackend(AttentionBackend):
    """The backend ``CUSTOM``: decoders with caches in their own dtype, in any memory layout."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        """Its name in vLLM."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TreeAttentionImpl]:
        """The layers' class."""
        return TreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeAttentionMetadataBuilder]:
        """The batches' class."""
        return TreeAttentionMetadataBuilder

    @classmethod
    def supports_sink(cls) -> bool:
        """One logit per head in the denominator."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """By position."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Where all of a batch is."""
        return True


class CPUTreeAttentionImpl(CPUAttentionBackendImpl):
    """One layer on a CPU: ours where it can be, else vLLM's, each in its own cache layout."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ours = not _unsupported(self.alibi_slopes, self.kv_cache_dtype, self.attn_type)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """See `TreeAttentionImpl.forward`."""
        if attn_metadata is None or not self.ours or output_scale is not None:
            stock = getattr(attn_metadata, "stock", attn_metadata)
            if stock is not None and key is not None and self.kv_sharing_target_layer_name is None:
                self.do_kv_cache_update(layer, key, value, kv_cache, stock.slot_mapping)
            rest = (stock, output, output_scale, output_block_scale)
            return super().forward(layer, query, key, value, kv_cache, *rest)
        return _forward(self, query, key, value, kv_cache, attn_metadata, output)


class CPUTreeAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Makes vLLM's own metadata too where a layer of the group is vLLM's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names)
        impls = [layer.impl for layer in layers.values()]
        self.ours = any(getattr(impl, "ours", False) for impl in impls)
        self.stock = not all(getattr(impl, "ours", False) for impl in impls)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """The metadata of this batch, in either form or both."""
        stock = None
        if self.stock:
            stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
            if not self.ours:
                return stock
        return make_metadata(common_attn_metadata, self.block_size, stock)


class CPUTreeAttentionBackend(CPUAttentionBackend):
    """Takes the place of ``CPU_ATTN``, whose name, cache shape and page sizes it keeps."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[CPUTreeAttentionImpl]:
        """The layers' class."""
        return CPUTreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CPUTreeAttentionMetadataBuilder]:
        """The batches' class."""
        return CPUTreeAttentionMetadataBuilder
