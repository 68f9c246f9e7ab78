"""What an API server adds to vLLM's routes: canvases in streams, pins, holes, decisions, /canvas.

Nothing here replaces a name of vLLM; ``dllm.patches`` calls it. This package imports engine and
settings.
"""
