"""The families of diffusion language models that are served; one folder each.

Imports engine, ops, settings, tasks, ``attention`` and ``quant``.
"""
