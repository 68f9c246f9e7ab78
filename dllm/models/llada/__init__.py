"""LLaDA-8B and LLaDA-1.5 (arXiv 2502.09992): every token sees the whole sequence in every step."""
