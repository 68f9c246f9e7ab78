"""Frames: what a watched canvas looks like after a denoise step, on the way to the client.

The frame of a canvas that has converged also holds its trace (``engine.traces``), if that is asked.

    worker        ``engine.frame_taker`` packs the canvases of watched requests
    engine core   FrameMail addresses them to the API server that has the request
    API server    ``api.watching`` keeps those that the client has not read yet
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from dllm.engine.channels import frame_in, frame_output
from dllm.settings.request import traced

if TYPE_CHECKING:
    import torch

# Rows of `StepFrames.packed`, and the types of their numbers: attributes of a `Frame`.
LINES: dict[str, Any] = {
    "canvas": np.int32,
    "argmax": np.int32,
    "entropy": np.float32,
    "accepted": bool,
}
# The last column of these two is the canvas width, and whether the canvas has converged.
WIDTH, ACCEPTED = 2, 3
TRACE_LINES = slice(4, 8)


@dataclass
class StepFrames:
    """The frames of one pass, of n watched requests."""

    req_ids: list[str]
    # "pass" or "visit": whether a request wants this frame if another pass follows; "block": only
    # if its canvas has converged.
    every: list[str]
    # [n, 4 or 8, C + 1] fp32, which holds ids and positions exactly up to 2^24. Rows: the next
    # canvas, the argmax canvas, entropies in nats, whether the sampled token is kept; if somebody
    # is traced, the four columns of ``engine.traces``. Last column: where the canvas starts,
    # denoise steps done, its width, whether it has converged. A width of 0 is no frame: an emitted
    # block got its KV (``engine.pending``).
    packed: "torch.Tensor | np.ndarray"


class FrameMail:
    """In the engine core: the frames of an engine step, by the API servers of their requests."""

    def __init__(self, steps: Sequence[StepFrames], requests: Mapping[str, Any]) -> None:
        """``requests``: by id, those that end in this step, too."""
        # Of each frame its server, and what its trace is made of.
        self._frames: list[tuple[EngineCoreOutput, int, np.ndarray, frozenset[str] | None]] = []
        for number, step in enumerate(steps):
            seen_later = {req_id for later in steps[number + 1 :] for req_id in later.req_ids}
            packed = np.asarray(step.packed)
            for req_id, every, frame in zip(step.req_ids, step.every, packed, strict=True):
                if not frame[WIDTH, -1]:
                    continue
                request = requests.get(req_id)
                is_final = bool(frame[ACCEPTED, -1])
                is_skipped = every == "visit" and req_id in seen_later
                is_skipped |= every == "block" and not is_final
                if request is None or is_skipped:
                    continue
                output = _frame_output(req_id, request.num_prompt_tokens, frame)
                asked = traced(request.sampling_params) if is_final else None
                self._frames.append((output, request.client_index, frame, asked))

    def add_to(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Append the frames to the engine core's outputs, behind everything else.

        A trace needs them: they say how many tokens of a block belong to the answer. A final frame
        without any is left out: vLLM has dropped that block, because the request was reset or has
        ended meanwhile.
        """
        if not self._frames:
            return
        emitted = {one.request_id: one for sent in outputs.values() for one in sent.outputs}
        for output, server, packed, asked in self._frames:
            frame, answer = frame_in(output), emitted.get(output.request_id)
            assert frame is not None
            if frame["is_final"] and answer is None:
                continue
            if answer is not None and asked is not None:
                frame["trace"] = _trace(packed, answer, asked)
            outputs.setdefault(server, EngineCoreOutputs(outputs=[])).outputs.append(output)


def _frame_output(req_id: str, num_prompt_tokens: int, packed: np.ndarray) -> EngineCoreOutput:
    start, step, width, is_final = (int(number) for number in packed[: len(LINES), -1])
    frame: dict[str, Any] = {"offset": start - num_prompt_tokens, "step": step}
    frame["is_final"] = bool(is_final)
    for line, (name, kind) in zip(packed, LINES.items(), strict=False):  # traces behind them
        frame[name] = line[:width].astype(kind).tobytes()
    return frame_output(req_id, frame)


def _trace(packed: np.ndarray, emitted: EngineCoreOutput, asked: frozenset[str]) -> dict[str, Any]:
    """A block's trace (``Frame.trace``); ``asked``: what the request wants beside the rest."""
    length, width = len(emitted.new_token_ids), int(packed[WIDTH, -1])
    shown = slice(width if "behind_stop" in asked and emitted.finished else length)
    tokens, (steps, *numbers) = packed[1, shown], packed[TRACE_LINES, shown]
    names = ("logprobs", "sampling_logprobs", *(("entropies",) if "entropy" in asked else ()))
    return {
        "length": length,
        "token_ids": tokens.astype(int).tolist(),
        "reveal_steps": steps.astype(int).tolist(),
        **{name: _finite(line) for name, line in zip(names, numbers, strict=False)},
    }


def _finite(numbers: np.ndarray) -> list[float | None]:
    """JSON has no NaN and no infinity."""
    return [number if math.isfinite(number) else None for number in numbers.tolist()]


@dataclass(frozen=True)
class Frame:
    """In the API server: one canvas after one denoise step. Arrays are ``[canvas width]``."""

    offset: int  # how many tokens of the answer are in front of the canvas
    step: int  # from 1 in each canvas
    is_final: bool  # the canvas has converged, and its argmax is emitted
    canvas: np.ndarray  # ids that the next step sees; no meaning if ``is_final``
    argmax: np.ndarray
    entropy: np.ndarray  # of the model's distributions, nats
    accepted: np.ndarray  # whether the sampled token is kept
    # If it is asked for, and ``is_final``: how many of the tokens belong to the answer
    # (``length``), and lists over these and, if asked for, those behind the stop.
    trace: dict[str, Any] | None = None


def frame_of(output: EngineCoreOutput) -> Frame | None:
    frame = frame_in(output)
    if frame is None:
        return None
    arrays = {name: np.frombuffer(frame[name], kind) for name, kind in LINES.items()}
    return Frame(**frame | arrays)
