"""Tables on a device, and what kernels read and write for canvases under grammars.

With x the logits of a row, and edges from a state r to s by the tokens of a label l, which is a set
of classes (`table.Edges`),

    best[l] = max of x over the tokens of l            label maxima, from those of classes
    at[0] = 0 in the canvas's state, else -inf
    at[p + 1, s] = max over edges e into s of at[p, r] + (best[p, l] - max x[p])
    a text that stops before p = at[p, s] + stop[p] + fill[p + 1] + fill[p + 2] + ...    s accepts

The best of at[C] and of the texts that stop is the best path. `viterbi` defines it, and finds it on
a CPU; `kernels` find the same one, also among nearly equal ones, because paths are sums of at most
C fp32 numbers in fp64, in one order. Among equals the first edge, the lowest class of its label and
the lowest token of that, the lowest state and the earliest stop win.

Several tables lie in one pool, because rows of one batch have different grammars or none.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dllm.grammar.table import Table

NO_TABLE = -1
# What a kernel reduces at once: tokens of one class, and classes of one label.
CHUNK, LABEL_CHUNK = 256, 16


class PackedTables(NamedTuple):
    """T tables, one behind the other; states and classes are numbered within each table."""

    class_of: Tensor  # [T, V] int32
    next: Tensor  # [sum of S * K] int32
    accepts: Tensor  # [sum of S] int8
    left: Tensor  # [sum of S] int32
    source: Tensor  # [sum of E] int32
    label: Tensor  # [sum of E] int32
    target: Tensor  # [sum of E] int32
    is_last: Tensor  # [sum of E] int8, the next edge leads elsewhere
    into: Tensor  # [sum of S, plus 1] int32, the first edge into each state
    chunk: Tensor  # [chunks, CHUNK] int32, tokens of one class; the last one is repeated
    chunk_class: Tensor  # [chunks] int32
    label_chunk: Tensor  # [label chunks, LABEL_CHUNK] int32, classes of one label, likewise
    chunk_label: Tensor  # [label chunks] int32
    # [T + 1] int32 each: where each table begins.
    first_next: Tensor
    first_state: Tensor
    first_edge: Tensor
    first_chunk: Tensor
    first_label_chunk: Tensor
    num_classes: Tensor  # [T] int32
    most_classes: int
    most_chunks: int
    most_labels: int
    most_label_chunks: int


class Sizes(NamedTuple):
    """Numbers of tables and of their parts: what tables take, or what there is room for."""

    tables: int
    cells: int  # states times classes
    states: int
    edges: int
    chunks: int
    label_chunks: int

    @classmethod
    def of(cls, table: Table) -> "Sizes":
        edges, (members, starts) = table.edges, table.members
        num_chunks = _num_chunks(np.append(starts, len(members)), CHUNK).sum()
        num_label_chunks = _num_chunks(edges.bounds, LABEL_CHUNK).sum()
        sizes = table.next.size, len(table.accepts), len(edges.source)
        return cls(1, *sizes, int(num_chunks), int(num_label_chunks))

    def plus(self, *others: "Sizes") -> "Sizes":
        return Sizes(*map(sum, zip(self, *others, strict=True)))

    def minus(self, other: "Sizes") -> "Sizes":
        return Sizes(*(one - less for one, less in zip(self, other, strict=True)))

    def fits(self, capacity: "Sizes") -> bool:
        return all(one <= most for one, most in zip(self, capacity, strict=True))


NOTHING = Sizes(0, 0, 0, 0, 0, 0)


class OverCapacity(ValueError):
    """Raised for tables that do not fit into a pool together."""


class TablePool:
    """Memory of one size on a device, in which tables lie one behind the other.

    All memory is taken when it is made. Nothing waits for the device: tables are written behind
    the kernels that were launched before.
    """

    def __init__(
        self, capacity: Sizes, vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        if max(capacity) >= 1 << 31:
            raise OverCapacity(f"{capacity}: the kernels count in 32 bits")
        self.vocab_size = vocab_size
        self._capacity = capacity

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._packed = PackedTables(
            class_of=empty(capacity.tables, vocab_size),
            next=empty(capacity.cells),
            accepts=empty(capacity.states, dtype=torch.int8),
            left=empty(capacity.states),
            source=empty(capacity.edges),
            label=empty(capacity.edges),
            target=empty(capacity.edges),
            is_last=empty(capacity.edges, dtype=torch.int8),
            into=empty(capacity.states + 1),
            chunk=empty(capacity.chunks, CHUNK),
            chunk_class=empty(capacity.chunks),
            label_chunk=empty(capacity.label_chunks, LABEL_CHUNK),
            chunk_label=empty(capacity.label_chunks),
            num_classes=empty(capacity.tables),
            **{name: empty(capacity.tables + 1) for name in FIRSTS} | NONE_YET,
        )
        self._clear()

    def _clear(self) -> None:
        self._placed: dict[int, Table] = {}  # by their ids, in the order in which they lie
        self._used = NOTHING
        self._packed = self._packed._replace(**NONE_YET)

    def place(self, tables: Sequence[Table]) -> tuple[PackedTables, list[int]]:
        """(the pool's tables, the numbers of those that were given).

        Others stay as long as there is room.

        Raises:
            OverCapacity: there is none, even for these tables alone; those in front of the first
                one that does not fit are there.
        """
        new = self._missing(tables)
        if not self._used.plus(*map(Sizes.of, new)).fits(self._capacity):
            self._clear()
            new = self._missing(tables)
        for table in new:
            self._write(table, Sizes.of(table))
            self._placed[id(table)] = table
        number = {key: number for number, key in enumerate(self._placed)}
        return self._packed, [number[id(table)] for table in tables]

    def _missing(self, tables: Sequence[Table]) -> list[Table]:
        """The tables that are not in the pool, each once."""
        asked = {id(table): table for table in tables}
        return [table for key, table in asked.items() if key not in self._placed]

    def _write(self, table: Table, sizes: Sizes) -> None:
        used, packed = self._used, self._packed
        behind = used.plus(sizes)
        if not behind.fits(self._capacity):
            raise OverCapacity(f"{behind} into {self._capacity}")
        source, label, target, classes, bounds = table.edges
        order, starts = table.members
        chunk, chunk_class = _chunks(order, np.append(starts, len(order)), CHUNK)
        label_chunk, chunk_label = _chunks(classes, bounds, LABEL_CHUNK)
        is_last = np.append(target[1:] != target[:-1], True)[: len(target)]
        into = used.edges + np.searchsorted(target, np.arange(sizes.states + 1))
        begins: Any = zip(FIRSTS, used[1:], behind[1:], strict=True)
        for part, first, values in (
            (packed.class_of, used.tables, table.class_of[None]),
            (packed.next, used.cells, table.next.reshape(-1)),
            (packed.accepts, used.states, table.accepts),
            (packed.left, used.states, table.left),
            (packed.source, used.edges, source),
            (packed.label, used.edges, label),
            (packed.target, used.edges, target),
            (packed.is_last, used.edges, is_last),
            (packed.into, used.states, into),
            (packed.chunk, used.chunks, chunk),
            (packed.chunk_class, used.chunks, chunk_class),
            (packed.label_chunk, used.label_chunks, label_chunk),
            (packed.chunk_label, used.label_chunks, chunk_label),
            (packed.num_classes, used.tables, [table.next.shape[1]]),
            *((getattr(packed, name), used.tables, [low, high]) for name, low, high in begins),
        ):
            dtype = np.int8 if part.dtype == torch.int8 else np.int32
            on_host = torch.from_numpy(np.ascontiguousarray(values, dtype))
            written = part[first : first + len(on_host)]
            written.copy_(on_host.pin_memory() if part.is_cuda else on_host, non_blocking=True)
        self._used = behind
        of_table = table.num_classes, sizes.chunks, len(bounds) - 1
        for name, size in zip(MOST, (*of_table, sizes.label_chunks), strict=True):
            packed = packed._replace(**{name: max(getattr(packed, name), size)})
        self._packed = packed


# The parts of `PackedTables` that count what `Sizes` does behind the first one.
FIRSTS = ("first_next", "first_state", "first_edge", "first_chunk", "first_label_chunk")
MOST = ("most_classes", "most_chunks", "most_labels", "most_label_chunks")
NONE_YET: Any = dict.fromkeys(MOST, 0)


def pack(tables: Sequence[Table], device: torch.device | str = "cpu") -> PackedTables:
    """Tables of one vocabulary, at least one, in this order and in a pool of their size."""
    capacity = NOTHING.plus(*map(Sizes.of, tables))
    return TablePool(capacity, len(tables[0].class_of), device).place(tables)[0]


def _num_chunks(bounds: np.ndarray, size: int) -> np.ndarray:
    return -(-np.diff(bounds) // size)


def _chunks(members: np.ndarray, bounds: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(members ``[chunks, size]`` of one group each, the group of each chunk).

    Args:
        bounds: ``[groups + 1]``, where each group begins in ``members``, and the last one ends.
    """
    num_chunks = _num_chunks(bounds, size)
    groups = np.repeat(np.arange(len(num_chunks)), num_chunks)
    within = np.arange(len(groups)) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)
    at = bounds[groups][:, None] + within[:, None] * size + np.arange(size)
    return members[np.minimum(at, bounds[groups + 1][:, None] - 1)].reshape(-1, size), groups


class Ends(NamedTuple):
    """For each of N rows, the likeliest token, and what stops and paddings cost."""

    likeliest: Tensor  # [N] int64
    peak: Tensor  # [N] fp32, its logit
    is_stop: Tensor  # [N] bool, it ends a text
    stop: Tensor  # [N] fp32, the largest logit of a token that ends a text
    stop_token: Tensor  # [N] int64
    filled: Tensor  # [N] fp32, the largest logit of a token that may stand behind the end


class Searches(NamedTuple):
    """R canvases whose best texts are searched; their rows lie one behind the other."""

    first_row: Tensor  # [R] int32
    length: Tensor  # [R] int32
    table: Tensor  # [R] int32; NO_TABLE: anything may stand there
    state: Tensor  # [R] int32, before the first position
    budget: Tensor  # [R] int32, tokens that the text may have from there
    thoughts_end: Tensor  # [R] int32, the place at which thoughts end at the latest
    request_of: Tensor  # [N] int64, the canvas of each row
    most_rows: int  # of one canvas
    num_states: int  # of the tables of all canvases, or more


class Paths(NamedTuple):
    """The best paths of N rows in R canvases; the likeliest tokens where there is no table."""

    tokens: Tensor  # [N] int64
    states: Tensor  # [N] int32, before each position; STOPPED behind the stop
    end: Tensor  # [R] int32, the state behind the last position
    score: Tensor  # [R] fp64, at most 0: what the path has less than the likeliest tokens


def pointers(parts: Any) -> Any:
    """The tensors of a NamedTuple, as a kernel's argument; None in place of the numbers.

    For a number in a tuple that is 1 or a multiple of 16, Triton would compile a kernel of its own.
    """
    return parts._make(part if isinstance(part, Tensor) else None for part in parts)


def padded(lists: list[np.ndarray]) -> list[list[int]]:
    """Lists of one length, by repeating the last number of each."""
    longest = max(map(len, lists))
    return [[*one.tolist(), *[int(one[-1])] * (longest - len(one))] for one in lists]
