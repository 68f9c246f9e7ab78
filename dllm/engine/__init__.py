"""Runs canvas models inside vLLM's engine: scheduler, state of each request, sampler.

``algorithm`` is the interface that a model implements. This package imports settings, ops, grammar
and ``attention``, and knows no particular model.
"""
