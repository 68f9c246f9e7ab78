"""Tensor operations of a denoise step: noise, statistics of rows of logits, soft embeddings.

``dispatch`` chooses the implementation. Imports ``attention`` (a product in a kernel), and neither
vLLM nor another package of this project.
"""
