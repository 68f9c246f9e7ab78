"""The commands ``dllm eval`` and ``dllm watch``, and their HTTP client.

Imports models, tasks and settings.
"""
