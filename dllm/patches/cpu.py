"""Patches for a CPU: Model Runner V2 without Triton, and a faster start."""

import functools
import os
from collections.abc import Iterator
from typing import Any

import torch
from vllm import platforms
from vllm.logger import init_logger

from dllm import LOGGER
from dllm.cpu.instructions import computes_bf16
from dllm.patches.contract import CPU_WORKER, IN_PROCESS_EXECUTOR, SCHEDULERS
from dllm.patches.preflight import refuse_missing_parts
from dllm.settings import vllm_names

logger = init_logger(LOGGER)

# oneDNN keeps what it compiled for so many products, by default 1,024: hundreds of MiB, because
# each number of rows has products of its own. Padded batches (`cpu_worker.padded_size`) need fewer.
ONEDNN_PRODUCTS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64"


def keep_few_products(vllm_config: Any) -> None:
    """Of a diffusion model, before its worker's process starts, which inherits it."""
    if platforms.current_platform.is_cpu():
        os.environ.setdefault(*ONEDNN_PRODUCTS)


def is_cpu_without_triton() -> bool:
    """Where our worker and kernels are needed."""
    from vllm.triton_utils import HAS_TRITON

    return platforms.current_platform.is_cpu() and not HAS_TRITON


def is_synchronous() -> bool:
    """Whether vLLM schedules no step ahead on this platform."""
    return platforms.current_platform.is_cpu()


def schedules_no_step_ahead(vllm_config: Any, why_steps_wait: str | None) -> bool:
    """Whether steps are scheduled one by one: here, as asked, or for this reason of the server."""
    is_asked = vllm_config.scheduler_config.async_scheduling is False
    return is_synchronous() or is_asked or why_steps_wait is not None


def prepare_worker(vllm_config: Any) -> None:
    """The worker runs in the engine's process if OpenMP has one thread and no binding.

    vLLM gives a CPU worker a process of its own, because each may need other settings of OpenMP.
    Where there is nothing to set, two processes only cost time: they poll for each other's messages
    several times a step, and take each other's core.

    Raises ValueError if the machine lacks what the worker needs, or the worker what is asked for.
    """
    parallel = vllm_config.parallel_config
    refuse_missing_parts(vllm_config)
    for is_asked, what in _asks_for_triton(vllm_config):
        if is_asked:
            raise ValueError(f"{what} with {CPU_WORKER}: it needs a Triton kernel. Leave it out.")
    # "uni" (in process) is vLLM's own choice for one rank. Its CPU platform overwrites "uni" later,
    # but not a class path.
    if parallel.distributed_executor_backend == "uni" and needs_no_openmp_setup():
        parallel.distributed_executor_backend = IN_PROCESS_EXECUTOR


def _asks_for_triton(vllm_config: Any) -> Iterator[tuple[Any, str]]:
    """What launches kernels of vLLM that ``dllm.cpu`` has no function for."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    yield model.enable_trace_replay, "--enable-trace-replay"
    yield model.return_sampling_mask, "--return-sampling-mask"
    yield vllm_config.watermark_config, "--watermark-config"
    yield parallel.enable_batch_sharded_sampling, "--enable-batch-sharded-sampling"
    yield parallel.decode_context_parallel_size > 1, "--decode-context-parallel-size"
    yield model.is_hybrid or model.is_attention_free, "a model with Mamba layers"
    yield model.uses_mrope, "a model with M-RoPE"
    speculative = vllm_config.speculative_config
    is_adaptive = speculative is not None and speculative.enable_adaptive_verification
    yield is_adaptive, "enable_adaptive_verification"


def choose_dtype(arguments: Any, model_config: Any, is_ours: bool) -> None:
    """Let ``--dtype auto`` be float32 for what we serve, on a CPU without bf16 instructions.

    Matrix products are several times faster in float32 there. Quantized checkpoints keep their
    dtype, for which the kernels of their format are made.
    """
    if not platforms.current_platform.is_cpu() or computes_bf16():
        return
    speculative = arguments.speculative_config or {}
    is_ours = (
        is_ours
        or speculative.get("method") == "dflash"
        or str(speculative.get("model")).startswith("dllm.")
    )
    is_open = arguments.dtype == "auto" and model_config.quantization is None
    if is_ours and is_open and model_config.dtype == torch.bfloat16:
        model_config.dtype = torch.float32
        logger.info("dllm: --dtype auto is float32: this CPU has no bf16 instructions")


def register_model(architecture: str, path: str) -> None:
    """``path``: "module:Class", imported when it is needed.

    vLLM imports it in another process to learn what it can do, so that a GPU is opened by none but
    the engine. That process imports vLLM again, which takes 8 s. On a CPU it is imported here.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.registry import _LazyRegisteredModel, _ModelInfo

    class ImportedHere(_LazyRegisteredModel):
        def inspect_model_cls(self) -> Any:
            return _ModelInfo.from_model_cls(self.load_model_cls())

    ModelRegistry.register_model(architecture, path)
    if platforms.current_platform.is_cpu():
        ModelRegistry.models[architecture] = ImportedHere(*path.split(":"))


def make_replicas_independent(vllm_config: Any) -> None:
    """On a CPU, let each data parallel replica of a model with experts be an engine of its own.

    In vLLM the replicas of such a model share its experts, and its CPU communicator cannot exchange
    unequal numbers of tokens. Told that the model has no experts, vLLM starts engines that know
    nothing of each other; model classes read the number in config.json.

    Raises ValueError if a flag asks for shared experts, or leaves the balancing to others.
    """
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size == 1 or not platforms.current_platform.is_cpu():
        return
    for given, flag, why in (
        (
            parallel.enable_expert_parallel,
            "--enable-expert-parallel",
            "on a CPU replicas cannot share experts",
        ),
        (
            parallel.data_parallel_external_lb,
            "--data-parallel-rank, --data-parallel-external-lb",
            "on a CPU replicas share nothing. Start each server without --data-parallel-size",
        ),
    ):
        if given:
            raise ValueError(f"{flag} with --data-parallel-size: {why}. Leave the flag out.")
    vllm_config.model_config.model_arch_config.num_experts = 0
    # vLLM chooses "mp" for replicas, though each of these is alone.
    if parallel.world_size == 1 and parallel.distributed_executor_backend == "mp":
        parallel.distributed_executor_backend = "uni"


def enable_cpu_runtime() -> None:
    """On a CPU without Triton, run Model Runner V2 for the models that our worker serves."""
    # Linux has to be asked for AMX, in each process, and vLLM's attention kernel does not.
    if platforms.current_platform.is_cpu():
        torch.cpu._init_amx()
    if not is_cpu_without_triton():
        return
    from vllm.triton_utils import triton
    from vllm.utils.math_utils import next_power_of_2

    from dllm.patches.cleared_pages import clear_pages

    triton.next_power_of_2 = next_power_of_2
    clear_pages(is_on_cpu_runtime)


def is_on_cpu_runtime(vllm_config: Any) -> bool:
    """With our worker, or with one that serves canvases."""
    is_ours = vllm_config.parallel_config.worker_cls == CPU_WORKER
    is_ours |= vllm_config.scheduler_config.scheduler_cls in SCHEDULERS
    return is_ours and is_cpu_without_triton()


def needs_no_openmp_setup() -> bool:
    """As `make serve` sets it."""
    # Not from vllm.envs, which may hold cached values of an engine that ran earlier.
    given = os.environ.get("OMP_NUM_THREADS"), os.environ.get("VLLM_CPU_OMP_THREADS_BIND")
    return given == ("1", "nobind")


@functools.cache  # vLLM looks for them in every module of the process
def register_cpu_kernels() -> None:
    """Replace Model Runner V2's Triton kernels in this worker's process by ``dllm.cpu``."""
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.v1.worker import gpu_worker

    from dllm.cpu.kernels import kernels

    register_kernels(kernels(parameters_of, vllm_names.is_0_32()))
    gpu_worker.HAS_TRITON = True  # asked by vLLM 0.33, which needs nothing else of Triton then


def parameters_of(kernel: str) -> tuple[str, ...]:
    """Of a Triton kernel of vLLM, by its dotted name."""
    from vllm.triton_utils.dispatcher import _kernel_arg_names, _resolve_kernel

    return _kernel_arg_names(getattr(*_resolve_kernel(kernel)))
