"""The questions that the small models are scored on, and their tokenizer.

``families`` has the kinds of questions, ``suite`` draws questions from them. ``tools`` has more
kinds, answered with tool calls, JSON and thoughts; ``chat`` says how these are asked. Imports no
other package of ours.
"""
