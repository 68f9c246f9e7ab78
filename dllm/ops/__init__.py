"""Tensor operations of a denoise step: noise, statistics of rows of logits, soft embeddings.

The statistics (``row_stats``) and the soft embeddings (``soft_embedding``) have a definition in
plain torch, a fast CPU version and Triton kernels; ``dispatch`` chooses which one runs. Uses torch
and Triton only: imports neither vLLM nor another package of this project.
"""
