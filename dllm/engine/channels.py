"""Channels: what travels between the processes of a server of ours, in which message of vLLM.

vLLM's messages have no fields for plugins. Where a message is a plain dataclass, ours is a subclass
of it. Where vLLM encodes a struct, ours rides in a field of it that may hold anything, and that
vLLM itself uses only for what is refused with a diffusion model.

| what                    | from -> to                 | in                                      |
|-------------------------|----------------------------|-----------------------------------------|
| a request's options     | API server -> core, worker | ``SamplingParams.extra_args``           |
| its grammar's table     | the same                   | the same, under ``GRAMMAR_ARG``         |
| may the loop go on      | core -> worker             | ``RepeatableSchedule``                  |
| a canvas: its width     | core -> worker             | ``scheduled_spec_decode_tokens``        |
| looked up, remote drafts| core -> worker             | the same                                |
| a block                 | worker -> core             | ``sampled_token_ids``                   |
| logits that are broken  | worker -> core             | ``num_nans_in_logits``                  |
| who has a canvas next   | worker -> core             | ``DraftTokenIds``, without the tokens   |
| passes, frames          | worker -> core             | ``CanvasAnswer``                        |
| drafts, counts of them  | worker -> core             | ``drafter.metrics.DraftReport``         |
| a frame, a trace        | core -> API server         | ``EngineCoreOutput.kv_transfer_params`` |
| counts                  | core -> API server         | ``SchedulerStats.ec_connector_stats``   |

The first two are read by ``settings.request``.
"""

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from dllm.engine.derived import as_one_of

FRAME = "dllm_frame"


class RepeatableSchedule(SchedulerOutput):
    """Of an engine step that may have more than one pass."""


@dataclass
class CanvasAnswer(ModelRunnerOutput):
    """Of an engine step."""

    num_passes: int = 1
    # ``frames.StepFrames`` of each pass that has some
    frames: list[Any] = field(default_factory=list)


@dataclass
class LateAnswer(AsyncModelRunnerOutput):
    """vLLM's answer, which may still be on its way to the host; ``own``: what ours has beside."""

    theirs: AsyncModelRunnerOutput
    own: dict[str, Any]

    def get_output(self) -> ModelRunnerOutput:
        answer: CanvasAnswer = as_one_of(CanvasAnswer, self.theirs.get_output(), **self.own)
        return answer


def frame_output(req_id: str, frame: dict[str, Any]) -> EngineCoreOutput:
    return EngineCoreOutput(request_id=req_id, new_token_ids=[], kv_transfer_params={FRAME: frame})


def frame_in(output: EngineCoreOutput) -> dict[str, Any] | None:
    frame: dict[str, Any] | None = (output.kv_transfer_params or {}).get(FRAME)
    return frame


def put_into(stats: SchedulerStats, key: str, counts: Any) -> None:
    """In the engine core; ``take_out`` is the front end's."""
    stats.ec_connector_stats = {**(stats.ec_connector_stats or {}), key: counts}


def take_out(stats: SchedulerStats, key: str) -> Any:
    carried = dict(stats.ec_connector_stats or {})
    counts = carried.pop(key, None)
    if counts is not None:
        stats.ec_connector_stats = carried or None
    return counts
