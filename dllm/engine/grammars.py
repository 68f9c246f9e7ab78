"""CanvasGrammars: keeps canvases of structured outputs inside the language of their grammar.

In every denoise step, behind the logit edits and in front of the algorithm's decisions:

    logits -> scores (the algorithm's) -> best path through the grammar's table
                                      -> mask of each row of logits along the path
                                      -> the tokens of the path

So entropies, samples, self-conditioning and logprobs are of the tokens that the grammar allows, and
what would be emitted is always the beginning of an allowed text. A slot's state moves when its
canvas is emitted. Before that each step solves the whole canvas again: nothing depends on noise.

`grammar.viterbi` solves a canvas on a CPU, `grammar.kernels` all on a GPU, where states stay.
"""

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.input_batch import InputBatch

from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.emitted_blocks import capacity_for, most_searched
from dllm.engine.thoughts import Thought
from dllm.grammar.automaton import START
from dllm.grammar.constraint import Constraint, Grammar, SlotGrammar
from dllm.grammar.device import (
    NO_TABLE,
    NOTHING,
    OverCapacity,
    PackedTables,
    Paths,
    Searches,
    Sizes,
    TablePool,
    padded,
)
from dllm.grammar.table import MOST_CLASSES, MOST_LABELS, Table
from dllm.grammar.viterbi import STOPPED, UNLIMITED, Path, budget_of
from dllm.ops.dispatch import GRAMMAR_PATHS, WRONG_KERNELS
from dllm.ops.staging import to_device
from dllm.settings.denoising import NO_TOKEN
from dllm.settings.request import grammar_of

# Classes and labels of a table with thoughts in front, with a few forbidden tokens.
LARGEST = MOST_CLASSES + 64, MOST_LABELS + 2
KEPT_GRAMMARS = 8  # that no request has any more, unpacked

# The scores of some rows of logits: ``[n, V]`` fp32 (``DenoisingAlgorithm.scores_of_texts``).
Scores = Callable[[slice], torch.Tensor]

logger = logging.getLogger(__name__)


class Written(NamedTuple):
    """The result of a step."""

    chosen: torch.Tensor  # [N] int64, the texts; NO_TOKEN behind their ends, and without a grammar
    paths: Any = None  # what ``advance`` reads; None if no request has a grammar


class CanvasGrammars(ABC):
    """The grammars of the requests in all slots. ``has_grammar``: ``[slots]``, for the host."""

    def __init__(self, vllm_config: VllmConfig, num_slots: int) -> None:
        self._longest = vllm_config.model_config.max_model_len
        model = vllm_config.model_config
        padding = model.hf_text_config.pad_token_id  # some configurations have -1
        is_token = padding is not None and 0 <= padding < model.get_vocab_size()
        self._fillers = (int(padding),) if is_token else ()
        self.slots: list[SlotGrammar | None] = [None] * num_slots
        self.has_grammar = np.zeros(num_slots, dtype=bool)
        self._slot_of: dict[str, int] = {}
        # Equal grammars are unpacked once, as long as a request has them or they were used last.
        self._unpacked: WeakValueDictionary[Any, Grammar] = WeakValueDictionary()
        self._last: deque[Grammar] = deque(maxlen=KEPT_GRAMMARS)

    def add_request(self, slot: int, data: NewRequestData, thought: Thought | None) -> None:
        """A request that contradicts its grammar goes on without, until the engine core ends it.

        ``thought`` is open behind the prompt.
        """
        self._put(slot, None)
        params = data.sampling_params
        if params is None or (serialized := grammar_of(params)) is None:
            return
        try:
            self._put(slot, self._read(serialized, data, thought))
            self._slot_of[data.req_id] = slot
        except Exception:
            logger.exception("Request %s has a grammar that cannot be kept to", data.req_id)

    def remove_request(self, req_id: str) -> None:
        if (slot := self._slot_of.pop(req_id, None)) is not None:
            self._put(slot, None)

    def _put(self, slot: int, found: SlotGrammar | None) -> None:
        self.has_grammar[slot] = found is not None
        self.slots[slot] = found

    def _read(
        self, serialized: bytes, data: NewRequestData, thought: Thought | None
    ) -> SlotGrammar:
        params = data.sampling_params
        assert params is not None
        key = serialized, tuple(sorted(params.all_stop_token_ids))
        if (grammar := self._unpacked.get(key)) is None:
            grammar = self._unpacked[key] = Grammar(*key, self._fillers)
        self._last.append(grammar)
        generated = (data.prefill_token_ids or [])[data.prompt_len :]
        states, num_valid = grammar.canvas.read(generated, grammar.start, UNLIMITED)
        if num_valid < len(generated):
            raise ValueError("what was emitted is not the beginning of an allowed text")
        most = params.max_tokens if params.max_tokens is not None else self._longest
        end = min(data.prompt_len + most, self._longest)
        if _is_free(params, grammar):
            end = UNLIMITED
        return SlotGrammar(grammar, states[-1], end, thought.end_by if thought else UNLIMITED)

    @contextmanager
    def largest(self) -> Iterator[None]:
        """Inside, while there are no requests, a step takes as much memory as any ever will."""
        yield

    def apply_staged_writes(self) -> None:  # noqa: B027  nothing is stored for the host's
        """Send what ``add_request`` stored to the device."""

    def prepare(self, batch: InputBatch, rows: CanvasRows) -> Any:
        """Does not wait for the device."""
        if not self.has_grammar[batch.idx_mapping_np[: batch.num_reqs]].any():
            return None
        return self._prepare(batch, rows)

    @abstractmethod
    def _prepare(self, batch: InputBatch, rows: CanvasRows) -> Any: ...

    @abstractmethod
    def write_(
        self, logits: torch.Tensor, scores: Scores, rows: CanvasRows, prepared: Any
    ) -> Written:
        """Mask canvases in ``logits`` ``[N, vocab]`` fp32, along the path with the largest sum of
        ``scores``.
        """

    @abstractmethod
    def advance(self, written: Written, num_emitted: torch.Tensor, prepared: Any) -> None:
        """Move the states of slots behind what is emitted: ``num_emitted`` ``[R]`` or longer."""


class HostGrammars(CanvasGrammars):
    """Canvases are solved one after the other, on the host."""

    def _prepare(self, batch: InputBatch, rows: CanvasRows) -> list[tuple[int, int, SlotGrammar]]:
        """(row, its first row of logits, grammar)."""
        slots, starts = batch.idx_mapping_np[: batch.num_reqs], batch.cu_num_logits_np
        return [
            (row, int(starts[row]), found)
            for row, slot in enumerate(slots.tolist())
            if (found := self.slots[slot])
        ]

    def write_(
        self,
        logits: torch.Tensor,
        scores: Scores,
        rows: CanvasRows,
        prepared: list[tuple[int, int, SlotGrammar]],
    ) -> Written:
        widths, canvas_starts = rows.widths.tolist(), rows.starts.tolist()
        chosen = np.full(len(logits), NO_TOKEN, dtype=np.int64)
        paths: dict[int, Path] = {}
        for row, low, grammar in prepared:
            width = widths[row]
            if not width:
                continue
            high = low + width
            canvas, of_canvas = grammar.grammar.canvas, logits[low:high]
            start = canvas_starts[row]
            tokens_left, thoughts_end = grammar.end - start, max(grammar.thoughts_end - start, 0)
            budget = budget_of(canvas.table, grammar.state, tokens_left)
            of_texts = scores(slice(low, high)).cpu().numpy()
            path = canvas.best_path(of_texts, grammar.state, budget, thoughts_end)
            for place, is_forbidden in enumerate(canvas.forbidden(path, budget, thoughts_end)):
                is_out = torch.from_numpy(is_forbidden).to(logits.device)
                of_canvas[place].masked_fill_(is_out, -torch.inf)
            chosen[low:high] = np.where(path.states[:-1] == STOPPED, NO_TOKEN, path.tokens)
            paths[row] = path
        return Written(torch.from_numpy(chosen).to(logits.device), paths)

    def advance(
        self,
        written: Written,
        num_emitted: torch.Tensor,
        prepared: list[tuple[int, int, SlotGrammar]],
    ) -> None:
        counts = num_emitted.tolist()
        for row, _, grammar in prepared:
            if counts[row]:
                grammar.state = int(written.paths[row].states[counts[row]])


class PreparedTables(NamedTuple):
    """What kernels need to know about the R requests of a batch."""

    tables: PackedTables
    table_of: torch.Tensor  # [R] int32, NO_TABLE without a grammar or a canvas
    slots: torch.Tensor  # [R] int64
    tokens_left: torch.Tensor  # [R] int64, of the answer from its canvas on
    thoughts_end: torch.Tensor  # [R] int32, place in the canvas at which thoughts end at the latest
    # [R, M] int64, ascending; the last one is repeated.
    stops: torch.Tensor
    fillers: torch.Tensor
    # [R] int32, of each canvas among the rows of logits.
    first_row: torch.Tensor
    length: torch.Tensor
    most_rows: int  # of one canvas
    num_states: int  # of all tables, equal ones counted for each request


class DeviceGrammars(CanvasGrammars):
    """All canvases are solved at once, by kernels. Does not wait for the device."""

    def __init__(self, vllm_config: VllmConfig, num_slots: int, device: torch.device) -> None:
        super().__init__(vllm_config, num_slots)
        self._device = device
        self._states = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self._staged: dict[int, int] = {}  # states of new requests, by slot
        vocab_size = vllm_config.model_config.get_vocab_size()
        self._capacity = capacity_for(num_slots, vocab_size)
        self._pool = TablePool(self._capacity, vocab_size, device)
        self._most_searched = most_searched(num_slots)
        # Classes, labels, and states of all canvases, that kernels have room for.
        self._least = 0, 0, 0

    def _put(self, slot: int, found: SlotGrammar | None) -> None:
        super()._put(slot, found)
        self._staged[slot] = found.state if found else 0
        # The scheduler lets in no more than there is room for.
        asked = self._grammars() if found else ()
        needed = NOTHING.plus(*(Sizes.of(grammar.canvas.table) for grammar in asked))
        num_states = sum(len(one.grammar.canvas.table.accepts) for one in self.slots if one)
        if not needed.fits(self._capacity) or num_states > self._most_searched:
            super()._put(slot, None)
            raise OverCapacity(
                f"tables of all requests need {needed}, and {num_states} states to be searched; "
                f"there is room for {self._capacity} and {self._most_searched}"
            )

    def _grammars(self) -> set[Grammar]:
        return {one.grammar for one in self.slots if one}

    def apply_staged_writes(self) -> None:
        if self._staged:
            slots, states = to_device(np.array([*self._staged.items()]).T.copy(), self._device)
            self._states[slots] = states.int()
            self._staged = {}

    @contextmanager
    def largest(self) -> Iterator[None]:
        serialized = Constraint.serialize(Table.of_any_text(self._pool.vocab_size).to_bytes(), None)
        grammar = Grammar(serialized, stops=(0,), fillers=())
        self._least = *LARGEST, self._most_searched
        for slot in range(len(self.slots)):
            self._put(slot, SlotGrammar(grammar, grammar.start, self._longest))
        try:
            yield
        finally:
            self._least = 0, 0, 0
            for slot in range(len(self.slots)):
                self._put(slot, None)

    def _prepare(self, batch: InputBatch, rows: CanvasRows) -> PreparedTables:
        num_reqs = batch.num_reqs  # `rows` may have an empty one more
        found = [self.slots[slot] for slot in batch.idx_mapping_np[:num_reqs].tolist()]
        # Of all slots, not of this batch alone: the same for every tile of an engine step.
        grammars = [*self._grammars()]
        tables, numbers = self._pool.place([one.canvas.table for one in grammars])
        number = dict(zip(grammars, numbers, strict=True))
        of_row = [(one.grammar if one else grammars[0]).canvas for one in found]  # none: any one

        def sent(values: Any, dtype: type[np.integer]) -> torch.Tensor:
            return to_device(np.array(values, dtype), self._device)

        num_states = sum(len(one.grammar.canvas.table.accepts) for one in found if one)
        starts, widths = batch.cu_num_logits_np[: num_reqs + 1], rows.widths[:num_reqs]
        table_of = sent([number[o.grammar] if o else NO_TABLE for o in found], np.int32)
        ends = sent([[o.end, o.thoughts_end] if o else [0, UNLIMITED] for o in found], np.int64)
        ends -= rows.starts[:num_reqs, None]
        return PreparedTables(
            tables=tables._replace(
                most_classes=max(tables.most_classes, self._least[0]),
                most_labels=max(tables.most_labels, self._least[1]),
            ),
            # A row that only writes a block's KV has logits, but no canvas (`engine.pending`).
            table_of=torch.where(widths > 0, table_of, NO_TABLE),
            slots=rows.slots[:num_reqs],
            tokens_left=ends[:, 0],
            thoughts_end=ends[:, 1].clamp(min=0).int(),
            stops=sent(padded([canvas.stops for canvas in of_row]), np.int64),
            fillers=sent(padded([canvas.fillers for canvas in of_row]), np.int64),
            first_row=sent(starts[:-1], np.int32),
            length=widths.int(),
            most_rows=max(int(np.diff(starts).max()), 1),
            num_states=max(num_states, self._least[2]),
        )

    def write_(
        self, logits: torch.Tensor, scores: Scores, rows: CanvasRows, prepared: PreparedTables
    ) -> Written:
        state = self._states[prepared.slots]
        canvases = Searches(
            first_row=prepared.first_row,
            length=prepared.length,
            table=prepared.table_of,
            state=state,
            budget=_budget(prepared, state),
            thoughts_end=prepared.thoughts_end,
            request_of=rows.request_of,
            most_rows=prepared.most_rows,
            num_states=prepared.num_states,
        )
        paths = write_paths(
            logits, scores(slice(None)), prepared.tables, canvases, prepared.stops, prepared.fillers
        )
        is_free = (prepared.table_of[rows.request_of] == NO_TABLE) | (paths.states == STOPPED)
        return Written(torch.where(is_free, NO_TOKEN, paths.tokens), paths)

    def advance(
        self, written: Written, num_emitted: torch.Tensor, prepared: PreparedTables
    ) -> None:
        """Canvases with a grammar are emitted whole: none has bad words."""
        paths: Paths = written.paths
        before = self._states[prepared.slots]
        is_emitted = num_emitted[: len(before)] > 0
        self._states[prepared.slots] = torch.where(is_emitted, paths.end, before)


def _is_free(params: SamplingParams, grammar: Grammar) -> bool:
    """Whether text is free around tags, as around calls of tools; ``max_tokens`` may cut it.

    Else the end of sequence would stand in the last place of an answer that is not complete.
    """
    asked = params.structured_outputs
    has_tags = asked is not None and asked.structural_tag is not None
    return has_tags and bool(grammar.canvas.table.accepts[START])


def _budget(prepared: PreparedTables, state: torch.Tensor) -> torch.Tensor:
    """``[R]`` int32, as ``viterbi.budget_of``; ``state``: ``[R]``."""
    tables, tokens_left = prepared.tables, prepared.tokens_left
    first_state = tables.first_state[prepared.table_of.clamp(min=0).long()]
    left = tables.left[(first_state + state.clamp(min=0)).long()]
    has_room = (left < tokens_left) & (state >= 0)  # for the token that ends the text
    can_end = (left <= tokens_left) | (state < 0)
    return torch.where(can_end, tokens_left - has_room.long(), UNLIMITED).int()


def write_paths(*given: Any) -> Paths:
    """Its module needs Triton."""
    from dllm.grammar import kernels

    return kernels.write_paths(*given)


def grammars_for(
    vllm_config: VllmConfig, num_slots: int, device: torch.device
) -> HostGrammars | DeviceGrammars:
    """Where canvases are solved: on the device, unless it is a CPU or gets the kernels wrong."""
    if device.type == "cpu" or GRAMMAR_PATHS in WRONG_KERNELS:
        return HostGrammars(vllm_config, num_slots)
    return DeviceGrammars(vllm_config, num_slots, device)
