"""Runs vLLM's Triton kernels in Triton's interpreter.

    python triton_interpreter_worker.py CASES RESULTS

This has to be a process of its own. vLLM decides when it is imported whether there is Triton, and
on a CPU it decides that there is none. Here vLLM gets the real Triton, with TRITON_INTERPRET=1,
before it imports a kernel. The tests call our replacements with the same `launch`.
"""

import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.support.interpreter import speed_up


def launch(kernel: Callable[..., Any], args: dict[str, Any]) -> None:
    """Call `kernel` by keyword; a list of tensors is passed as a tensor of their addresses.

    In such a list None is the address 0.
    """

    def as_argument(value: Any) -> Any:
        if isinstance(value, list):
            addresses = [0 if table is None else table.data_ptr() for table in value]
            return torch.tensor(addresses, dtype=torch.uint64)
        return value

    kernel(**{name: as_argument(value) for name, value in args.items()})


def resolve(name: str) -> tuple[Any, str]:
    """Split a dotted name: the module, imported, and the name of the attribute."""
    module, _, attribute = name.rpartition(".")
    return importlib.import_module(module), attribute


def use_real_triton() -> None:
    """Let vLLM import real Triton, and add what the interpreter lacks."""
    import triton
    import triton.language as tl
    import vllm.triton_utils
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain_store = InterpreterBuilder.create_masked_store
    plain_load = InterpreterBuilder.create_masked_load

    def as_mask(mask: Any) -> Any:
        # A scalar mask joined with a block of masks comes out as int32, which both refuse.
        return TensorHandle(mask.data.astype(bool), tl.int1)

    def masked_store(builder: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return plain_store(builder, ptrs, value, as_mask(mask), *rest)

    def masked_load(builder: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        return plain_load(builder, ptrs, as_mask(mask), *rest)

    def log1p(x: Any) -> Any:
        return tl.tensor(TensorHandle(np.log1p(x.handle.data), x.dtype.scalar), x.type)

    InterpreterBuilder.create_masked_store = masked_store
    InterpreterBuilder.create_masked_load = masked_load
    vllm.triton_utils.triton = triton
    vllm.triton_utils.tl = tl
    vllm.triton_utils.tldevice = SimpleNamespace(log1p=log1p)
    logits_metrics: Any = importlib.import_module("vllm.v1.worker.gpu.metrics.logits")
    logits_metrics.libdevice = SimpleNamespace(isnan=lambda x: x != x)


def call_host_function(name: str, args: dict[str, Any]) -> list[Any]:
    """Call a function of vLLM on copies of `args`; return its result(s) and the copies."""
    module, attribute = resolve(name)
    copies = {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in args.items()
    }
    result = getattr(module, attribute)(**copies)
    return [list(result) if isinstance(result, tuple) else result, copies]


def main(cases_path: str, results_path: str) -> None:
    """Run every kernel case, then every host case with Triton and with our kernels installed."""
    speed_up()
    use_real_triton()
    from vllm.triton_utils.dispatcher import KernelOverride

    from dllm.patches.cpu import register_cpu_kernels

    # Memory that a function allocates and never writes must be the same in both runs.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]

    job = torch.load(cases_path)
    kernels = {name: getattr(*resolve(name)) for name in job["kernels"]}
    for case in job["cases"]:
        try:
            kernel, args = kernels[case["kernel"]], case["args"]
            launch(kernel[case["grid"]], {k: v for k, v in args.items() if k in kernel.arg_names})
        except Exception as error:
            raise RuntimeError(f"{case['kernel']}, case {case['label']!r}") from error
    host_triton = [call_host_function(*case) for case in job["host_cases"]]
    register_cpu_kernels()
    host_ours = [call_host_function(*case) for case in job["host_cases"]]
    torch.save(
        {
            "args": [case["args"] for case in job["cases"]],
            "arg_names": {name: list(kernel.arg_names) for name, kernel in kernels.items()},
            "replaced": [
                name for name in kernels if isinstance(getattr(*resolve(name)), KernelOverride)
            ],
            "host": list(zip(host_triton, host_ours, strict=True)),
        },
        results_path,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
