"""SDAR and its relatives, which are decoded alike: SDAR-MoE, TraDo, Tiny-A2D, Stable-DiffCoder.

Fast-dLLM v2 (arXiv 2509.26328) is decoded so, too, in one sub-block after the other.
"""
