"""Tensor operations of a denoise step: noise, statistics of rows of logits, soft embeddings, paths.

The statistics (``row_stats``), soft embeddings (``soft_embedding``) and paths under grammars
(``grammar_paths``) have a definition in plain torch and Triton kernels; where it is worth it, also
a fast CPU version. ``dispatch`` chooses which one runs. Uses torch, numpy and Triton only: imports
neither vLLM nor another package of this project.
"""
