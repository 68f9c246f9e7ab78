"""What a target told a draft worker, what the worker expects next, and what of it can be used.

A session is one request of a target. Its tokens only grow, so the target sends what is new, and a
guess that came late stays usable as long as the target's tokens agree with it. Pure functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dllm.remote.wire import MAX_ROW_TOKENS, OVER, UNKNOWN, Row


@dataclass
class Session:
    """A request as the target sees it.

    Attributes:
        number: the session's number on the wire.
        told: how many of its tokens the worker was told.
        start: the guess stands behind so many tokens.
        guess: token ids that the worker expects there.
        answered: the step of the ask that this guess answers.
        resets: how often the worker said that it lacks tokens.
    """

    number: int
    told: int = 0
    start: int = 0
    guess: list[int] = field(default_factory=list)
    answered: int = 0
    resets: int = 0


def news(session: Session, tokens: Sequence[int], want: int) -> list[Row]:
    """The rows that tell the worker all ``tokens`` of a session, and ask for ``want`` more.

    Several if there are more tokens than a row holds; only the last one asks.
    """
    edges = [*range(session.told, len(tokens), MAX_ROW_TOKENS), len(tokens)]
    if len(edges) == 1:
        return [Row(session.number, len(tokens), [], want)]
    starts = edges[:-1]
    return [
        Row(session.number, start, list(tokens[start:end]), want if end == len(tokens) else 0)
        for start, end in zip(starts, edges[1:], strict=True)
    ]


def over(session: Session) -> Row:
    """The row that ends a session."""
    return Row(session.number, 0, [], OVER)


def take_guess(session: Session, row: Row, step: int) -> None:
    """Take a reply's row; an older one than the last is ignored."""
    if row.extra & UNKNOWN:
        session.told = 0
        session.resets += 1
    elif step >= session.answered:
        session.start, session.guess, session.answered = row.start, row.tokens, step


def usable(session: Session, tokens: Sequence[int], limit: int) -> list[int]:
    """The rest of the guess, ``limit`` drafts at most, unless ``tokens`` contradict it."""
    done = len(tokens) - session.start
    if not 0 <= done < len(session.guess):
        return []
    if list(tokens[session.start :]) != session.guess[:done]:
        return []
    return session.guess[done : done + limit]


def hear(known: list[int], guess: list[int], row: Row) -> list[int] | None:
    """Worker's side: write an ask's tokens into ``known``, in place.

    Returns:
        What is left of the guess, which stood behind ``known``. None if the tokens contradict it,
        or go beyond it.
    """
    assert row.start <= len(known), (row.start, len(known))
    expected = known[row.start :] + guess
    known[row.start :] = row.tokens
    count = len(row.tokens)
    return expected[count:] if expected[:count] == row.tokens else None
