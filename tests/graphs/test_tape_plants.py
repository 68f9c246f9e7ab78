"""Faults that the tape catches (``tests/support/tape_plants``), and those that a start sees."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.graphs.test_tape_engines import requests
from tests.support.engine_harness import RUN_TOLERANCE, relative_error
from tests.support.tape_jobs import CANVAS, PLANTED, PLANTS, run_jobs, write_with_thoughts

pytestmark = pytest.mark.slow

WAITS, FREED, DIFFERS = "waits for the device", "freed memory is read", "other answers"
CAUGHT = {
    "nothing": set(),
    "python_number": {DIFFERS},
    "inputs_elsewhere": {FREED, DIFFERS},
    "metadata_of_capture": {FREED, DIFFERS},
    "lengths_of_capture": {DIFFERS},
    "wait": {WAITS},
    "number_of_host": {FREED, DIFFERS},
    "table_of_capture": {DIFFERS},
    "padding_with_a_slot": {DIFFERS},
    "memory_of_another_graph": {DIFFERS},
}
# What reads a graph's memory behind the model changes no hidden states. And the table is right: the
# graph that makes it was replayed before.
UNSEEN_AT_START = {"nothing", "memory_of_another_graph", "table_of_capture"}


@pytest.fixture(scope="module")
def results(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("plants")
    layers, few = ["sliding_attention", "full_attention"], {"max_denoising_steps": 4}
    plain = checkpoint(canvas_length=CANVAS["gemma"], layer_types=layers, generation=few)
    path = write_with_thoughts(plain, folder / "gemma")
    found = run_jobs({"planted": PLANTED}, lambda name: path, folder / "found.pt")["planted"]
    assert "failed" not in found, found["failed"]
    return found


def caught(result: dict[str, Any]) -> set[str]:
    if result["failed"]:
        return {WAITS} if WAITS in result["failed"] else {result["failed"]}
    pairs = zip(requests(result, "taped"), requests(result, "eager"), strict=True)
    is_same = all(
        taped[0] == eager[0] and relative_error(taped[2], eager[2]) < RUN_TOLERANCE
        for taped, eager in pairs
    )
    has_read = any(FREED in fault for fault in result["faults"])
    found = [DIFFERS] * (not is_same) + [FREED] * has_read
    return set(found)


@pytest.mark.parametrize("plant", PLANTS)
def test_tape_catches(plant, results):
    assert caught(results[plant]) == CAUGHT[plant]


@pytest.mark.parametrize("plant", [plant for plant in PLANTS if plant != "wait"])
def test_a_start_sees_on_a_tape(plant, results):
    """What it sees is not used, and the server is right. Here it comes behind requests."""
    left = {"FULL"} if plant in UNSEEN_AT_START else set()
    assert results[plant]["left"] == left
