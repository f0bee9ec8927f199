"""Fused Triton kernels for the ops between the matmuls and the attention."""
