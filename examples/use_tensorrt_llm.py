"""TensorRT-LLM: a draft tree as its packed mask, relative positions and draft paths, and back."""

import torch

import eagle2_kernels as ek
from eagle2_kernels.integrations import tensorrt_llm

prefix_lens = torch.tensor([40, 7], dtype=torch.int32)
log_probs = torch.randn(2, 3, 4).sort(-1, descending=True).values.log_softmax(-1)
tokens = torch.randint(1000, (2, 3, 4))
tree = ek.build_tree_from_marginals(
    torch.tensor([17, 18]), prefix_lens, tokens, log_probs, max_nodes=16
)
tensors = tensorrt_llm.to_tensorrt_llm(tree)
print({name: tuple(value.shape) for name, value in tensors._asdict().items()})
print(tensorrt_llm.draft_paths(tree, max_path_len=4)[0])
