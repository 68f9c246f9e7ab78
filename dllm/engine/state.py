"""What the sampler remembers of each request's canvas: device tensors, allocated once.

A request has a slot, which is its index into these tensors for as long as it runs. The canvas
itself (the noisy input of the next denoise step) is in vLLM's ``RequestState.draft_tokens``, from
where the model runner puts it into the next batch. Everything else is here:

| tensor           | shape            | written by              | read by                        |
|------------------|------------------|-------------------------|--------------------------------|
| seeds, is_greedy | [slots]          | reset                   | denoise                        |
| temperatures     | [slots]          | reset                   | denoise                        |
| is_read_only     | [slots]          | reset                   | sampler: logprobs              |
| numbers          | [slots] each     | reset                   | denoise                        |
| is_stop          | [slots, V] bool  | reset                   | denoise                        |
| seed_canvas      | [slots, C] int64 | reset                   | sampler: the first canvas      |
| pinned           | [slots, P] int32 | reset                   | sampler, each step             |
| holds_pins       | [slots]          | reset                   | sampler, each step             |
| given_from       | [slots]          | reset                   | sampler: canvases and pins     |
| thought          | [slots] each     | reset; each step: begin | sampler: canvases, each step   |
| argmax_canvas    | [slots, C] int64 | sampler, each step      | denoise; edits; prepare_inputs |
| steps_done       | [slots] int32    | sampler, each step      | denoise; prepare_inputs        |
| carried          | [slots, ...]     | sampler, each step      | denoise                        |
| soft_embeds      | [slots, C, S]    | sampler, each step      | prepare_inputs, if steps_done  |
| commits          | [slots] bool     | prepare_attn            | inputs, sampler  (`pending`)   |

The family says which ``numbers`` and ``carried`` tensors there are, and S, the last dimension of
``soft_embeds`` (``family``). C is the served canvas length, V the vocabulary size, P how many
positions of an answer can be pinned.
"""

import hashlib

import numpy as np
import torch

from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.family import Canvases, Denoised, Family
from dllm.engine.thoughts import ABSENT, Thought, Thoughts
from dllm.ops.filters import RowFilters
from dllm.ops.staging import to_device
from dllm.settings.denoising import NO_TOKEN
from dllm.settings.pins import PINNED_CANVASES
from dllm.settings.request import RequestOptions
from dllm.settings.thoughts import NO_MARK

# ``CanvasState.thought`` of a request without a budget.
NO_THOUGHT = {"begin": ABSENT, "budget": -1, "start": NO_MARK, "end": NO_MARK}


class CanvasState:
    """The state of up to ``num_slots`` requests, in tensors of ``num_slots + 1`` slots."""

    def __init__(
        self,
        family: Family,
        num_slots: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        canvas_length = family.settings.canvas_length
        # A slot that no request ever has: that of the empty row which CanvasRows.of_batch adds,
        # and what is written for a row without a canvas goes there.
        self.spare_slot = num_slots

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_slots + 1, *shape, dtype=dtype, device=device)

        self.argmax_canvas = zeros(canvas_length, dtype=torch.int64)
        self.steps_done = zeros(dtype=torch.int32)
        self.carried = {name: zeros(*shape, dtype=dtype) for name, shape, dtype in family.carried}
        self.soft_embeds = zeros(canvas_length, family.soft_size or 0, dtype=dtype)
        self.commits = zeros(dtype=torch.bool)

        # What a request brings is one record, which goes to the device in one copy. The tensors
        # below are columns of the records. Wide types come first, so that all are aligned.
        parameters = {one.name: one.dtype for one in family.settings.parameters}
        self._layout = np.dtype(
            [
                ("slot", "int64"),
                ("seed", "int64"),
                ("given_from", "int64"),
                ("seed_canvas", "int64", canvas_length),
                *sorted(parameters.items(), key=lambda item: -np.dtype(item[1]).itemsize),
                ("temperature", "float32"),
                ("pinned", "int32", PINNED_CANVASES * canvas_length),
                # Far behind: torch.compile takes an offset that equals the batch size for it.
                *((f"thought_{name}", "int64") for name in NO_THOUGHT),
                ("is_greedy", "bool"),
                ("is_read_only", "bool"),
                ("holds_pins", "bool"),
            ],
            align=True,
        )
        self._records = zeros(self._layout.itemsize // 8, dtype=torch.int64)
        self._staged: dict[int, tuple[np.ndarray, list[int]]] = {}  # by slot: record, stop tokens
        self.seeds = self._column("seed")
        self.numbers = {name: self._column(name) for name in parameters}
        self.temperatures = self._column("temperature")
        self.is_greedy = self._column("is_greedy")
        self.is_read_only = self._column("is_read_only")
        self.is_stop = zeros(vocab_size, dtype=torch.bool)
        self.has_pins = np.zeros(num_slots, dtype=bool)  # for the host
        self.has_budget = np.zeros(num_slots, dtype=bool)  # likewise, a thinking budget

        self.seed_canvas = self._column("seed_canvas")
        # By answer position: a token that is given, or NO_TOKEN.
        self.pinned = self._column("pinned").fill_(NO_TOKEN)
        self.holds_pins = self._column("holds_pins")
        # The position of the answer's first token in the sequence; -1: nothing is given.
        self.given_from = self._column("given_from").fill_(-1)
        # By the names of the fields of ``Thoughts``. Where one begins is written in each step: a
        # tensor of its own, because torch.compile writes to no part of one that it reads.
        self.thought = {
            name: self._column(f"thought_{name}").fill_(value) for name, value in NO_THOUGHT.items()
        }
        self._first_begin = self.thought["begin"]
        self.thought["begin"] = self._first_begin.clone()

    def _column(self, name: str) -> torch.Tensor:
        """A field of all records: ``[slots]``, or ``[slots, length]``."""
        dtype, offset = self._layout.fields[name][:2]  # type: ignore[index]
        part = self._records.view(torch.uint8)[:, offset : offset + dtype.itemsize]
        column = part.view(getattr(torch, dtype.base.name))
        return column if dtype.shape else column[:, 0]

    def reset(
        self,
        slot: int,
        options: RequestOptions,
        seed: int,
        prompt_len: int,
        thought: Thought | None = None,
    ) -> None:
        """Prepare ``slot`` for a new (or resumed) request; what was there is overwritten.

        Takes effect with ``apply_staged_writes``.

        ``soft_embeds`` and ``argmax_canvas`` need not be cleared. They are not used while
        ``steps_done`` is 0, and the first step writes them.

        Args:
            seed: of the request's noise, from ``request_seed``.
            prompt_len: in tokens.
            thought: in front of the first canvas; None without a thinking budget.
        """
        record = np.zeros((), self._layout)
        record["slot"], record["seed"] = slot, seed
        for name, number in options.numbers.items():
            record[name] = number
        record["temperature"] = options.temperature
        record["is_greedy"] = options.is_greedy
        record["is_read_only"] = options.is_read_only
        is_given = bool(options.seed_canvas or options.pins)
        record["given_from"] = prompt_len if is_given else -1
        record["holds_pins"] = options.holds_pins
        record["seed_canvas"] = NO_TOKEN
        first = options.seed_canvas or ()
        record["seed_canvas"][: len(first)] = first
        self.has_pins[slot] = bool(options.pins)
        record["pinned"] = NO_TOKEN
        record["pinned"][list(options.pins)] = list(options.pins.values())
        self.has_budget[slot] = thought is not None
        numbers = NO_THOUGHT if thought is None else thought.numbers()
        for name, number in numbers.items():
            record[f"thought_{name}"] = number
        self._staged[slot] = record, sorted(options.stops)

    def apply_staged_writes(self) -> None:
        """Send what ``reset`` stored to the device; does not wait for it."""
        if not self._staged:
            return
        device, num_new = self._records.device, len(self._staged)
        records = np.stack([record for record, _ in self._staged.values()])
        sent = to_device(records.view(np.int64).reshape(num_new, -1), device)
        slots = sent[:, 0]
        self._records.index_copy_(0, slots, sent)
        self.thought["begin"].index_copy_(0, slots, self._first_begin[slots])
        self.steps_done.index_fill_(0, slots, 0)
        for column in self.carried.values():
            column.index_fill_(0, slots, 0)
        vocab_size = self.is_stop.shape[1]
        stops = [slot * vocab_size + t for slot, (_, ids) in self._staged.items() for t in ids]
        for slot in self._staged:
            self.is_stop[slot].zero_()
        self.is_stop.view(-1).index_fill_(0, to_device(np.array(stops, np.int64), device), True)
        self._staged = {}

    def written_slots(self, rows: CanvasRows) -> torch.Tensor:
        """``[R]``, where the state of each row is written: the spare slot without a canvas."""
        return torch.where(rows.widths > 0, rows.slots, self.spare_slot)

    def canvases(self, rows: CanvasRows, ids: torch.Tensor, chosen: torch.Tensor) -> Canvases:
        """The state of the canvases of a step.

        Args:
            ids: ``[N]``, their tokens.
            chosen: ``[N]``, what grammars have chosen.
        """
        slots, starts = rows.slots, rows.seq_lens - rows.widths
        pins = self.pins(slots, starts)
        return Canvases(
            ids=ids,
            seeds=self.seeds[slots],
            steps_done=self.steps_done[slots].long(),
            argmax_canvas=self.argmax_canvas[slots],
            chosen=chosen,
            temperature=self.temperatures[slots],
            is_greedy=self.is_greedy[slots],
            is_stop=self.is_stop,
            held=torch.where(self.holds_pins[slots, None], pins, NO_TOKEN),
            numbers={name: column[slots] for name, column in self.numbers.items()},
            carried={name: column[slots] for name, column in self.carried.items()},
            thoughts=self.thoughts(slots, starts),
        )

    def thoughts_of(self, rows: CanvasRows) -> Thoughts:
        """The thoughts in front of the canvases of a step."""
        return self.thoughts(rows.slots, rows.seq_lens - rows.widths)

    def thoughts(self, slots: torch.Tensor, starts: torch.Tensor) -> Thoughts:
        """The thoughts in front of canvases.

        Args:
            slots: ``[R]``.
            starts: ``[R]`` int64, where each canvas starts in its sequence.
        """
        of_slots = {name: column[slots] for name, column in self.thought.items()}
        return Thoughts(canvas_start=starts, **of_slots)

    def with_seeds(
        self, slots: torch.Tensor, drawn: torch.Tensor, thoughts: Thoughts
    ) -> torch.Tensor:
        """The first contents of canvases: what the request gives, else ``drawn``. ``[R, C]``.

        Only the first canvas behind the prompt can be a seed canvas (``diffusion_seed_canvas``).
        Pins, and ends of thoughts, may be in any.

        Args:
            slots: ``[R]``.
            drawn: ``[R, C]`` int64, from ``Family.fresh_canvas``.
            thoughts: in front of these canvases.
        """
        starts = thoughts.canvas_start
        seed_canvas, pins = self.seed_canvas[slots], self.pins(slots, starts)
        is_seeded = (starts == self.given_from[slots])[:, None] & (seed_canvas != NO_TOKEN)
        given = torch.where(is_seeded, seed_canvas, NO_TOKEN)
        given = torch.where(pins != NO_TOKEN, pins, given)
        given = torch.where(thoughts.ends_at(given), thoughts.end[:, None], given)
        return torch.where(given != NO_TOKEN, given, drawn)

    def pins(self, slots: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """The tokens that a request gives at each position, else NO_TOKEN: ``[R, C]`` int64.

        Arguments as of ``thoughts``.
        """
        length, num_positions = self.seed_canvas.shape[1], self.pinned.shape[1]
        given_from = self.given_from[slots, None]
        columns = torch.arange(length, device=starts.device)
        place = starts[:, None] - given_from + columns  # [R, C], in the answer
        is_known = (given_from >= 0) & (place >= 0) & (place < num_positions)
        pins = self.pinned[slots[:, None], place.clamp(0, num_positions - 1)].long()
        return torch.where(is_known, pins, NO_TOKEN)


def condition_rows(
    rows: torch.Tensor,
    slots: torch.Tensor,
    places: torch.Tensor,
    embeds: torch.Tensor,
    is_canvas_row: torch.Tensor,
    state: CanvasState,
    family: Family,
) -> None:
    """The compiled part of making a model's inputs: conditions canvas rows, and marks them.

    A pending block is no canvas.

    Args:
        rows: ``[N]``, which tokens of the batch are of canvases.
        slots, places: ``[N]``, whose canvas each is of, and where in it.
        embeds, is_canvas_row: ``[tokens, hidden]`` and ``[tokens]``, longer than any batch; the
            embeddings of tokens, and False. Written to.
    """
    is_canvas = ~state.commits[slots]
    if family.soft_size is not None:
        own, soft = embeds[rows], state.soft_embeds[slots, places]
        conditioned = family.condition(own, soft, state.steps_done[slots])
        embeds[rows] = torch.where(is_canvas[:, None], conditioned, own)
    is_canvas_row[rows] = is_canvas


def denoise_rows(
    logits: torch.Tensor,
    ids: torch.Tensor,
    chosen: torch.Tensor,
    rows: CanvasRows,
    state: CanvasState,
    family: Family,
    filters: RowFilters | None,
) -> Denoised:
    """The compiled part of a step: the family's denoise step, and the canvas of the next step.

    Args:
        logits: ``[N, V]`` fp32, edited.
        ids: ``[N]`` int64, the canvas tokens that entered the model.
        chosen: ``[N]`` int64, the tokens that grammars have chosen; NO_TOKEN in other rows.
        rows: at least two of them (``CanvasRows.of_batch``).
        state: read only.

    Returns:
        What the family decided; but ``canvas`` is the input of the next step in any case, and
        ``steps_done`` and ``carried`` are 0 where a fresh canvas starts.
    """
    pins = state.pins(rows.slots, rows.seq_lens - rows.widths)
    canvases = state.canvases(rows, ids, chosen)
    step = family.denoise(logits, rows, canvases, filters)
    goes_on = (rows.widths > 0) & ~step.converged  # [R]
    canvas = step.canvas
    if not family.decides_for_good:  # else the family keeps what stands on a canvas
        canvas = torch.where(pins != NO_TOKEN, pins, canvas)
    behind = state.thoughts_of(rows).behind(step.argmax_canvas, rows.widths)
    fresh = state.with_seeds(rows.slots, step.fresh, behind)
    return step._replace(
        canvas=torch.where(goes_on[:, None], canvas, fresh),
        steps_done=torch.where(goes_on, step.steps_done, 0),
        carried={  # [R, ...], so that goes_on has to be [R, 1, ...]
            name: torch.where(goes_on.view(-1, *[1] * (column.dim() - 1)), column, 0)
            for name, column in step.carried.items()
        },
    )


def store_rows(
    num_emitted: torch.Tensor,
    step: Denoised,
    rows: CanvasRows,
    state: CanvasState,
    draft_tokens: torch.Tensor,
    lengths: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The compiled end of a step: writes what the next one reads, and makes what vLLM gets.

    Args:
        num_emitted: ``[R]``, how many tokens of each canvas are emitted.
        rows: at least two of them.
        draft_tokens: ``[slots, C]``, vLLM's; the canvases.
        lengths, block_size: as of ``num_rejected``.

    Returns:
        int32: emitted tokens ``[R, C]``, how many ``[R]``, and ``num_rejected`` ``[R]``.
    """
    written = state.written_slots(rows)
    behind = state.thoughts_of(rows).behind(step.argmax_canvas, num_emitted)
    state.thought["begin"][written] = behind.begin
    for column, values in (
        (draft_tokens, step.canvas),
        (state.argmax_canvas, step.argmax_canvas),
        (state.steps_done, step.steps_done),
        *((state.carried[name], step.carried[name]) for name in state.carried),
    ):
        column[written] = values.to(column.dtype)
    rejected = num_rejected(state, rows, lengths, block_size)
    return step.argmax_canvas.int(), num_emitted.int(), rejected.int()


def num_rejected(
    state: CanvasState, rows: CanvasRows, lengths: torch.Tensor, block_size: int
) -> torch.Tensor:
    """How many tokens of each row keep no KV: ``[R]``.

    What is kept ends with the last whole block in front of the canvas, or with that of a pending
    block.

    Args:
        rows: a pending block has a width of 0.
        lengths: ``[R]``, tokens of each request that has a pending block, what it has emitted
            included.
        block_size: of the model.
    """
    ends = torch.where(state.commits[rows.slots], lengths, rows.seq_lens - rows.widths)
    return rows.seq_lens - ends + ends % block_size


def request_seed(options: RequestOptions, request_id: str, server_seed: int) -> int:
    """The 64-bit seed of a request's noise: the request's own, else one computed from its id.

    vLLM makes request ids random, so requests get different noise. Because the seed follows from
    the id, all tensor-parallel ranks compute the same seed, and a request that was preempted gets
    the same seed when it resumes.
    """
    if options.seed is not None:
        return options.seed
    digest = hashlib.blake2b(f"{server_seed}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
