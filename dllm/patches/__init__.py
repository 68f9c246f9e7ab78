"""IF vLLM CHANGED, LOOK HERE: ``contract`` lists every name of vLLM that is replaced, and why.

The other modules replace modules' and classes' attributes; some objects of a worker are changed in
attention, engine, models and drafter. This package imports remote, models, drafter, api and the
packages below them.
"""
