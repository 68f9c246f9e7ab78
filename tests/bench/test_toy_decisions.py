"""Families of typed decisions: right answers, known odds, and the prompt that a server writes."""

import re

import pytest
from tokenizers import Tokenizer

from bench.toys.suite import DECISION_FAMILIES, TOKEN_ID, Question, question
from dllm.api.decisions.labels import Labels
from dllm.api.decisions.protocol import DecisionRequest
from dllm.api.decisions.reads import written
from dllm.api.decisions.route import vllm_question

TOKENIZER = Tokenizer.from_file("checkpoints/tiny-decisions/tokenizer.json")
COUNT = 60
ITEMS = [question(name, "heldout", i) for name in DECISION_FAMILIES for i in range(COUNT)]


@pytest.fixture(scope="module")
def labels() -> Labels:
    """As a server makes them of the families' tokenizer."""
    return Labels(ids, TOKEN_ID["<eos>"])


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def test_the_prompt_and_the_answers_are_those_of_a_server(labels):
    for item in ITEMS:
        decision = item.decision
        body = DecisionRequest(model="m", input=decision.input, questions=[decision.question])
        asked = vllm_question(0, body.questions[0])
        names = [option.name for option in asked.options]
        found = {
            "noul": labels.yes_no,
            "choice": lambda names=names: labels.choices(names),
            "score": lambda names=names: labels.levels(names),
        }[asked.type.name]()
        assert found.texts == decision.labels
        assert f"{body.transcript()[0]}\n\n{written(asked, found)}" == item.prompt
        tokens = found.tokens[decision.labels.index(item.answer)]
        end = [] if found.is_code else [TOKEN_ID["<eos>"]]
        assert list(tokens) == ids(item.answer) + end


def expected(item: Question) -> str | None:
    """The right label, read off the words of a question; None where it is a matter of chance."""
    decision = item.decision
    said, has = decision.instructions, re.search(r"has (?:a )?(\w+)\.", decision.input)
    if item.family == "yesno":
        sign, bound = re.search(r"(more|less) than (\d+)", said).groups()
        is_more = int(has[1]) > int(bound)
        return "yes" if is_more == (sign == "more") else "no"
    if item.family == "level":
        spans = [tuple(map(int, text.split(" to "))) for text in decision.options]
        return decision.labels[[low <= int(has[1]) <= high for low, high in spans].index(True)]
    if item.family in ("choice", "wide"):
        return decision.labels[decision.options.index(has[1])]
    return None


@pytest.mark.parametrize("item", ITEMS[::7], ids=lambda item: f"{item.family}: {item.prompt[:20]}")
def test_the_answer_is_right(item):
    right = expected(item)
    if right is None:
        number, total = map(int, re.findall(r"\d+", item.decision.input))
        assert item.decision.odds == number / total
        assert item.answer in {"yes", "no"}
    else:
        assert item.accepted == {right}


def test_answers_of_chance_are_drawn_with_their_odds():
    drawn = [question("odds", "train", i) for i in range(4000)]
    said = sum(item.answer == "yes" for item in drawn) / len(drawn)
    odds = sum(item.decision.odds for item in drawn) / len(drawn)
    # Four standard deviations of a mean of 4,000 draws.
    assert said == pytest.approx(odds, abs=4 * 0.5 / len(drawn) ** 0.5)
