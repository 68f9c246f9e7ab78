"""Records: what new requests bring to the state of canvases, on its way to the device."""

import hashlib

import numpy as np
from torch import Tensor

from dllm.engine.state import NO_THOUGHT, CanvasState
from dllm.engine.thoughts import Thought
from dllm.ops.staging import to_device
from dllm.settings.denoising import NO_TOKEN
from dllm.settings.request import RequestOptions


class Records:
    """A record of each new request; all of an engine step go to the device in one copy."""

    def __init__(self, state: CanvasState) -> None:
        self._state = state
        self._columns: dict[str, Tensor] = {
            "seed": state.seeds,
            "temperature": state.temperatures,
            "is_greedy": state.is_greedy,
            "is_read_only": state.is_read_only,
            "holds_pins": state.holds_pins,
            "seed_canvas": state.seed_canvas,
            "pinned": state.pinned,
            "given_from": state.given_from,
            **state.parameters,
            **{f"thought_{name}": column for name, column in state.thought.items()},
        }
        self._layout = np.dtype(
            [
                ("slot", "int64"),
                *(
                    (name, str(column.dtype).removeprefix("torch."), tuple(column.shape[1:]))
                    for name, column in self._columns.items()
                ),
            ],
            align=True,  # so that a part of the bytes of all records is a column
        )
        self._staged: dict[int, tuple[np.ndarray, list[int]]] = {}  # by slot: record, stop tokens

    def reset(
        self,
        slot: int,
        options: RequestOptions,
        seed: int,
        prompt_len: int,
        thought: Thought | None = None,
    ) -> None:
        """For a new (or resumed) request; takes effect with ``send``.

        ``soft_embeds`` and ``argmax_canvas`` are not used while ``steps_done`` is 0.
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
        record["pinned"] = NO_TOKEN
        record["pinned"][list(options.pins)] = list(options.pins.values())
        numbers = NO_THOUGHT if thought is None else thought.fields()
        for name, number in numbers.items():
            record[f"thought_{name}"] = number
        self._state.has_pins[slot] = bool(options.pins)
        self._state.has_thinking_budget[slot] = thought is not None
        self._staged[slot] = record, sorted(options.stops)

    def send(self) -> None:
        """Does not wait for the device."""
        if not self._staged:
            return
        state = self._state
        device, num_new = state.seeds.device, len(self._staged)
        records = np.stack([record for record, _ in self._staged.values()])
        sent = to_device(records.view(np.uint8).reshape(num_new, -1), device)
        slots = self._part(sent, "slot", state.seeds)
        for name, column in self._columns.items():
            column.index_copy_(0, slots, self._part(sent, name, column))
        for column in (state.steps_done, *state.step_state.values()):
            column.index_fill_(0, slots, 0)
        vocab_size = state.is_stop.shape[1]
        stops = [slot * vocab_size + t for slot, (_, ids) in self._staged.items() for t in ids]
        for slot in self._staged:
            state.is_stop[slot].zero_()
        state.is_stop.view(-1).index_fill_(0, to_device(np.array(stops, np.int64), device), True)
        self._staged = {}

    def _part(self, sent: Tensor, name: str, like: Tensor) -> Tensor:
        """A field of records ``[n, bytes]``: ``[n]``, or ``[n, length]``."""
        dtype, offset = self._layout.fields[name][:2]  # type: ignore[index]
        part = sent[:, offset : offset + dtype.itemsize].view(like.dtype)
        return part if dtype.shape else part[:, 0]


def request_seed(options: RequestOptions, origin: str, server_seed: int) -> int:
    """The 64-bit seed of a request's noise: the request's own, else one computed from ``origin``.

    All tensor-parallel ranks compute the same one, and a request that resumes gets it again.
    """
    if options.seed is not None:
        return options.seed
    digest = hashlib.blake2b(f"{server_seed}/{origin}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
