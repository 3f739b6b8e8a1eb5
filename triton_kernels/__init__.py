"""GPU kernels in Triton, imported when the first CUDA tensor arrives.

The launchers here have the signatures of their rows in the op table, take checked arguments and run
on the tensors' own device. Offsets are computed in int64: a page table times a page stride passes
2**31 at ordinary sizes.
"""
