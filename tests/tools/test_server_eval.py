"""The `dllm` commands against a real server: `eval` and `watch` see the same answers and steps."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.toys.evaluate import ServedModel
from bench.toys.suite import questions
from dllm.cli import main
from dllm.tools.client import connect
from dllm.tools.watch import served_frames
from dllm.tools.watch_drawing import Texts
from tests.support.server_harness import Server
from tests.support.watched import Watched

pytest_plugins = ["tests.support.server_harness"]

MAX_BLOCKS = 2
# A character whose bytes the last token cuts off: the server leaves it out, the tokenizer does not.
CUT_OFF = "\ufffd"


@pytest.mark.parametrize("concurrency", [1, 4])
def test_answers_steps_and_blocks_are_those_that_watch_draws(
    server: Server, checkpoint, concurrency: int
) -> None:
    """In fp32, with the same seeds; the server's steps are read from its counters.

    Seeds are such that ``diffusion_eos_stop`` saves no step: the reference does not have it.
    """
    watched = Watched(checkpoint())
    length = Texts(ends=set(watched.eos_ids)).length
    asked = questions(["sort", "extract"], "heldout", 3)
    connection = connect(server.url, None)
    max_tokens = MAX_BLOCKS * watched.settings.canvas_length
    run = ServedModel(connection, max_tokens, concurrency, seed=6).answer(asked)

    texts, num_steps, num_blocks = [], 0, 0
    for index, question in enumerate(asked):
        drawn = list(watched.frames(question.prompt, MAX_BLOCKS, seed=6 + index))
        ids = [*drawn[-1].emitted, *drawn[-1].argmax]
        text = watched.tokenizer.decode(ids[: length(ids)], skip_special_tokens=True)
        texts.append(text.rstrip(CUT_OFF))
        num_steps += len(drawn)
        num_blocks += sum(frame.is_final for frame in drawn)
    assert [answer.text.rstrip(CUT_OFF) for answer in run.answers] == texts
    assert (run.denoise_steps, run.blocks) == (num_steps, num_blocks)


def test_the_server_shows_the_steps_that_are_computed_here(server: Server, checkpoint) -> None:
    watched, question, seed = Watched(checkpoint()), "Sort 3, 1, 2.", 5
    expected = list(watched.frames(question, MAX_BLOCKS, seed))
    texts = Texts()
    connection = connect(server.url, None)
    found = list(served_frames(connection, texts, question, MAX_BLOCKS, seed))
    assert [(f.block, f.step, f.is_final) for f in found] == [
        (f.block, f.step, f.is_final) for f in expected
    ]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.argmax, ours.accepted) == (theirs.argmax, theirs.accepted)
        if not ours.is_final:
            assert ours.next_canvas == theirs.next_canvas
        # Rounded to thousandths of a nat.
        assert ours.entropy == pytest.approx(theirs.entropy, abs=1e-3)
    first = found[-1].argmax[0]
    assert texts.of(first) == watched.tokenizer.decode([first])


def test_the_command_draws_and_writes(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg = tmp_path / "out.svg"
    arguments = ["watch", "Sort 3, 1, 2.", "--base-url", server.url, "--max-blocks", "1"]
    assert main([*arguments, "--svg", str(svg)]) == 0
    shown = capsys.readouterr().out
    assert "> Sort 3, 1, 2." in shown
    steps = [int(step) for step in re.findall(r"block 1, step (\d+):", shown)]
    assert steps == list(range(1, len(steps) + 1))
    groups = [g for g in ElementTree.parse(svg).getroot().iter() if g.get("class") == "f"]
    assert len(groups) == len(steps)


def test_typed_decisions_of_a_file_are_scored(server: Server, tmp_path, capsys) -> None:
    """The last line has odds alone; each question is asked twice."""
    people = {
        "type": "choice",
        "instructions": "Who?",
        "choices": [{"value": "a"}, {"value": True}],
    }
    levels = {"type": "score", "instructions": "Far?", "levels": [{"label": "x"}, {"label": "y"}]}
    sure = {"type": "predicate", "instructions": "Yes"}
    lines = [
        *({"input": f"in {n}", "question": people, "answer": True} for n in range(5)),
        {"input": "in", "question": levels, "answer": "y"},
        {"input": "in", "question": sure, "answer": False},
        {"input": "in", "question": sure, "odds": 0.25, "name": "odds"},
    ]
    file, output = tmp_path / "asked.jsonl", tmp_path / "scores.json"
    file.write_text("\n".join(map(json.dumps, lines)))
    base = ["eval", "--base-url", server.url]
    given = [*base, "--decisions", str(file), "--samples", "1", "--output", str(output)]
    assert main(given) == 0
    found = json.loads(output.read_text())
    counts = {name: scores["questions"] for name, scores in found["reports"].items()}
    assert counts == {"choice": 5, "score": 1, "predicate": 1, "odds": 1, "all": 8}
    assert found["reports"]["all"]["agreement"] == 1  # the noise is drawn from the prompt
    assert 0 <= found["reports"]["odds"]["odds"] <= 0.75
    assert list(found["temperatures"]) == ["choice"]
    assert "choice: temperature" in capsys.readouterr().out
