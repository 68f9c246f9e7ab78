"""Attention for causal and bidirectional sequences over a paged KV cache.

Read the files in this order; each uses only the ones before it:

    masks.py             the specification: which keys a query row sees
    inputs.py            the tensors of one call, and the checks that refuse inconsistent ones
    reference.py         dense fp32 attention written from the specification
    cases.py             batches that kernels are checked with, and how far from right they may be
    tuning.py            the committed table of tile sizes (nothing is searched at start-up)
    planning.py          from static shapes to a launch plan; pure Python, no device access
    splits.py            long sequences cut into parts, and how the parts are merged
    online_softmax.py    the inner loop: a running softmax over tiles of keys
    canvas_attention.py  the Triton kernel and its wrapper
    cache_write.py       writes K and V into cache pages, as fp8 if the cache is fp8
    context_kv.py        computes a drafter's K and V of all layers and writes them, in one kernel
    choice.py            which kernel computes a layer: ours or vLLM's FlashAttention
    calls.py             the calls that serve a step: one, or one for each kind of rows
    visible_pages.py     for FlashAttention: leaves out pages in front of a window
    ragged.py            spans of different lengths, end to end

None of these imports vLLM; the first six, choice.py, calls.py and ragged.py do not import Triton.
Four files connect them, or vLLM's own kernels, to a server:

    layers.py            what a model says of its layers: the anchored window, blocks, most rows
    flash.py             what vLLM's FlashAttention 4 serves, called with our kernel's arguments
    backend.py           vLLM's attention backend on CUDA: runs our kernel or FlashAttention
    cpu_backend.py       vLLM's attention backend on a CPU, plus the anchored window and blocks
"""
