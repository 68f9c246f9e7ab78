"""CanvasGrammars: keeps canvases of structured outputs inside the language of their grammar.

In every denoise step, behind the logit edits and in front of the family's decisions:

    logits of a canvas -> best path through the grammar's table -> mask of each row along the path
                                                                -> the tokens of the path

So entropies, samples, self-conditioning and logprobs are of the tokens that the grammar allows, and
what would be emitted is always the beginning of an allowed text. A slot's state moves when its
canvas is emitted. Before that every step solves the whole canvas again, so that nothing depends on
how many steps there are, or on their noise.

On a CPU each canvas is solved by `grammar.viterbi`. On a GPU all canvases are solved by the kernels
of `ops.grammar_paths`, and states stay on the device.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.input_batch import InputBatch

from dllm.engine.canvas_rows import CanvasRows
from dllm.grammar.constraint import Constraint
from dllm.grammar.viterbi import UNLIMITED, Canvas, Path, budget_of
from dllm.ops.dispatch import best_paths, class_maxima, mask_rows
from dllm.ops.grammar_paths import NO_TABLE, Canvases, PackedTables, Paths, ends, join, pack
from dllm.ops.staging import to_device
from dllm.settings.denoising import NO_TOKEN
from dllm.settings.structured import grammar_of

KEPT_GRAMMARS = 32  # how many are kept unpacked


@dataclass
class SlotGrammar:
    """The grammar of one request.

    Attributes:
        canvas: what it allows.
        state: of the text in front of the request's canvas.
        end: the position in the sequence at which the answer ends at the latest.
    """

    canvas: Canvas
    state: int
    end: int


class Written(NamedTuple):
    """The result of a step: ``chosen`` ``[N]`` int64, NO_TOKEN without a grammar; and paths."""

    chosen: torch.Tensor
    paths: Any


class CanvasGrammars(ABC):
    """The grammars of the requests in all slots.

    Args:
        vllm_config: for the longest sequence, and for the token that pads.
        num_slots: how many requests run at a time.
    """

    def __init__(self, vllm_config: VllmConfig, num_slots: int) -> None:
        self._longest = vllm_config.model_config.max_model_len
        padding = vllm_config.model_config.hf_text_config.pad_token_id
        self._fillers = () if padding is None else (int(padding),)
        self.slots: list[SlotGrammar | None] = [None] * num_slots
        self._has_grammar = np.zeros(num_slots, dtype=bool)
        self._unpacked = lru_cache(KEPT_GRAMMARS)(self._unpack)

    def _unpack(self, shipped: bytes, stops: tuple[int, ...]) -> tuple[Canvas, int]:
        """What a grammar allows on canvases, and the state in which an answer starts."""
        table, start = Constraint.from_bytes(shipped).with_start(stops, self._fillers)
        return Canvas(table, stops, self._fillers), start

    def add_request(self, slot: int, data: NewRequestData) -> None:
        """Store the grammar of a new (or resumed) request, in place of the slot's last one."""
        params = data.sampling_params
        assert params is not None, "a generation request has parameters"
        shipped = grammar_of(params)
        self._has_grammar[slot] = shipped is not None
        self.slots[slot] = None
        if shipped is None:
            return
        canvas, start = self._unpacked(shipped, tuple(sorted(params.all_stop_token_ids)))
        generated = (data.prefill_token_ids or [])[data.prompt_len :]
        states, num_valid = canvas.read(generated, start, UNLIMITED)
        assert num_valid == len(generated), "what was emitted is the beginning of an allowed text"
        most = params.max_tokens if params.max_tokens is not None else self._longest
        end = min(data.prompt_len + most, self._longest)
        self.slots[slot] = SlotGrammar(canvas, states[-1], end)

    def apply_staged_writes(self) -> None:  # noqa: B027  nothing is stored for the host's
        """Send what ``add_request`` stored to the device."""

    def prepare(self, batch: InputBatch, rows: CanvasRows) -> Any:
        """What a visit's steps need to know about a batch; None if no request has a grammar.

        Does not wait for the device.
        """
        if not self._has_grammar[batch.idx_mapping_np[: batch.num_reqs]].any():
            return None
        return self._prepare(batch, rows)

    @abstractmethod
    def _prepare(self, batch: InputBatch, rows: CanvasRows) -> Any:
        """As ``prepare``, for a batch with a grammar."""

    @abstractmethod
    def write(self, logits: torch.Tensor, rows: CanvasRows, prepared: Any) -> Written:
        """Find the best path of every canvas with a grammar, and mask its logits along it.

        Args:
            logits: ``[N, vocab]`` fp32, edited; changed in place.
            rows: where the canvases are in the batch.
            prepared: what ``prepare`` returned.
        """

    @abstractmethod
    def emitted(self, written: Written, num_emitted: torch.Tensor, prepared: Any) -> None:
        """Move the states of slots behind what is emitted: ``num_emitted`` ``[R]``."""


class HostGrammars(CanvasGrammars):
    """Canvases are solved one after the other, on the host. Waits for the device."""

    def _prepare(self, batch: InputBatch, rows: CanvasRows) -> list[tuple[int, int, SlotGrammar]]:
        """(row, its first row of logits, grammar) of those that have one."""
        slots, starts = batch.idx_mapping_np[: batch.num_reqs], batch.cu_num_logits_np
        return [
            (row, int(starts[row]), found)
            for row, slot in enumerate(slots.tolist())
            if (found := self.slots[slot])
        ]

    def write(
        self, logits: torch.Tensor, rows: CanvasRows, prepared: list[tuple[int, int, SlotGrammar]]
    ) -> Written:
        """As described; ``paths`` by batch row."""
        widths, seq_lens = rows.widths.tolist(), rows.seq_lens.tolist()
        chosen = np.full(len(logits), NO_TOKEN, dtype=np.int64)
        paths: dict[int, Path] = {}
        for row, low, grammar in prepared:
            width = widths[row]
            if not width:
                continue
            high = low + width
            canvas, of_canvas = grammar.canvas, logits[low:high]
            tokens_left = grammar.end - (seq_lens[row] - width)
            budget = budget_of(canvas.table, grammar.state, tokens_left)
            path = canvas.best_path(of_canvas.cpu().numpy(), grammar.state, budget)
            is_forbidden = torch.from_numpy(canvas.forbidden(path, budget))
            of_canvas.masked_fill_(is_forbidden.to(logits.device), -torch.inf)
            chosen[low:high] = path.tokens
            paths[row] = path
        return Written(torch.from_numpy(chosen).to(logits.device), paths)

    def emitted(
        self,
        written: Written,
        num_emitted: torch.Tensor,
        prepared: list[tuple[int, int, SlotGrammar]],
    ) -> None:
        """As described."""
        counts = num_emitted.tolist()
        for row, _, grammar in prepared:
            if counts[row]:
                grammar.state = int(written.paths[row].states[counts[row]])


class PreparedTables(NamedTuple):
    """What kernels need to know about R rows.

    Attributes:
        tables: of the grammars in all slots.
        table_of: ``[R]`` int32, NO_TABLE without a grammar.
        slots: ``[R]`` int64.
        end: ``[R]`` int64, where answers end at the latest.
        stops, fillers: ``[R, M]`` int64, ascending; the last one is repeated.
        first_row: ``[R]`` int32, among the rows of logits.
        most_rows: of one canvas.
    """

    tables: PackedTables
    table_of: torch.Tensor
    slots: torch.Tensor
    end: torch.Tensor
    stops: torch.Tensor
    fillers: torch.Tensor
    first_row: torch.Tensor
    most_rows: int


class DeviceGrammars(CanvasGrammars):
    """All canvases are solved at once, by kernels. Does not wait for the device."""

    def __init__(self, vllm_config: VllmConfig, num_slots: int, device: torch.device) -> None:
        super().__init__(vllm_config, num_slots)
        self._device = device
        self._states = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self._staged: dict[int, int] = {}  # states of new requests, by slot
        self._packed: dict[Canvas, PackedTables] = {}  # each alone
        self._joined: PackedTables | None = None

    def _tables(self, canvases: list[Canvas]) -> PackedTables:
        """The tables of all, in this order. Those that were asked for last are on the device."""
        if self._joined is None or canvases != list(self._packed):
            known = self._packed
            self._packed = {
                one: known.get(one) or pack(one.table, self._device) for one in canvases
            }
            self._joined = join([*self._packed.values()])
        return self._joined

    def add_request(self, slot: int, data: NewRequestData) -> None:
        """As described; the state goes to the device with ``apply_staged_writes``."""
        super().add_request(slot, data)
        found = self.slots[slot]
        self._staged[slot] = found.state if found else 0

    def apply_staged_writes(self) -> None:
        """As described."""
        if self._staged:
            slots, states = to_device(np.array([*self._staged.items()]).T.copy(), self._device)
            self._states[slots] = states.int()
            self._staged = {}

    def _prepare(self, batch: InputBatch, rows: CanvasRows) -> PreparedTables:
        slots = batch.idx_mapping_np[: batch.num_reqs].tolist()
        found = [self.slots[slot] for slot in slots]
        # Of all slots, not of this batch: the same for every tile of every visit, until a request
        # with another grammar comes.
        canvases = sorted({one.canvas for one in self.slots if one}, key=id)
        number = {canvas: table for table, canvas in enumerate(canvases)}
        of_row = [one.canvas if one else canvases[0] for one in found]  # any, without a grammar
        starts = batch.cu_num_logits_np[: batch.num_reqs + 1]

        def sent(values: Any, dtype: type[np.integer]) -> torch.Tensor:
            return to_device(np.array(values, dtype), self._device)

        table_of = sent([number[o.canvas] if o else NO_TABLE for o in found], np.int32)
        return PreparedTables(
            tables=self._tables(canvases),
            # A row that only writes a block's KV has logits, but no canvas (`engine.pending`).
            table_of=torch.where(rows.widths > 0, table_of, NO_TABLE),
            slots=rows.slots,
            end=sent([one.end if one else 0 for one in found], np.int64),
            stops=sent(_padded([canvas.stops for canvas in of_row]), np.int64),
            fillers=sent(_padded([canvas.fillers for canvas in of_row]), np.int64),
            first_row=sent(starts[:-1], np.int32),
            most_rows=max(int(np.diff(starts).max()), 1),
        )

    def write(self, logits: torch.Tensor, rows: CanvasRows, prepared: PreparedTables) -> Written:
        """As described; ``paths`` of all rows."""
        tables, table_of = prepared.tables, prepared.table_of
        row_of = rows.row_of
        state = self._states[prepared.slots]
        budget = self._budget(rows, prepared, state)
        canvases = Canvases(
            first_row=prepared.first_row,
            length=rows.widths.int(),
            table=table_of,
            state=state,
            budget=budget,
            most_rows=prepared.most_rows,
        )
        likeliest = logits.argmax(dim=1)
        maxima = class_maxima(logits, tables, table_of[row_of])
        found = ends(logits, likeliest, row_of, prepared.stops, prepared.fillers)
        paths = best_paths(maxima, found, tables, canvases)
        mask_rows(
            logits,
            tables,
            table_of[row_of],
            paths.states,
            (budget[row_of] - rows.place).int(),
            prepared.stops[row_of],
        )
        is_free = table_of[row_of] == NO_TABLE
        return Written(torch.where(is_free, NO_TOKEN, paths.tokens), paths)

    def _budget(
        self, rows: CanvasRows, prepared: PreparedTables, state: torch.Tensor
    ) -> torch.Tensor:
        """``[R]`` int32, as ``viterbi.budget_of``."""
        tokens_left = prepared.end - (rows.seq_lens - rows.widths)
        first_state = prepared.tables.first_state[prepared.table_of.clamp(min=0).long()]
        left = prepared.tables.left[(first_state + state.clamp(min=0)).long()]
        has_room = (left < tokens_left) & (state >= 0)  # for the token that ends the text
        can_end = (left <= tokens_left) | (state < 0)
        return torch.where(can_end, tokens_left - has_room.long(), UNLIMITED).int()

    def emitted(
        self, written: Written, num_emitted: torch.Tensor, prepared: PreparedTables
    ) -> None:
        """As described. Canvases with a grammar are emitted whole: none has bad words."""
        paths: Paths = written.paths
        before = self._states[prepared.slots]
        self._states[prepared.slots] = torch.where(num_emitted > 0, paths.end, before)


def _padded(lists: list[np.ndarray]) -> list[list[int]]:
    """Lists of one length, by repeating the last number of each."""
    longest = max(map(len, lists))
    return [[*one.tolist(), *[int(one[-1])] * (longest - len(one))] for one in lists]
