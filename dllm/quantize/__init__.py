"""``dllm quantize`` and ``dllm check-quant``: FP8 and NVFP4 checkpoints, with LLM Compressor.

Runs in an environment without vLLM. Imports models (names and shapes), tasks, settings, ``quant``.
"""
