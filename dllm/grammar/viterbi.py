"""The best allowed text on a canvas: exact, over all texts at once.

Every position of a canvas has a score for each token. A text is a path through the states of a
table, one token a position, which may stop where a state accepts. Its score is the sum of the
scores of its tokens. All paths are compared by dynamic programming over (position, state)
(Viterbi 1967); within a class of tokens only the best one of a position matters.

A state is entered only if the text can still be ended within the budget of tokens, so that it is
complete whenever the budget allowed that at the beginning. Thoughts in front of a text (the last
state of a table, ``constraint``) end at a given place at the latest. The token that ends them there
costs nothing: else a path would rather end them at any earlier place where it is a bit likelier.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dllm.grammar.automaton import DEAD
from dllm.grammar.reach import NEVER
from dllm.grammar.table import Table

STOPPED = -2  # stands for a state behind the end of a text
# Stands for a score of -inf, so that texts with impossible tokens can be compared, too: the best
# allowed text may be one of these.
WORST = -1e30
# Where a token is fixed it has the score 0, and all others have this one. It is less than a whole
# canvas of WORST.
OTHER_THAN_FIXED = -1e33
LOWEST = 10 * OTHER_THAN_FIXED  # a score that is not above this, or NaN, counts as WORST
UNLIMITED = NEVER - 1  # a budget
COLUMN = 256  # states; numpy compares whole arrays faster than segments of one
AT_ONCE = 1 << 16  # scores that stay in a processor's cache
KEPT_MASK_BYTES = 4 << 20  # for each table, of masks of what its states allow


@dataclass(frozen=True)
class Path:
    """The best text of a canvas of C positions.

    Attributes:
        tokens: ``[C]`` int64; behind the one that stops, whatever scores best.
        states: ``[C + 1]`` int64: before each position and behind the last; STOPPED behind the
            stop.
        score: sum over positions of the token's score less the best score there; at most 0.
            Behind a stop the best of stops and fillers counts.
    """

    tokens: np.ndarray
    states: np.ndarray
    score: float


def budget_of(table: Table, state: int, tokens_left: int) -> int:
    """How many tokens a text may still have.

    One of the tokens that are left is kept for the token that ends the text. All of them count if
    the shortest text needs them, and there is no limit if the text cannot end in time.
    """
    if state == STOPPED:
        return tokens_left
    shortest = int(table.left[state])
    if shortest < tokens_left:
        return tokens_left - 1
    return tokens_left if shortest == tokens_left else UNLIMITED


class Canvas:
    """What a table allows on canvases.

    Args:
        stops: ids of tokens that end a text.
        fillers: further ids that may stand behind the end, for instance padding.
    """

    def __init__(self, table: Table, stops: Sequence[int], fillers: Sequence[int] = ()) -> None:
        self.table = table
        self.stops = np.array(sorted(stops), dtype=np.int64)
        self.fillers = np.array(sorted({*stops, *fillers}), dtype=np.int64)
        self._is_stop = frozenset(stops)
        edges = table.edges
        can_end = table.left[edges.target] < NEVER
        source, target = edges.source[can_end], edges.target[can_end]
        # Edges come sorted by target.
        bounds = np.searchsorted(target, np.arange(len(table.accepts) + 1))
        self._bounds: list[int] = bounds.tolist()
        # In the search, states are ordered by how many edges lead to them, those with most first.
        self._order = np.argsort(-np.diff(bounds), kind="stable")
        self._rank = np.argsort(self._order)
        self._left = table.left[self._order]
        self._source, self._label = self._rank[source], edges.label[can_end]
        # A column are the first edges into states, the second ones, ..., as far as COLUMN states
        # have one. The edges of all columns come first, then the others, state by state.
        number = np.arange(len(target)) - bounds[target]
        sizes = np.bincount(number)
        sizes = sizes[sizes >= COLUMN]
        ends = np.cumsum(sizes)
        self._columns = [
            (slice(end - size, end), slice(size)) for end, size in zip(ends, sizes, strict=True)
        ]
        searched = np.lexsort((number, self._rank[target], np.minimum(number, len(sizes))))
        self._searched = self._source[searched], self._label[searched]
        self._rest = slice(int(sizes.sum()), None)
        self._begins = np.flatnonzero(number[searched[self._rest]] == len(sizes))
        self._thinking = len(table.accepts) - 1  # if there are thoughts
        # Of the token that ends thoughts, which is in no answer, nor in another label.
        ends_thoughts = (source == self._thinking) & (target != self._thinking)
        self._end_of_thoughts = self._label[ends_thoughts]
        self._accepting = np.flatnonzero(table.accepts)
        # The tokens of the class that has most, in strings nearly all, and those of all others.
        order, starts = table.members
        sizes = np.diff(starts, append=len(order))
        self._is_largest = np.arange(len(sizes)) == (sizes.argmax() if len(sizes) else 0)
        is_most, others = np.repeat(self._is_largest, sizes), sizes[~self._is_largest]
        self._most, self._others = order[is_most], order[~is_most]
        self._other_starts = np.cumsum(others) - others
        self._longest = int(table.left.max(initial=0, where=table.left < NEVER))
        self._masks: dict[int, np.ndarray] = {}

    def best_path(
        self, scores: np.ndarray, state: int, budget: int, thoughts_end: int = UNLIMITED
    ) -> Path:
        """The allowed text with the highest score.

        A canvas whose most likely tokens are a text already stays as it is, whatever stands behind
        its stop. For any other text each place behind the stop counts with the score of the best
        stop or filler there, because a text that could leave these places out for nothing would be
        the better, the shorter it is.

        Args:
            scores: ``[C, V]`` fp32. OTHER_THAN_FIXED beside a token keeps it, if some text can.
            state: before the first position.
            budget: tokens that the text may have from there (``budget_of``).
            thoughts_end: the place at which thoughts end at the latest.
        """
        likeliest = scores.argmax(axis=1)
        states, num_valid = self.read(likeliest.tolist(), state, budget, thoughts_end)
        if num_valid == len(scores):
            return Path(likeliest, np.array(states), 0.0)
        return self._search(scores, likeliest, state, budget, thoughts_end)

    def read(
        self, tokens: Sequence[int], state: int, budget: int, thoughts_end: int = UNLIMITED
    ) -> tuple[list[int], int]:
        """(states before and behind each token, how many tokens are allowed, from the start)."""
        table, states = self.table, [state]
        class_of = table.class_of[np.asarray(tokens, dtype=np.int64)].tolist()
        for place, (token, kind) in enumerate(zip(tokens, class_of, strict=True)):
            if state == STOPPED or (token in self._is_stop and table.accepts[state]):
                state = STOPPED
            else:
                state = DEAD if kind < 0 else int(table.next[state, kind])
                is_late = state == self._thinking and place >= thoughts_end
                if state == DEAD or is_late or table.left[state] > budget - place - 1:
                    return states, place
            states.append(state)
        return states, len(tokens)

    def forbidden(self, path: Path, budget: int, thoughts_end: int = UNLIMITED) -> list[np.ndarray]:
        """C times ``[V]`` bool: tokens that may not stand there, behind those in front of it.

        Read only: equal ones share memory.

        Args:
            path: what ``best_path`` returned for this budget, and these thoughts.
        """
        states = path.states[:-1].tolist()
        found = [self._forbidden(at, budget - place) for place, at in enumerate(states)]
        if thoughts_end < len(states) and states[thoughts_end] == self._thinking:
            goes_on = np.append(self.table.next[self._thinking] == self._thinking, False)
            found[thoughts_end] = found[thoughts_end] | goes_on[self.table.class_of]
        return found

    def _forbidden(self, state: int, budget: int) -> np.ndarray:
        """``[V]`` bool: tokens that may not follow a state, with ``budget`` tokens left."""
        if budget - 1 < self._longest and state != STOPPED:
            return self._make_forbidden(state, budget)
        if state not in self._masks:
            if (len(self._masks) + 1) * len(self.table.class_of) > KEPT_MASK_BYTES:
                self._masks.clear()
            self._masks[state] = self._make_forbidden(state, UNLIMITED)
        return self._masks[state]

    def _make_forbidden(self, state: int, budget: int) -> np.ndarray:
        table = self.table
        if state == STOPPED:
            return np.zeros(len(table.class_of), dtype=bool)
        following = table.next[state]
        too_long = np.append(table.left, NEVER)[following] > budget - 1  # DEAD is the last
        # Class -1 is the last: never allowed.
        found: np.ndarray = np.append(too_long, True)[table.class_of]
        found[self.stops] = not table.accepts[state]
        return found

    def _search(
        self, scores: np.ndarray, likeliest: np.ndarray, state: int, budget: int, thoughts_end: int
    ) -> Path:
        num_places, edges = len(scores), self.table.edges
        best = np.take_along_axis(scores, likeliest[:, None], axis=1)
        by_class = self._class_maxima(scores, likeliest) - best
        by_class[np.isnan(by_class)] = -np.inf
        of_members = np.take(by_class, edges.members, axis=1)
        by_label = _finite(np.maximum.reduceat(of_members, edges.bounds[:-1], axis=1))  # [C, L]
        if thoughts_end < num_places:
            by_label[thoughts_end, self._end_of_thoughts] = 0.0
        stop = _finite(scores[:, self.stops].max(axis=1) - best[:, 0])
        filled = _finite(scores[:, self.fillers].max(axis=1) - best[:, 0])
        at = self._forward(by_label, state, budget, thoughts_end)  # [C + 1, S]
        # A text that stops at a place: what led there, the stop, and what fills the rest.
        rest = np.append(np.cumsum(filled[:0:-1])[::-1], 0.0)
        accepting, whole = at[:num_places, self._rank[self._accepting]], at[num_places, self._rank]
        ending = accepting.max(axis=1, initial=-np.inf) + stop + rest
        place, last = int(ending.argmax()), int(whole.argmax())
        tokens, states = likeliest.copy(), np.full(num_places + 1, STOPPED, dtype=np.int64)
        score = max(ending[place], whole[last])
        if ending[place] == score:
            last = int(self._accepting[accepting[place].argmax()])
            tokens[place] = self.stops[scores[place, self.stops].argmax()]
        else:
            place = num_places
        labels = self._trace(by_label, at, place, last, states)
        tokens[:place] = [*self._tokens_of(labels, by_class, scores, likeliest)]
        return Path(tokens, states, float(score))

    def _class_maxima(self, scores: np.ndarray, likeliest: np.ndarray) -> np.ndarray:
        """``[C, K]``."""
        largest = scores[np.arange(len(scores)), likeliest]
        is_other = np.append(~self._is_largest, True)[self.table.class_of[likeliest]]
        for place in np.flatnonzero(is_other):
            largest[place] = scores[place].take(self._most, mode="wrap").max(initial=-np.inf)
        found = np.empty((len(scores), len(self._is_largest)), dtype=scores.dtype)
        found[:, self._is_largest] = largest[:, None]
        num_rows = AT_ONCE // (len(self._others) + 1) + 1
        for low in range(0, len(scores), num_rows):
            some = scores[low : low + num_rows].take(self._others, axis=1, mode="wrap")
            others = np.maximum.reduceat(some, self._other_starts, axis=1)
            found[low : low + num_rows, ~self._is_largest] = others
        return found

    def _forward(
        self, by_label: np.ndarray, state: int, budget: int, thoughts_end: int
    ) -> np.ndarray:
        """``[C + 1, S]`` fp64: the best path's score to each state, in order, at each place."""
        source, label = self._searched
        at = np.full((len(by_label) + 1, len(self._left)), -np.inf)
        at[0, self._rank[state]] = 0.0
        for place, (scores, here, behind) in enumerate(zip(by_label, at, at[1:], strict=False)):
            arriving = here.take(source, mode="wrap")  # the fastest mode
            arriving += scores.take(label, mode="wrap")
            best = behind[: len(self._begins)]
            np.maximum.reduceat(arriving[self._rest], self._begins, out=best)
            for column, states in self._columns:
                np.maximum(behind[states], arriving[column], out=behind[states])
            if self._longest > budget - place - 1:
                behind[self._left > budget - place - 1] = -np.inf
            if place >= thoughts_end:
                behind[self._rank[self._thinking]] = -np.inf
        return at

    def _trace(
        self, by_label: np.ndarray, at: np.ndarray, place: int, state: int, states: np.ndarray
    ) -> list[int]:
        """Write the path that leads to ``state`` before ``place``; returns its labels."""
        states[place] = state
        labels = []
        for before in range(place - 1, -1, -1):
            low, high = self._bounds[state], self._bounds[state + 1]
            through = at[before].take(self._source[low:high])
            through += by_label[before].take(self._label[low:high])
            edge = low + int(through.argmax())
            labels.append(int(self._label[edge]))
            states[before] = state = int(self._order[self._source[edge]])
        return labels[::-1]

    def _tokens_of(
        self, labels: list[int], by_class: np.ndarray, scores: np.ndarray, likeliest: np.ndarray
    ) -> Iterator[int]:
        """The best token of the best class of each label."""
        order, starts = self.table.members
        ends = np.append(starts[1:], len(order))
        is_of = self.table.class_of[likeliest].tolist()
        for place, label in enumerate(labels):
            classes = self.table.edges.classes(label)
            best = int(classes[by_class[place].take(classes).argmax()])
            token = likeliest[place]
            if is_of[place] != best:
                some = order[starts[best] : ends[best]]
                token = some[scores[place].take(some).argmax()]
            yield int(token)


def _finite(scores: np.ndarray) -> np.ndarray:
    """Scores in fp64; NaN and what is at most ``LOWEST`` become ``WORST``."""
    finite: np.ndarray = np.where(scores > LOWEST, scores.astype(np.float64), WORST)
    return finite
