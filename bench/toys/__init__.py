"""What the small models of ``checkpoints/`` are asked and how they are scored; random models.

``families`` has the kinds of questions, ``suite`` draws questions from them. ``tools`` and
``decisions`` have more kinds: answered with tool calls, JSON and thoughts, and typed decisions;
``chat`` says how these are asked. ``prompts`` writes questions into files for the ``dllm``
commands, ``evaluate`` scores a server or a ``reference``. ``tiny`` writes a random checkpoint.
"""
