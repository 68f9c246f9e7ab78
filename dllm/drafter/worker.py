"""vLLM's GPU worker with our drafter; on a CPU it is ``dllm.cpu.worker`` that makes it."""

from vllm.config import VllmConfig
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from dllm import seams_drafter


class DrafterWorker(Worker):
    """A worker whose Model Runner V2 drafts with ``dllm.drafter.speculator``."""

    def __init__(self, vllm_config: VllmConfig, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        seams_drafter.draft_in_this_worker(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """vLLM's warm-up, and then what steps cost."""
        times = super().compile_or_warm_up_model()
        seams_drafter.measure_costs_in_this_worker(self.model_runner, self.execute_model)
        return times
