"""Small models of LLaDA, Dream and Fast-dLLM v2: right answers, and the plain loop's tokens."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from vllm import SamplingParams

from bench.toys.reference import open_reference
from bench.toys.suite import FAMILIES, questions
from tests.support.engine_harness import get_engine
from tests.support.toy_prompts import encode_prompt

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
EACH = 4  # questions of a family


@pytest.mark.parametrize("name", ["tiny-dream", "tiny-fast-dllm", "tiny-llada"])
def test_held_out_questions_are_answered_as_by_the_plain_loop(name: str) -> None:
    """Greedily, by the family's defaults; the loop answers one question of each kind."""
    path = CHECKPOINTS / name
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    asked = questions(FAMILIES, "heldout", EACH)
    prompts = [encode_prompt(tokenizer, question.prompt) for question in asked]
    answers = get_engine(path).generate(prompts, SamplingParams(max_tokens=64, temperature=0))
    texts = [tokenizer.decode(answer) for answer in answers]
    right = sum(one.is_correct(text) for one, text in zip(asked, texts, strict=True))
    assert right >= 0.9 * len(asked)
    loop = open_reference(path, max_tokens=64)
    for prompt, tokens in zip(prompts[::EACH], answers[::EACH], strict=True):
        assert tokens == loop.generate(prompt, 0).tokens[: len(tokens)]
        assert tokens[-1] in loop.stops
