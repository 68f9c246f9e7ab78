"""One decision, made once: compile small tensor functions unless the server runs eagerly."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from vllm.config import CompilationMode

Function = TypeVar("Function", bound=Callable[..., Any])


def maybe_compile(function: Function, vllm_config: Any) -> Function:
    """``torch.compile(function)`` for any batch size, or ``function`` under ``--enforce-eager``."""
    if vllm_config.compilation_config.mode == CompilationMode.NONE:
        return function
    return torch.compile(function, dynamic=True)
