"""The Triton code that Inductor writes for a GPU, run in Triton's interpreter on a CPU's tensors.

``install`` is called before Triton is imported, in a process of its own with
``TRITON_INTERPRET=1``. Functions of CUDA's libdevice, which Inductor calls, are numpy's.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

UNARY: dict[str, Callable[[Any], Any]] = {
    name: getattr(np, name)
    for name in ("tanh", "exp", "exp2", "log", "log2", "log1p", "expm1", "sqrt", "floor", "ceil")
} | {
    "trunc": np.trunc,
    "cos": np.cos,
    "sin": np.sin,
    "abs": np.abs,
    "nearbyint": np.rint,
    "round": np.rint,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "erf": lambda x: torch.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy(),
}


def install() -> None:
    import torch._inductor.config as config
    import triton.runtime.driver as driver
    from torch._inductor.runtime import triton_helpers
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget

    config.cpu_backend = "triton"
    config.compile_threads = 1
    _triton.triton_hash_with_backend = lambda: "interpreter"
    target = GPUTarget("cuda", 90, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_active_torch_device=lambda: torch.device("cpu"),
        )
    )
    triton_helpers.libdevice = _libdevice()


def _libdevice() -> SimpleNamespace:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def of(function: Callable[[Any], Any]) -> Callable[..., Any]:
        def call(x: Any, **_: Any) -> Any:
            with np.errstate(all="ignore"):
                found = function(x.handle.data).astype(x.handle.data.dtype)
            return tl.core.tensor(TensorHandle(found, x.handle.dtype), x.type)

        return call

    def asks(function: Callable[[Any], Any]) -> Callable[..., Any]:
        def call(x: Any, **_: Any) -> Any:
            is_block = x.type.is_block()
            kind = tl.block_type(tl.int1, list(x.shape)) if is_block else tl.int1
            return tl.core.tensor(TensorHandle(function(x.handle.data), tl.int1), kind)

        return call

    def power(x: Any, y: Any, **_: Any) -> Any:
        exponent = y.handle.data if hasattr(y, "handle") else y
        found = np.power(x.handle.data, exponent).astype(x.handle.data.dtype)
        return tl.core.tensor(TensorHandle(found, x.handle.dtype), x.type)

    functions = {name: of(function) for name, function in UNARY.items()}
    return SimpleNamespace(**functions, isnan=asks(np.isnan), isinf=asks(np.isinf), pow=power)
