"""The states of an automaton that a table holds: all, or those of so many levels of nesting.

A grammar without recursion has a limited number of states; if they are too many it is refused,
because a part of them would be an arbitrary part of its texts. Recursion has no end of states.
There the states are taken level by level: first those that no further recursive call leads to, then
those behind one, and so on, as long as all states of a level fit. Every text of the kept states is
a text of the grammar: one that is nested less deeply.

Of the states behind which the same may follow, one is kept: the automaton knows them by what was
read, and finds two to six times as many.
"""

import functools
import itertools
from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from dllm.grammar.automaton import DEAD, START, Automaton
from dllm.grammar.classes import coarsest
from dllm.grammar.refusals import Unsupported

LOOKED_AT = 3  # times as many states, of which equal ones become one
FEWEST_STATES = 64  # of the kept levels: in fewer may be nothing but an empty list
UNROLLED = 2048  # states with which there may be more of them; four times as many up to
ENOUGH_LEVELS = 4  # levels: in JSON, an object within an object is two
AT_ONCE = 4096  # states whose pairs are looked up
NEVER = 1 << 30  # steps to the end of the text from a state that has none


class TooManyStates(Unsupported):
    """A grammar that is over a limit of states."""

    def __init__(self, most_states: int) -> None:
        super().__init__(
            f"The grammar is over the limit of states, {most_states}. Make it smaller: fewer "
            "optional parts and choices, shorter lists and texts, less nesting."
        )


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

    Raises:
        Unsupported: more states than ``most_states`` without recursion, or with one level of it.
    """
    levels, is_whole = _by_level(automaton, LOOKED_AT * most_states)

    @functools.cache
    def of_levels(number: int) -> ByteTable:
        found = _bytes_of(automaton, [*itertools.chain(*levels[:number])])
        return _merged(found) if automaton.is_merged else found

    def size(number: int) -> int:
        try:
            return len(of_levels(number).rows)
        except Unsupported:  # no text ends within so few
            return 0

    number, least = 1, min(FEWEST_STATES, most_states // 2)
    if is_whole and size(len(levels)) <= most_states:
        number, least = len(levels), 0
    step = 1
    while step:
        more = min(number + step, len(levels))
        if number < more and (size(more) <= min(most_states, _room(more)) or size(number) < least):
            number, step = more, max(1, more // 8)
        else:
            step //= 2
    if not levels or not least <= size(number) <= most_states:
        raise TooManyStates(most_states)
    return replace(of_levels(number), rows=of_levels(number).rows.astype(np.int16))


def _room(level: int) -> int:
    return 4 * UNROLLED if level <= ENOUGH_LEVELS else UNROLLED


def _bytes_of(automaton: Automaton, states: list[int]) -> ByteTable:
    number = np.full(len(automaton) + 1, DEAD, dtype=np.int32)  # the first one is for DEAD
    number[np.array(states) + 1] = np.arange(len(states))
    rows, part_of = automaton.rows(states, number)
    accepts = np.array([automaton.accepts(state) for state in states])
    columns: dict[bytes, int] = {}
    of_part = np.array([columns.setdefault(row.tobytes(), len(columns)) for row in rows.T])
    columns.clear()  # as long as all rows
    rows, class_of = rows[:, np.unique(of_part, return_index=True)[1]], of_part[part_of]
    # What leads only to states that were left out is left out too.
    source, target, _ = _steps(rows)
    has_end = distances(source, target, accepts) < NEVER
    if not has_end[0]:
        raise Unsupported(
            f"The grammar allows no finite text, or none within {len(states)} states. Give another "
            "one, or make it smaller: fewer parts, less nesting."
        )
    renumbered = np.append(np.where(has_end, np.cumsum(has_end) - 1, DEAD), DEAD).astype(np.int32)
    circle, is_head, most = automaton.circles([states[at] for at in np.flatnonzero(has_end)])
    return ByteTable(
        renumbered[rows[has_end]],
        class_of.astype(np.uint8),
        accepts[has_end],
        circle,
        is_head,
        np.array(most, dtype=np.int64),
    )


def _steps(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(which states, ascending, lead; to which; a number of each set of bytes that does)."""
    drawn = np.frombuffer(np.random.default_rng(0).bytes(8 * rows.shape[1]), dtype=np.uint64)
    found = []
    for low in range(0, len(rows), AT_ONCE):
        source, kind = np.nonzero(rows[low : low + AT_ONCE] != DEAD)
        source += low
        each, which = np.unique(source * len(rows) + rows[source, kind], return_inverse=True)
        found.append((each, np.zeros(len(each), dtype=np.uint64)))
        np.add.at(found[-1][1], which, drawn[kind])
    pairs, weight = map(np.concatenate, zip(*found, strict=True))
    return *np.divmod(pairs, len(rows)), weight


def _merged(states: ByteTable) -> ByteTable:
    """States with equal continuations as one; those of different circles stay apart."""
    own = states.accepts + 2 * states.is_head + 4 * (states.circle + 1)
    class_of = coarsest(own, *_steps(states.rows))
    _, kept, class_of = np.unique(class_of, return_index=True, return_inverse=True)
    order = np.sort(kept)
    class_of = np.searchsorted(order, kept)[class_of]
    leads_to = np.append(class_of, DEAD).astype(np.int32)[states.rows]
    is_same = (own == own[order][class_of]).all() and (leads_to == leads_to[order][class_of]).all()
    if not is_same:  # different states had one number
        return states
    parts = {name: getattr(states, name)[order] for name in ("accepts", "circle", "is_head")}
    return replace(states, rows=leads_to[order], **parts)


def _by_level(automaton: Automaton, most_states: int) -> tuple[list[list[int]], bool]:
    """(the states of each level, as many levels as fit; whether these are all)."""
    waiting: dict[int, list[int]] = {0: [START]}  # by open recursive calls
    levels: list[list[int]] = []
    seen: set[int] = set()
    while waiting:
        if len(levels) > 1 and len(seen) > FEWEST_STATES:
            most_states = min(most_states, 2 * _room(len(levels) + 1))
        calls = min(waiting)
        todo = deque(state for state in dict.fromkeys(waiting.pop(calls)) if state not in seen)
        seen.update(todo)
        found = list(todo)
        while todo:
            if len(seen) > most_states:
                return levels, False
            state = todo.popleft()
            depth = automaton.level(state)
            for target in automaton.targets(state):
                if target in seen:
                    continue
                deeper = automaton.level(target) - depth
                if deeper > 0:
                    waiting.setdefault(calls + deeper, []).append(target)
                else:
                    seen.add(target)
                    found.append(target)
                    todo.append(target)
        levels += [found] if found else []
    return levels, True


def distances(source: np.ndarray, target: np.ndarray, is_end: np.ndarray) -> np.ndarray:
    """``[S]`` int32: fewest edges from each state to one that ``is_end``, NEVER without a way."""
    num_states = len(is_end)
    pairs = np.unique(target * num_states + source)  # [E] int64
    source, bounds = (
        pairs % num_states,
        np.searchsorted(pairs, np.arange(num_states + 1) * num_states),
    )
    steps = np.where(is_end, 0, NEVER).astype(np.int32)
    reached = np.flatnonzero(is_end)
    distance = 0
    while len(reached):
        distance += 1
        leads_on = [source[bounds[state] : bounds[state + 1]] for state in reached.tolist()]
        before = np.unique(np.concatenate(leads_on))
        reached = before[steps[before] == NEVER]
        steps[reached] = distance
    return steps
