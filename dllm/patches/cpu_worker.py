"""vLLM's CPU worker with Model Runner V2, on kernels that need no Triton.

``patches.kinds`` chooses this class for our architectures on a CPU without Triton. Any
other model can be run with ``--worker-cls dllm.patches.cpu_worker.CanvasCPUWorker``.
"""

# This module of vLLM patches torch, and must be imported before every other worker module.
import vllm.v1.worker.cpu.shm  # noqa: F401  isort: skip

import ctypes
import gc
import time
from dataclasses import replace
from typing import Any

import psutil
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu import model_runner
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.worker_base import CompilationTimes

from dllm import LOGGER
from dllm.drafter.runner import DraftingRunner
from dllm.engine.runner import CanvasRunner
from dllm.engine.warm_up import warm_up
from dllm.patches.compile_cache import prepare_compiler, reload_compiled_backbone, write_checksums
from dllm.patches.cpu import register_cpu_kernels
from dllm.patches.new_weights import pack_new_weights, refuse_new_int8_weights
from dllm.patches.worker import OurRunners

logger = init_logger(LOGGER)

ATTENTION_BACKEND = "dllm.attention.cpu_backend.CanvasCPUBackend"
TRIM_SECONDS = 60.0


class CanvasCPUWorker(OurRunners, CPUWorker):
    def __init__(self, vllm_config: VllmConfig, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        # vLLM collects garbage several times until the server is ready. Modules are none.
        gc.freeze()
        self._compiler_is_ready = prepare_compiler(vllm_config)
        register_cpu_kernels()
        register_backend(AttentionBackendEnum.CPU_ATTN, ATTENTION_BACKEND)
        reload_compiled_backbone()
        self._trim_at = time.monotonic() + TRIM_SECONDS
        # vLLM 0.33 gives each data-parallel replica a memory node of its own, and a replica whose
        # node the machine lacks cannot start. Without these, it takes the node of its cores.
        vllm_config.parallel_config.assigned_physical_gpu_ids = None
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        """vLLM makes the runner that has this name in its module."""
        theirs = model_runner.CPUModelRunner
        model_runner.CPUModelRunner = CanvasCPURunner if self.serves_canvases else DraftingCPURunner
        try:
            super().init_device()
        finally:
            model_runner.CPUModelRunner = theirs

    def determine_available_memory(self) -> int:
        self._compiler_is_ready()
        size: int = super().determine_available_memory()
        if self.cache_config.kv_cache_memory_bytes is None:
            warn_of_large_cache(size, psutil.virtual_memory().total)
        return size

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Compile everything that a request will run, before the server reports ready."""
        # Made-up requests of vLLM would compile Triton kernels, which there are none of here. They
        # are longer than some models.
        self.vllm_config.kernel_config.enable_jit_warmup = False
        times = super().compile_or_warm_up_model()
        if self.serves_canvases and self._should_warm_up_model():
            warm_up(self.model_runner, self.execute_model)
        write_checksums(self.vllm_config)
        return times

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Once a minute, return what is free in the heap, which takes about 8 ms: glibc returns its
        end alone, and it grows for days, with gaps between what oneDNN keeps.
        """
        if (now := time.monotonic()) >= self._trim_at:
            self._trim_at = now + TRIM_SECONDS
            return_free_memory()
        return super().execute_model(scheduler_output)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Packed as vLLM's CPU kernels read them. Raises as ``refuse_new_int8_weights`` does."""
        refuse_new_int8_weights(self.model_runner.model)
        super().reload_weights(*args, **kwargs)
        pack_new_weights(self.model_runner.model)

    def start_weight_update(self) -> None:
        """Weights that come in pieces are packed, and refused, as in ``reload_weights``."""
        refuse_new_int8_weights(self.model_runner.model)
        super().start_weight_update()

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        pack_new_weights(self.model_runner.model)


def warn_of_large_cache(size: int, memory: int) -> None:
    """As vLLM's default does. It is cleared at start, which takes a minute for 20 GiB."""
    if size > memory / 2:
        logger.warning(
            "dllm: the KV cache takes %.1f of this machine's %.1f GiB of memory. Bound it with "
            "--kv-cache-memory-bytes, for instance 1G; `dllm doctor MODEL` says what a token takes",
            size / 2**30,
            memory / 2**30,
        )


def return_free_memory() -> None:
    """Other C libraries than glibc have no ``malloc_trim``, and nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class DraftingCPURunner(DraftingRunner, CPUModelRunner):
    """On a CPU: of a target with or without drafts."""


class CanvasCPURunner(CanvasRunner, CPUModelRunner):
    """On a CPU: of a diffusion model, whose batches have one of few sizes.

    oneDNN compiles each product of matrices for its number of rows, and keeps a limited number of
    them. Prompts have any length: a batch of prompts and canvases would mostly be a new size.
    """

    def prepare_inputs(
        self,
        scheduler_output: SchedulerOutput,
        batch_req_state: Any,
        batch_desc: BatchExecutionDescriptor,
        num_active_loras: int,
    ) -> InputBatch:
        """Pad as for a CUDA graph."""
        size = min(padded_size(batch_desc.num_tokens), self.max_num_tokens)
        padded = replace(batch_desc, num_tokens=size)
        return super().prepare_inputs(scheduler_output, batch_req_state, padded, num_active_loras)


def padded_size(num_tokens: int) -> int:
    """The next of eight sizes between a power of two and its double; up to 16 each is one."""
    step = 1 << max((num_tokens - 1).bit_length() - 4, 0)
    return -(-num_tokens // step) * step
