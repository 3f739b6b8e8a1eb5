"""XGrammar: what a grammar allows at each node of a draft tree, as the verifier takes it."""

import torch
import xgrammar

import eagle2_kernels as ek
from eagle2_kernels.integrations.xgrammar import fill_bitmask

vocab = ["[", "]", ",", "1", "2", "a", "</s>"]
info = xgrammar.TokenizerInfo(vocab, vocab_size=len(vocab), stop_token_ids=[6])
matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_builtin_json_grammar())
assert matcher.accept_token(0)  # the root, "[", is committed
prefix_lens = torch.tensor([1], dtype=torch.int32)
tokens = torch.tensor([[[3, 5], [2, 1]]])  # "1" or "a", then "," or "]"
log_probs = torch.tensor([[[-0.1, -2.0], [-0.5, -0.9]]])
tree = ek.build_tree_from_marginals(torch.tensor([0]), prefix_lens, tokens, log_probs, max_nodes=7)
allowed = fill_bitmask(tree, [matcher], len(vocab))
emitted, accept_index, accept_length, bonus = ek.sample_and_verify(
    torch.randn(1, 7, len(vocab)), tree.position_ids, 42, tree.draft_tokens, tree.first_child,
    tree.next_sibling, max_depth=2, num_nodes=tree.num_nodes, allowed_mask=allowed,
)  # fmt: skip
print("".join(vocab[t] for t in emitted[0].tolist() if t >= 0))
