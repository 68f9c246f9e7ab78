"""A patch of the engine core, installed by the scheduler that vLLM makes in the core's process."""

import functools
from typing import Any

from dllm.drafter.scheduler import DraftingScheduler
from dllm.patches.contract import CPU_WORKER
from dllm.patches.drafts import draft_of
from dllm.patches.replace import replaces


class PatchingScheduler(DraftingScheduler):
    """Its constructor installs the patch: vLLM makes no other object of ours in that process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _skip_drafting_when_all_finished()


@functools.cache
def _skip_drafting_when_all_finished() -> None:
    """On a CPU, skip drafting after a step that finished every request; only save its context.

    On a CPU the drafter runs in ``post_step``, after the step's tokens were sent
    (``Steering.draft_late``). If every request has finished, nobody uses the drafts, and the next
    request would have to wait for them.
    """
    from vllm.v1.engine.core import EngineCore

    @replaces(EngineCore)
    def post_step(theirs: Any, self: Any, model_executed: bool) -> None:
        draft = draft_of(self.vllm_config.speculative_config)
        is_late = self.vllm_config.parallel_config.worker_cls == CPU_WORKER
        is_late &= draft is not None and draft.is_of_worker
        if is_late and model_executed and not self.scheduler.running:
            self.model_executor.collective_rpc("save_context_only")
        else:
            theirs(self, model_executed)
