"""Context that waits until somebody drafts: what may wait, and what is written of it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dllm.drafter.context import NO_SLOT
from dllm.drafter.deferred import MAX_DEFERRED, DeferredContext, last_of_each_slot


def step(num_tokens: int, **fields: Any) -> Any:
    """The parts of an InputBatch that are read; its positions are overwritten by the next step."""
    plain = dict(num_tokens=num_tokens, has_prefill=False, num_draft_tokens=0)
    return SimpleNamespace(positions=torch.arange(num_tokens + 2), **(plain | fields))


def test_everything_that_waits_comes_out_in_order_and_once():
    deferred, slots = DeferredContext(), torch.tensor([[3, 4, -9], [0, 0, 0], [5, 6, -9]])
    first, second = step(2), step(1)
    hidden = [torch.tensor([[1.0], [2.0], [9.0]]), torch.tensor([[10.0], [20.0], [90.0]])]
    deferred.append(first, hidden, slots, [0, 2])
    first.positions += 100  # buffers of the engine, used again
    for kept in (slots, *hidden):
        kept += 7
    deferred.append(second, hidden, slots, [0, 2])
    assert len(deferred) == 3
    features, positions, slots = deferred.take()
    assert features.tolist() == [[1, 10], [2, 20], [8, 17]]
    assert positions.tolist() == [0, 1, 0]
    assert slots.tolist() == [[3, 4, 10], [5, 6, 12]]
    assert len(deferred) == 0


def test_only_ordinary_decode_steps_wait_and_not_too_many():
    deferred = DeferredContext()
    assert deferred.admits(step(MAX_DEFERRED))
    assert not deferred.admits(step(MAX_DEFERRED + 1))
    assert not deferred.admits(step(1, has_prefill=True))
    assert not deferred.admits(step(4, num_draft_tokens=3))
    deferred.append(step(2), [torch.zeros(2, 1)], torch.zeros(1, 2, dtype=torch.int64), [0])
    assert deferred.admits(step(MAX_DEFERRED - 2))
    assert not deferred.admits(step(MAX_DEFERRED - 1))


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([[4, 5, 6]], [[4, 5, 6]]),
        ([[4, 5, 4, 6, 4]], [[NO_SLOT, 5, NO_SLOT, 6, 4]]),
        ([[1, 2, 1], [7, 8, 8]], [[NO_SLOT, 2, 1], [7, NO_SLOT, 8]]),
        ([[NO_SLOT, 3, NO_SLOT]], [[NO_SLOT, 3, NO_SLOT]]),
    ],
)
def test_of_two_tokens_for_one_place_the_last_is_written(slots, expected):
    assert last_of_each_slot(torch.tensor(slots)).tolist() == expected
