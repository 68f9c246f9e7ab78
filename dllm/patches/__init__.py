"""IF vLLM CHANGED, LOOK HERE: ``contract`` lists every name of vLLM that is replaced, and why.

Where vLLM lets a class be chosen, ours is derived from its own: schedulers, workers, model runners
(``engine.runner``, ``drafter.runner``), the objects that answer routes (``serving``), parsers. The
other modules here replace functions. This package imports remote, models, drafter, api and the
packages below them.
"""
