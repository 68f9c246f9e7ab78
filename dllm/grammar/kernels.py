"""Best paths and row masks on a GPU, in Triton (defined in `device` and `viterbi`).

Best paths: one program a canvas. A first kernel reads the likeliest tokens; if they are a text that
is all. Else, position by position, the second one goes over the edges, which are sorted by the
state that they lead to, in blocks. A segmented scan finds the best edge into each state; a state
whose edges begin in one block and end in another is carried over. Nothing but the scores is kept:
on the way back the best edge into the path's own state is found again.

Row masks: one program for a block of tokens of one row. What is allowed is not written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dllm.grammar import automaton, viterbi
from dllm.grammar.class_maxima import HIGHEST, NO_TABLE, Maxima, class_maxima, label_maxima
from dllm.grammar.device import Ends, PackedTables, Paths, Searches, pointers

DEAD = tl.constexpr(automaton.DEAD)
STOPPED = tl.constexpr(viterbi.STOPPED)
WORST = tl.constexpr(viterbi.WORST)
LOWEST = tl.constexpr(viterbi.LOWEST)
NEVER = tl.constexpr(2**31 - 1)


@dataclass(frozen=True)
class PathTiles:
    """How the kernels cut their work; powers of two. No result depends on it."""

    edges: int = 1024
    tokens: int = 4096  # of a program of row masks
    num_warps: int = 8


class KeptScores(NamedTuple):
    """What the search keeps of R canvases: the best scores in front of each of P places."""

    at: Tensor  # [sum of P * S] fp64, of each state; -inf where the search begins
    first: Tensor  # [R] int64, the states of the canvases in front of each one
    accepted: Tensor  # [R, P] fp64, of the states that accept
    accepted_state: Tensor  # [R, P] int32, the one with it


def write_paths(
    logits: Tensor,
    scores: Tensor,
    tables: PackedTables,
    canvases: Searches,
    stops: Tensor,
    fillers: Tensor,
    cut: PathTiles = PathTiles(),
) -> Paths:
    """The best path of each canvas; its rows are masked along it. Does not wait for the GPU.

    Rows without a table, and those behind a stop, keep every bit.

    Args:
        logits: [N, V] fp32 or bf16, changed in place.
        scores: [N, V] fp32 or bf16, may be the logits. NaN counts as -inf.
        stops: [R, M] int64, tokens that end a text, in ascending order; filled up by repeating the
            last one.
        fillers: [R, M] int64 likewise, the stops among them.
    """
    request_of = canvases.request_of
    table_of, its_stops = canvases.table[request_of], stops[request_of]
    maxima = class_maxima(scores, tables, table_of)
    labels = label_maxima(maxima, tables, table_of)
    likeliest = scores.argmax(dim=1)
    stop, which = scores.gather(1, its_stops).float().max(dim=1)
    found = Ends(
        likeliest=likeliest,
        peak=scores.gather(1, likeliest[:, None])[:, 0].float(),
        is_stop=(its_stops == likeliest[:, None]).any(dim=1),
        stop=stop,
        stop_token=its_stops.gather(1, which[:, None])[:, 0],
        filled=scores.gather(1, fillers[request_of]).float().amax(dim=1),
    )
    paths = best_paths_kernels(maxima, labels, found, tables, canvases, cut)
    places = torch.arange(len(request_of), device=logits.device) - canvases.first_row[request_of]
    budgets = (canvases.budget[request_of] - places).int()
    goes_on = places < canvases.thoughts_end[request_of]
    mask_rows_kernel(logits, tables, table_of, paths.states, budgets, goes_on, its_stops, cut)
    return paths


def best_paths_kernels(
    maxima: Maxima,
    labels: Maxima,
    found: Ends,
    tables: PackedTables,
    canvases: Searches,
    cut: PathTiles,
) -> Paths:
    """The allowed text with the highest score on each canvas.

    A canvas whose likeliest tokens are a text stays as it is.
    """
    num_rows, num_canvases = len(found.likeliest), len(canvases.table)
    device = found.likeliest.device
    paths = Paths(
        tokens=torch.empty_like(found.likeliest),
        states=torch.empty(num_rows, dtype=torch.int32, device=device),
        end=torch.empty_like(canvases.state),
        score=torch.empty(num_canvases, dtype=torch.float64, device=device),
    )
    if not num_canvases:
        return paths
    shape = num_canvases, canvases.most_rows + 1
    has_table, table = canvases.table != NO_TABLE.value, canvases.table.clamp(min=0).long()
    sizes = tables.first_state[table + 1] - tables.first_state[table]
    behind = torch.where(has_table, sizes, 0).cumsum(0)
    num_scores = canvases.num_states * shape[1]
    kept = KeptScores(
        torch.full((num_scores,), -torch.inf, dtype=torch.float64, device=device),
        torch.where(has_table, behind - sizes, 0),
        torch.empty(shape, dtype=torch.float64, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
    )
    is_text = torch.empty(num_canvases, dtype=torch.int8, device=device)
    inputs = found, pointers(canvases), pointers(tables)
    _read_kernel[(num_canvases,)](*inputs, is_text, paths, tables.class_of.shape[1], num_warps=1)
    _search_kernel[(num_canvases,)](
        *inputs, is_text, paths, maxima.member, labels, kept,
        maxima.member.shape[1], labels.best.shape[1], shape[1],
        BLOCK=cut.edges, num_warps=cut.num_warps,
    )  # fmt: skip
    return paths


@triton.jit
def _read_kernel(found, canvases, tables, is_text, paths, vocab_size):
    """Read the likeliest tokens of one canvas; ``is_text`` says whether they are its path.

    Grid: (canvases,).
    """
    canvas = tl.program_id(0)
    table = tl.load(canvases.table + canvas)
    row = tl.load(canvases.first_row + canvas).to(tl.int64)
    num_places = tl.load(canvases.length + canvas)
    has_table = table != NO_TABLE
    table = tl.maximum(table, 0)
    budget = tl.load(canvases.budget + canvas)
    start = tl.load(canvases.state + canvas)
    state = tl.where(has_table, start, STOPPED)
    first = tl.load(tables.first_state + table)
    kinds = tl.load(tables.num_classes + table)
    matrix = tables.next + tl.load(tables.first_next + table)
    thinking = tl.load(tables.first_state + table + 1) - first - 1
    last_thought = tl.load(canvases.thoughts_end + canvas)
    for place in range(num_places):
        token = tl.load(found.likeliest + row + place)
        tl.store(paths.tokens + row + place, token)
        tl.store(paths.states + row + place, state)
        kind = tl.load(tables.class_of + table.to(tl.int64) * vocab_size + token)
        is_open = state >= 0
        accepting = tl.load(tables.accepts + first + state, mask=is_open, other=0) != 0
        is_over = is_open & accepting & (tl.load(found.is_stop + row + place) != 0)
        target = tl.load(matrix + state * kinds + kind, mask=is_open & (kind >= 0), other=DEAD)
        needed = tl.load(tables.left + first + target, mask=target >= 0, other=NEVER)
        target = tl.where(needed <= budget - place - 1, target, DEAD)
        no_longer = tl.where(place < last_thought, DEAD, thinking)
        target = tl.where(target == no_longer, DEAD, target)
        state = tl.where(is_open, tl.where(is_over, STOPPED, target), state)
    tl.store(paths.end + canvas, tl.where(has_table, state, start))
    tl.store(paths.score + canvas, 0.0)
    tl.store(is_text + canvas, (state != DEAD).to(tl.int8))


@triton.jit
def _better_of_segment(value, target, next_value, next_target):
    """The larger of two scores of edges into one state; the second one if the states differ."""
    same = tl.where(value > next_value, value, next_value)
    return tl.where(target == next_target, same, next_value), next_target


@triton.jit
def _finite(score):
    return tl.where(score > LOWEST, score.to(tl.float64), WORST)  # also for NaN


@triton.jit(do_not_specialize=["most_classes", "most_labels", "num_places_kept"])
def _search_kernel(
    found, canvases, tables, is_text, paths, class_token, labels, kept,
    most_classes, most_labels, num_places_kept, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find and write the best path of one canvas whose likeliest tokens are no text.

    Forwards the best score of each state, then where the text stops, then backwards the path.
    Grid: (canvases,).
    """
    canvas = tl.program_id(0)
    if tl.load(is_text + canvas) != 0:
        return
    table = tl.load(canvases.table + canvas)
    row = tl.load(canvases.first_row + canvas).to(tl.int64)
    num_places = tl.load(canvases.length + canvas)
    budget = tl.load(canvases.budget + canvas)
    first = tl.load(tables.first_state + table)
    num_states = tl.load(tables.first_state + table + 1) - first
    last_thought = tl.load(canvases.thoughts_end + canvas)
    thinking = num_states - 1
    low_edge = tl.load(tables.first_edge + table)
    high_edge = tl.load(tables.first_edge + table + 1)
    # Offsets within one canvas fit 32 bits.
    at = kept.at + tl.load(kept.first + canvas) * num_places_kept
    accepted = kept.accepted + canvas * num_places_kept
    accepted_state = kept.accepted_state + canvas * num_places_kept
    lane = tl.arange(0, BLOCK)
    tl.store(at + tl.load(canvases.state + canvas), 0.0)
    tl.debug_barrier()  # what other threads have written is there

    for place in range(num_places):
        here = at + place * num_states
        highest, which = _best_state(here, tables.accepts + first, num_states, True, BLOCK)
        tl.store(accepted + place, highest)
        tl.store(accepted_state + place, which)
        top = tl.load(found.peak + row + place)
        of_row = labels.best + (row + place) * most_labels
        no_longer = tl.where(place < last_thought, -1, thinking)
        held_behind = tl.where(place == last_thought, thinking, -1)
        carried = tl.full((), float("-inf"), tl.float64)
        carried_to = tl.full((), -2, tl.int32)
        for begin in range(low_edge, high_edge, BLOCK):
            edge = begin + lane
            is_edge = edge < high_edge
            to = tl.load(tables.target + edge, mask=is_edge, other=-3)
            origin = tl.load(tables.source + edge, mask=is_edge, other=0)
            weight = tl.load(of_row + tl.load(tables.label + edge, mask=is_edge, other=0)) - top
            is_held = (origin == held_behind) & (to != thinking)
            weight = tl.where(is_held, 0.0, _finite(weight))
            value = tl.where(is_edge, tl.load(here + origin) + weight, float("-inf"))
            value, _ = tl.associative_scan((value, to), 0, _better_of_segment)
            value = tl.where((to == carried_to) & (carried > value), carried, value)
            needed = tl.load(tables.left + first + to, mask=is_edge, other=NEVER)
            is_end = tl.load(tables.is_last + edge, mask=is_edge, other=0) != 0
            fits = is_end & (needed <= budget - place - 1) & (to != no_longer)
            tl.store(here + num_states + to, value, mask=fits)
            carried = tl.max(tl.where(lane == BLOCK - 1, value, float("-inf")), axis=0)
            carried_to = tl.max(tl.where(lane == BLOCK - 1, to, -3), axis=0)
        tl.debug_barrier()

    behind = at + num_places * num_states
    total, state = _best_state(behind, tables.accepts + first, num_states, False, BLOCK)
    rest = tl.full((), 0.0, tl.float64)
    ending = tl.full((), float("-inf"), tl.float64)
    stop_place = num_places * 0  # 0, of the type that it has after the loop
    for step in range(num_places):
        place = num_places - 1 - step
        top = tl.load(found.peak + row + place)
        value = tl.load(accepted + place) + _finite(tl.load(found.stop + row + place) - top) + rest
        stop_place = tl.where(value >= ending, place, stop_place)
        ending = tl.where(value >= ending, value, ending)
        rest += _finite(tl.load(found.filled + row + place) - top)
    stops = ending >= total
    stop_place = tl.where(stops, stop_place, num_places)
    tl.store(paths.score + canvas, tl.where(stops, ending, total))
    tl.store(paths.end + canvas, tl.where(stops, STOPPED, state))
    state = tl.where(stops, tl.load(accepted_state + stop_place, mask=stops, other=0), state)
    its_stop = tl.load(found.stop_token + row + stop_place, mask=stops, other=0)
    tl.store(paths.tokens + row + stop_place, its_stop, mask=stops)
    tl.store(paths.states + row + stop_place, state, mask=stops)

    for step in range(num_places):
        place = num_places - 1 - step
        tl.store(paths.states + row + place, STOPPED, mask=place > stop_place)
        if place < stop_place:
            here = at + place * num_states
            top = tl.load(found.peak + row + place)
            of_row = (row + place) * most_labels
            held_behind = tl.where(place == last_thought, thinking, -1)
            low = tl.load(tables.into + first + state)
            high = tl.load(tables.into + first + state + 1)
            highest = tl.full((), float("-inf"), tl.float64)
            chosen = low
            for begin in range(low, high, BLOCK):
                edge = begin + lane
                is_edge = edge < high
                origin = tl.load(tables.source + edge, mask=is_edge, other=0)
                label = tl.load(tables.label + edge, mask=is_edge, other=0)
                weight = tl.load(labels.best + of_row + label) - top
                is_held = (origin == held_behind) & (state != thinking)
                value = tl.load(here + origin) + tl.where(is_held, 0.0, _finite(weight))
                value = tl.where(is_edge, value, float("-inf"))
                largest = tl.max(value, axis=0)
                earliest = tl.min(tl.where(value == largest, edge, HIGHEST), axis=0)
                chosen = tl.where(largest > highest, earliest, chosen)
                highest = tl.where(largest > highest, largest, highest)
            kind = tl.load(labels.member + of_row + tl.load(tables.label + chosen))
            token = tl.load(class_token + (row + place) * most_classes + kind)
            tl.store(paths.tokens + row + place, token.to(tl.int64))
            state = tl.load(tables.source + chosen)
            tl.store(paths.states + row + place, state)


@triton.jit
def _best_state(here, accepts, num_states, ONLY_ACCEPTING: tl.constexpr, BLOCK: tl.constexpr):
    """(the highest score, the lowest state with it)."""
    highest = tl.full((), float("-inf"), tl.float64)
    which = tl.full((), 0, tl.int32)
    for begin in range(0, num_states, BLOCK):
        state = begin + tl.arange(0, BLOCK)
        is_one = state < num_states
        if ONLY_ACCEPTING:
            is_one = is_one & (tl.load(accepts + state, mask=is_one, other=0) != 0)
        value = tl.load(here + state, mask=is_one, other=float("-inf"))
        largest = tl.max(value, axis=0)
        lowest = tl.min(tl.where(value == largest, state, HIGHEST), axis=0)
        which = tl.where(largest > highest, lowest, which)
        highest = tl.where(largest > highest, largest, highest)
    return highest, which


def mask_rows_kernel(
    logits: Tensor,
    tables: PackedTables,
    table_of: Tensor,
    states: Tensor,
    budgets: Tensor,
    goes_on: Tensor,
    stops: Tensor,
    cut: PathTiles,
) -> None:
    """Set logits to -inf, in place, where a token may not follow its row's state.

    Args:
        table_of: [N] int32, `NO_TABLE` for rows without one.
        states: [N] int32, before each row (`Paths.states`).
        budgets: [N] int32, tokens that the text may have from there.
        goes_on: [N] bool, thoughts may go on behind the row.
        stops: [N, M] int64, tokens that end a text, allowed where the state accepts.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and stops.is_contiguous(), (logits.stride(), stops.stride())
    if num_rows:
        _mask_kernel[(num_rows, triton.cdiv(vocab_size, cut.tokens))](
            logits, logits.stride(0), table_of, states, budgets, goes_on, stops, stops.shape[1],
            pointers(tables), vocab_size, BLOCK=cut.tokens, num_warps=cut.num_warps,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_stops"])
def _mask_kernel(
    logits, row_stride, table_of, states, budgets, goes_on, stops, num_stops, tables, vocab_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Mask one block of tokens of one row. Grid: (rows, blocks of tokens)."""
    row = tl.program_id(0).to(tl.int64)
    table = tl.load(table_of + row)
    state = tl.load(states + row)
    if (table == NO_TABLE) | (state == STOPPED):
        return
    first = tl.load(tables.first_state + table)
    kinds = tl.load(tables.num_classes + table)
    matrix = tables.next + tl.load(tables.first_next + table) + state * kinds
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocab_size
    class_of = tables.class_of + table.to(tl.int64) * vocab_size
    kind = tl.load(class_of + token, mask=is_token, other=-1)
    target = tl.load(matrix + kind, mask=kind >= 0, other=DEAD)
    needed = tl.load(tables.left + first + target, mask=target >= 0, other=NEVER)
    thinking = tl.load(tables.first_state + table + 1) - first - 1
    no_longer = tl.where(tl.load(goes_on + row) != 0, DEAD, thinking)
    is_allowed = (needed <= tl.load(budgets + row) - 1) & (target != no_longer)
    may_stop = tl.load(tables.accepts + first + state) != 0
    for index in range(num_stops):
        is_stop = token == tl.load(stops + row * num_stops + index)
        is_allowed = tl.where(is_stop, may_stop, is_allowed)
    forbidden = tl.full((BLOCK,), float("-inf"), logits.dtype.element_ty)
    tl.store(logits + row * row_stride + token, forbidden, mask=is_token & (is_allowed == 0))
