"""Frames as events: what is in them, and what a client that replaces content ends with."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dllm.api.events import MAX_ENTROPY, CanvasWriter, Stream, TextWriter
from dllm.engine.frames import Frame


class Letters:
    """A tokenizer of letters: 0 is a, 1 is b; 9 is a special token."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(
            ("" if skip_special_tokens else "<end>") if one == 9 else chr(97 + one) for one in ids
        )


def stream(is_chat: bool = True) -> Stream:
    return Stream("id-1", "tiny", is_chat, frozenset({9}), Letters())


def frame(argmax: list[int], is_final: bool = False, entropy: Any = None) -> Frame:
    width = len(argmax)
    return Frame(
        offset=32,
        step=2,
        is_final=is_final,
        canvas=np.full(width, 3, np.int32),
        argmax=np.array(argmax, np.int32),
        entropy=np.array([0.5] * width if entropy is None else entropy, np.float32),
        accepted=np.arange(width) % 2 == 0,
    )


def body(line: str) -> Any:
    assert line.startswith("data: {") and line.endswith("}\n\n")
    return json.loads(line[6:])


def own(content: str | None, **choice: Any) -> str:
    delta = {} if content is None else {"content": content}
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, **choice}]})}\n\n"


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_canvas_event_reads_as_empty_to_others(is_chat):
    event = body(CanvasWriter(stream(is_chat)).frame(1, frame([0, 9])))
    (choice,) = event["choices"]
    assert choice["index"] == 1 and choice["finish_reason"] is None
    assert choice["delta"] == {"content": ""} if is_chat else choice["text"] == ""
    assert event["object"] == ("chat.completion.chunk" if is_chat else "text_completion")
    assert (event["id"], event["model"]) == ("id-1", "tiny")
    assert choice["canvas"] == {
        "offset": 32,
        "step": 2,
        "final": False,
        "ids": [3, 3],
        "tokens": ["d", "d"],
        "argmax": [0, 9],
        "length": 2,
        "entropy": [500, 500],
        "accepted": [1, 0],
    }


def test_entropies_are_rounded_and_never_infinite():
    entropy = [0.0004, 0.0006, np.inf, np.nan]
    (choice,) = body(CanvasWriter(stream()).frame(0, frame([0] * 4, entropy=entropy)))["choices"]
    assert choice["canvas"]["entropy"] == [0, 1, MAX_ENTROPY, MAX_ENTROPY]


def test_a_client_that_replaces_content_always_shows_the_whole_text():
    writer = TextWriter(stream())
    shown = [
        body(line)
        for line in (
            writer.own(own("", role="assistant")),
            writer.frame(0, frame([0, 1, 9, 5])),
            writer.own(own("", role="assistant")),
            writer.own(own("ab")),
            writer.frame(0, frame([2, 9])),
            writer.own(own("cd")),
            writer.own(own(None, finish_reason="stop")),
        )
    ]
    texts = [one["choices"][0]["delta"]["content"] for one in shown]
    assert texts == ["", "ab", "ab", "ab", "abc", "abcd", "abcd"]
    progress = [one["diffusion_meta"]["diffusion_progress"] for one in shown]
    assert progress == [1, 0.5, 0.5, 1, 0.5, 1, 1]


def test_a_settled_draft_is_no_emitted_text():
    settled = replace(frame([0]), accepted=np.array([True]))
    (one,) = [body(TextWriter(stream()).frame(0, settled))]
    assert one["diffusion_meta"]["diffusion_progress"] == 0.999


def test_the_choices_of_a_replacing_stream_are_kept_apart():
    writer = TextWriter(stream(is_chat=False))
    for index, text in ((0, "a"), (1, "b"), (0, "c")):
        line = writer.own(f"data: {json.dumps({'choices': [{'index': index, 'text': text}]})}\n\n")
    assert body(line)["choices"][0]["text"] == "ac"
    assert body(writer.frame(1, frame([2, 9])))["choices"][0]["text"] == "bc"
