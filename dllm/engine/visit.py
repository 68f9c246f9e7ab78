"""What the scheduler and the worker tell each other about a visit, beside vLLM's own messages.

A visit is a message of the scheduler to the worker, and the worker's answer. In a visit the worker
may make several passes (``engine.loop``). vLLM's messages have no field for that, so it travels as
an attribute of them, which survives pickling. Our workers import this for any model, so it imports
nothing of the engine.
"""

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput


def allow_more_passes(message: SchedulerOutput) -> None:
    """Scheduler: the worker may repeat the batch, because no request waits for another one."""
    message.allows_more_passes = True  # type: ignore[attr-defined]


def allows_more_passes(message: SchedulerOutput) -> bool:
    """Worker: whether it may repeat the batch."""
    return getattr(message, "allows_more_passes", False)


def report_passes(answer: ModelRunnerOutput, num_passes: int) -> None:
    """Worker: how often every canvas of the batch went through the model."""
    answer.num_passes = num_passes  # type: ignore[attr-defined]


def num_passes(answer: ModelRunnerOutput) -> int:
    """Scheduler: how often that was; 1 if the worker does not say."""
    return getattr(answer, "num_passes", 1)
