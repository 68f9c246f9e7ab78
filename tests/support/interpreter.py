"""Kernels in Triton's interpreter, which is made several times as fast, and rounds to FP8.

The interpreter is chosen by an environment variable when Triton is first imported, so suites that
need it run in a process of their own (``tests/test_kernel_suites.py``), where ``speed_up`` is
called before kernels are launched. It is written against Triton 3.9, whose launches spend most of
their time on what has no effect, and on types and shapes that are made anew for every operation.
Of what is computed it changes nothing but the grouping of scans.
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
        _patch_language_once()
        _leave_out_overflow_checks()
        _share_shapes()
        _look_types_up()
        _scan_whole_blocks()


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


def _patch_language_once() -> None:
    """Replace the functions of ``triton.language`` once for each module of kernels, and for good.

    A launch replaces some hundred of them by the interpreter's, and takes them back when it ends.
    Every device function that it calls, ``tl.sum`` and ``tl.max`` included, replaces them again.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    patched: set[int] = set()

    def patch_once(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module not in patched:
            patched.add(module)
            patch(fn)
        return interpreter._LangPatchScope()  # has nothing to take back

    interpreter._patch_lang = patch_once


def _leave_out_overflow_checks() -> None:
    """Sums and products of integers are checked in 64 bits, and then nobody looks at the result:
    an assertion in a kernel counts in debug mode only, which the interpreter does not turn on."""
    from triton.runtime.interpreter import interpreter_builder

    assert not interpreter_builder.options.debug
    options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
    interpreter_builder.options = options


def _share_shapes() -> None:
    """Make the shapes of types and tensors once for each list of sizes, not for each object."""
    from triton.language import core

    of_type, of_tensor = core.block_type.__init__, core.tensor.__init__

    @functools.cache
    def parts(*sizes: int) -> tuple[core.block_type, core.tensor, str]:
        block, tensor = object.__new__(core.block_type), object.__new__(core.tensor)
        of_type(block, core.int8, list(sizes))
        of_tensor(tensor, None, block)
        return block, tensor, str(block.shape)

    scalar = object.__new__(core.tensor)
    of_tensor(scalar, None, core.int8)

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        block, _, text = parts(*map(core._unwrap_if_constexpr, shape))
        self.element_ty, self.shape, self.numel = element_ty, block.shape, block.numel
        self.name = f"<{text}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        made = parts(*type.shape.values)[1] if type.is_block() else scalar
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = made.shape, made.numel

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor


def _look_types_up() -> None:
    """Numpy's type for one of Triton's, and the type of a result, depend on names of types only."""
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    numpy_type, result_type = interpreter._get_np_dtype, TritonSemantic.computation_type_impl
    of_numpy: dict[str, Any] = {}
    of_result: dict[Any, Any] = {}

    def find_numpy(dtype: Any) -> Any:
        if dtype.name not in of_numpy:
            of_numpy[dtype.name] = numpy_type(dtype)
        return of_numpy[dtype.name]

    def find_result(
        self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool
    ) -> Any:
        key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
        if key not in of_result:
            of_result[key] = result_type(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return of_result[key]

    interpreter._get_np_dtype, TritonSemantic.computation_type_impl = find_numpy, find_result


def _scan_whole_blocks() -> None:
    """Scan with an operator of ours in log2(size) steps of whole blocks, not element by element.

    So do GPUs: an operator of ``tl.associative_scan`` may be applied in any grouping.
    """
    from triton.runtime.interpreter import ScanOps

    def scan(self: Any, input: Any) -> Any:
        def tensors(arrays: Any) -> list[Any]:
            return [self.to_tensor(of, one.dtype) for of, one in zip(arrays, input, strict=True)]

        found, shift = [one.handle.data for one in input], 1
        place = np.indices(found[0].shape)[self.axis]
        while shift < found[0].shape[self.axis]:
            before = [np.roll(array, shift, self.axis) for array in found]
            joined = self.combine_fn.fn(*tensors(before), *tensors(found))
            joined = joined if isinstance(joined, tuple) else (joined,)
            pairs = zip(joined, found, strict=True)
            found = [np.where(place >= shift, new.handle.data, old) for new, old in pairs]
            shift *= 2
        return tensors(found)

    ScanOps.generic_scan = scan
