"""Kernels in Triton's interpreter, which is made three times as fast without computing otherwise.

The interpreter is chosen by an environment variable when Triton is first imported, so suites that
need it run in a process of their own (``tests/test_kernel_suites.py``), where ``speed_up`` is
called before kernels are launched. It is written against Triton 3.9, whose launches spend most of
their time on two things that have no effect.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of a suite's tensors
# Of one rounding in each dtype. The interpreter truncates to bf16 instead of rounding.
UNIT_ROUNDOFF = {
    torch.float32: 2**-24,
    torch.float16: 2**-11,
    torch.bfloat16: 2**-8 if DEVICE == "cuda" else 2**-7,
}


@functools.cache  # the suites of one process share an interpreter
def speed_up() -> None:
    """Change the interpreter of this process; does nothing where kernels are compiled."""
    from triton import knobs

    if knobs.runtime.interpret:
        _patch_language_once_per_launch()
        _leave_out_overflow_checks()


@functools.cache
def round_to_fp8() -> None:
    """Let the interpreter round fp32 to FP8 as a GPU does.

    Its own conversion loses the carry of a mantissa that is rounded up to the next power of two:
    1.99 becomes 1.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    dtypes = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if source != tl.float32 or target not in dtypes:
            return convert(values, source, target, mode)
        given = torch.from_numpy(np.ascontiguousarray(values))
        return given.to(dtypes[target]).view(torch.uint8).numpy()

    interpreter._convert_float = rounded


def _patch_language_once_per_launch() -> None:
    """Replace the functions of ``triton.language`` once in a launch, not in every device function.

    A launch replaces some hundred of them by the interpreter's. Every device function that it
    calls does so again, ``tl.sum`` and ``tl.max`` included; only the first call from a module has
    anything left to replace.
    """
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_once(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module in patched:
            return interpreter._LangPatchScope()
        patched.add(module)
        return patch(fn)

    def launch_afresh(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()  # a launch undoes its own replacements when it ends
        return launch(self, *args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_afresh


def _leave_out_overflow_checks() -> None:
    """Sums and products of integers are checked in 64 bits, and then nobody looks at the result:
    an assertion in a kernel counts in debug mode only, which the interpreter does not turn on."""
    from triton.runtime.interpreter import interpreter_builder

    assert not interpreter_builder.options.debug
    options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
    interpreter_builder.options = options
