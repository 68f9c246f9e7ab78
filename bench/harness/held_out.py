"""Our held-out questions as data sets of lm_eval; the YAML files beside this name the functions.

``--metadata '{"count": 20}'`` asks fewer questions of each family.
"""

from typing import Any

import pyarrow
from datasets import Dataset

from bench.toys.suite import FAMILIES, questions

CHOICES = 4


def answers(count: int = 100, **_: Any) -> dict[str, Dataset]:
    """Questions of all families, and every text that is a right answer."""
    rows = [
        {"prompt": one.prompt, "accepted": sorted(one.accepted)}
        for one in questions(FAMILIES, "heldout", count)
    ]
    return _dataset("answers", rows)


def is_right(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether the answer is one of those, as ``bench.toys`` counts."""
    return {"exact_match": float(results[0].strip() in doc["accepted"])}


def choices(count: int = 100, **_: Any) -> dict[str, Dataset]:
    """The same questions, with answers to choose from: one is right, others are of other questions.

    Four of them, or as many different answers as ten more questions of the family have.
    """
    rows = []
    for family in FAMILIES:
        asked = questions([family], "heldout", count + 10)
        for index, one in enumerate(asked[:count]):
            others = (other.answer for other in asked[index + 1 :] + asked[:index])
            wrong = dict.fromkeys(answer for answer in others if answer not in one.accepted)
            offered = sorted([one.answer, *list(wrong)[: CHOICES - 1]])
            row = {"prompt": one.prompt, "choices": offered, "right": offered.index(one.answer)}
            rows.append(row)
    return _dataset("choices", rows)


def _dataset(name: str, rows: list[dict[str, Any]]) -> dict[str, Dataset]:
    """The name is its fingerprint; to compute one, pyarrow's functions would have to be pickled."""
    return {"test": Dataset(pyarrow.Table.from_pylist(rows), fingerprint=name)}
