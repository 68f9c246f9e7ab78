"""No number of a pass depends on memory that nobody has written: here all of it is NaN at first."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engine.test_parity import prompt
from tests.support.drafter_harness import greedy
from tests.support.engine_harness import get_engine
from tests.support.engine_models import Model
from tests.support.process import ROOT

LENGTHS = (37, 101)  # of prompts: behind each, a batch is padded


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """Torch fills new memory with NaN, and integers with their largest value."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def passes_of(model: torch.nn.Module, seen: list[bool]) -> Any:
    def note(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        seen.append(all(bool(one.isfinite().all()) for one in tensors if torch.is_tensor(one)))

    return model.register_forward_hook(note)


def test_every_row_of_a_family_is_finite(model: Model, filled_memory: None) -> None:
    """Rows of padding, too: with AMX a product can carry NaN from a row into its neighbours."""
    engine, seen = model.engine(max_num_batched_tokens=288), []
    with passes_of(engine.runner.model, seen):
        for length in LENGTHS:
            engine.generate([prompt(length), prompt(length // 2, salt=5)], model.params(1.5))
    assert seen and all(seen)


def test_every_row_of_a_target_and_its_drafter_is_finite(filled_memory: None) -> None:
    engine = get_engine(
        ROOT / "checkpoints/tiny-ar",
        speculative_config={"method": "dflash", "model": str(ROOT / "checkpoints/tiny-drafter")},
    )
    seen: list[bool] = []
    speculator = engine.runner.speculator
    with passes_of(engine.runner.model, seen), passes_of(speculator.model, seen):
        for length in LENGTHS:
            engine.generate([prompt(length), prompt(length // 2)], greedy(24))
    assert seen and all(seen)
    assert speculator.num_speculative_steps == 15  # the drafter's block
