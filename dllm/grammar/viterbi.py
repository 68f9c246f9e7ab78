"""The best allowed text on a canvas: exact, over all texts at once.

Every position of a canvas has a score for each token. A text is a path through the states of a
table, one token a position, which may stop where a state accepts. Its score is the sum of the
scores of its tokens. All paths are compared by dynamic programming over (position, state)
(Viterbi 1967); within a class of tokens only the best one of a position matters.

A state is entered only if the text can still be ended within the budget of tokens, so that it is
complete whenever the budget allowed that at the beginning.
"""

from dataclasses import dataclass

import numpy as np

from dllm.grammar.automaton import DEAD
from dllm.grammar.table import NEVER, Table

STOPPED = -2  # in the place of a state: the text is over


@dataclass(frozen=True)
class Path:
    """The best text of a canvas of C positions.

    Attributes:
        tokens: ``[C]``; behind the one that stops, whatever scores best.
        states: ``[C + 1]``: before each position and behind the last; STOPPED behind the stop.
        score: sum over positions of the token's score less the best score there; at most 0.
    """

    tokens: np.ndarray
    states: np.ndarray
    score: float


def budget_of(table: Table, state: int, tokens_left: int) -> int:
    """How many tokens a text may still have: all that are left if it can end, else any number."""
    return tokens_left if table.left[state] <= tokens_left else NEVER - 1


def best_path(
    table: Table,
    scores: np.ndarray,
    stops: np.ndarray,
    state: int,
    budget: int,
    fillers: np.ndarray | None = None,
) -> Path:
    """The allowed text with the highest score.

    Args:
        scores: ``[C, V]``, finite or -inf; at least one finite in each row.
        stops: ids that end a text.
        state: before the first position.
        budget: tokens that the text may have from there (``budget_of``).
        fillers: further ids that may stand behind the end, for instance padding.
    """
    best = scores.max(axis=1)
    order, starts = table.members
    by_class = np.maximum.reduceat(scores[:, order], starts, axis=1) - best[:, None]  # [C, K]
    stop = scores[:, stops].max(axis=1) - best
    filled = stop if fillers is None else np.maximum(stop, scores[:, fillers].max(axis=1) - best)
    back, stopped_from, total = _forward(table, by_class, stop, filled, state, budget)
    return _trace(table, scores, stops, back, stopped_from, total)


def _forward(
    table: Table,
    by_class: np.ndarray,
    stop: np.ndarray,
    filled: np.ndarray,
    state: int,
    budget: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores of the best paths, position by position.

    Returns:
        ``[C, S]`` the edge into each state; ``[C]`` the state in which a text stops best at each
        position, STOPPED if it had stopped before; ``[S + 1]`` the scores behind the last position,
        the last one that of stopped texts.
    """
    source, kind, target = table.edges
    num_states, num_places = len(table.accepts), len(by_class)
    # Edges come sorted by target: one segment for each state that has any.
    reached, segment = np.unique(target, return_index=True)
    score = np.full(num_states, -np.inf)
    score[state] = 0.0
    stopped = -np.inf
    back = np.full((num_places, num_states), -1, dtype=np.int32)
    stopped_from = np.full(num_places, STOPPED, dtype=np.int32)
    for place in range(num_places):
        ending = np.where(table.accepts, score, -np.inf)
        where = int(ending.argmax())
        goes_on = stopped + filled[place]
        stops_here = ending[where] + stop[place]
        if stops_here > goes_on:
            stopped_from[place] = where
        stopped = max(goes_on, stops_here)
        through = score[source] + by_class[place, kind]
        best = np.maximum.reduceat(through, segment)
        lengths = np.diff(np.append(segment, len(target)))
        is_best = through == np.repeat(best, lengths)
        edge = np.flatnonzero(is_best)
        # The first of equal edges: later ones are written over by going backwards.
        back[place, target[edge[::-1]]] = edge[::-1]
        score = np.full(num_states, -np.inf)
        score[reached] = best
        score[table.left > budget - place - 1] = -np.inf
    return back, stopped_from, np.append(score, stopped)


def _trace(
    table: Table,
    scores: np.ndarray,
    stops: np.ndarray,
    back: np.ndarray,
    stopped_from: np.ndarray,
    total: np.ndarray,
) -> Path:
    """Follow the best path from its end."""
    source, kind, _ = table.edges
    order, starts = table.members
    ends = np.append(starts[1:], len(order))
    num_places = len(scores)
    end = int(total.argmax())
    at = STOPPED if end == len(total) - 1 else end
    states = np.empty(num_places + 1, dtype=np.int64)
    tokens = scores.argmax(axis=1)
    states[num_places] = at
    for place in range(num_places - 1, -1, -1):
        if at == STOPPED:
            before = int(stopped_from[place])
            if before != STOPPED:
                tokens[place] = stops[scores[place, stops].argmax()]
                at = before
        else:
            edge = int(back[place, at])
            some = order[starts[kind[edge]] : ends[kind[edge]]]
            tokens[place] = some[scores[place, some].argmax()]
            at = int(source[edge])
        states[place] = at
    return Path(tokens, states, float(total[end]))


def allowed_tokens(table: Table, state: int, budget: int, stops: np.ndarray) -> np.ndarray:
    """``[V]`` bool: tokens that may follow a state, if ``budget`` tokens are left before it."""
    if state == STOPPED:
        return np.ones(len(table.class_of), dtype=bool)
    following = table.next[state]
    fits = (following != DEAD) & (np.append(table.left, NEVER)[following] <= budget - 1)
    allowed: np.ndarray = np.append(fits, False)[
        table.class_of
    ]  # class -1 is the last: not allowed
    allowed[stops] = table.accepts[state]
    return allowed
