"""Frames: what a watched canvas looks like after a denoise step, on the way to the client.

    worker        ``engine.frame_taker`` packs the canvases of watched requests
    engine core   FrameMail addresses them to the API server that has the request
    API server    ``api.watching`` keeps those that the client has not read yet

They travel in messages that are sent anyway: in the worker's answer to a visit, and in the engine
core's outputs. There are none if nobody watches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput

if TYPE_CHECKING:
    import torch

# `kv_transfer_params` is the field of an output that may hold anything, and KV transfer is refused
# for diffusion models. An output with this key holds a frame and nothing else.
KEY = "dllm_frame"
WIDTH = 2  # the row of `StepFrames.packed` whose last column is the canvas width


@dataclass
class StepFrames:
    """The frames of one pass.

    Attributes:
        req_ids: of the watched requests of the batch, n of them.
        every: for each, "pass" or "visit": whether it wants this frame if another pass follows.
        packed: ``[n, 4, C + 1]`` fp32, which holds ids and positions exactly up to 2^24. Rows: the
            next canvas, the argmax canvas, entropies in nats, whether the sampled token is kept.
            Last column: where the canvas starts, denoise steps done, its width, whether it has
            converged. A width of 0 is no frame: an emitted block got its KV (``engine.pending``).
    """

    req_ids: list[str]
    every: list[str]
    packed: "torch.Tensor | np.ndarray"


class FrameMail:
    """In the engine core: the frames of a visit, addressed to the API servers of their requests."""

    def __init__(self, answer: ModelRunnerOutput, requests: Mapping[str, Any]) -> None:
        """Read the worker's answer. ``requests`` holds those that end in this visit as well."""
        self._by_server: dict[int, list[EngineCoreOutput]] = {}
        steps: list[StepFrames] = getattr(answer, "canvas_frames", [])
        for number, step in enumerate(steps):
            seen_later = {req_id for later in steps[number + 1 :] for req_id in later.req_ids}
            packed = np.asarray(step.packed)
            for req_id, every, frame in zip(step.req_ids, step.every, packed, strict=True):
                if not frame[WIDTH, -1]:
                    continue
                request = requests.get(req_id)
                if request is not None and not (every == "visit" and req_id in seen_later):
                    output = _frame_output(req_id, request.num_prompt_tokens, frame)
                    self._by_server.setdefault(request.client_index, []).append(output)

    def add_to(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Append the frames to the engine core's outputs, behind everything else."""
        for server, frames in self._by_server.items():
            outputs.setdefault(server, EngineCoreOutputs(outputs=[])).outputs.extend(frames)


def _frame_output(req_id: str, num_prompt_tokens: int, packed: np.ndarray) -> EngineCoreOutput:
    start, step, width, is_final = (int(number) for number in packed[:, -1])
    frame = {
        "offset": start - num_prompt_tokens,
        "step": step,
        "is_final": bool(is_final),
        "canvas": packed[0, :width].astype(np.int32).tobytes(),
        "argmax": packed[1, :width].astype(np.int32).tobytes(),
        "entropy": packed[2, :width].tobytes(),
        "accepted": packed[3, :width].astype(bool).tobytes(),
    }
    return EngineCoreOutput(request_id=req_id, new_token_ids=[], kv_transfer_params={KEY: frame})


@dataclass(frozen=True)
class Frame:
    """In the API server: one canvas after one denoise step. Arrays are ``[canvas width]``.

    Attributes:
        offset: how many tokens of the answer are in front of the canvas.
        step: counted from 1 in each canvas.
        is_final: the canvas has converged, and its argmax is emitted.
        canvas: ids that the next step sees. Without meaning if ``is_final``.
        argmax: ids of the most likely tokens.
        entropy: of the model's distributions, nats.
        accepted: whether the sampled token is kept.
    """

    offset: int
    step: int
    is_final: bool
    canvas: np.ndarray
    argmax: np.ndarray
    entropy: np.ndarray
    accepted: np.ndarray


def is_frame(output: EngineCoreOutput) -> bool:
    """Whether an output of the engine core is a frame."""
    return output.kv_transfer_params is not None and KEY in output.kv_transfer_params


def frame_of(output: EngineCoreOutput) -> Frame:
    """The frame in an output of which ``is_frame`` is true."""
    assert output.kv_transfer_params is not None
    frame = output.kv_transfer_params[KEY]
    return Frame(
        offset=frame["offset"],
        step=frame["step"],
        is_final=frame["is_final"],
        canvas=np.frombuffer(frame["canvas"], np.int32),
        argmax=np.frombuffer(frame["argmax"], np.int32),
        entropy=np.frombuffer(frame["entropy"], np.float32),
        accepted=np.frombuffer(frame["accepted"], bool),
    )
