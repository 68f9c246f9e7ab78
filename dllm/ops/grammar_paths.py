"""Canvases under grammars, defined once: class maxima, best paths and row masks.

A grammar is a table: states, classes of tokens that all states treat alike, and edges (state,
class, state) (`dllm/grammar`). With x the logits of a row, and edges from a state r to s by k,

    best[k] = max of x over the tokens of k            class maxima
    at[0] = 0 in the canvas's state, else -inf
    at[p + 1, s] = max over edges e into s of at[p, r] + (best[p, k] - max x[p])
    a text that stops before p = at[p, s] + stop[p] + fill[p + 1] + fill[p + 2] + ...    s accepts

The best of at[C] and of the texts that stop is the best path (Viterbi 1967); `grammar.viterbi` says
what a budget is, and why a canvas that is a text already stays as it is. Paths are sums of at most
C fp32 numbers in fp64, in one order everywhere, so that the definition, the CPU and the kernels
find the same path also among nearly equal ones. Among equals the lowest token, the first edge, the
lowest state and the earliest stop win.

Several tables are packed into one, because rows of one batch have different grammars or none.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dllm.ops.staging import put

DEAD, STOPPED, NO_TABLE = -1, -2, -1
WORST = -1e30  # in the place of -inf: a text of impossible tokens is still one of the grammar
CHUNK = 256  # tokens of one class that a kernel reduces at once


class Table(Protocol):
    """What is needed of a `grammar.table.Table`."""

    @property
    def class_of(self) -> np.ndarray:
        """``[V]`` int32, the class of each token; -1 for those in no text."""

    @property
    def next(self) -> np.ndarray:
        """``[S, K]`` int32, the state behind a token of each class, or DEAD."""

    @property
    def accepts(self) -> np.ndarray:
        """``[S]`` bool, a text may end here."""

    @property
    def left(self) -> np.ndarray:
        """``[S]`` int32, fewest tokens to a state that accepts."""

    @property
    def edges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(from, class, to), sorted by where they lead."""

    @property
    def members(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens sorted by class, where each class begins)."""


class PackedTables(NamedTuple):
    """T tables, one behind the other; states and classes are numbered within each table."""

    class_of: Tensor  # [T, V] int32
    next: Tensor  # [sum of S * K] int32
    accepts: Tensor  # [sum of S] int8
    left: Tensor  # [sum of S] int32
    source: Tensor  # [sum of E] int32
    kind: Tensor  # [sum of E] int32
    target: Tensor  # [sum of E] int32
    is_last: Tensor  # [sum of E] int8, the next edge leads elsewhere
    into: Tensor  # [sum of S, plus 1] int32, the first edge into each state
    chunk: Tensor  # [chunks, CHUNK] int32, tokens of one class; the last one is repeated
    chunk_class: Tensor  # [chunks] int32
    # [T + 1] int32 each: where each table begins.
    first_next: Tensor
    first_state: Tensor
    first_edge: Tensor
    first_chunk: Tensor
    num_classes: Tensor  # [T] int32
    most_classes: int
    most_states: int
    most_chunks: int


class Sizes(NamedTuple):
    """What tables take, or the room for them: how many there are of each part."""

    tables: int
    cells: int  # states times classes
    states: int
    edges: int
    chunks: int

    @classmethod
    def of(cls, table: Table) -> "Sizes":
        """Of one table."""
        members, starts = table.members
        num_chunks = int((-(-np.diff(np.append(starts, len(members))) // CHUNK)).sum())
        return cls(1, table.next.size, len(table.accepts), len(table.edges[0]), num_chunks)

    def plus(self, other: "Sizes") -> "Sizes":
        """Both together."""
        return Sizes(*(one + more for one, more in zip(self, other, strict=True)))

    def minus(self, other: "Sizes") -> "Sizes":
        """What is left without the other."""
        return Sizes(*(one - less for one, less in zip(self, other, strict=True)))

    def fits(self, room: "Sizes") -> bool:
        """Whether there is room for all of them."""
        return all(one <= most for one, most in zip(self, room, strict=True))


class NoRoom(ValueError):
    """Tables that do not fit into a pool together."""


class TablePool:
    """Memory of one size on a device, in which tables lie one behind the other.

    All memory is taken when it is made. Nothing waits for the device: tables are written behind
    the kernels that were launched before.

    Args:
        room: for all tables.
        vocab_size: of every table.
        device: of the tensors.
    """

    def __init__(self, room: Sizes, vocab_size: int, device: torch.device | str = "cpu") -> None:
        if max(room.cells, room.edges, room.chunks) >= 1 << 31:
            raise NoRoom(f"{room}: the kernels count in 32 bits")
        self.vocab_size = vocab_size
        self._room = room

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._packed = PackedTables(
            class_of=empty(room.tables, vocab_size),
            next=empty(room.cells),
            accepts=empty(room.states, dtype=torch.int8),
            left=empty(room.states),
            source=empty(room.edges),
            kind=empty(room.edges),
            target=empty(room.edges),
            is_last=empty(room.edges, dtype=torch.int8),
            into=empty(room.states + 1),
            chunk=empty(room.chunks, CHUNK),
            chunk_class=empty(room.chunks),
            **{name: empty(room.tables + 1) for name in FIRSTS},
            num_classes=empty(room.tables),
            most_classes=0,
            most_states=0,
            most_chunks=0,
        )
        self._clear()

    def _clear(self) -> None:
        self._placed: list[Table] = []
        self._used = Sizes(0, 0, 0, 0, 0)
        self._packed = self._packed._replace(most_classes=0, most_states=0, most_chunks=0)

    def place(self, tables: Sequence[Table]) -> tuple[PackedTables, list[int]]:
        """(the pool's tables, the numbers of those that were given).

        Others stay as long as there is room.

        Raises:
            NoRoom: there is none, even for these tables alone; those in front of the first one that
                does not fit are there.
        """
        needed = self._used
        for table in {id(one): one for one in tables}.values():
            if self._number(table) is None:
                needed = needed.plus(Sizes.of(table))
        if not needed.fits(self._room):
            self._clear()
        numbers = [self._placed_at(table) for table in tables]
        return self._packed, numbers

    def _number(self, table: Table) -> int | None:
        return next((at for at, one in enumerate(self._placed) if one is table), None)

    def _placed_at(self, table: Table) -> int:
        number = self._number(table)
        if number is None:
            number = len(self._placed)
            self._write(table, Sizes.of(table))
            self._placed.append(table)
        return number

    def _write(self, table: Table, sizes: Sizes) -> None:
        used, packed = self._used, self._packed
        behind = used.plus(sizes)
        if not behind.fits(self._room):
            raise NoRoom(f"{behind} into {self._room}")
        source, kind, target = table.edges
        chunk, chunk_class = _chunks(table)
        is_last = np.append(target[1:] != target[:-1], True)[: len(target)]
        into = used.edges + np.searchsorted(target, np.arange(sizes.states + 1))
        for part, first, values in (
            (packed.class_of, used.tables, table.class_of[None]),
            (packed.next, used.cells, table.next.reshape(-1)),
            (packed.accepts, used.states, table.accepts),
            (packed.left, used.states, table.left),
            (packed.source, used.edges, source),
            (packed.kind, used.edges, kind),
            (packed.target, used.edges, target),
            (packed.is_last, used.edges, is_last),
            (packed.into, used.states, into),
            (packed.chunk, used.chunks, chunk),
            (packed.chunk_class, used.chunks, chunk_class),
            (packed.num_classes, used.tables, [table.next.shape[1]]),
            (packed.first_next, used.tables, [used.cells, behind.cells]),
            (packed.first_state, used.tables, [used.states, behind.states]),
            (packed.first_edge, used.tables, [used.edges, behind.edges]),
            (packed.first_chunk, used.tables, [used.chunks, behind.chunks]),
        ):
            narrow = np.int8 if part.dtype == torch.int8 else np.int32
            put(np.asarray(values, narrow), part[first : first + len(values)])
        self._used = behind
        self._packed = packed._replace(
            most_classes=max(packed.most_classes, table.next.shape[1]),
            most_states=max(packed.most_states, sizes.states),
            most_chunks=max(packed.most_chunks, sizes.chunks),
        )


FIRSTS = ("first_next", "first_state", "first_edge", "first_chunk")


def pack(tables: Sequence[Table], device: torch.device | str = "cpu") -> PackedTables:
    """Tables of one vocabulary, at least one, in this order and in a pool of their size."""
    room = Sizes(0, 0, 0, 0, 0)
    for table in tables:
        room = room.plus(Sizes.of(table))
    return TablePool(room, len(tables[0].class_of), device).place(tables)[0]


def _chunks(table: Table) -> tuple[np.ndarray, np.ndarray]:
    """(tokens ``[chunks, CHUNK]``, the class of each chunk)."""
    order, starts = table.members
    sizes = np.diff(np.append(starts, len(order)))
    num_chunks = -(-sizes // CHUNK)
    classes = np.repeat(np.arange(len(sizes)), num_chunks)
    within = np.arange(len(classes)) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)
    offset = within[:, None] * CHUNK + np.arange(CHUNK)
    at = starts[classes][:, None] + np.minimum(offset, sizes[classes][:, None] - 1)
    return order[at].reshape(-1, CHUNK), classes


class ClassMaxima(NamedTuple):
    """Of N rows; K is that of the largest table."""

    best: Tensor  # [N, K] fp32; -inf for classes that a row's table does not have
    token: Tensor  # [N, K] int32, the lowest id with it; -1 there


class Ends(NamedTuple):
    """What stops and paddings cost in each of N rows, and what is likeliest."""

    likeliest: Tensor  # [N] int64
    peak: Tensor  # [N] fp32, its logit
    is_stop: Tensor  # [N] bool, it ends a text
    stop: Tensor  # [N] fp32, the largest logit of a token that ends a text
    stop_token: Tensor  # [N] int64
    filled: Tensor  # [N] fp32, the largest logit of a token that may stand behind the end


class Canvases(NamedTuple):
    """R canvases, whose rows lie one behind the other."""

    first_row: Tensor  # [R] int32
    length: Tensor  # [R] int32
    table: Tensor  # [R] int32; NO_TABLE: anything may stand there
    state: Tensor  # [R] int32, before the first position
    budget: Tensor  # [R] int32, tokens that the text may have from there
    most_rows: int  # of one canvas


class Paths(NamedTuple):
    """The best paths of N rows in R canvases; the likeliest tokens where there is no table."""

    tokens: Tensor  # [N] int64
    states: Tensor  # [N] int32, before each position; STOPPED behind the stop
    end: Tensor  # [R] int32, the state behind the last position
    score: Tensor  # [R] fp64, at most 0: what the path has less than the likeliest tokens


def ends(
    logits: Tensor, likeliest: Tensor, canvas_of: Tensor, stops: Tensor, fillers: Tensor
) -> Ends:
    """Look up the few tokens that end texts or stand behind them.

    Args:
        logits: [N, V].
        likeliest: [N] int64, the argmax of each row.
        canvas_of: [N] int64, each row's canvas.
        stops: [R, M] int64, in ascending order; filled up by repeating the last one.
        fillers: [R, M] int64 likewise, the stops among them.
    """
    its_stops = stops[canvas_of]
    stop, which = logits.gather(1, its_stops).float().max(dim=1)
    return Ends(
        likeliest=likeliest,
        peak=logits.gather(1, likeliest[:, None])[:, 0].float(),
        is_stop=(its_stops == likeliest[:, None]).any(dim=1),
        stop=stop,
        stop_token=its_stops.gather(1, which[:, None])[:, 0],
        filled=logits.gather(1, fillers[canvas_of]).float().amax(dim=1),
    )


def reference_class_maxima(logits: Tensor, tables: PackedTables, table_of: Tensor) -> ClassMaxima:
    """The definition of `dispatch.class_maxima`."""
    num_rows, vocab_size = logits.shape
    x = torch.where(logits.isnan(), -torch.inf, logits.float())
    # One more class takes the tokens that are in no text, and those of rows without a table.
    most = tables.most_classes
    class_of = tables.class_of[table_of.clamp(min=0).long()].long()
    class_of = torch.where((class_of < 0) | (table_of < 0)[:, None], most, class_of)
    best = x.new_full((num_rows, most + 1), -torch.inf).scatter_reduce_(1, class_of, x, "amax")
    ids = torch.arange(vocab_size, device=logits.device).expand(num_rows, -1)
    ids = torch.where(x == best.gather(1, class_of), ids, vocab_size)
    token = ids.new_full((num_rows, most + 1), vocab_size).scatter_reduce_(1, class_of, ids, "amin")
    token = torch.where(token == vocab_size, -1, token)
    return ClassMaxima(best[:, :most].contiguous(), token[:, :most].int().contiguous())


def reference_best_paths(
    maxima: ClassMaxima, found: Ends, tables: PackedTables, canvases: Canvases
) -> Paths:
    """The definition of `dispatch.best_paths`, one canvas after the other."""
    num_rows, num_canvases = len(found.likeliest), len(canvases.table)
    paths = Paths(
        tokens=found.likeliest.clone(),
        states=torch.full((num_rows,), STOPPED, dtype=torch.int32),
        end=canvases.state.clone(),
        score=torch.zeros(num_canvases, dtype=torch.float64),
    )
    for canvas in range(num_canvases):
        first = int(canvases.first_row[canvas])
        rows = slice(first, first + int(canvases.length[canvas]))
        if int(canvases.table[canvas]) != NO_TABLE:
            one = _OnePath(tables, canvases, canvas, ClassMaxima(*(x[rows] for x in maxima)))
            one.solve(Ends(*(each[rows] for each in found)))
            paths.tokens[rows], paths.states[rows] = one.tokens, one.states[:-1]
            paths.end[canvas], paths.score[canvas] = one.states[-1], one.score
    return paths


class _OnePath:
    """One canvas of C positions; `tokens`, `states` and `score` once it is solved."""

    def __init__(
        self, tables: PackedTables, canvases: Canvases, canvas: int, maxima: ClassMaxima
    ) -> None:
        table = int(canvases.table[canvas])
        states = slice(int(tables.first_state[table]), int(tables.first_state[table + 1]))
        edges = slice(int(tables.first_edge[table]), int(tables.first_edge[table + 1]))
        following = slice(int(tables.first_next[table]), int(tables.first_next[table + 1]))
        self.class_of = tables.class_of[table]
        self.next = tables.next[following].view(-1, int(tables.num_classes[table]))
        self.left, self.accepts = tables.left[states], tables.accepts[states].bool()
        self.source, self.kind = tables.source[edges].long(), tables.kind[edges].long()
        self.target = tables.target[edges].long()
        self.start, self.budget = int(canvases.state[canvas]), int(canvases.budget[canvas])
        self.maxima = maxima

    def solve(self, found: Ends) -> None:
        """Read the likeliest tokens; search if they are no text."""
        self.tokens, self.score = found.likeliest.clone(), 0.0
        self.states = torch.full((len(self.tokens) + 1,), STOPPED, dtype=torch.int32)
        if not self._is_text(found):
            self.states.fill_(STOPPED)
            self._search(found)

    def _is_text(self, found: Ends) -> bool:
        state = self.start
        for place, token in enumerate(found.likeliest.tolist()):
            self.states[place] = state
            if state == STOPPED:
                continue
            if found.is_stop[place] and self.accepts[state]:
                state = STOPPED
                continue
            kind = int(self.class_of[token])
            state = DEAD if kind < 0 else int(self.next[state, kind])
            if state == DEAD or self.left[state] > self.budget - place - 1:
                return False
        self.states[-1] = state
        return True

    def _search(self, found: Ends) -> None:
        length = len(self.tokens)
        weight = _finite(self.maxima.best - found.peak[:, None])
        at = torch.full((length + 1, len(self.left)), -torch.inf, dtype=torch.float64)
        at[0, self.start] = 0.0
        for place in range(length):
            through = at[place, self.source] + weight[place, self.kind]
            at[place + 1].scatter_reduce_(0, self.target, through, "amax")
            at[place + 1, self.left > self.budget - place - 1] = -torch.inf
        stop, filled = _finite(found.stop - found.peak), _finite(found.filled - found.peak)
        rest, ending = 0.0, [0.0] * length
        for place in reversed(range(length)):
            accepted = at[place].masked_fill(~self.accepts, -torch.inf)
            ending[place] = float(accepted.max()) + float(stop[place]) + rest
            rest += float(filled[place])
        place = max(range(length), key=ending.__getitem__)
        state = int(at[length].argmax())
        if ending[place] >= float(at[length, state]):
            state = int(at[place].masked_fill(~self.accepts, -torch.inf).argmax())
            self.tokens[place], self.score = found.stop_token[place], ending[place]
        else:
            place, self.score = length, float(at[length, state])
        self.states[place] = state
        for before in reversed(range(place)):
            edges = torch.nonzero(self.target == state)[:, 0]
            through = at[before, self.source[edges]] + weight[before, self.kind[edges]]
            edge = int(edges[through.argmax()])
            self.tokens[before] = self.maxima.token[before, self.kind[edge]]
            state = int(self.source[edge])
            self.states[before] = state


def _finite(scores: Tensor) -> Tensor:
    """In fp64, at least WORST; NaN becomes WORST."""
    return torch.where(scores > WORST, scores.double(), WORST)


def reference_mask_rows(
    logits: Tensor,
    tables: PackedTables,
    table_of: Tensor,
    states: Tensor,
    budgets: Tensor,
    stops: Tensor,
) -> None:
    """The definition of `dispatch.mask_rows`."""
    for row, (table, state) in enumerate(zip(table_of.tolist(), states.tolist(), strict=True)):
        if table == NO_TABLE or state == STOPPED:
            continue
        num_classes, first = int(tables.num_classes[table]), int(tables.first_state[table])
        at = int(tables.first_next[table]) + state * num_classes
        following = tables.next[at : at + num_classes].long()
        fits = tables.left[(first + following).clamp(min=0)] <= budgets[row] - 1
        allowed = torch.cat([(following != DEAD) & fits, fits.new_zeros(1)])
        # Class -1 is the last: never allowed.
        is_allowed = allowed[tables.class_of[table].long()]
        is_allowed[stops[row]] = bool(tables.accepts[first + state])
        logits[row, ~is_allowed] = -torch.inf
