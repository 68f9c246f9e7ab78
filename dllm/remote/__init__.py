"""Drafts from other processes: a target asks pools of draft workers for token ids.

``worker`` serves drafts from a vLLM engine, ``client`` asks for them, ``scheduler`` is where vLLM's
engine core does so. Imports drafter and settings.
"""
