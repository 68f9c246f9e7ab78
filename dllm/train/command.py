"""``dllm train``: hands the command line to what trains a language model, or a pilot."""

import importlib
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """``dllm train pilot ...``, or ``dllm train KIND ...`` with one of ``lm.command.KINDS``."""
    is_pilot = argv[:1] == ["pilot"]
    # A pilot's trials need vLLM, a language model needs transformers: only one is imported.
    module = importlib.import_module(f"dllm.train.{'pilot' if is_pilot else 'lm'}.command")
    status: int = module.main(argv[1:] if is_pilot else argv)
    return status
