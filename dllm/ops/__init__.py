"""Tensor operations of a denoise step: noise, statistics of rows of logits, soft embeddings.

The statistics (``row_stats``) and soft embeddings (``soft_embedding``) have a definition in plain
torch and Triton kernels; where it is worth it, also a fast CPU version. ``dispatch`` chooses which
one runs. Uses torch, numpy and Triton only: imports neither vLLM nor another package of this
project.
"""
