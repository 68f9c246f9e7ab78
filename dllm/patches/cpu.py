"""Patches for a CPU: Model Runner V2 where there is no Triton, and a start that is not slow."""

import functools
import os
from typing import Any

from dllm.models import FAMILIES
from dllm.patches.contract import CPU_WORKER, IN_PROCESS_EXECUTOR


def is_cpu_without_triton() -> bool:
    """Whether this process would run our CPU worker."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    return current_platform.is_cpu() and not HAS_TRITON


def set_cpu_worker(vllm_config: Any) -> None:
    """Choose our worker on a CPU without Triton, unless the user chose one.

    It runs in the engine's process where it can. vLLM gives it one of its own, in which OpenMP's
    variables can differ; with one thread and no binding nothing differs, and two processes that
    poll for each other's messages several times a step only take each other's core.
    """
    parallel = vllm_config.parallel_config
    if is_cpu_without_triton() and parallel.worker_cls == "auto":
        parallel.worker_cls = CPU_WORKER
    # "uni" is vLLM's choice for one rank, which its CPU platform overwrites afterwards.
    is_alone = parallel.distributed_executor_backend == "uni"
    if is_alone and parallel.worker_cls == CPU_WORKER and _needs_no_openmp_setup():
        parallel.distributed_executor_backend = IN_PROCESS_EXECUTOR


def enable_cpu_runtime() -> None:
    """Let our architecture, and models started with ``--worker-cls`` of ours, run on V2."""
    if not is_cpu_without_triton():
        return
    from vllm.config import VllmConfig
    from vllm.triton_utils import triton
    from vllm.utils.math_utils import next_power_of_2

    use_v2 = VllmConfig.use_v2_model_runner
    validate_v2 = VllmConfig._validate_v2_model_runner

    def use_v2_model_runner(self: Any) -> bool:
        return _is_on_cpu_runtime(self) or use_v2.fget(self)  # type: ignore[attr-defined]

    def _validate_v2_model_runner(self: Any) -> None:
        if not _is_on_cpu_runtime(self):
            validate_v2(self)

    VllmConfig.use_v2_model_runner = property(use_v2_model_runner)  # type: ignore[assignment]
    VllmConfig._validate_v2_model_runner = _validate_v2_model_runner  # type: ignore[method-assign]
    triton.next_power_of_2 = next_power_of_2
    _let_fork_stand()


def _is_on_cpu_runtime(vllm_config: Any) -> bool:
    return vllm_config.parallel_config.worker_cls == CPU_WORKER or (
        vllm_config.model_config is not None and vllm_config.model_config.architecture in FAMILIES
    )


def _let_fork_stand() -> None:
    """Honour ``VLLM_WORKER_MULTIPROC_METHOD=fork``, which vLLM overwrites on a CPU.

    A forked process is there at once; a spawned one imports everything again, 10 s of CPU time, for
    the engine core and then for the worker. vLLM spawns because OpenMP reads its variables, which
    differ by worker, when it is loaded, and because its threads do not survive a fork. With one
    thread and no binding there are neither.
    """
    import torch._inductor.config
    from vllm.platforms.cpu import CpuPlatform

    check_and_update = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        asked = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD")
        check_and_update(cls, vllm_config)
        if asked == "fork" and _needs_no_openmp_setup() and _is_on_cpu_runtime(vllm_config):
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = asked
            # vLLM has just said so by a variable, which Inductor reads when it is imported.
            torch._inductor.config.compile_threads = 1

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)  # type: ignore[assignment]


def _needs_no_openmp_setup() -> bool:
    # Not from vllm.envs, which caches what it read for an engine before.
    given = os.environ.get("OMP_NUM_THREADS"), os.environ.get("VLLM_CPU_OMP_THREADS_BIND")
    return given == ("1", "nobind")


@functools.cache  # several workers in one process
def reload_compiled_backbone() -> None:
    """Make a restart load what ``torch.compile`` saved of our backbone; vLLM traces it again.

    On a CPU vLLM compiles with stock Inductor, whose functions are complete once they are loaded.
    It then calls their ``finalize_loading``, which only those of its own backend have, and takes
    the AttributeError for a broken file. Called in the worker; for our architecture only.
    """
    import torch
    from vllm.compilation import decorators

    try_load = decorators._try_load_aot_compiled_fn
    load_compiled_function = torch.compiler.load_compiled_function

    def load(*args: Any, **kwargs: Any) -> Any:
        loaded: Any = load_compiled_function(*args, **kwargs)
        function = loaded._artifacts.compiled_fn
        if not hasattr(function, "finalize_loading"):
            function.finalize_loading = lambda vllm_config: None
        return loaded

    def _try_load_aot_compiled_fn(model: Any, aot_compilation_path: str) -> Any:
        if model.vllm_config.model_config.architecture not in FAMILIES:
            return try_load(model, aot_compilation_path)
        torch.compiler.load_compiled_function = load
        try:
            return try_load(model, aot_compilation_path)
        finally:
            torch.compiler.load_compiled_function = load_compiled_function

    decorators._try_load_aot_compiled_fn = _try_load_aot_compiled_fn


@functools.cache
def multiply_no_rows() -> None:
    """Let vLLM's product for small weights take zero rows, which kill the process otherwise.

    It divides by the number of rows. vLLM's built-in DiffusionGemma asks for the logits of no row
    in each step that reads prompts only; processors with AMX have this product.
    """
    from vllm import _custom_ops

    multiply = _custom_ops.weight_packed_linear_cpu

    def weight_packed_linear_cpu(x: Any, packed_weight: Any, n: int, bias: Any) -> Any:
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], n)
        return multiply(x, packed_weight, n, bias)

    _custom_ops.weight_packed_linear_cpu = weight_packed_linear_cpu


def register_cpu_kernels(include_sampling: bool) -> None:
    """Replace Model Runner V2's Triton kernels in this worker process."""
    from vllm.triton_utils.dispatcher import register_kernels

    from dllm.cpu.install import install

    install(register_kernels, include_sampling=include_sampling)
