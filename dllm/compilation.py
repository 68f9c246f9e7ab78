"""One decision, made once: compile small tensor functions unless the server runs eagerly."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from vllm.config import CompilationMode, VllmConfig

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def maybe_compile(
    function: Callable[Arguments, Result], vllm_config: VllmConfig
) -> Callable[Arguments, Result]:
    """``torch.compile(function)`` for any batch size, or ``function`` under ``--enforce-eager``."""
    if vllm_config.compilation_config.mode == CompilationMode.NONE:
        return function
    return torch.compile(function, dynamic=True)
