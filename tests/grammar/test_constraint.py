"""Thoughts in front of an answer: free, ended in time, and then the grammar holds."""

import numpy as np
import pytest

from dllm.grammar.constraint import Constraint, Thoughts
from dllm.grammar.table import Table
from dllm.grammar.viterbi import STOPPED, Canvas, budget_of
from tests.support.grammars import PADDING, STOP, WORDS, table

END = WORDS.index(b"true")  # ends thoughts here, although it could be text
ALSO = WORDS.index(b"null")  # forbidden in thoughts


def behind_thoughts(
    found: Table, forbidden: tuple[int, ...] = (), fillers: tuple[int, ...] = ()
) -> tuple[Canvas, int]:
    """Canvases of thoughts and an answer, as a worker has them, and the state at their start."""
    serialized = Constraint.serialize(found.to_bytes(), Thoughts(END, forbidden))
    both, start = Constraint.from_bytes(serialized).with_start((STOP,), fillers)
    return Canvas(both, (STOP,), fillers), start


def generate(canvas: Canvas, state: int, most: int, width: int, draws) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < most:
        scores = draws.normal(0, 3, (width, len(WORDS)))
        scores[:, [STOP, ALSO]] += 9
        path = canvas.best_path(scores, state, budget_of(canvas.table, state, most - len(tokens)))
        for token, behind in zip(path.tokens.tolist(), path.states[1:].tolist(), strict=True):
            tokens.append(token)
            if behind == STOPPED:
                return tokens[:most]
        state = int(path.states[-1])
    return tokens[:most]


@pytest.mark.parametrize("name", ["choice", "date"])
@pytest.mark.parametrize("width", [3, 8, 32])
def test_thoughts_end_in_time_and_an_answer_follows(name, width):
    kind, text = {"choice": ("ebnf", 'root ::= "yes" | "no"'), "date": ("regex", "[0-9]{4}-[0-9]")}[
        name
    ]
    found, _ = table(kind, text)
    canvas, start = behind_thoughts(found, (ALSO,), (PADDING,))
    draws = np.random.default_rng(0)
    shortest = int(canvas.table.left[start])
    assert shortest == int(found.left[0]) + 1
    for most in range(shortest, 70):
        tokens = generate(canvas, start, most, width, draws)
        assert END in tokens, (most, tokens)
        end = tokens.index(END)
        thoughts, answer = tokens[:end], tokens[end + 1 :]
        assert STOP not in thoughts and ALSO not in thoughts and PADDING not in thoughts
        answer = answer[: answer.index(STOP)] if STOP in answer else answer
        assert found.accepts[found.read(0, answer)], (most, answer)


def test_what_thoughts_must_not_hold_the_answer_may():
    """Some parsers take the first token of a tool call for the end of the thoughts."""
    found, _ = table("ebnf", 'root ::= "null" "a"')
    canvas, start = behind_thoughts(found, (ALSO,))
    draws = np.random.default_rng(0)
    for most in range(3, 20):
        tokens = generate(canvas, start, most, 8, draws)
        end = tokens.index(END)
        assert ALSO not in tokens[:end]
        assert tokens[end + 1] == ALSO and WORDS[tokens[end + 2]] == b"a"


def test_the_end_of_thoughts_is_not_in_the_answer():
    found, _ = table("ebnf", 'root ::= "true"')
    canvas, start = behind_thoughts(found)
    states, num_read = canvas.read([END, END], start, 99)
    assert num_read == 1 and states[-1] == 0


def test_room_is_left_for_an_answer_that_does_without_the_end_of_thoughts():
    found, _ = table("ebnf", 'root ::= "[true]"')
    canvas, start = behind_thoughts(found)
    assert found.left[0] == 3 and canvas.table.left[start] == 1 + 6
    tokens = generate(canvas, start, 7, 8, np.random.default_rng(0))
    assert b"".join(WORDS[token] for token in tokens) == b"true[true]"


def test_without_thoughts_it_is_the_table():
    found, _ = table("regex", "(ab)*")
    again = Constraint.from_bytes(Constraint.serialize(found.to_bytes(), None))
    both, start = again.with_start((STOP,), ())
    assert start == 0 and (both.next == found.next).all()
