"""IF vLLM MOVED, LOOK HERE: everything that replaces or names a private part of vLLM.

``contract`` lists each name and why; the other files install. Imports models, drafter and below.
"""
