"""Speculative decoding for autoregressive models, by any draft source of vLLM's Model Runner V2.

``steering`` stands in front of a speculator of vLLM: it decides whether a step drafts, and how many
drafts the target verifies (``widths``). ``sources`` has what is special of each speculator, and
``speculator`` our DFlash drafter (arXiv 2602.06036), whose model is ``network``. Imports engine,
settings and ``attention``.
"""
