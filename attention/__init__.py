"""Attention for causal, bidirectional and mixed rows over a paged KV cache.

Read it in this order; every file stands on the ones before it:

    masks.py             the specification: which keys a query row sees
    inputs.py            the tensors of one call, and the checks that refuse inconsistent ones
    reference.py         dense fp32 attention written from the specification
    tuning.py            the committed table of tile sizes (nothing is searched at start-up)
    planning.py          from static shapes to a launch plan; pure Python, no device access
    row_tiles.py         which rows a program works on and which keys they see
    splits.py            long sequences in parts, and their merge
    canvas_attention.py  the Triton kernel and its wrapper
    cache_write.py       K/V into pages, with optional fp8 quantization

Backends, which import vLLM, stand on these. None of the above does, and the first five can be
imported without Triton.
"""
