"""Schemas of tools as OpenAI's clients write them, drawn at random, and texts of their calls."""

import random
from typing import Any

import numpy as np

from dllm.grammar.table import Table
from dllm.grammar.viterbi import STOPPED, Canvas, budget_of
from tests.support.grammars import STOP, WORDS

NAMES = ("city", "days", "unit", "note", "who", "a b", "x-1", "größe")
VALUES = ("red", "1", "true", "null", "", "ü", 1, 2, -3, 2.5, True, False, None)
PATTERNS = ("^[0-9]{1,3}$", "^[A-Z][a-z]+$", "^(true|null)$")
DEFINED = ("number", "word", "mixed", "person")


def tool_schema(rng: random.Random) -> dict[str, Any]:
    """Arguments of a tool: nested models, enums and constants, most of them behind references."""
    return _object(rng, 0) | {
        "$defs": {
            "number": {"type": "integer", "enum": rng.sample(range(-3, 9), 3), "title": "Number"},
            "word": {"type": "string", "enum": rng.sample(["a", "1", "null", "blue"], 2)},
            "mixed": {"enum": rng.sample(VALUES, 3)},
            "person": _object(rng, 2),
        }
    }


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["plain", "const", "enum", "pattern", "range", "length", "list of types"]
    if depth < 3:
        kinds += ["reference", "reference", "all of", "optional", "union", "array", "map", "object"]
    match rng.choice(kinds):
        case "const":
            return {"const": rng.choice(VALUES)}
        case "enum":
            return {"enum": rng.sample(VALUES, 3)}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(PATTERNS)}
        case "range":
            return {"type": "integer", "minimum": rng.randint(-9, 0), "maximum": rng.randint(0, 50)}
        case "length":
            return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": 4}
        case "list of types":
            return {"type": rng.sample(["string", "integer", "boolean", "null"], 2)}
        case "reference":
            return {"$ref": f"#/$defs/{rng.choice(DEFINED if depth < 2 else DEFINED[:3])}"}
        case "all of":
            return {"allOf": [{"$ref": f"#/$defs/{rng.choice(DEFINED[:3])}"}], "description": "x"}
        case "optional":
            return {"anyOf": [_value(rng, depth + 1), {"type": "null"}], "default": None}
        case "union":
            return {"anyOf": [_value(rng, depth + 1), {"type": "string", "pattern": "^[0-9]+$"}]}
        case "array":
            return {"type": "array", "items": _value(rng, depth + 1), "maxItems": rng.randint(1, 3)}
        case "map":
            return {"type": "object", "additionalProperties": _value(rng, depth + 1)}
        case "object":
            return _object(rng, depth)
        case _:
            return {"type": rng.choice(["string", "integer", "number", "boolean", "null"])}


def random_text(found: Table, draws: np.random.Generator, length: int = 200) -> str:
    """A complete text of at most ``length`` random tokens of ``WORDS``; it tends to be short.

    Bytes that are no UTF-8 are replaced, as a server replaces them.
    """
    scores = draws.normal(0, 3, (length, len(WORDS)))
    scores[:, STOP] += 5
    path = Canvas(found, (STOP,)).best_path(scores, 0, budget_of(found, 0, length))
    text = [
        token
        for token, behind in zip(path.tokens, path.states[1:], strict=True)
        if behind != STOPPED
    ]
    return b"".join(WORDS[token] for token in text).decode(errors="replace")
