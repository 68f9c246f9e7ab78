"""Judges of schemas that none of us wrote: the official JSON-Schema-Test-Suite and ``jsonschema``.

A schema is compiled as a request's is. Texts are sampled from its automaton, byte by byte, and
``jsonschema`` says whether they are of the schema as it was given.
"""

import functools
import itertools
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import regex

from dllm.grammar.children import Children
from dllm.grammar.refusals import Unsupported
from dllm.grammar.table import MOST_STATES, Table
from dllm.grammar.vocabulary import Vocabulary

SUITE = Path(__file__).parents[2] / ".venv" / "jsonschema-suite" / "draft2020-12"
BYTES = Vocabulary([bytes([byte]) for byte in range(256)])
VALIDATOR = jsonschema.Draft202012Validator
SPACES = b"\t\n\r "
LONGEST = 2000  # bytes of a sampled text, which is given up then
# How bytes are drawn: any kind of byte alike; any byte alike; rather one that the schema has.
MODES = ("kinds", "bytes", "likely")
BUDGETS = (0, 4, 12, 30, 80, 200)  # bytes behind which a text is brought to an end


@dataclass
class Case:
    """A schema, and values of which the suite says whether they are of it."""

    schema: Any
    name: str = ""
    values: list[tuple[Any, bool]] = field(default_factory=list)


def suite() -> list[Case]:
    """The schemas of the suite, equal ones once."""
    found: dict[str, Case] = {}
    for path in sorted(SUITE.rglob("*.json")):
        for each in json.loads(path.read_text()):
            key = json.dumps(each["schema"], sort_keys=True)
            case = found.setdefault(
                key, Case(each["schema"], f"{path.stem}: {each['description']}")
            )
            case.values += [(test["data"], test["valid"]) for test in each["tests"]]
    return list(found.values())


def compiled(schema: Any, children: Children) -> Table | None:
    """The table of a schema over bytes; None if it is refused."""
    asked = {"kind": "json", "text": json.dumps(schema), "any_whitespace": True}
    limits = {"separators": None, "most_states": MOST_STATES, "absent": [], "marks": []}
    try:
        return Table.from_bytes(children.table(asked | limits))
    except Unsupported:
        return None


def accepts(table: Table, text: str) -> bool:
    state = table.read(0, list(text.encode()))
    return state >= 0 and bool(table.accepts[state])


def spelled(value: Any) -> str:
    """A value as JSON, with characters as they are."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if any("\ud800" <= c <= "\udfff" for c in text) else text


def is_valid_schema(schema: Any) -> bool:
    return VALIDATOR(VALIDATOR.META_SCHEMA).is_valid(schema)


def wrong_texts(case: Case, table: Table, num_texts: int) -> list[str]:
    """Texts of the automaton that are not of the schema, as ``REASON: TEXT``."""
    judge = VALIDATOR(case.schema, format_checker=VALIDATOR.FORMAT_CHECKER)
    texts = set(Sampler(table, case.schema).texts(num_texts))
    given = (spelled(value) for value, _ in case.values)
    texts |= {text.encode() for text in given if accepts(table, text)}
    return [f"{reason}: {text!r}" for text in texts if (reason := _reason(text, judge))]


def _reason(text: bytes, judge: Any) -> str:
    """Why a text is not of a schema; empty if it is."""
    try:
        value = json.loads(text.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return f"no JSON ({error})"
    error = next(judge.iter_errors(value), None)
    return "" if error is None else f"{error.validator} {error.validator_value!r}"[:200]


def _no_constant(text: str) -> Any:
    raise ValueError(text)


class Sampler:
    """Draws texts of a table over bytes."""

    def __init__(self, table: Table, schema: Any, seed: int = 0) -> None:
        self._random, self._table = random.Random(seed), table
        self._likely = set(json.dumps(schema, ensure_ascii=False).encode(errors="replace"))
        self._bytes_of: dict[int, list[int]] = defaultdict(list)
        for byte, kind in enumerate(table.class_of[:256]):
            self._bytes_of[int(kind)].append(byte)
        self._moves = functools.cache(self._moves_of)

    def texts(self, count: int) -> Iterator[bytes]:
        """At most so many; long ones are left out."""
        for number in range(count):
            mode = MODES[number % len(MODES)]
            text = self._walk(mode, BUDGETS[number // len(MODES) % len(BUDGETS)])
            if text is not None:
                yield text

    def _moves_of(
        self, state: int, mode: str, is_over: bool
    ) -> tuple[list[tuple[int, Sequence[int]]], list[float]]:
        """(state behind, the bytes that are drawn from) of each kind of bytes; sums of weights.

        is_over: those that lead to the end on the shortest way alone.
        """
        left, row = self._table.left, self._table.next[state].tolist()
        moves = [
            (to, each) for kind, to in enumerate(row) if to >= 0 and (each := self._bytes_of[kind])
        ]
        if is_over and moves:
            nearest = min(left[to] for to, _ in moves)
            moves = [move for move in moves if left[move[0]] == nearest]
        sums = list(itertools.accumulate(self._weight(mode, each) for _, each in moves))
        if mode == "likely":
            moves = [
                (to, [one for one in each if one in self._likely] or each) for to, each in moves
            ]
        return moves, sums

    def _walk(self, mode: str, budget: int) -> bytes | None:
        state, text = 0, bytearray()
        while len(text) < LONGEST:
            is_over = len(text) >= budget
            moves, sums = self._moves(state, mode, is_over)
            if self._table.accepts[state] and (is_over or not moves or self._random.random() < 0.3):
                return bytes(text)
            state, each = self._random.choices(moves, cum_weights=sums)[0]
            text.append(self._random.choice(each))
        return None

    def _weight(self, mode: str, each: Sequence[int]) -> float:
        if each[0] in SPACES and each[-1] in SPACES:
            return 0.05
        if mode == "likely":
            return 20 if self._likely.intersection(each) else 1
        return len(each) if mode == "bytes" else 1


# --- patterns -------------------------------------------------------------------------------------

JS_SPACES = r"\t\n\v\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
JS_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "s": JS_SPACES}


@functools.cache
def javascript(pattern: str) -> regex.Pattern[str]:
    r"""A pattern as JavaScript reads it: ``\d`` is ASCII, ``$`` is not before a last line end."""
    parts, is_inside = [], False
    for part in re.findall(r"\\c[A-Za-z]|\\.|.", pattern, flags=re.DOTALL):
        if part in "[]":
            is_inside = part == "["
        if part[:2] == r"\c":
            part = f"\\x{ord(part[2].upper()) - 64:02x}"
        elif part[0] == "\\" and part[1].lower() in JS_CLASSES:
            members = JS_CLASSES[part[1].lower()]
            part = members if is_inside else f"[{'^' * part[1].isupper()}{members}]"
        elif part == "$" and not is_inside:
            part = r"\Z"
        parts.append(part)
    return regex.compile("".join(parts))


class JavaScriptPatterns:
    """What stands for the module ``re`` in ``jsonschema``."""

    error = re.error

    @staticmethod
    def search(pattern: str, text: str) -> Any:
        return javascript(pattern).search(text)
