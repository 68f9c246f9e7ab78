"""Image prompts: the cases of image_cases.py, and a server, both where torchvision imports.

The set-up has torchvision in a folder of its own, off Python's path, so that everything else is
tested without it.
"""

import base64
import io
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dllm.engine.spans import Spans
from tests.support.images import WITH_TOWER, needs_torchvision, path_with_torchvision, picture
from tests.support.process import run_python
from tests.support.server_harness import FLAGS, MODEL, Server

pytestmark = pytest.mark.slow


@needs_torchvision
@pytest.mark.parametrize(("chosen", "interpret"), [("not triton", "0"), ("triton", "1")])
def test_the_cases(chosen: str, interpret: str) -> None:
    if interpret == "1":
        pytest.importorskip("triton", reason="the kernel runs in Triton's interpreter")
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen)
    result = run_python(
        *command,
        "tests/models/image_cases.py",
        environment={"PYTHONPATH": path_with_torchvision(), "TRITON_INTERPRET": interpret},
    )
    assert re.search(r"\d+ passed", result.stdout) and "skipped" not in result.stdout


# --- the server ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def image_server(checkpoint, tmp_path_factory):
    """A server of a checkpoint with a tower, in an environment with torchvision."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", path_with_torchvision())
        running = Server(checkpoint(**WITH_TOWER), tmp_path_factory.mktemp("server") / "log", FLAGS)
    with running:
        running.wait_until_ready()
        yield running


def chat(server: Server, *urls: str, text: str = "What is this?") -> str:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    answer = server.client().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": [*parts, {"type": "text", "text": text}]}],
        max_tokens=32,
        seed=1,
        extra_body={"ignore_eos": True},
    )
    return str(answer.choices[0].message.content)


def data_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@needs_torchvision
def test_a_chat_request_with_an_image_is_answered(image_server):
    first, second = data_url(picture(1)), data_url(picture(2))
    answers = {chat(image_server), chat(image_server, first), chat(image_server, second)}
    assert len(answers) == 3, "an image makes no difference"
    assert chat(image_server, first) in answers
    assert chat(image_server, first, second) not in answers


@needs_torchvision
@pytest.mark.parametrize(
    "content",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,!"}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
        {"type": "text", "text": "<|video|>"},  # the processor's own token, not in the vocabulary
        {"type": "text", "text": "<|image|>"},  # a placeholder without an image
    ],
    ids=["no image", "no base64", "video", "video token", "image token"],
)
def test_what_is_no_image_leaves_the_server_alone(image_server, content):
    expected = chat(image_server, data_url(picture(1)))
    body = {"model": MODEL, "messages": [{"role": "user", "content": [content]}], "max_tokens": 5}
    reply = image_server.post("/v1/chat/completions", body)
    assert reply.status == (200 if content["type"] == "text" else 400), reply.text
    assert chat(image_server, data_url(picture(1))) == expected


@needs_torchvision
def test_typed_decisions_are_read_behind_images(image_server):
    def asked(*images: Image.Image) -> list[float]:
        parts = [{"type": "input_image", "image_url": data_url(one)} for one in images]
        text = {"type": "input_text", "text": "What is this?"}
        decision = image_server.client().decisions.create(
            model=MODEL,
            input=[{"role": "user", "content": [*parts, text]}],
            questions=[{"type": "predicate", "instructions": f"q{n}"} for n in range(3)],
        )
        return [answer.probability for answer in decision.answers]

    first, second = picture(1), picture(2)
    assert asked(first) == asked(first)
    assert (
        len({tuple(asked(*images)) for images in ((), (first,), (second,), (first, second))}) == 4
    )


@needs_torchvision
@pytest.mark.parametrize("url", ["data:image/png;base64,AAAA", "http://127.0.0.1:1/", "file:///x"])
def test_typed_decisions_refuse_what_is_no_image(image_server, url):
    part = {"type": "input_image", "image_url": url}
    question = {"type": "predicate", "instructions": "a"}
    body = {"model": MODEL, "input": [{"role": "user", "content": [part]}], "questions": [question]}
    reply = image_server.post("/v1/decisions", body)
    assert (reply.status, reply.parameter) == (400, "input"), reply.text


# --- which rows see which ------------------------------------------------------------------------


@given(
    context=st.integers(0, 12),
    head=st.integers(1, 20),
    canvas=st.integers(0, 4),
    cuts=st.lists(st.integers(0, 36), max_size=6, unique=True).map(sorted),
)
def test_sequences_show_each_row_what_the_reference_does(context, head, canvas, cuts):
    images = [(a, b - 1) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    # The scheduler never leaves a part of an image for a later chunk.
    images = [image for image in images if not image[0] < context + head <= image[1]]
    spans = Spans.of_schedule(np.array([head + canvas]), np.array([canvas]))
    seq_len = context + head + canvas
    sequences = spans.sequences(np.array([seq_len])).with_images([images])
    seen = []
    for i, stop in enumerate(sequences.seq_lens):
        rows = int(sequences.query_start_loc[i + 1] - sequences.query_start_loc[i])
        for position in range(stop - rows, stop):
            seen.append(position + 1 if sequences.is_causal[i] else int(stop))
    image_of = {p: n for n, (a, b) in enumerate(images) for p in range(a, b + 1)}
    expected = []
    for position in range(context, seq_len):
        visible = position + 1
        if position >= context + head:
            visible = seq_len
        elif position in image_of:
            visible = images[image_of[position]][1] + 1
        expected.append(visible)
    assert seen == expected
    for sequence, (image,) in (sequences.images or {}).items():
        assert image in images and not sequences.is_causal[sequence]
