"""Trains drafters (``drafter``).

The modules here are the loop of a run (``run``), its optimizers and its files.
May import every other room but ``dllm.cli``.
"""
