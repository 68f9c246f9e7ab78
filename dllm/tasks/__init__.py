"""The questions that the small models are trained and scored on, and their tokenizer.

``families`` has the kinds of questions, ``suite`` draws questions from them, ``tokenizer`` is made
for their words. Imports no other package of ours.
"""
