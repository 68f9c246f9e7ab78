"""Batches of canvases under several grammars, with hostile logits, for tests of their kernels."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dllm.grammar.constraint import Constraint, Thoughts
from dllm.grammar.device import NO_TABLE, PackedTables, Searches, pack
from dllm.grammar.table import Table
from dllm.grammar.viterbi import STOPPED

VOCAB = 300  # more than a chunk
UNLIMITED = (1 << 30) - 1
STOP, OTHER_STOP, PADDING = 7, 11, 13


def random_table(seed: int, num_states: int, num_classes: int, density: float) -> Table:
    """Every state leads to one that accepts: each has an edge to the one before it."""
    rng = np.random.default_rng(seed)
    following = rng.integers(0, num_states, (num_states, num_classes)).astype(np.int32)
    following[rng.random(following.shape) > density] = -1
    following[np.arange(1, num_states), rng.integers(0, num_classes, num_states - 1)] = np.arange(
        num_states - 1
    )
    if num_states > 2:  # one that many edges lead to
        following[:, 0] = np.where(rng.random(num_states) < 0.8, num_states // 2, following[:, 0])
    following[0, num_classes - 1] = num_states - 1
    accepts = rng.random(num_states) < 0.2
    accepts[0] = True
    left = np.where(accepts, 0, num_states).astype(np.int32)
    for _ in range(num_states):
        behind = np.where(following >= 0, left[following], num_states)
        left = np.minimum(left, behind.min(axis=1) + 1).astype(np.int32)
    class_of = rng.integers(0, num_classes, VOCAB).astype(np.int32)
    class_of[rng.random(VOCAB) < 0.3] = -1
    class_of[20 : 20 + num_classes] = np.arange(num_classes)  # none is empty
    class_of[[STOP, OTHER_STOP, PADDING]] = -1
    return Table(class_of, following, accepts, left)


SIZES = ((1, 1, 1.0), (5, 4, 0.5), (40, 17, 0.3), (130, 6, 0.9))


def tables_of(seed: int) -> list[Table]:
    """Tables of very different sizes."""
    found = [random_table(seed + number, *size) for number, size in enumerate(SIZES)]
    thinking, _ = Constraint(found[2], Thoughts(30, (31, 32))).with_start((STOP,), (PADDING,))
    return [*found, thinking]


class Batch(NamedTuple):
    """Canvases of different widths, tables and states; some without a table, some over."""

    logits: Tensor  # [N, VOCAB]
    tables: PackedTables
    canvases: Searches
    canvas_of: Tensor  # [N] int64
    table_of: Tensor  # [N] int32
    stops: Tensor  # [R, 2] int64
    fillers: Tensor  # [R, 3] int64


def batch(seed: int, num_canvases: int = 7, dtype: torch.dtype = torch.float32) -> Batch:
    """Rows of ties, of -inf, of -0 and 0, and of one NaN among them."""
    rng = np.random.default_rng(seed)
    tables = tables_of(seed)
    lengths = rng.integers(1, 9, num_canvases)
    which = rng.integers(-1, len(tables), num_canvases)
    which[:4] = NO_TABLE, 3, 4, 4
    states, budgets, thoughts = [], [], []
    for table in which:
        state = int(rng.integers(0, len(tables[table].accepts))) if table >= 0 else 0
        if table == 4 and rng.random() < 0.8:
            state = len(tables[table].accepts) - 1
        thoughts.append(int(rng.integers(0, 9)) if table == 4 else UNLIMITED)
        left = int(tables[table].left[state]) if table >= 0 else 0
        is_over = table >= 0 and rng.random() < 0.15
        states.append(STOPPED if is_over else state)
        budgets.append(UNLIMITED if rng.random() < 0.3 else left + int(rng.integers(0, 4)))
    logits = torch.from_numpy(rng.normal(0, 3, (int(lengths.sum()), VOCAB)))
    kinds = rng.integers(0, 8, len(logits))
    for row, kind in enumerate(kinds):
        if kind == 0:
            logits[row] = logits[row].round()
        elif kind == 1:
            logits[row] = -torch.inf
            logits[row, rng.integers(0, VOCAB, 3)] = 1.0
        elif kind == 2:
            logits[row] = torch.where(logits[row] > 0, 0.0, -0.0)
        elif kind == 3:
            logits[row, STOP] = 30.0
    canvas_of = torch.from_numpy(np.repeat(np.arange(num_canvases), lengths))
    table_of = torch.from_numpy(which.astype(np.int32))
    first = np.cumsum(lengths) - lengths
    ints = [torch.from_numpy(np.array(x, dtype=np.int32)) for x in (first, lengths)]
    rest = [torch.tensor(x, dtype=torch.int32) for x in (states, budgets, thoughts)]
    stops = torch.tensor([[STOP, OTHER_STOP]]).repeat(num_canvases, 1)
    stops[::2, 1] = STOP
    fillers = torch.cat([stops, torch.full((num_canvases, 1), PADDING)], dim=1)
    return Batch(
        logits.to(dtype),
        pack(tables),
        Searches(
            *ints,
            table_of,
            *rest,
            canvas_of,
            most_rows=int(lengths.max()),
            num_states=sum(len(tables[table].accepts) for table in which if table >= 0),
        ),
        canvas_of,
        table_of[canvas_of],
        stops,
        fillers,
    )
