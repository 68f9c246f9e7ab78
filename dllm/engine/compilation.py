"""Compiles small tensor functions, unless the server was started with ``--enforce-eager``."""

import functools
import re
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any, ParamSpec, TypeVar

import torch
from vllm.config import CompilationMode, VllmConfig

_runs_plain = False

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Arguments of compiled functions that are made once for an engine, and whose attributes do not
# change: parameters and preallocated tensors. A guard is named after what it looks at, for instance
# ``state.seeds`` or ``dict(type(state).__dict__)``.
OF_FIXED = re.compile(r"(dict\(|type\()*(self|state|algorithm)\b")


def maybe_compile(
    function: Callable[Arguments, Result], vllm_config: VllmConfig
) -> Callable[Arguments, Result]:
    """``torch.compile(function)`` for any batch size, or ``function`` under ``--enforce-eager``.

    The size of the batch is the first dimension of the first tensor argument. If it is 1 (a canvas
    of one token), ``function`` runs without the compiler, which treats a size of 1 as a special
    case, and would compile everything once more for it while a request waits.

    Before each call ``torch.compile`` checks its guards: hundreds of attributes and functions.
    Those of fixed arguments and of modules are not checked, as they do not change: a wrong kernel
    (``ops.dispatch``) is replaced before anything is compiled.
    """
    if vllm_config.compilation_config.mode == CompilationMode.NONE:
        return function
    # Compiled code belongs to a code object. Another engine of this process has other fixed
    # arguments, so each gets a copy of its own.
    options: dict[str, Any] = {"guard_filter_fn": _guards_to_check, "size_asserts": False}
    compiled = torch.compile(_copy(function), dynamic=True, options=options)

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        rows = next(arg for arg in args if isinstance(arg, torch.Tensor))
        is_plain = _runs_plain or len(rows) == 1
        return (function if is_plain else compiled)(*args, **kwargs)

    return call


def run_as_written(is_plain: bool) -> None:
    global _runs_plain
    _runs_plain = is_plain


def of_fixed_size(tensor: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Mark a tensor: its sizes, or that of ``dim``, are constants of compiled code.

    Before each call, compiled code reads all sizes that it does not know: 2 us each. Two that are
    equal when it is compiled would count as the same one, which a constant does not.
    """
    torch._dynamo.mark_static(tensor, dim)
    return tensor


def _copy(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The same function, or bound method, with a code object of its own."""
    if isinstance(function, MethodType):
        return MethodType(_copy(function.__func__), function.__self__)
    assert isinstance(function, FunctionType), f"{function} is not written in Python"
    copy = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _guards_to_check(guards: Sequence[Any]) -> list[bool]:
    return [not (guard.is_global or OF_FIXED.match(guard.name)) for guard in guards]
