"""Structured outputs: which texts a grammar allows, and the best of them on a canvas.

xgrammar's grammar -> Rules -> Automaton (bytes) -> Table (tokens) -> the best path
"""
