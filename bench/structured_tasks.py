"""Formats that tiny-dllm was, and was not, trained to write: what is asked for and what is right.

The questions are those of ``dllm.tasks``; the answers are asked for in another form than the one
that the model has learned.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema  # type: ignore[import-untyped]

from dllm.tasks import families
from dllm.tasks.suite import Question

NAME = "|".join(families.NAMES)
TEXT, WHOLE = {"type": "string"}, {"type": "integer"}


@dataclass(frozen=True)
class Format:
    """A form of answers.

    Attributes:
        family: of the questions.
        body: of the request: ``response_format`` or ``structured_outputs``.
        is_valid: whether a text has the form; may raise ValueError.
        is_right: whether a valid text answers the question.
        concerns: which questions of the family it can answer.
    """

    family: str
    body: Mapping[str, Any]
    is_valid: Callable[[str], bool]
    is_right: Callable[[Question, str], bool]
    concerns: Callable[[Question], bool] = lambda question: True


def is_valid_answer(form: Format, text: str) -> bool:
    """Whether the text has the form."""
    try:
        return form.is_valid(text)
    except (ValueError, jsonschema.ValidationError):
        return False


def _closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _json(
    family: str, schema: Mapping[str, Any], is_right: Callable[[Question, Any], bool]
) -> Format:
    def is_valid(text: str) -> bool:
        jsonschema.validate(json.loads(text), schema)
        return True

    return Format(
        family,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema},
            }
        },
        is_valid,
        lambda question, text: is_right(question, json.loads(text)),
    )


def _regex(
    family: str,
    pattern: str,
    is_right: Callable[[Question, str], bool],
    concerns: Callable[[Question], bool] = lambda question: True,
) -> Format:
    compiled = re.compile(pattern)
    return Format(
        family,
        {"structured_outputs": {"regex": pattern}},
        lambda text: compiled.fullmatch(text) is not None,
        is_right,
        concerns,
    )


def _known(question: Question) -> Any:
    """The answer that the question's family has, which is JSON."""
    return json.loads(min(question.accepted))


def _first(question: Question) -> str:
    return min(question.accepted)


FORMATS: dict[str, Format] = {
    "as trained": _json(
        "extract",
        _closed(name=TEXT, age=WHOLE, city=TEXT),
        lambda question, found: found == _known(question),
    ),
    "age as a string": _json(
        "extract",
        _closed(name=TEXT, age={"type": "string", "pattern": "^[0-9]{2}$"}, city=TEXT),
        lambda question, found: found | {"age": int(found["age"])} == _known(question),
    ),
    "two of three keys": _json(
        "extract",
        _closed(name=TEXT, city=TEXT),
        lambda question, found: (
            found == {key: value for key, value in _known(question).items() if key != "age"}
        ),
    ),
    "keys in another order": _json(
        "extract",
        _closed(city=TEXT, age=WHOLE, name=TEXT),
        lambda question, found: found == _known(question),
    ),
    "one level deeper": _json(
        "extract",
        _closed(person=_closed(name=TEXT, age=WHOLE, city=TEXT)),
        lambda question, found: found["person"] == _known(question),
    ),
    '`"yes"` or `"no"` for booleans': _json(
        "schema",
        _closed(
            item={"enum": list(families.FOODS)},
            count=WHOLE,
            **{"for": {"enum": list(families.NAMES)}},
            bulk={"enum": ["yes", "no"]},
        ),
        lambda question, found: (
            found == _known(question) | {"bulk": "yes" if _known(question)["bulk"] else "no"}
        ),
    ),
    "numbers as a list": _json(
        "sort",
        {"type": "array", "items": WHOLE, "minItems": 2, "maxItems": 4},
        lambda question, found: found == [int(part) for part in _first(question).split(",")],
    ),
    "dates with slashes": _regex(
        "convert",
        r"[0-9]{4}/(0[1-9]|1[0-2])/[0-3][0-9]",
        lambda question, text: text.replace("/", "-") in question.accepted,
        lambda question: "ISO" in question.prompt,
    ),
    "prose, one wording": _regex(
        "prose",
        r"(Dear|Hi|Hello) [A-Z][a-z]+, many thanks for the [a-z]+\. It is so nice\. Yours, "
        r"[A-Z][a-z]+",
        lambda question, text: question.is_correct(text),
        lambda question: question.prompt.startswith("Thank"),
    ),
    "a greeting, one wording": _regex(
        "prose",
        r"Good [a-z]+, [A-Z][a-z]+ and [A-Z][a-z]+! Are you well\? So nice to see you today\.",
        lambda question, text: question.is_correct(text),
        lambda question: question.prompt.startswith("Greet"),
    ),
    "a word in front": _regex(
        "compare",
        rf"Answer: ({NAME})\.",
        lambda question, text: text.removeprefix("Answer: ").removesuffix(".") in question.accepted,
    ),
}
