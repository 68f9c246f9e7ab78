"""One denoise step of any canvas model, inside vLLM's engine: scheduler, state, sampler.

``family`` is the interface behind which a model hides. Imports settings and ops; names no model.
"""
