"""Patches of the engine core's process, installed by the scheduler that vLLM makes there."""

import functools
from typing import Any

from dllm.drafter.scheduler import DraftingScheduler
from dllm.patches.contract import CPU_WORKER
from dllm.patches.drafting import drafts_with_ours


class PatchingScheduler(DraftingScheduler):
    """The scheduler of a server with a drafter; nothing else of ours is made in its process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _draft_for_those_who_go_on()


@functools.cache
def _draft_for_those_who_go_on() -> None:
    """On a CPU, skip drafting after a step that finished every request; its context is kept."""
    from vllm.v1.engine.core import EngineCore

    post_step = EngineCore.post_step

    def post_step_of_ours(self: Any, model_executed: bool) -> None:
        drafts = drafts_with_ours(self.vllm_config.speculative_config)
        on_cpu = self.vllm_config.parallel_config.worker_cls == CPU_WORKER
        if drafts and on_cpu and model_executed and not self.scheduler.running:
            self.model_executor.collective_rpc("put_away_step")
        else:
            post_step(self, model_executed)

    EngineCore.post_step = post_step_of_ours  # type: ignore[method-assign]
