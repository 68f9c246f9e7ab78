"""Quantized checkpoints: making them with LLM Compressor, checking them, serving them.

``formats`` and ``schemes`` define what is in one, ``checks`` what may not be wrong with it. Making
one runs in an environment of its own, because LLM Compressor's pins clash with vLLM's: ``command``
starts ``make`` there, and neither what ``make`` imports nor ``check_command`` imports vLLM.
"""
