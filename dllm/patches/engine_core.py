"""vLLM's engine core, derived: of diffusion models, and of targets with drafts.

The engine core's process installs the plugin before it makes one (``lifetime``).
"""

from typing import Any

from vllm.v1.engine.core import EngineCore

from dllm.patches.contract import CPU_WORKER
from dllm.patches.drafts import Draft, draft_of
from dllm.patches.grammars import TableManager
from dllm.patches.served import Part


class CanvasCore(EngineCore):
    structured_output_manager: Any = Part(TableManager)

    def run_busy_loop(self) -> None:
        """Let the denoise loop see that a request has arrived, if the worker is in this process.

        The input thread puts messages into a queue while the worker denoises.
        """
        driver = getattr(self.model_executor, "driver_worker", None)
        worker: Any = getattr(driver, "worker", None)
        if getattr(worker, "serves_canvases", False):
            queue: Any = self.input_queue  # type: ignore[attr-defined]
            worker.model_runner.model_state.loop.has_arrived = lambda: not queue.empty()
        super().run_busy_loop()  # type: ignore[misc]


class DraftingCore(EngineCore):
    def post_step(self, model_executed: bool) -> None:
        """On a CPU, skip drafting after a step that finished every request; save its context.

        On a CPU the drafter runs here, after the step's tokens were sent
        (``Steering.draft_late``). If every request has finished, nobody uses the drafts, and the
        next request would have to wait for them.
        """
        draft = draft_of(self.vllm_config.speculative_config)
        is_late = self.vllm_config.parallel_config.worker_cls == CPU_WORKER
        is_late &= draft in (Draft.ITSELF, Draft.NETWORK, Draft.SOURCE)  # of the worker
        if is_late and model_executed and not self.scheduler.running:
            self.model_executor.collective_rpc("save_context_only")
        else:
            super().post_step(model_executed)
