"""``dllm quantize`` writes FP8 and NVFP4 checkpoints, ``dllm check-quant`` checks them.

LLM Compressor and vLLM cannot be installed together, so ``make`` runs in an environment of its own,
without vLLM; ``command`` goes there. Nothing here imports vLLM. Imports
models (names and shapes of tensors), settings and ``quant``.
"""
