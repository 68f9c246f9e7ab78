"""A DFlash drafter (arXiv 2602.06036) for autoregressive models: speculative decoding by blocks.

``speculator`` runs one drafting step, ``network`` is the model, ``widths`` decides how many drafts
of each request the target verifies. Imports engine, settings and ``attention``.
"""
