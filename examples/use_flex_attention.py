"""FlexAttention: a draft tree as a mask_mod, beside our own kernel on the same keys."""

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import eagle2_kernels as ek
from eagle2_kernels.integrations.flex_attention import tree_mask_mod

prefix_lens = torch.tensor([40, 7], dtype=torch.int32)
log_probs = torch.randn(2, 3, 4).sort(-1, descending=True).values.log_softmax(-1)
tokens = torch.randint(1000, (2, 3, 4))
tree = ek.build_tree_from_marginals(
    torch.tensor([17, 18]), prefix_lens, tokens, log_probs, max_nodes=16
)
q, k, v = torch.randn(2, 16, 4, 32), torch.randn(2, 64, 2, 32), torch.randn(2, 64, 2, 32)
mask = create_block_mask(tree_mask_mod(tree, prefix_lens), 2, None, 16, 64, device="cpu")
theirs = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, enable_gqa=True)
ours = ek.tree_attention(q, k, v, prefix_lens, tree.tree_mask)
live = torch.arange(16) < tree.num_nodes[:, None]
print("largest difference", (theirs.transpose(1, 2) - ours)[live].abs().max().item())
