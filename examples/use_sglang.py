"""SGLang: its draft, tree and verification operators under their own names.

In a live engine one line puts them in the place of its own, in the process that runs the model::

    from eagle2_kernels.integrations import sglang; sglang.register()
"""

import torch

from eagle2_kernels.integrations import sglang

top_k, steps, slots, vocab = 3, 2, 6, 50
scores, states, lists = None, None, []
for step in range(steps):
    rows = 1 if step == 0 else top_k
    probabilities, ids = torch.rand(rows, vocab).softmax(-1).topk(top_k)
    tokens, states, scores, info = sglang.select_top_k_tokens(
        step, probabilities, ids, states, scores, top_k
    )
    lists.append(info)
parents, chosen, drafts = sglang.organize_draft_results(*zip(*lists, strict=True), slots)

seq_lens = torch.tensor([7])
mask = torch.zeros(1, slots, slots, dtype=torch.bool)
positions = torch.zeros(slots, dtype=torch.int64)
index, first_child, next_sibling = torch.zeros(3, 1, slots, dtype=torch.int64)
sglang.build_tree_kernel_efficient(
    parents, chosen, seq_lens, mask, positions, index, first_child, next_sibling,
    top_k, steps, slots, sglang.TreeMaskMode.QLEN_ONLY,
)  # fmt: skip
print(mask[0].int(), positions)

predicts, accepted = torch.full((slots,), -1), torch.full((1, steps + 1), -1)
count = torch.zeros(1, dtype=torch.int64)
tokens = torch.cat([torch.tensor([[5]]), drafts], 1)
target = torch.randint(vocab, (1, slots))
target[0, 0] = tokens[0, 1]  # the target agrees with the first draft
sglang.verify_tree_greedy(
    predicts, accepted, count, tokens, index, first_child, next_sibling, target
)
print(accepted, count, predicts)
