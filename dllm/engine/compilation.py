"""One decision, made once: compile small tensor functions unless the server runs eagerly."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from vllm.config import CompilationMode, VllmConfig

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def maybe_compile(
    function: Callable[Arguments, Result], vllm_config: VllmConfig
) -> Callable[Arguments, Result]:
    """``torch.compile(function)`` for any batch size, or ``function`` under ``--enforce-eager``.

    A first tensor of one row goes to ``function`` as it is: the compiler takes a size of 1 for a
    case of its own, and would compile everything once more for a canvas of one token.
    """
    if vllm_config.compilation_config.mode == CompilationMode.NONE:
        return function
    compiled = torch.compile(function, dynamic=True)

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        rows = next(arg for arg in args if isinstance(arg, torch.Tensor))
        return (function if len(rows) == 1 else compiled)(*args, **kwargs)

    return call
