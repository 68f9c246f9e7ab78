"""vLLM's Triton kernels in numpy and torch, for a CPU without Triton.

``install`` is the table of what replaces what. Imports neither vLLM nor anything of ours.
"""
