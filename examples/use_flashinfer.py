"""FlashInfer: a draft tree as the custom mask of a batch prefill plan over paged caches."""

import torch

import eagle2_kernels as ek
from eagle2_kernels.integrations import flashinfer

prefix_lens = torch.tensor([40, 7], dtype=torch.int32)
log_probs = torch.randn(2, 3, 4).sort(-1, descending=True).values.log_softmax(-1)
tokens = torch.randint(1000, (2, 3, 4))
tree = ek.build_tree_from_marginals(
    torch.tensor([17, 18]), prefix_lens, tokens, log_probs, max_nodes=16
)
page_table, page_size = torch.arange(8, dtype=torch.int32).view(2, 4), 16
plan = {
    "qo_indptr": flashinfer.qo_indptr(tree),
    "pages": flashinfer.paged_indptr(page_table, prefix_lens + tree.num_nodes, page_size),
    "custom_mask": flashinfer.custom_mask(tree, prefix_lens),
}
print({name: getattr(value, "shape", value) for name, value in plan.items()})


def attend(wrapper, q, kv_cache, num_kv_heads):
    """A ``flashinfer.BatchPrefillWithPagedKVCacheWrapper`` run on the tree."""
    _, num_heads, head_dim = q.shape
    wrapper.plan(
        plan["qo_indptr"], *plan["pages"], num_heads, num_kv_heads, head_dim, page_size,
        custom_mask=plan["custom_mask"],
    )  # fmt: skip
    out, lse = wrapper.run(q, kv_cache, return_lse=True)
    return out, flashinfer.lse_from_base2(lse)
