"""vLLM's Triton kernels in numpy and torch, for a CPU without Triton.

``kernels`` says which function replaces which kernel; ``batch`` explains how they are written.
Imports neither vLLM nor any other package of ours but ``attention.ragged``.
"""
