"""vLLM's CPU worker on Model Runner V2, with kernels that need no Triton.

The config hook names this class for our architecture on a CPU without Triton. Any other model
opts in with ``--worker-cls dllm.patches.cpu_worker.CanvasCPUWorker``.
"""

# The shm module patches torch and must come before every other worker module.
import vllm.v1.worker.cpu.shm  # noqa: F401  isort: skip

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import CompilationTimes

from dllm.engine.warm_up import warm_up
from dllm.models import FAMILIES
from dllm.patches.contract import SCHEDULER
from dllm.patches.cpu import multiply_no_rows, register_cpu_kernels, reload_compiled_backbone
from dllm.patches.drafting import draft_in_this_worker, measure_costs_in_this_worker
from dllm.patches.worker import prepare_runner


class CanvasCPUWorker(CPUWorker):
    """A CPU worker whose start replaces the kernels and warms the sampler up."""

    def __init__(self, vllm_config: VllmConfig, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        is_diffusion = vllm_config.model_config.architecture in FAMILIES
        register_cpu_kernels(include_sampling=not is_diffusion)
        reload_compiled_backbone()
        multiply_no_rows()
        draft_in_this_worker(vllm_config)
        # Not so for vLLM's built-in DiffusionGemma, which this worker may serve as well.
        self._is_ours = vllm_config.scheduler_config.scheduler_cls == SCHEDULER
        if self._is_ours:
            prepare_runner()
        super().__init__(vllm_config, *args, **kwargs)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Compile everything a request will run, before the server reports ready."""
        times = super().compile_or_warm_up_model()
        if self._is_ours and self._should_warm_up_model():
            warm_up(self.model_runner, self.execute_model)
        measure_costs_in_this_worker(self.model_runner, self.execute_model)
        return times

    @torch.inference_mode()
    def put_away_step(self) -> None:
        """Called instead of ``take_draft_token_ids`` if nobody is left to draft for."""
        speculator = self.model_runner.speculator  # type: ignore[attr-defined]
        if speculator is not None:  # the last pipeline stage has it
            speculator.put_away()
