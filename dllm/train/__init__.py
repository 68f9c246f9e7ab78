"""``dllm train drafter`` trains a drafter for a target; ``check-drafter`` measures whether it fits.

``run`` is the loop of a training, ``learner`` what it trains, ``network`` the drafter.
May import every other package but ``dllm.cli``.
"""
