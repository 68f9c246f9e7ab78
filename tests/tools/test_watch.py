"""`dllm watch`: every drawn step is a real one, and the SVG file shows all of them."""

import io
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from dllm.cli import main
from dllm.ops import noise
from dllm.tools.watch import BUNDLED, Watched, frames, parse
from dllm.tools.watch_drawing import (
    ENTROPY_COLORS,
    Frame,
    Labels,
    cells,
    entropy_level,
    entropy_ranges,
    legend,
    picture,
)
from dllm.tools.watch_svg import LAST_S, STEP_S, animation
from tests.support import hf_reference
from tests.support.chat_stub import Stub, serve

SVG = "{http://www.w3.org/2000/svg}"
ROOT = Path(__file__).parents[2]
CONTEXT = [20 + (7 * i + i * i // 5) % 450 for i in range(40)]


@pytest.fixture(scope="module")
def path(checkpoint) -> Path:
    """With a bound so tight that many positions are renoised."""
    sampler = {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.05}
    return checkpoint(generation={"sampler_config": sampler})


@pytest.fixture(scope="module")
def watched(path: Path) -> Watched:
    return Watched.load(path)


@pytest.fixture(scope="module")
def endless(watched: Watched) -> Watched:
    """Without an end-of-sequence token: then our rules are exactly the reference's."""
    return replace(watched, eos_ids=frozenset())


@pytest.fixture(scope="module")
def labels(path: Path) -> Labels:
    return Labels(AutoTokenizer.from_pretrained(path), frozenset({1, 6}))


@pytest.fixture(scope="module")
def two_blocks(endless: Watched) -> list[Frame]:
    return list(frames(endless, CONTEXT, max_blocks=2, seed=5))


# --------------------------------------------------------------------------------------------------
# Frames


@pytest.mark.parametrize("seed", [0, 5])
def test_the_frames_are_hugging_faces_steps_under_the_same_noise(
    path: Path, endless: Watched, seed: int
) -> None:
    drawn = list(frames(endless, CONTEXT, max_blocks=2, seed=seed))
    reference = hf_reference.generate_with_noise(hf_reference.load_hf(path), CONTEXT, 2, seed)
    for block, canvases in enumerate(reference.canvases):
        assert [list(f.canvas) for f in drawn if f.block == block] == canvases
    finals = [frame for frame in drawn if frame.is_final]
    assert [token for frame in finals for token in frame.argmax] == reference.tokens


def test_each_step_hands_its_canvas_to_the_next(two_blocks: list[Frame]) -> None:
    for before, after in pairwise(two_blocks):
        if before.is_final:
            assert (after.block, after.step) == (before.block + 1, 1)
            assert after.emitted == before.emitted + before.argmax
        else:
            assert (after.block, after.step) == (before.block, before.step + 1)
            assert after.canvas == before.next_canvas
            assert after.temperature < before.temperature
    assert [frame.is_final for frame in two_blocks].count(True) == 2
    assert two_blocks[-1].is_final


def test_what_is_not_accepted_is_noise(two_blocks: list[Frame]) -> None:
    for frame in two_blocks:
        place = [torch.tensor([x]) for x in (5, len(CONTEXT) + len(frame.emitted), frame.step - 1)]
        random = noise.random_tokens(*place, 32, 512, noise.STREAM_RENOISE)[0].tolist()
        assert any(frame.accepted)
        for position, accepted in enumerate(frame.accepted):
            assert accepted or frame.next_canvas[position] == random[position]
    assert not all(accepted for frame in two_blocks for accepted in frame.accepted)


def test_the_lowest_entropies_are_accepted(two_blocks: list[Frame]) -> None:
    for frame in two_blocks:
        kept = [nats for nats, yes in zip(frame.entropy, frame.accepted, strict=True) if yes]
        left = [nats for nats, yes in zip(frame.entropy, frame.accepted, strict=True) if not yes]
        assert not left or max(kept) <= min(left)


def test_it_ends_with_the_block_that_holds_the_end(watched: Watched) -> None:
    """Any token serves as the end, so that this does not depend on what random weights say."""
    first = list(frames(replace(watched, eos_ids=frozenset()), CONTEXT, 1, seed=5))[-1]
    ending = replace(watched, eos_ids=frozenset({first.argmax[20]}))
    assert list(frames(ending, CONTEXT, 4, seed=5))[-1].block == 0
    assert [f.block for f in frames(watched, CONTEXT, 2, seed=5) if f.is_final] == [0, 1]


# --------------------------------------------------------------------------------------------------
# Cells


def test_a_cell_says_what_became_of_its_position(two_blocks: list[Frame], labels: Labels) -> None:
    mixed = next(frame for frame in two_blocks if not frame.is_final and not all(frame.accepted))
    for position, cell in enumerate(cells(mixed, labels)):
        assert cell.status == ("accepted" if mixed.accepted[position] else "renoised")
        assert cell.text == labels.token(mixed.next_canvas[position])
        assert cell.level == entropy_level(mixed.entropy[position])
    final = replace(two_blocks[-1], argmax=(50,) * 9 + (1,) + (60,) * 22)
    drawn = cells(final, labels)
    assert [cell.status for cell in drawn] == ["final"] * 10 + ["unused"] * 22
    assert drawn[9].text == "<eos>"
    assert labels.answer(replace(final, emitted=())) == labels.tokenizer.decode([50] * 9)


def test_entropy_has_a_color_at_every_value() -> None:
    assert [entropy_level(nats) for nats in (0.0, 0.01, 0.05, 0.5, 1.0, 99.0)] == [0, 0, 1, 2, 3, 4]
    assert entropy_level(float("inf")) == len(ENTROPY_COLORS) - 1
    assert entropy_ranges() == ["≤ 0.01", "≤ 0.1", "≤ 0.5", "≤ 1.5", "> 1.5"]


def test_tokens_are_short_and_visible(labels: Labels) -> None:
    texts = [labels.token(token_id) for token_id in range(512)]
    assert all(0 < len(text) <= 9 and text.isprintable() and " " not in text for text in texts)
    assert labels.token(labels.tokenizer("\n", add_special_tokens=False).input_ids[0]) == "⏎"


def test_a_terminal_shows_the_canvas_and_the_answer(
    two_blocks: list[Frame], labels: Labels
) -> None:
    console = Console(width=100, file=io.StringIO())
    console.print(legend())
    console.print(picture(two_blocks[-1], labels, console.width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "accepted renoised final" in text
    assert f"block 2, step {two_blocks[-1].step}:" in text
    shown = [cell.text for cell in cells(two_blocks[-1], labels) if cell.text != "�"]
    assert all(token in text for token in shown)


def test_control_characters_do_not_reach_the_terminal(two_blocks: list[Frame]) -> None:
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens=False: "a\x1b[2J\n")
    console = Console(width=100, file=io.StringIO())
    console.print(picture(two_blocks[-1], Labels(tokenizer, {1}), console.width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "a�[2J⏎" in text and "a�[2J\n" in text and "\x1b" not in text


# --------------------------------------------------------------------------------------------------
# SVG


def test_the_svg_has_one_group_a_frame(two_blocks: list[Frame], labels: Labels) -> None:
    text = animation(two_blocks, labels, "Is 1 < 2 & 3\x00?")
    root = ElementTree.fromstring(text)
    groups = [group for group in root.findall(f"{SVG}g") if group.get("class") == "f"]
    assert [group.get("id") for group in groups] == [f"f{i}" for i in range(len(two_blocks))]
    for group, frame in zip(groups, two_blocks, strict=True):
        drawn = group.findall(f"{SVG}g")
        assert len(drawn) == len(frame.canvas)
        kinds = [str(cell.get("class")).split()[1:] for cell in drawn]
        assert kinds == [[f"e{c.level}", c.status] for c in cells(frame, labels)]
        assert "".join(cell.find(f"{SVG}text").text or "" for cell in drawn) == "".join(
            cell.text for cell in cells(frame, labels)
        )
    title = root.find(f"{SVG}title")
    assert title is not None and title.text == "Is 1 < 2 & 3�?"


def test_the_svg_needs_nothing_outside_it_and_stays_small(
    two_blocks: list[Frame], labels: Labels
) -> None:
    text = animation(two_blocks * 3, labels, "A question")
    assert len(text.encode()) < 300_000
    assert re.findall(r"https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"<script|<image|href|url\(|@import", text)


def test_every_frame_has_its_time_and_they_fill_the_cycle(
    two_blocks: list[Frame], labels: Labels
) -> None:
    text = animation(two_blocks, labels, "A question")
    cycle = STEP_S * (len(two_blocks) - 2) + LAST_S * 2
    assert set(re.findall(r"animation:k\d+ ([\d.]+)s", text)) == {f"{cycle:.2f}"}
    begins = [float(x) for x in re.findall(r"([\d.]+)%\{visibility:visible\}", text)]
    ends = [float(x) for x in re.findall(r"([\d.]+)%\{visibility:hidden\}\}", text)]
    assert begins[0] == 0
    assert ends == begins[1:], "the next frame appears when one disappears; the last one stays"
    last = max(i for i, frame in enumerate(two_blocks) if frame.is_final)
    assert 100 - begins[last] == pytest.approx(100 * LAST_S / cycle, abs=0.001)


def test_everything_is_inside_the_picture(two_blocks: list[Frame], labels: Labels) -> None:
    root = ElementTree.fromstring(animation(two_blocks, labels, "A question"))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("x", 0)) + float(rect.get("width", 0)) <= width
        assert float(rect.get("y", 0)) + float(rect.get("height", 0)) <= height
    for text in root.iter(f"{SVG}text"):
        assert float(text.get("y", 0)) < height


def test_no_frames_no_svg(labels: Labels) -> None:
    with pytest.raises(ValueError, match="at least one frame"):
        animation([], labels, "A question")


# --------------------------------------------------------------------------------------------------
# The command


def test_the_command_draws_and_writes(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg = tmp_path / "out.svg"
    arguments = ["watch", "Sort 3, 1, 2.", "--model", str(path), "--max-blocks", "1"]
    assert main([*arguments, "--svg", str(svg)]) == 0
    shown = capsys.readouterr().out
    assert "> Sort 3, 1, 2." in shown
    steps = [int(step) for step in re.findall(r"block 1, step (\d+):", shown)]
    assert steps == list(range(1, len(steps) + 1))
    groups = [g for g in ElementTree.parse(svg).getroot() if g.get("class") == "f"]
    assert len(groups) == len(steps)


def test_the_bundled_model_is_watched_unless_another_is_named() -> None:
    assert parse(["?"]).model == BUNDLED and (ROOT / BUNDLED / "model.safetensors").exists()


def test_a_server_without_canvases_cannot_be_watched(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(Stub(lambda messages: "plain")) as stub:
        assert main(["watch", "?", "--base-url", stub.url]) == 1
        (body,) = stub.requests
    assert "answered without canvases" in capsys.readouterr().err
    assert body["vllm_xargs"] == {"diffusion_stream": "canvas"} and body["stream"]
    assert main(["watch", "?", "--base-url", stub.url]) == 1
    assert "no server answers" in capsys.readouterr().err


def test_what_cannot_be_watched_is_refused(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", "?", "--model", str(tmp_path)]) == 1
    assert "give a checkpoint's folder" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert main(["watch", "?", "--model", str(tmp_path)]) == 1
    assert "give a checkpoint's folder" in capsys.readouterr().err
    generation = json.loads((path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(generation | {"t_min": -1}))
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    assert main(["watch", "?", "--model", str(tmp_path)]) == 1
    assert "is a Qwen3ForCausalLM; allowed: a DiffusionGemma" in capsys.readouterr().err
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    assert main(["watch", "?", "--model", str(tmp_path)]) == 1
    assert "t_min = -1" in capsys.readouterr().err
