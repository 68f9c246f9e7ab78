"""`dllm watch`: cells, terminal and SVG file show what a frame says. Frames of a server:
``test_server_eval.py``."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console
from transformers import AutoTokenizer

from dllm.cli import main
from dllm.tools.watch_drawing import Frame, Texts, animation, cells, legend, picture, visible
from tests.support.chat_stub import Stub, serve

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def texts(checkpoint: Callable[..., Path]) -> Texts:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint())
    return Texts({one: tokenizer.decode([one]) for one in range(512)}, {1, 6})


@pytest.fixture(scope="module")
def two_blocks() -> list[Frame]:
    """Random tokens and entropies: three steps of a block, then four of the next."""
    draw = np.random.default_rng(0)
    drawn: list[Frame] = []
    emitted: tuple[int, ...] = ()
    for block, steps in enumerate((3, 4)):
        for step in range(1, steps + 1):
            argmax, canvas = (tuple(row) for row in draw.integers(10, 500, (2, 32)).tolist())
            drawn.append(
                Frame(
                    block=block,
                    step=step,
                    emitted=emitted,
                    argmax=argmax,
                    entropy=tuple(draw.exponential(0.5, 32).tolist()),
                    accepted=tuple((draw.random(32) < 0.7).tolist()),
                    next_canvas=canvas,
                    is_final=step == steps,
                )
            )
        emitted += drawn[-1].argmax
    return drawn


# --------------------------------------------------------------------------------------------------
# Cells


def test_a_terminal_shows_the_canvas_and_the_answer(two_blocks: list[Frame], texts: Texts) -> None:
    console = Console(width=100, file=io.StringIO())
    console.print(legend())
    console.print(picture(two_blocks[-1], texts, console.width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "accepted renoised final" in text
    assert f"block 2, step {two_blocks[-1].step}:" in text
    shown = [cell.plain for cell in cells(two_blocks[-1], texts) if cell.plain != "�"]
    assert all(token in text for token in shown)


def test_control_characters_do_not_reach_the_terminal(two_blocks: list[Frame]) -> None:
    texts = Texts(dict.fromkeys(range(512), "a\x1b[2J\n"))
    console = Console(width=100, file=io.StringIO())
    console.print(picture(two_blocks[-1], texts, console.width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "a�[2J⏎" in text and "a�[2J\n" in text and "\x1b" not in text


def test_what_is_no_control_character_stays() -> None:
    said = "clip\x1b]52;c;cHduZWQ=\x07 clear\x9b2J\x7f\r 👩\u200d🔬\xa0x\ny"
    shown = "clip�]52;c;cHduZWQ=� clear�2J�� 👩\u200d🔬\xa0x\ny"
    assert visible(said, kept="\n\t") == shown


# --------------------------------------------------------------------------------------------------
# SVG


def test_the_svg_has_one_group_a_frame(two_blocks: list[Frame], texts: Texts) -> None:
    root = ElementTree.fromstring(animation(two_blocks, texts, "Is 1 < 2 & 3\x00?"))
    groups = root.findall(f".//{SVG}g[@class='f']")
    assert [group.get("id") for group in groups] == [f"f{i}" for i in range(len(two_blocks))]
    for group, frame in zip(groups, two_blocks, strict=True):
        shown = "".join(group.itertext()).replace("\xa0", " ")
        assert frame.title in shown and "> Is 1 < 2 & 3�?" in shown
        assert all(cell.plain in shown for cell in cells(frame, texts))
    title = root.find(f"{SVG}title")
    assert title is not None and title.text == "Is 1 < 2 & 3�?"


def test_the_svg_is_small_and_needs_nothing_outside_it(
    two_blocks: list[Frame], texts: Texts
) -> None:
    text = animation(two_blocks * 3, texts, "A question")
    assert len(text.encode()) < 300_000
    assert re.findall(r"https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"<script|<image|href|url\((?!#)|@import", text)
    root = ElementTree.fromstring(text)
    width, height = (float(root.get(name, 0)) for name in ("width", "height"))
    for drawn in (*root.iter(f"{SVG}rect"), *root.iter(f"{SVG}text")):
        long = float(drawn.get("width") or drawn.get("textLength", 0))
        assert float(drawn.get("x", 0)) + long <= width
        assert float(drawn.get("y", 0)) < height
    with pytest.raises(ValueError, match="at least one frame"):
        animation([], texts, "A question")


# --------------------------------------------------------------------------------------------------
# The command


def test_a_server_without_canvases_cannot_be_watched(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(Stub(lambda messages: "plain")) as stub:
        assert main(["watch", "?", "--base-url", stub.url]) == 1
        (body,) = stub.requests
    assert "answered without canvases" in capsys.readouterr().err
    assert body["vllm_xargs"] == {"diffusion_stream": "canvas"} and body["stream"]
    assert main(["watch", "?", "--base-url", stub.url]) == 1
    assert "no server answers" in capsys.readouterr().err
