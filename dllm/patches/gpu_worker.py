"""vLLM's GPU worker, patched for diffusion models and for our drafter.

``cpu_worker`` is a module of its own because importing its base class patches torch for a CPU.
"""

from vllm.config import VllmConfig
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from dllm.patches.contract import SCHEDULER
from dllm.patches.drafting import draft_in_this_worker, measure_costs_in_this_worker
from dllm.patches.recording import Records
from dllm.patches.worker import Visits, prepare_runner


class CanvasGPUWorker(Records, Visits, Worker):
    """A GPU worker whose Model Runner V2 runs a diffusion model, or our drafter."""

    def __init__(self, vllm_config: VllmConfig, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        self.serves_canvases = vllm_config.scheduler_config.scheduler_cls == SCHEDULER
        if self.serves_canvases:
            prepare_runner()
        draft_in_this_worker(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """vLLM's warm-up; then the cost of steps is measured if the width policy needs it."""
        times = super().compile_or_warm_up_model()
        measure_costs_in_this_worker(self.model_runner, self.execute_model)
        return times
