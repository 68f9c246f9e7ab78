"""A DFlash drafter for autoregressive models: network, drafting step, widths of verification.

Imports engine, settings and ``attention``.
"""
