"""Context that waits until somebody drafts: what may wait, and what is written of it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dllm.drafter.context import NO_SLOT
from dllm.drafter.deferred import MAX_DEFERRED, DeferredContext, last_of_each_slot
from dllm.drafter.step import TargetStep
from tests.support.watched_device import DeviceWatch, on_device


def step(lengths: list[int], hidden: list[torch.Tensor], rejected: list[int]) -> TargetStep:
    """What is read of a step; its tensors are overwritten by the next one."""
    starts = np.concatenate(([0], np.cumsum(lengths)))
    batch: Any = SimpleNamespace(
        num_reqs=len(lengths),
        num_tokens=int(starts[-1]),
        num_draft_tokens=sum(rejected),
        query_start_loc=torch.from_numpy(np.append(starts, starts[-1])),  # padded
        positions=torch.arange(int(starts[-1]) + 2),
    )
    nothing = torch.zeros(0)
    return TargetStep(batch, nothing, hidden, nothing, torch.tensor(rejected), nothing)


def test_everything_that_waits_comes_out_in_order_and_once():
    deferred, slots = DeferredContext(), torch.tensor([[3, 4, -9], [0, 0, 0], [5, 6, -9]])
    hidden = [torch.tensor([[1.0], [2.0], [9.0]]), torch.tensor([[10.0], [20.0], [90.0]])]
    first, second = step([1, 1], hidden, [0, 0]), step([1], hidden, [0])
    deferred.append(first, slots, [0, 2])
    first.batch.positions += 100  # buffers of the engine, used again
    for kept in (slots, *hidden):
        kept += 7
    deferred.append(second, slots, [0, 2])
    assert len(deferred) == 3
    features, positions, slots = deferred.take()
    assert features.tolist() == [[1, 10], [2, 20], [8, 17]]
    assert positions.tolist() == [0, 1, 0]
    assert slots.tolist() == [[3, 4, 10], [5, 6, 12]]
    assert len(deferred) == 0


def test_not_too_many_wait():
    deferred = DeferredContext()
    assert deferred.admits(MAX_DEFERRED)
    assert not deferred.admits(MAX_DEFERRED + 1)
    two = step([2], [torch.zeros(2, 1)], [0])
    deferred.append(two, torch.zeros(1, 2, dtype=torch.int64), [0])
    assert deferred.admits(MAX_DEFERRED - 2)
    assert not deferred.admits(MAX_DEFERRED - 1)


def test_rejected_drafts_wait_for_no_place():
    deferred, hidden = DeferredContext(), [torch.zeros(9, 1)]
    slots = torch.arange(18).view(2, 9)
    verified = step([4, 1, 3], hidden, [2, 0, 3])
    assert verified.is_rejected().tolist() == [False, False, True, True, False] + 3 * [True]
    deferred.append(verified, slots, [1])
    assert deferred.take().slots.tolist() == [[9, 10, NO_SLOT, NO_SLOT, 13] + 3 * [NO_SLOT]]
    assert slots.tolist() == torch.arange(18).view(2, 9).tolist()


@pytest.mark.parametrize("rejected", [[0, 0], [1, 2]])
def test_nobody_waits_for_the_device(rejected):
    hidden = on_device([torch.ones(9, 2)] * 2)
    waiting = step([4, 5], hidden, rejected)
    tensors = on_device((waiting.batch.query_start_loc, waiting.batch.positions))
    waiting.batch.query_start_loc, waiting.batch.positions = tensors
    waiting = replace(waiting, num_rejected=on_device(waiting.num_rejected))
    slots = on_device(torch.arange(27).view(3, 9))
    with DeviceWatch() as watch:
        deferred = DeferredContext()
        for _ in range(2):
            deferred.append(waiting, slots, [0, 2])
        context = deferred.take()
    assert not watch.findings
    assert (context.slots >= 0).sum() == 2 * (9 - sum(rejected))


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
