"""The `dllm` commands against a real server: `eval` and `watch` see the same answers and steps."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dllm.tasks.suite import questions
from dllm.tools.chat import Conversation
from dllm.tools.client import connect
from dllm.tools.eval_server import ServedModel
from dllm.tools.watch import Watched, frames
from dllm.tools.watch_drawing import Labels
from dllm.tools.watch_server import StreamedTexts, labels_of, served_frames
from tests.support.server_harness import Server

pytest_plugins = ["tests.support.server_harness"]

MAX_BLOCKS = 2
# A character whose bytes the last token cuts off: the server leaves it out, the tokenizer does not.
CUT_OFF = "\ufffd"


@pytest.mark.parametrize("concurrency", [1, 4])
def test_answers_steps_and_blocks_are_those_that_watch_draws(
    server: Server, checkpoint, concurrency: int
) -> None:
    """In fp32, with the same seeds; the server's steps are read from its counters."""
    path: Path = checkpoint()
    watched, tokenizer = Watched.load(path), AutoTokenizer.from_pretrained(path)
    labels = Labels(tokenizer, watched.eos_ids)
    asked = questions(["sort", "extract"], "heldout", 3)
    connection = connect(server.url, None)
    max_tokens = MAX_BLOCKS * watched.settings.canvas_length
    run = ServedModel(connection, max_tokens, concurrency, seed=7).answer(asked, lambda: None)

    texts, num_steps, num_blocks = [], 0, 0
    for index, question in enumerate(asked):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question.prompt}],
            add_generation_prompt=True,
            return_dict=False,
        )
        drawn = list(frames(watched, prompt, MAX_BLOCKS, seed=7 + index))
        texts.append(labels.answer(drawn[-1]).rstrip(CUT_OFF))
        num_steps += len(drawn)
        num_blocks += sum(frame.is_final for frame in drawn)
    assert [answer.text.rstrip(CUT_OFF) for answer in run.answers] == texts
    assert (run.denoise_steps, run.blocks) == (num_steps, num_blocks)


def test_the_server_shows_the_steps_that_are_computed_here(server: Server, checkpoint) -> None:
    watched, tokenizer = Watched.load(checkpoint()), AutoTokenizer.from_pretrained(checkpoint())
    question, seed = "Sort 3, 1, 2.", 5
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    expected = list(frames(watched, prompt, MAX_BLOCKS, seed))
    texts = StreamedTexts()
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
    shown = labels_of(texts)
    assert shown.token(found[-1].argmax[0]) == Labels(tokenizer, frozenset()).token(
        found[-1].argmax[0]
    )


def test_a_conversation_goes_on(server: Server) -> None:
    """The server takes what it said itself, streamed, as history."""
    conversation = Conversation(connect(server.url, None), system="Be brief.", max_tokens=40)
    for turn, question in enumerate(["Sort 3, 1, 2.", "And now?"], start=1):
        said = "".join(conversation.ask(question))
        assert len(conversation.messages) == 1 + 2 * turn
        assert conversation.messages[-1] == {"role": "assistant", "content": said}
