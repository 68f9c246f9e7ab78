"""``dllm train pilot``: a small network that chooses each request's draft width."""
