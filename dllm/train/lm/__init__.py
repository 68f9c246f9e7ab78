"""``dllm train diffusion``, ``ar``, ``sdar``, ``llada2``: small models on the task suite."""
