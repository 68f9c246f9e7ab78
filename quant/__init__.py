"""Quantized checkpoints: what is in one, how to check it, how to serve it.

    formats      the number formats: encode and decode FP8, INT8 and NVFP4
    schemes      which layers of a checkpoint are quantized, and how (from its config.json)
    checks       what can be wrong with the tensors of a quantized layer
    cpu_config   how a CPU serves a quantized checkpoint
    cpu_experts  the same for the experts of a mixture

Only the last two import vLLM: ``dllm.quantize``, which writes and checks checkpoints, uses the
others in an environment without vLLM.
"""
