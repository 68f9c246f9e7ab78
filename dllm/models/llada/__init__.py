"""LLaDA-8B, LLaDA-1.5 (arXiv 2502.09992), Dream-7B (2508.15487), DiffuCoder (2506.20639).

Every token sees the whole sequence in every step.
"""
