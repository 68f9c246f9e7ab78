"""Trains drafters (``dllm train drafter``) and pilots (``dllm train pilot``); ``check-drafter``.

``run`` is what a training does, ``network`` the drafter, ``target`` what it learns from.
May import every other package but ``dllm.cli``.
"""
