"""Trains drafters (``dllm train drafter``) and pilots (``dllm train pilot``); ``check-drafter``.

``run`` is the loop of a training, ``learner`` what it trains, ``network`` the drafter.
May import every other package but ``dllm.cli``.
"""
