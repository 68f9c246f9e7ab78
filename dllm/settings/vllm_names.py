"""Modules of vLLM that have other names in 0.33 than in 0.32: ``from ... import strategies``.

Each is imported when it is first asked for, because some of them import vLLM's API server.
"""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.entrypoints.generate.structured_decisions import question_types, strategies
    from vllm.entrypoints.launchers import cli_args
    from vllm.v1.core import kv_cache_utils as kv_cache_planning

    __all__ = ["cli_args", "kv_cache_planning", "question_types", "strategies"]

# By the name here: in 0.33, and in 0.32.
PLACES = {
    "cli_args": ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args"),
    "kv_cache_planning": ("vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils"),
    "question_types": (
        "vllm.entrypoints.openai.decisions.question_types",
        "vllm.entrypoints.generate.structured_decisions.question_types",
    ),
    "strategies": (
        "vllm.entrypoints.openai.decisions.strategies",
        "vllm.entrypoints.generate.structured_decisions.strategies",
    ),
}


def place_of(name: str) -> str:
    """The dotted name of a module in the vLLM that is installed."""
    return next(place for place in PLACES[name] if _exists(place))


def is_0_32() -> bool:
    """Whether vLLM's kernels take what they take in 0.32."""
    return place_of("kv_cache_planning") == PLACES["kv_cache_planning"][1]


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that it is in
        return False


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(place_of(name))
