"""``dllm train diffusion`` and ``dllm train ar``: small language models on the task suite."""
