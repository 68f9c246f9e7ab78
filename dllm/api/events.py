"""Frames as server-sent events of a chat completion or a completion.

trace   events of our own, too: an empty delta, and the trace of a block beside it
canvas  events of our own between vLLM's: an empty delta, and ``canvas`` beside it
text    the form of Inception's Mercury: every delta holds the whole text so far, drafts
        included, and replaces the one before; ``diffusion_meta`` tells drafts apart

The trace of an answer is the field ``diffusion_trace`` of a choice: a dictionary of lists over the
tokens of the answer, and of lists over its blocks. Python code has it as an attribute of vLLM's
``CompletionOutput``, and JSON in each choice. In a stream each block is told once, and the lists of
all blocks end to end are the trace of the answer.
"""

import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from dllm.engine.frames import Frame

_encode = msgspec.json.Encoder().encode
# Thousandths of a nat. A position without a distribution has infinite entropy; JSON has none.
MAX_ENTROPY = 10**6
# The progress of a draft whose every token has settled: the model may still change them.
ALMOST = 0.999
TRACE_FIELD = "diffusion_trace"


def block_trace(frame: Frame) -> dict[str, Any] | None:
    """The field ``diffusion_trace`` of an event: that of one block; None without a trace.

    Lists have a number for each emitted token. Those of tokens behind the end are in "behind_stop".
    """
    if frame.trace is None:
        return None
    lists = {name: values for name, values in frame.trace.items() if name != "length"}
    length = frame.trace["length"]
    trace: dict[str, Any] = {name: values[:length] for name, values in lists.items()}
    trace |= {"block_lengths": [length], "block_passes": [frame.step]}
    if len(lists["token_ids"]) > length:
        trace["behind_stop"] = {name: values[length:] for name, values in lists.items()}
    return trace


def append_trace(trace: dict[str, Any], block: dict[str, Any]) -> None:
    """Put the trace of the next block behind those in front of it, in place."""
    for name, values in block.items():
        if isinstance(values, list):
            trace.setdefault(name, []).extend(values)
        else:
            trace[name] = values


@dataclass(frozen=True)
class Stream:
    """What the events of a stream have in common."""

    request_id: str
    model: str
    is_chat: bool  # a chat completion, else a completion
    stops: frozenset[int]  # tokens that end an answer; a draft is shown up to the first of them
    tokenizer: Any

    def event(self, frame: Frame, choice: dict[str, Any], index: int, text: str, **top: Any) -> str:
        """An event with one choice, whose new text is ``text``, and the trace of a frame."""
        said = {"delta": {"content": text}} if self.is_chat else {"text": text}
        if (block := block_trace(frame)) is not None:
            choice = {**choice, TRACE_FIELD: block}
        return _event(
            {
                "id": self.request_id,
                "object": "chat.completion.chunk" if self.is_chat else "text_completion",
                "created": int(time.time()),  # noqa: TID251  only told
                "model": self.model,
                "choices": [{"index": index, **said, "finish_reason": None, **choice}],
                **top,
            }
        )

    def length(self, frame: Frame) -> int:
        """How many tokens a canvas has up to the first that ends the answer, with it."""
        ends = (n for n, token in enumerate(frame.argmax.tolist(), 1) if token in self.stops)
        return next(ends, len(frame.argmax))

    def draft(self, frame: Frame) -> str:
        """The text of a canvas if it were emitted now."""
        ids = frame.argmax[: self.length(frame)].tolist()
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


class TraceWriter:
    """Writes the lines of a stream: frames with traces, and vLLM's own lines."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def frame(self, choice: int, frame: Frame) -> str:
        """An event that a client which does not know frames reads as empty."""
        return self._stream.event(frame, {}, choice, "")

    def own(self, line: str) -> str:
        return line


class CanvasWriter(TraceWriter):
    """Each frame is ``canvas`` of an empty event; entropies are integers, thousandths of a nat."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self._text_of = token_texts(stream.tokenizer)

    def frame(self, choice: int, frame: Frame) -> str:
        ids = (frame.argmax if frame.is_final else frame.canvas).tolist()
        entropy = np.fmin(frame.entropy * 1000 + 0.5, MAX_ENTROPY).astype(np.int32)
        canvas = {
            "offset": frame.offset,
            "step": frame.step,
            "final": frame.is_final,
            "ids": ids,
            "tokens": [self._text_of(token) for token in ids],
            "argmax": frame.argmax.tolist(),
            "length": self._stream.length(frame),
            "entropy": entropy.tolist(),
            "accepted": frame.accepted.astype(np.int8).tolist(),
        }
        return self._stream.event(frame, {"canvas": canvas}, choice, "")


class TextWriter(TraceWriter):
    """Writes the whole text so far in each event, so that a client replaces what it shows."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self._said: dict[int, str] = {}  # by choice: the emitted text
        self._shown: dict[int, tuple[str, float]] = {}  # by choice: the last event

    def frame(self, choice: int, frame: Frame) -> str:
        text = self._said.get(choice, "") + self._stream.draft(frame)
        progress = min(round(float(frame.accepted.mean()), 3), ALMOST)
        self._shown[choice] = text, progress
        return self._stream.event(frame, {}, choice, text, diffusion_meta=_meta(progress))

    def own(self, line: str) -> str:
        """vLLM's line, with all of the emitted text in the place of what is new.

        A line that says nothing new (the role of a chat) repeats what was shown last.
        """
        if not line.startswith("data: {"):
            return line
        body = json.loads(line[len("data: ") :])
        for choice in body.get("choices", ()):
            holder, key = (choice["delta"], "content") if "delta" in choice else (choice, "text")
            index = choice["index"]
            if holder.get(key) or choice.get("finish_reason") or index not in self._shown:
                self._said[index] = self._said.get(index, "") + (holder.get(key) or "")
                self._shown[index] = self._said[index], 1.0
            holder[key], progress = self._shown[index]
            body["diffusion_meta"] = _meta(progress)
        return _event(body)


def _meta(progress: float) -> dict[str, Any]:
    """``diffusion_content``: the content replaces. ``diffusion_progress``: the settled share."""
    return {"diffusion_content": True, "diffusion_progress": progress}


def _event(body: Any) -> str:
    return f"data: {_encode(body).decode()}\n\n"


@functools.lru_cache(maxsize=4)
def token_texts(tokenizer: Any) -> Callable[[int], str]:
    """A function that gives the text of a token, and remembers it: canvases are full of noise."""

    @functools.lru_cache(maxsize=1 << 19)
    def text_of(token: int) -> str:
        return str(tokenizer.decode([token]))

    return text_of
