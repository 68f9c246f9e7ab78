"""IF vLLM CHANGED, LOOK HERE: ``contract`` lists every name of vLLM that is replaced, and why.

Ours are derived from vLLM's: schedulers, workers, model runners (``engine.runner``,
``drafter.runner``), the objects that answer routes (``serving``), parsers; and engines with their
parts, which a server of ours gets where vLLM makes its own (``served``). The other modules here
replace functions. This package imports remote, models, drafter, api and the
packages below them.
"""
