"""Tensor operations of a denoise step: noise, statistics of rows of logits, soft embeddings.

Each has a definition in plain torch, a fast CPU version and Triton kernels; ``dispatch`` chooses.
torch and Triton only: imports neither vLLM nor anything of ours.
"""
