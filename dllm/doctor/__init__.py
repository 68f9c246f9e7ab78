"""``dllm doctor``: what a machine and a model lack, before a server says so."""
