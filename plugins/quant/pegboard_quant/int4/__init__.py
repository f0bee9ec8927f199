"""Products with packed 4-bit weights on NVIDIA GPUs: the layout in memory, Triton kernels, and which one runs when."""
