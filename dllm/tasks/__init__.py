"""The questions that the small models are trained and scored on, and their tokenizer.

Imports nothing of ours.
"""
