"""Families of typed decisions: right answers and known odds."""

import re

import pytest

from bench.toys.suite import DECISION_FAMILIES, Question, question

ITEMS = [question(name, "heldout", i) for name in DECISION_FAMILIES for i in range(60)]


def expected(item: Question) -> str | None:
    """The right answer, read off the words of a question; None where it is a matter of chance."""
    decision = item.decision
    said, has = decision.instructions, re.search(r"has (?:a )?(\w+)\.", decision.input)
    if item.family == "yesno":
        sign, bound = re.search(r"(more|less) than (\d+)", said).groups()
        is_more = int(has[1]) > int(bound)
        return "yes" if is_more == (sign == "more") else "no"
    if item.family == "level":
        spans = [tuple(map(int, text.split(" to "))) for text in decision.options]
        return decision.options[[low <= int(has[1]) <= high for low, high in spans].index(True)]
    if item.family in ("choice", "wide"):
        assert has[1] in decision.options
        return has[1]
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
