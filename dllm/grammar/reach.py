"""The states of an automaton that a table holds: all, or those of so many levels of nesting.

A grammar without recursion has a limited number of states; if they are too many it is refused,
because a part of them would be an arbitrary part of its texts. Recursion has no end of states.
There the states are taken level by level: first those that no further recursive call leads to, then
those behind one, and so on, as long as all states of a level fit. Every text of the kept states is
a text of the grammar: one that is nested less deeply.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from dllm.grammar.automaton import DEAD, START, Automaton
from dllm.grammar.rules import Unsupported

NEVER = 1 << 30  # steps to the end of the text from a state that has none


@dataclass(frozen=True)
class ByteTable:
    """States over bytes; S of them, numbered from 0, the start. A text leads on from each.

    Attributes:
        rows: ``[S, B]`` int16, the state behind each class of bytes; DEAD if it is not allowed.
        class_of: ``[256]`` uint8, the class of each byte: bytes that all states treat alike.
        accepts: ``[S]`` bool, the text may end here.
        circle, is_head: ``[S]``, where characters are counted (`Automaton.circles`).
        most: ``[circles]`` int64, the characters that a circle may have.
    """

    rows: np.ndarray
    class_of: np.ndarray
    accepts: np.ndarray
    circle: np.ndarray
    is_head: np.ndarray
    most: np.ndarray


def nearest(automaton: Automaton, most_states: int) -> ByteTable:
    """The states that texts lead to.

    Args:
        most_states: up to 32,767.

    Raises:
        Unsupported: more states than ``most_states`` without recursion, or with one level of it;
            no text ends within the kept levels.
    """
    states = _by_level(automaton, most_states)
    number = np.full(len(automaton) + 1, DEAD, dtype=np.int16)  # the last one is for DEAD
    number[states] = np.arange(len(states))
    rows = number[automaton.rows[states]]
    accepts = np.array([automaton.accepts(state) for state in states])
    # What leads only to states that were left out is left out too.
    has_end = steps_to_end(rows, accepts) < NEVER
    if not has_end[0]:
        raise Unsupported(
            f"No text of the grammar is within the limit of {most_states} states. Make it smaller: "
            "fewer parts, less nesting."
        )
    rows, accepts = only(has_end, rows), accepts[has_end]
    columns: dict[bytes, int] = {}
    by_byte = np.ascontiguousarray(rows.T)
    class_of = np.array([columns.setdefault(row.tobytes(), len(columns)) for row in by_byte])
    first = np.unique(class_of, return_index=True)[1]
    circle, is_head, most = automaton.circles([states[at] for at in np.flatnonzero(has_end)])
    return ByteTable(
        rows[:, first],
        class_of.astype(np.uint8),
        accepts,
        circle,
        is_head,
        np.array(most, dtype=np.int64),
    )


def over_the_limit(most_states: int) -> str:
    return (
        f"The grammar is over the limit of states, {most_states}. Make it smaller: fewer optional "
        "parts and choices, shorter lists and texts, less nesting."
    )


def _by_level(automaton: Automaton, most_states: int) -> list[int]:
    """States in the order of level and distance: all, or those of the levels that are whole."""
    waiting: dict[int, list[int]] = {0: [START]}  # by open recursive calls
    kept: list[int] = []
    seen: set[int] = set()
    num_levels = 0
    while waiting:
        calls = min(waiting)
        todo = deque(state for state in dict.fromkeys(waiting.pop(calls)) if state not in seen)
        seen.update(todo)
        found = list(todo)
        while todo:
            if len(seen) > most_states:
                if num_levels < 2:
                    raise Unsupported(over_the_limit(most_states))
                return kept
            state = todo.popleft()
            depth = automaton.level(state)
            for target in np.unique(automaton.row(state)).tolist():
                if target == DEAD or target in seen:
                    continue
                deeper = automaton.level(target) - depth
                if deeper > 0:
                    waiting.setdefault(calls + deeper, []).append(target)
                else:
                    seen.add(target)
                    found.append(target)
                    todo.append(target)
        kept += found
        num_levels += bool(found)
    return kept


def steps_to_end(following: np.ndarray, accepts: np.ndarray) -> np.ndarray:
    """``[S]`` int32: fewest steps to a state that accepts, NEVER if there is no way.

    Args:
        following: ``[S, K]``, the state behind each kind of step, or DEAD.
    """
    num_states = len(accepts)
    # [target, state]; the last row is for DEAD.
    leads_to = np.zeros((num_states + 1, num_states), dtype=bool)
    for kind in range(following.shape[1]):
        leads_to[following[:, kind], np.arange(num_states)] = True
    steps = np.where(accepts, 0, NEVER).astype(np.int32)
    reached = np.flatnonzero(accepts)
    distance = 0
    while len(reached):
        distance += 1
        is_new = leads_to[reached].any(axis=0) & (steps == NEVER)
        steps[is_new] = distance
        reached = np.flatnonzero(is_new)
    return steps


def only(is_kept: np.ndarray, following: np.ndarray) -> np.ndarray:
    """The kept states' rows of ``following``, numbered anew; DEAD in the place of the others."""
    number = np.full(len(is_kept) + 1, DEAD, dtype=following.dtype)  # the last one is for DEAD
    number[:-1][is_kept] = np.arange(is_kept.sum())
    return number[following[is_kept]]
