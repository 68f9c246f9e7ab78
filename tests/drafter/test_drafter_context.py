"""The drafter's context: what waits until somebody drafts, and the kernel in vLLM's engine."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dllm.drafter.context import NO_SLOT, DeferredContext, last_of_each_slot
from dllm.drafter.step import TargetStep
from tests.support.drafter_harness import assert_drafts
from tests.support.drafter_pairs import write_drafter, write_target
from tests.support.process import QUIET_ENGINE, run_python
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
    return TargetStep(batch, hidden, nothing, torch.tensor(rejected), nothing)


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


def test_a_single_step_is_not_copied_again():
    deferred = DeferredContext()
    deferred.append(step([4], [torch.ones(4, 2)], [0]), torch.arange(4)[None], [0])
    (kept,) = deferred._steps
    assert deferred.take().features is kept.features


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


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_server_on_cuda_kernels_writes_its_context_by_this_one(tmp_path: Path) -> None:
    """In the interpreter: vLLM's engine, real layers, an FP8 target. The drafts are the
    definition's, in fp32 with sums in another order."""
    target, drafter = write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter")
    output = tmp_path / "result.pt"
    worker = ("-m", "tests.support.drafter_context_worker")
    run_python(*worker, str(target), str(drafter), str(output), environment=QUIET_ENGINE)
    found = torch.load(output, weights_only=False)
    assert set(found["taken"]) == {"kernel"}
    assert found["dtypes"] == 4 * [torch.uint8] + 2 * [torch.float32]
    assert len(found["drafts"]) >= 2
    assert_drafts(target, found["config"], found["drafts"], found["states"], tolerance=1e-4)
