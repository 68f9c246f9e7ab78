"""What the sampler remembers of each request's canvas: device tensors, allocated once.

A request has a slot, which is its index into these tensors for as long as it runs. The canvas
itself, the noisy input of the next denoise step, is vLLM's ``RequestState.draft_tokens``, too, from
where the model runner puts it into the next batch.

The algorithm says which ``parameters`` and ``step_state`` tensors there are, and S, the last
dimension of ``soft_embeds`` (``algorithm``). C is the served canvas length, V the vocabulary size,
P how many positions of an answer can be pinned.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dllm.engine.algorithm import Canvases, DenoisingAlgorithm
from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.compilation import of_fixed_size
from dllm.engine.thoughts import ABSENT, Thoughts
from dllm.settings.denoising import NO_TOKEN
from dllm.settings.pins import PINNED_CANVASES
from dllm.settings.thoughts import NO_MARK

# ``CanvasState.thought`` of a request without a budget.
NO_THOUGHT = {"begin": ABSENT, "budget": -1, "start": NO_MARK, "end": NO_MARK, "call": NO_MARK}


@dataclass(frozen=True)
class CanvasState:
    """The state of all requests; compiled functions take it.

    The last slot is that of no request: of the empty row which ``CanvasRows.of_batch`` adds, and
    what is written for a row without a canvas goes there.
    """

    # What a request brings (``records``): [slots], or [slots, ...].
    seeds: Tensor  # int64, of its noise
    temperatures: Tensor  # fp32, 1 if it is greedy
    is_greedy: Tensor  # bool
    is_read_only: Tensor  # bool
    holds_pins: Tensor  # bool
    parameters: dict[str, Tensor]  # [slots] each
    is_stop: Tensor  # [slots, V] bool, tokens that end it
    seed_canvas: Tensor  # [slots, C] int64, of its first canvas; NO_TOKEN: drawn
    pinned: Tensor  # [slots, P] int32, by answer position: a token that is given, or NO_TOKEN
    given_from: Tensor  # int64, position of the answer's first token; -1: nothing is given
    thought: dict[str, Tensor]  # [slots] int64 each; a step writes ``begin``, too
    # What a step writes for the next one. What has no meaning at step 0 is written by the first
    # step.
    canvas: Tensor  # [slots, C] int64, what enters the model
    argmax_canvas: Tensor  # [slots, C] int64, the most likely tokens; no meaning at step 0
    steps_done: Tensor  # int32
    step_state: dict[str, Tensor]  # [slots, ...] each, columns of the algorithm
    soft_embeds: Tensor  # [slots, C, S], for ``self_condition``; no meaning at step 0
    commits: Tensor  # bool, whether the canvas in flight is an emitted block (``pending``)
    # On the host.
    has_pins: np.ndarray  # [slots - 1] bool
    has_thinking_budget: np.ndarray  # [slots - 1] bool
    asked: np.ndarray  # [] bool, whether a request of the step has a thinking budget
    is_asked: Tensor  # the same memory

    @classmethod
    def allocate(
        cls,
        algorithm: DenoisingAlgorithm,
        num_slots: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "CanvasState":
        """Of up to ``num_slots`` requests, in tensors of ``num_slots + 1`` slots."""
        length, asked = algorithm.settings.canvas_length, np.zeros((), dtype=bool)

        def full(value: float, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            sizes = num_slots + 1, *shape
            return of_fixed_size(torch.full(sizes, value, dtype=dtype, device=device))

        return cls(
            seeds=full(0),
            temperatures=full(0, dtype=torch.float32),
            is_greedy=full(False, dtype=torch.bool),
            is_read_only=full(False, dtype=torch.bool),
            holds_pins=full(False, dtype=torch.bool),
            parameters={
                one.name: full(0, dtype=getattr(torch, one.dtype))
                for one in algorithm.settings.parameters
            },
            is_stop=full(False, vocab_size, dtype=torch.bool),
            seed_canvas=full(0, length),
            pinned=full(NO_TOKEN, PINNED_CANVASES * length, dtype=torch.int32),
            given_from=full(-1),
            thought={name: full(value) for name, value in NO_THOUGHT.items()},
            canvas=full(0, length),
            argmax_canvas=full(0, length),
            steps_done=full(0, dtype=torch.int32),
            step_state={
                name: full(0, *shape, dtype=kind) for name, shape, kind in algorithm.step_state
            },
            soft_embeds=full(0, length, algorithm.soft_size or 0, dtype=dtype),
            commits=full(False, dtype=torch.bool),
            has_pins=np.zeros(num_slots, dtype=bool),
            has_thinking_budget=np.zeros(num_slots, dtype=bool),
            asked=asked,
            is_asked=torch.from_numpy(asked),
        )

    @property
    def spare_slot(self) -> int:
        """The slot of no request."""
        return len(self.seeds) - 1

    def canvases(self, rows: CanvasRows, ids: Tensor, chosen: Tensor) -> Canvases:
        """``ids``: ``[N]``, their tokens; ``chosen``: ``[N]``, what grammars have chosen."""
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
        self.asked[...] = self.has_thinking_budget[slots].any()
        return bool(self.asked)

    def thoughts(self, slots: Tensor, starts: Tensor) -> Thoughts:
        """In front of canvases that start at ``starts`` ``[R]`` int64 in their sequences."""
        of_slots = {name: column[slots] for name, column in self.thought.items()}
        return Thoughts(canvas_start=starts, is_asked=self.is_asked, **of_slots)

    def with_given_tokens(self, slots: Tensor, drawn: Tensor, thoughts: Thoughts) -> Tensor:
        """The first contents of canvases: what the request gives, else ``drawn``. ``[R, C]`` int64.

        Only the first canvas behind the prompt can be a seed canvas (``diffusion_seed_canvas``).
        Pins, and ends of thoughts, may be in any.
        """
        starts = thoughts.canvas_start
        seed_canvas, pins = self.seed_canvas[slots], self.pins(slots, starts)
        is_seeded = (starts == self.given_from[slots])[:, None] & (seed_canvas != NO_TOKEN)
        given = torch.where(is_seeded, seed_canvas, NO_TOKEN)
        given = torch.where(pins != NO_TOKEN, pins, given)
        given = torch.where(thoughts.ends_at(given), thoughts.end[:, None], given)
        return torch.where(given != NO_TOKEN, given, drawn)

    def pins(self, slots: Tensor, starts: Tensor) -> Tensor:
        """The tokens that a request gives at each position, else NO_TOKEN: ``[R, C]`` int64."""
        length, num_positions = self.seed_canvas.shape[1], self.pinned.shape[1]
        given_from = self.given_from[slots, None]
        columns = torch.arange(length, device=starts.device)
        place = starts[:, None] - given_from + columns  # [R, C], in the answer
        is_known = (given_from >= 0) & (place >= 0) & (place < num_positions)
        pins = self.pinned[slots[:, None], place.clamp(0, num_positions - 1)].long()
        return torch.where(is_known, pins, NO_TOKEN)
