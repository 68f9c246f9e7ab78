"""IF vLLM CHANGED, LOOK HERE: everything that replaces an attribute of vLLM, or registers with it.

``contract`` lists each name and why; the other modules do it. This package imports remote, models,
drafter, api and the packages below them.
"""
