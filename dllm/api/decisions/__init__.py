"""Typed decisions: yes or no, choice and score, answered with probabilities from one denoise step.

protocol   the body of ``POST /v1/decisions``, in OpenAI's shape
labels     what stands for each option in a model's reply, as tokens
reads      how a canvas is read: vLLM's interface of strategies, which ``/v1/systemone`` uses, too
route      ``POST /v1/decisions``: answers, diagnostics, usage

``reads`` and ``route`` import vLLM's API server, so only that imports them.
"""
