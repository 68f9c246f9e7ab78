"""The commands ``dllm eval`` and ``dllm watch``, and their HTTP client.

Imports prompts and settings.
"""
