"""Small models of LLaDA, Dream and Fast-dLLM v2: right answers, and the plain loop's tokens."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from vllm import SamplingParams

from bench.loops import plain_loop
from bench.toys.suite import FAMILIES, questions
from tests.support.engine_harness import get_engine
from tests.support.toy_prompts import encode_prompt

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
EACH = 4  # questions of a family


@pytest.mark.parametrize("name", ["tiny-dream", "tiny-fast-dllm", "tiny-llada"])
def test_held_out_questions_are_answered_as_by_the_plain_loop(name: str) -> None:
    """Greedily, by the family's defaults; the loop answers one question a kind, in a batch."""
    path = CHECKPOINTS / name
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    asked = questions(FAMILIES, "heldout", EACH)
    prompts = [encode_prompt(tokenizer, question.prompt) for question in asked]
    answers = get_engine(path).generate(prompts, SamplingParams(max_tokens=64, temperature=0))
    texts = [tokenizer.decode(answer) for answer in answers]
    right = sum(one.is_correct(text) for one, text in zip(asked, texts, strict=True))
    assert right >= 0.9 * len(asked)
    generate, stops = plain_loop(path, 64)
    expected = generate(prompts[::EACH]).answers
    for tokens, whole in zip(answers[::EACH], expected, strict=True):
        assert tokens == whole[: len(tokens)]
        assert tokens[-1] in stops
