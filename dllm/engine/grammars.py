"""CanvasGrammars: keeps canvases of structured outputs inside the language of their grammar.

In every denoise step, behind the logit edits and in front of the family's decisions:

    logits of a canvas -> best path through the grammar's table -> mask of each row along the path
                                                                -> the tokens of the path

So entropies, samples, self-conditioning and logprobs are of the tokens that the grammar allows, and
what would be emitted is always the beginning of an allowed text. A slot's state moves when its
canvas is emitted. Before that every step solves the whole canvas again, so that nothing depends on
how many steps there are, or on their noise.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.input_batch import InputBatch

from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.family import FREE
from dllm.grammar.constraint import Constraint
from dllm.grammar.viterbi import UNLIMITED, Canvas, Path, budget_of
from dllm.settings.structured import grammar_of

KEPT_GRAMMARS = 64  # how many are kept unpacked


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


@dataclass(frozen=True)
class Written:
    """The result of a step.

    Attributes:
        chosen: ``[N]`` int64, the token of the best path; FREE in rows without a grammar.
        paths: by batch row.
    """

    chosen: torch.Tensor
    paths: dict[int, Path]


class CanvasGrammars:
    """The grammars of the requests in all slots.

    Args:
        vllm_config: for the longest sequence, and for the token that pads.
        num_slots: how many requests run at a time.
    """

    def __init__(self, vllm_config: VllmConfig, num_slots: int) -> None:
        self._longest = vllm_config.model_config.max_model_len
        padding = vllm_config.model_config.hf_text_config.pad_token_id
        self._fillers = () if padding is None else (int(padding),)
        self._slots: list[SlotGrammar | None] = [None] * num_slots
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
        self._slots[slot] = None
        if shipped is None:
            return
        canvas, start = self._unpacked(shipped, tuple(sorted(params.all_stop_token_ids)))
        generated = (data.prefill_token_ids or [])[data.prompt_len :]
        states, num_valid = canvas.read(generated, start, UNLIMITED)
        assert num_valid == len(generated), "what was emitted is the beginning of an allowed text"
        most = params.max_tokens if params.max_tokens is not None else self._longest
        end = min(data.prompt_len + most, self._longest)
        self._slots[slot] = SlotGrammar(canvas, states[-1], end)

    def are_wanted(self, input_batch: InputBatch) -> bool:
        """Whether a request of the batch has a grammar. Does not wait for the device."""
        return bool(self._has_grammar[input_batch.idx_mapping_np[: input_batch.num_reqs]].any())

    def write(self, logits: torch.Tensor, rows: CanvasRows, input_batch: InputBatch) -> Written:
        """Find the best path of every canvas with a grammar, and mask its logits along it.

        Waits for the device.

        Args:
            logits: ``[N, vocab]`` fp32, edited; changed in place.
            rows: where the canvases are in ``input_batch``.
        """
        slots = input_batch.idx_mapping_np[: input_batch.num_reqs].tolist()
        bounds = input_batch.cu_num_logits_np.tolist()
        ends = rows.seq_lens.tolist()
        chosen = np.full(len(logits), FREE, dtype=np.int64)
        paths = {}
        for row, slot in enumerate(slots):
            grammar, low, high = self._slots[slot], bounds[row], bounds[row + 1]
            if grammar is None or low == high:
                continue
            budget = budget_of(
                grammar.canvas.table, grammar.state, grammar.end - (ends[row] - (high - low))
            )
            of_canvas = logits[low:high]
            path = grammar.canvas.best_path(of_canvas.cpu().numpy(), grammar.state, budget)
            is_forbidden = torch.from_numpy(grammar.canvas.forbidden(path, budget))
            of_canvas.masked_fill_(is_forbidden.to(logits.device), -torch.inf)
            chosen[low:high] = path.tokens
            paths[row] = path
        return Written(torch.from_numpy(chosen).to(logits.device), paths)

    def emitted(self, written: Written, num_emitted: torch.Tensor, input_batch: InputBatch) -> None:
        """Move the states of slots behind what is emitted: ``num_emitted`` ``[R]``."""
        counts = num_emitted.tolist()
        for row, path in written.paths.items():
            grammar = self._slots[int(input_batch.idx_mapping_np[row])]
            assert grammar is not None
            if counts[row]:
                grammar.state = int(path.states[counts[row]])
