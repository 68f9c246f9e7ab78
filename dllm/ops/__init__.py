"""Tensor operations of a denoise step: noise, statistics of rows of logits, soft embeddings.

The statistics (``row_stats``) have a definition in plain torch, a fast CPU version and Triton
kernels; ``dispatch`` chooses which one runs. Soft embeddings are a matrix product, or on a CPU one
that leaves out unlikely tokens. Uses torch, numpy and Triton; imports ``attention`` (a product in a
kernel), and neither vLLM nor another package of this project.
"""
