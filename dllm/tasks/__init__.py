"""The questions that the small models are trained and scored on, and their tokenizer.

``families`` has the kinds of questions, ``suite`` draws questions from them, ``tokenizer`` is made
for their words. ``tools`` has more kinds, answered with tool calls, JSON and thoughts; ``chat``
says how these are asked, and ``tool_tokenizer`` is made for them. Imports no other package of ours.
"""
