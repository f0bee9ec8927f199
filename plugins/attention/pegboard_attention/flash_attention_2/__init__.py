"""FlashAttention-2: exact attention by tiles with an online softmax (Dao, 2023, arXiv 2307.08691)."""
