"""Compiles small tensor functions, unless the server was started with ``--enforce-eager``."""

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

    The size of the batch is the first dimension of the first tensor argument. If it is 1 (a canvas
    of one token), ``function`` runs without the compiler. ``torch.compile`` treats a size of 1 as a
    special case, and would compile everything once more for it while a request waits.
    """
    if vllm_config.compilation_config.mode == CompilationMode.NONE:
        return function
    compiled = torch.compile(function, dynamic=True)

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        rows = next(arg for arg in args if isinstance(arg, torch.Tensor))
        return (function if len(rows) == 1 else compiled)(*args, **kwargs)

    return call
