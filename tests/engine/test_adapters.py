"""LoRA adapters: an adapter is its merged weights, in every family and in any batch."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.support.adapters import asked, merged, projections, write_adapter
from tests.support.engine_harness import Engine, assert_same_runs, get_engine
from tests.support.family_checkpoints import (
    A2D_QWEN2,
    A2D_QWEN3,
    LLADA2,
    NEMOTRON,
    SDAR,
    SDAR_MOE,
    STABLE_DIFFCODER,
    write,
)

CONFIGS = {
    "sdar": SDAR,
    "sdar-moe": SDAR_MOE,
    "a2d-qwen3": A2D_QWEN3,
    "a2d-qwen2": A2D_QWEN2,
    "stable-diffcoder": STABLE_DIFFCODER,
    "llada2": LLADA2,
    "nemotron": NEMOTRON,
}
FAMILIES = ["gemma", *CONFIGS]
WITH_ADAPTERS = dict(enable_lora=True, max_loras=2, max_cpu_loras=4)
# Ids that every vocabulary has.
CONTEXTS = [[one * salt % 500 for one in range(1, 1 + salt)] for salt in (71, 22, 131, 43)]
GREEDY = SamplingParams(temperature=0, seed=1, max_tokens=70, ignore_eos=True)
WIDTH = 1  # of the narrowest first canvas: rows of logits of a run that are of its first pass
TOLERANCE = 1e-5  # of the largest logit


class Case(NamedTuple):
    """A checkpoint, two adapters of it, and what a server of each has."""

    base: Path
    adapters: list[Path]
    merged: list[Path]

    def requests(self) -> list[LoRARequest]:
        return [asked(path, number) for number, path in enumerate(self.adapters, 1)]

    def engine(self, **options: object) -> Engine:
        return get_engine(self.base, **WITH_ADAPTERS, **options)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    is_out = theirs == -torch.inf
    ours, theirs = ours.masked_fill(is_out, 0), theirs.masked_fill(is_out, 0)
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.fixture(scope="module")
def case(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def make(family: str) -> Case:
        if family not in made:
            path = tmp_path_factory.mktemp(family)
            base = checkpoint() if family == "gemma" else write(path / "base", CONFIGS[family])
            shapes = projections(base)
            adapters = [write_adapter(path / name, shapes, seed) for seed, name in enumerate("ab")]
            made[family] = Case(
                base, adapters, [merged(base, one, path / f"{one.name}-merged") for one in adapters]
            )
        return made[family]

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_is_its_merged_weights_beside_others_in_a_batch(
    family: str, case: Callable[[str], Case]
) -> None:
    """Two adapters, and rows with none, whose heads and canvases are in the same passes."""
    its = case(family)
    first, second = its.requests()
    runs = its.engine().runs(CONTEXTS, GREEDY, [None, first, second, first])
    # In the same batch, because a batch of another size rounds differently.
    of_each = [get_engine(path).runs(CONTEXTS, GREEDY) for path in (its.base, *its.merged)]
    expected = [of_each[which][row] for row, which in enumerate((0, 1, 2, 1))]
    assert all(of_each[0][row].tokens != expected[row].tokens for row in (1, 2, 3))
    firsts = [difference(run.logits[:WIDTH], other.logits[:WIDTH])
              for run, other in zip(runs, expected, strict=True)]  # fmt: skip
    assert firsts[0] == 0 and max(firsts) < TOLERANCE, firsts
    assert_same_runs(runs, expected)
