"""``dllm train`` for language models: small ones, on the task suite."""
