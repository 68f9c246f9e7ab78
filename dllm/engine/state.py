"""What the sampler remembers of each request's canvas: device tensors, allocated once.

A request has a slot, which is its index into these tensors for as long as it runs. The canvas
itself, the noisy input of the next denoise step, is vLLM's ``RequestState.draft_tokens``, too, from
where the model runner puts it into the next batch.

| tensor           | shape            | written by              | read by                        |
|------------------|------------------|-------------------------|--------------------------------|
| seeds, is_greedy | [slots]          | reset                   | denoise                        |
| temperatures     | [slots]          | reset                   | denoise                        |
| is_read_only     | [slots]          | reset                   | sampler: logprobs              |
| parameters       | [slots] each     | reset                   | denoise                        |
| is_stop          | [slots, V] bool  | reset                   | denoise                        |
| seed_canvas      | [slots, C] int64 | reset                   | sampler: the first canvas      |
| pinned           | [slots, P] int32 | reset                   | sampler, each step             |
| holds_pins       | [slots]          | reset                   | sampler, each step             |
| given_from       | [slots]          | reset                   | sampler: canvases and pins     |
| thought          | [slots] each     | reset; each step: begin | sampler: canvases, each step   |
| canvas           | [slots, C] int64 | ``write_canvases``      | vLLM's runner; sampler; loop   |
| argmax_canvas    | [slots, C] int64 | sampler, each step      | denoise; edits; prepare_inputs |
| steps_done       | [slots] int32    | sampler, each step      | denoise; prepare_inputs        |
| step_state       | [slots, ...]     | sampler, each step      | denoise                        |
| soft_embeds      | [slots, C, S]    | sampler, each step      | prepare_inputs, if steps_done  |
| commits          | [slots] bool     | prepare_attn            | inputs, sampler  (`pending`)   |

The algorithm says which ``parameters`` and ``step_state`` tensors there are, and S, the last
dimension of ``soft_embeds`` (``algorithm``). C is the served canvas length, V the vocabulary size,
P how many positions of an answer can be pinned.
"""

import hashlib

import numpy as np
import torch

from dllm.engine.algorithm import Canvases, DenoisingAlgorithm
from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.compilation import of_fixed_size
from dllm.engine.thoughts import ABSENT, Thought, Thoughts
from dllm.ops.staging import to_device
from dllm.settings.denoising import NO_TOKEN
from dllm.settings.pins import PINNED_CANVASES
from dllm.settings.request import RequestOptions
from dllm.settings.thoughts import NO_MARK

# ``CanvasState.thought`` of a request without a budget.
NO_THOUGHT = {"begin": ABSENT, "budget": -1, "start": NO_MARK, "end": NO_MARK, "call": NO_MARK}


class CanvasState:
    """The state of up to ``num_slots`` requests, in tensors of ``num_slots + 1`` slots."""

    def __init__(
        self,
        algorithm: DenoisingAlgorithm,
        num_slots: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        canvas_length = algorithm.settings.canvas_length
        # A slot that no request ever has: that of the empty row which CanvasRows.of_batch adds,
        # and what is written for a row without a canvas goes there.
        self.spare_slot = num_slots

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return of_fixed_size(torch.zeros(num_slots + 1, *shape, dtype=dtype, device=device))

        self.canvas = zeros(canvas_length, dtype=torch.int64)
        self.argmax_canvas = zeros(canvas_length, dtype=torch.int64)
        self.steps_done = zeros(dtype=torch.int32)
        self.step_state = {
            name: zeros(*shape, dtype=dtype) for name, shape, dtype in algorithm.step_state
        }
        self.soft_embeds = zeros(canvas_length, algorithm.soft_size or 0, dtype=dtype)
        self.commits = zeros(dtype=torch.bool)

        # What a request brings is one record, which goes to the device in one copy. The tensors
        # below are columns of the records; ``align`` pads between types of different widths.
        parameters = {one.name: one.dtype for one in algorithm.settings.parameters}
        self._layout = np.dtype(
            [
                ("slot", "int64"),
                ("seed_canvas", "int64", canvas_length),
                *sorted(parameters.items(), key=lambda item: -np.dtype(item[1]).itemsize),
                ("temperature", "float32"),
                ("pinned", "int32", PINNED_CANVASES * canvas_length),
                # Behind the large fields: where a column's offset equals the batch size,
                # torch.compile takes it for the batch size.
                ("seed", "int64"),
                ("given_from", "int64"),
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
        self.parameters = {name: self._column(name) for name in parameters}
        self.temperatures = self._column("temperature")
        self.is_greedy = self._column("is_greedy")
        self.is_read_only = self._column("is_read_only")
        self.is_stop = zeros(vocab_size, dtype=torch.bool)
        self.has_pins = np.zeros(num_slots, dtype=bool)  # for the host
        self.has_thinking_budget = np.zeros(num_slots, dtype=bool)  # likewise, a thinking budget
        self._asked = np.zeros((), dtype=bool)  # whether one of a step has
        self._is_asked = torch.from_numpy(self._asked)  # the same, for ``Thoughts``

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
        self.thought["begin"] = of_fixed_size(self._first_begin.clone())

    def _column(self, name: str) -> torch.Tensor:
        """A field of all records: ``[slots]``, or ``[slots, length]``."""
        dtype, offset = self._layout.fields[name][:2]  # type: ignore[index]
        part = self._records.view(torch.uint8)[:, offset : offset + dtype.itemsize]
        column = part.view(getattr(torch, dtype.base.name))
        return of_fixed_size(column if dtype.shape else column[:, 0])

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
        for name, number in options.parameters.items():
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
        self.has_thinking_budget[slot] = thought is not None
        numbers = NO_THOUGHT if thought is None else thought.fields()
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
        for column in self.step_state.values():
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

    def write_canvases(self, slots: torch.Tensor, canvases: torch.Tensor) -> None:
        """Make ``[R, C]`` int64 the input of the next step of ``slots`` ``[R]``."""
        self.canvas[slots] = canvases

    def canvases(self, rows: CanvasRows, ids: torch.Tensor, chosen: torch.Tensor) -> Canvases:
        """The state of the canvases of a step.

        Args:
            ids: ``[N]``, their tokens.
            chosen: ``[N]``, what grammars have chosen.
        """
        slots, starts = rows.slots, rows.starts
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
            parameters={name: column[slots] for name, column in self.parameters.items()},
            step_state={name: column[slots] for name, column in self.step_state.items()},
            thoughts=self.thoughts(slots, starts),
        )

    def looks_for_ends(self, slots: np.ndarray) -> bool:
        """Whether any of these requests has a thinking budget. If not, nothing is searched."""
        self._asked[...] = self.has_thinking_budget[slots].any()
        return bool(self._asked)

    def thoughts_of(self, rows: CanvasRows) -> Thoughts:
        """The thoughts in front of the canvases of a step."""
        return self.thoughts(rows.slots, rows.starts)

    def thoughts(self, slots: torch.Tensor, starts: torch.Tensor) -> Thoughts:
        """The thoughts in front of canvases.

        Args:
            slots: ``[R]``.
            starts: ``[R]`` int64, where each canvas starts in its sequence.
        """
        of_slots = {name: column[slots] for name, column in self.thought.items()}
        return Thoughts(canvas_start=starts, is_asked=self._is_asked, **of_slots)

    def with_seeds(
        self, slots: torch.Tensor, drawn: torch.Tensor, thoughts: Thoughts
    ) -> torch.Tensor:
        """The first contents of canvases: what the request gives, else ``drawn``. ``[R, C]``.

        Only the first canvas behind the prompt can be a seed canvas (``diffusion_seed_canvas``).
        Pins, and ends of thoughts, may be in any.

        Args:
            slots: ``[R]``.
            drawn: ``[R, C]`` int64, from ``DenoisingAlgorithm.fresh_canvas``.
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


def request_seed(options: RequestOptions, origin: str, server_seed: int) -> int:
    """The 64-bit seed of a request's noise: the request's own, else one computed from ``origin``.

    So all tensor-parallel ranks compute the same seed, and a request that was preempted gets the
    same seed when it resumes.
    """
    if options.seed is not None:
        return options.seed
    digest = hashlib.blake2b(f"{server_seed}/{origin}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
