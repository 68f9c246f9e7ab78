"""Trains small models (``lm``), drafters (``drafter``) and pilots (``pilot``).

The modules here are what models and drafters share: ``run`` is the loop, a ``Learner`` is what it
trains.
May import every other room but ``dllm.cli``.
"""
