"""Draft trees inside vLLM: a worker that drafts with our head, verifies trees, and moves their K/V.

::

    from vllm import LLM

    LLM(
        model,
        worker_cls="eagle2_kernels.integrations.vllm.trees.TreeWorker",
        speculative_config={
            "method": "custom_class",
            "model": "eagle2_kernels.integrations.vllm.trees.TreeProposer",
            "num_speculative_tokens": 15,  # slots of a tree, the root not counted
        },
        additional_config={"eagle2": {"head": "path/to/head", "top_k": 4, "max_depth": 4}},
        enable_prefix_caching=False,  # the head must see the features of every prompt token
    )

To vLLM's scheduler a tree is a list of draft tokens, in slot order, of which a number are accepted.
What knows better is the model runner: slot j of a tree has position prefix + depth, its mask row
instead of a causal one, and after the walk the accepted slots' K and V move behind the prefix.

Trees are grown for greedy requests. Another request (sampled, penalised, with log-probabilities or
a grammar) takes the one token that vLLM's own sampler draws at its root, exactly as without drafts.

Measured with SmolLM2-135M and the demo's head in bfloat16 on two cores: 2.2 tokens per forward of
16 rows, which costs as much more than a forward of one row, so no time was gained yet (12 to 38
tokens/s, plain 26 to 42).

On a CPU, with vLLM 0.32's V1 model runner, which it chooses for this method by itself.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from ...cache import compact_kv
from ...flatten import build_tree, flatten_tree, pack_tree_mask, unpack_tree_mask
from ...models.draft import HeadDrafter, grow_candidates, new_draft_cache, refeed, take_rows
from ...models.heads import EagleHead
from ...verify import verify_tree
from .attention import TreeAttentionMetadata, halves


class TreeProposer:
    """What vLLM's method ``custom_class`` asks for; the model runner below does the work."""

    def __init__(self, vllm_config: Any) -> None:
        if vllm_config.cache_config.enable_prefix_caching:
            raise ValueError("enable_prefix_caching: expected False, the head reads every prompt")

    def load_model(self, model: Any) -> None:
        """Nothing: the runner loads the head."""

    def propose(self, *args: Any, **kwargs: Any) -> Any:
        """Not called by `TreeModelRunner`. Raises RuntimeError."""
        raise RuntimeError("TreeProposer: expected worker_cls='....vllm.trees.TreeWorker'")


class _Drafted(NamedTuple):
    """A request's tree as it was proposed: tokens of slots 1 and on, parents of all slots."""

    tokens: list[int]
    parents: list[int]


class _Batch(NamedTuple):
    """This step's trees, in the batch's order; a request without one has a chain of its rows."""

    counts: list[int]  # rows of the tree, 1 without drafts
    parents: Tensor  # int32 [R, N]
    depths: Tensor  # int32 [R, N]
    first_child: Tensor
    next_sibling: Tensor
    mask: Tensor  # bool [R, N, N]
    prefix_lens: Tensor  # int32 [R]


class TreeModelRunner(CPUModelRunner):
    """VLLM's model runner for a CPU, with trees for chains."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """The target, then the head that ``additional_config`` names (the demo's by default)."""
        super().load_model(*args, **kwargs)
        options = dict((self.vllm_config.additional_config or {}).get("eagle2", {}))
        if "head" not in options:
            from ...demo import demo_head_dir

            options["head"] = demo_head_dir()
        base, vocab = self.model.model, self.model_config.get_vocab_size()
        shim = SimpleNamespace(
            config=self.model_config.hf_text_config,
            get_input_embeddings=lambda: SimpleNamespace(weight=base.embed_tokens.weight[:vocab]),
            get_output_embeddings=lambda: SimpleNamespace(weight=self.model.lm_head.weight[:vocab]),
        )
        self._head = EagleHead.from_pretrained(options["head"], dtype=self.model_config.dtype)
        self._head.bind(shim).eval()  # type: ignore[arg-type]
        self._top_k, self._depth = options.get("top_k", 4), options.get("max_depth", 4)
        self._drafted: dict[str, _Drafted] = {}
        self._rows: dict[str, int] = {}
        rows = self.scheduler_config.max_num_seqs
        capacity = self.max_model_len + self._top_k * self._depth + self.num_spec_tokens + 1
        self._draft_cache = new_draft_cache(self._head, rows, capacity)
        self._batch: _Batch | None = None
        self._walk: tuple[list[list[int]], list[int]] = ([], [])

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        ids = self.input_batch.req_ids
        drafts = scheduler_output.scheduled_spec_decode_tokens
        counts = [len(drafts.get(r, ())) + 1 for r in ids]
        n = max(counts)
        parents = torch.arange(-1, n - 1, dtype=torch.int32).repeat(len(ids), 1)
        for i, request in enumerate(ids):
            known, tokens = self._drafted.get(request), list(drafts.get(request, ()))
            # vLLM may cut the list: the first slots are a tree of their own.
            if known is not None and tokens and known.tokens[: len(tokens)] == tokens:
                parents[i, : counts[i]] = torch.tensor(known.parents[: counts[i]])
        lengths = torch.tensor(counts, dtype=torch.int32)
        before = self.input_batch.num_computed_tokens_cpu_tensor[: len(ids)].int()
        depths, _, first_child, next_sibling, words = flatten_tree(parents, lengths, before)
        mask = unpack_tree_mask(words, n)
        self._batch = _Batch(counts, parents, depths, first_child, next_sibling, mask, before)
        start = 0
        for i, count in enumerate(num_scheduled_tokens.tolist()):
            if counts[i] > 1:
                self.positions[start : start + count] = before[i].long() + depths[i, :count]
            start += count
        return result

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._build_attention_metadata(*args, **kwargs)
        batch = self._batch
        if batch is None or max(batch.counts) == 1 or not isinstance(result[0], dict):
            return result
        for metadata in {id(m): m for m in result[0].values()}.values():
            if isinstance(metadata, TreeAttentionMetadata):
                self._mask(batch, metadata)
        return result

    @staticmethod
    def _mask(batch: _Batch, metadata: TreeAttentionMetadata) -> None:
        """Trees where there are drafts, causal chains elsewhere, one row of bits per token."""
        starts = metadata.qo_indptr.tolist()
        seen = torch.zeros(metadata.num_actual_tokens, metadata.max_q, dtype=torch.bool)
        depths = torch.zeros(metadata.num_actual_tokens, dtype=torch.int32)
        for i, count in enumerate(batch.counts):
            rows = slice(starts[i], starts[i + 1])
            length = starts[i + 1] - starts[i]
            if count > 1:
                seen[rows, :count] = batch.mask[i, :count, :count]
                depths[rows] = batch.depths[i, :count]
            else:
                seen[rows, :length] = torch.ones(length, length, dtype=torch.bool).tril()
                depths[rows] = torch.arange(length, dtype=torch.int32)
        metadata.tree_mask, metadata.depths = pack_tree_mask(seen), depths

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        batch = self._batch
        assert batch is not None
        count = len(batch.counts)
        if spec_decode_metadata is None:
            self._walk = ([[0]] * count, [0] * count)
            return super()._sample(logits, spec_decode_metadata)
        ends = torch.tensor(batch.counts).cumsum(0)
        starts = ends - torch.tensor(batch.counts)
        meta = self.input_batch.sampling_metadata
        output = self.sampler(logits=logits[starts], sampling_metadata=meta)
        n = batch.parents.shape[1]
        at = (starts[:, None] + torch.arange(n)).clamp(max=logits.shape[0] - 1)
        target = logits.argmax(-1)[at]
        first = output.sampled_token_ids[:, 0].long()
        walked = self._walked(target[:, 0] == first)
        target[:, 0] = first
        links = (
            torch.where(walked[:, None], batch.first_child, -1),
            torch.where(walked[:, None], batch.next_sibling, -1),
        )
        drafts = self.input_ids.gpu[spec_decode_metadata.logits_indices][at].long()
        accept_index, accept_length, _ = verify_tree(target, drafts, *links, self._depth)
        self._walk = (accept_index.tolist(), accept_length.tolist())
        emitted = target.gather(1, accept_index.long().clamp(min=0))
        emitted = torch.where(accept_index >= 0, emitted, -1)
        # As wide as vLLM expects with drafts, -1 behind the last token.
        wide = torch.full((count, max(n, emitted.shape[1])), -1, dtype=torch.int32)
        wide[:, : emitted.shape[1]] = emitted.int()
        output.sampled_token_ids = wide[:, : max(n, 2)].contiguous()
        self._compact(batch, accept_index, torch.where(accept_length > 0, accept_length, -1))
        return output

    def _walked(self, agrees: Tensor) -> Tensor:
        """Which requests have trees to walk: greedy ones, unless logprobs are asked for."""
        if self.input_batch.sampling_metadata.max_num_logprobs is not None:
            return torch.zeros_like(agrees)
        return agrees & torch.tensor([self._is_greedy(r) for r in self.input_batch.req_ids])

    def _is_greedy(self, request: str) -> bool:
        """Whether the request's token is the argmax of its logits and nothing else."""
        p = self.requests[request].sampling_params
        return (
            p is not None
            and p.temperature < 1e-5
            and (p.repetition_penalty, p.frequency_penalty, p.presence_penalty) == (1.0, 0.0, 0.0)
            and p.logprobs is None
            and not p.min_tokens
            and not p.bad_words
            and not p.logit_bias
            and p.allowed_token_ids is None
            and p.structured_outputs is None
            and getattr(p, "thinking_token_budget", None) is None
            and not self.model_config.logits_processors
        )

    def _compact(self, batch: _Batch, accept_index: Tensor, accept_length: Tensor) -> None:
        """The accepted slots' K and V to the end of each prefix, in every layer."""
        if not bool((accept_length > 0).any()):
            return
        table = self.input_batch.block_table[0].get_device_tensor(len(batch.counts))
        caches: list[Tensor] = []
        size = self.model_config.get_head_size()
        for layer in self.compilation_config.static_forward_context.values():
            if isinstance(getattr(layer, "kv_cache", None), Tensor):
                caches += halves(layer.kv_cache, size)
        table = table[: len(batch.counts)].int().contiguous()
        compact_kv(caches, accept_index, accept_length, batch.prefix_lens, table)

    def propose_draft_token_ids(  # type: ignore[override]
        self, scheduler_output: Any, sampled_token_ids: Any, sampling_metadata: Any,
        hidden_states: Tensor, *args: Any, **kwargs: Any,
    ) -> list[list[int]]:  # fmt: skip
        """Feed the head what was committed, grow a tree per request, return its tokens."""
        batch, ids = self._batch, self.input_batch.req_ids
        assert batch is not None
        for gone in self._rows.keys() - self.requests.keys():
            del self._rows[gone]
            self._drafted.pop(gone, None)
        for request in ids:
            if request not in self._rows:
                taken = set(self._rows.values())
                self._rows[request] = next(i for i in range(len(taken) + 1) if i not in taken)
        b = max(self._rows.values()) + 1
        scheduled = [scheduler_output.num_scheduled_tokens[r] for r in ids]
        tokens = self.input_batch.token_ids_cpu
        pairs: list[tuple[int, Tensor, list[int], int]] = []
        start = 0
        for i, request in enumerate(ids):
            before = int(batch.prefix_lens[i])
            if batch.counts[i] > 1:
                path = [s for s in self._walk[0][i] if s >= 0]
                features, following = (
                    hidden_states[start + torch.tensor(path)],
                    sampled_token_ids[i],
                )
            else:
                features = hidden_states[start : start + scheduled[i]]
                following = tokens[i, before + 1 : before + 1 + scheduled[i]].tolist()
            pairs.append((self._rows[request], features, list(following), before))
            start += scheduled[i]
        widest = max(len(p[2]) for p in pairs)
        width = hidden_states.shape[-1]
        fed, feats = (
            torch.zeros(b, widest, dtype=torch.int64),
            hidden_states.new_zeros(b, widest, width),
        )
        prefix, lengths = torch.zeros(2, b, dtype=torch.int32)
        limits = torch.zeros(b, 2, dtype=torch.int32)
        for i, (row, features, following, before) in enumerate(pairs):
            fed[row, : len(following)] = torch.tensor(following)
            feats[row, : len(following)] = features
            prefix[row], lengths[row] = before, len(following)
            if sampled_token_ids[i] and self._is_greedy(ids[i]):
                room = self.max_model_len - before - len(following) - 1
                limits[row] = torch.tensor([self.num_spec_tokens + 1, max(room, 0)])
        cache = self._draft_cache.narrow(b)
        hidden = refeed(self._head, cache, fed, feats, prefix, lengths)
        last = (lengths - 1).clamp(min=0)[:, None]
        after = prefix + lengths
        drafter = HeadDrafter(self._head, cache, after, take_rows(hidden, last))
        candidates = grow_candidates(drafter, b, self._top_k, self._depth)
        roots = fed.gather(1, last.long())[:, 0]
        tree = build_tree(roots, after, *candidates, self.num_spec_tokens + 1, limits)
        drafts = []
        for request, (row, *_) in zip(ids, pairs, strict=True):
            n = int(tree.num_nodes[row])
            kept = tree.draft_tokens[row, 1:n].tolist() if n else []
            self._drafted[request] = _Drafted(kept, tree.parents[row, : max(n, 1)].tolist())
            drafts.append(kept)
        return drafts


class TreeWorker(cpu_worker.CPUWorker):
    """VLLM's worker for a CPU, with `TreeModelRunner`: give it as ``worker_cls``."""

    def init_device(self) -> None:
        """As vLLM does, with our runner in the place of its own."""
        theirs, cpu_worker.CPUModelRunner = cpu_worker.CPUModelRunner, TreeModelRunner
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = theirs
