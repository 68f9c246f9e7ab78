"""Models with blocks under asynchronous scheduling: the runs of their synchronous twin.

SDAR with blocks of 4, and LLaDA2 with blocks of 32, which edits its canvases. Random schedules on a
worker that models pages are in ``test_async_scheduler``.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dllm.engine import step_rows
from tests.engine.test_async_engine import started_run
from tests.engine.test_blocks import prompt
from tests.support.async_engine import rows_taken
from tests.support.engine_harness import RUN_TOLERANCE, Engine, Run, assert_same_runs
from tests.support.engine_models import BLOCKS, Model, model_of

pytestmark = pytest.mark.slow

CONTEXT = 254  # tokens: no multiple of a block
EXTRA: dict[int, list[dict[str, Any]]] = {
    4: [
        {"diffusion_threshold": 0.3},
        {"diffusion_strategy": "sequential", "diffusion_max_steps": 3},
        {"diffusion_strategy": "entropy_bounded", "diffusion_entropy_bound": 4.0},
    ],
    32: [
        {"diffusion_threshold": 0.3},
        {"diffusion_threshold": 0.1, "diffusion_editing": 1, "diffusion_editing_threshold": 0.0},
        {"diffusion_max_steps": 4, "diffusion_editing": 1, "diffusion_max_post_steps": 3},
    ],
}


class Mixed(Model):
    """A checkpoint, and requests that decide in different ways."""

    def requests(self, lengths: Sequence[int], blocks: float = 2) -> list[Any]:
        """Prompts of these lengths; each third one is greedy, and each decides in its own way."""
        extra = EXTRA[self.size]
        return [
            (
                prompt(length, salt=at),
                self.params(
                    blocks + at % 3 / 2,
                    seed=at,
                    temperature=float(at % 3 > 0),
                    extra_args=extra[at // 3 % 3],
                ),
            )
            for at, length in enumerate(lengths)
        ]


@pytest.fixture(scope="module", params=BLOCKS)
def model(request: pytest.FixtureRequest, family: Callable[[str], Path]) -> Mixed:
    return Mixed(**vars(model_of(request.param, family(request.param))))


@pytest.fixture(scope="module")
def twin(model: Mixed) -> Engine:
    return model.engine()


@pytest.fixture(scope="module")
def ours(model: Mixed) -> Engine:
    return model.engine(True)


def runs_of(engine: Engine, requests: Sequence[Any]) -> list[Run]:
    engine.reset_prefix_cache()
    return engine.runs(*zip(*requests, strict=True))


# --- exactness ------------------------------------------------------------------------------------


def test_tokens_and_logits_are_those_of_the_twin_behind_every_tail(model, twin, ours):
    size = model.size
    requests = model.requests([size + tail for tail in range(size)] + [1, size - 1, 3 * size])
    with rows_taken(size) as taken:
        mine = runs_of(ours, requests)
    assert_same_runs(mine, runs_of(twin, requests))
    assert taken["commit with its tail"] and taken["mixed batch"], taken
    assert taken["deferred commit"] > taken["commit with its tail"]


@pytest.mark.parametrize("seed", range(4))
def test_random_arrivals_and_aborts_in_small_budgets(model, seed):
    """Few pages, a budget for two blocks, and a context that ends within a block."""
    draw, size = random.Random(seed), model.size
    small = model.engine(
        True,
        max_num_batched_tokens=2 * size + 3 + 64,
        max_model_len=CONTEXT,
        block_size=32,
        num_gpu_blocks_override=14,
    )
    lengths = [draw.randint(1, 5 * size + 3) for _ in range(9)]
    requests = model.requests(lengths, blocks=draw.choice([1.25, 48 / size]))
    aborted = set(draw.sample(range(9), 2))
    # Where the context ends, the last block is cut, and each of its tokens sees fewer.
    twin = model.engine(max_model_len=CONTEXT)
    expected = [run.tokens for run in runs_of(twin, requests)]
    arrivals = sorted(draw.randint(0, 30) for _ in requests)
    names: list[str] = []
    finished: dict[str, Any] = {}
    small.reset_prefix_cache()
    for step in range(3000):
        while len(names) < len(requests) and arrivals[len(names)] <= step:
            names.append(small.add(*requests[len(names)]))
        for number in aborted & set(range(len(names))):
            if draw.random() < 0.2:
                small.llm.llm_engine.abort_request([names[number]])
        finished |= {one.request_id: one for one in small.step()}
        if len(names) == len(requests) and not small.llm.llm_engine.has_unfinished_requests():
            break
    for number, name in enumerate(names):
        if number not in aborted:
            assert list(finished[name].outputs[0].token_ids) == expected[number], number
    small.reset_prefix_cache()  # asserts that no KV block leaked


def test_canvases_that_do_not_fit_wait_with_their_tails(model, twin):
    size = model.size
    small = model.engine(True, max_num_batched_tokens=2 * size + 3)
    requests = model.requests([size + 1, 2 * size, size + 3, 3 * size - 1, 5], blocks=4)
    expected = runs_of(twin, requests)
    with rows_taken(size) as taken:
        assert_same_runs(runs_of(small, requests), expected)
    assert taken["commit with its tail"] and taken["mixed batch"], taken


# --- these tests can fail -------------------------------------------------------------------------


def no_tails(canvases: Any, rows: Any, num_tokens: Any, block_size: int) -> torch.Tensor:
    """As if every token in front of a canvas kept its KV."""
    return num_rejected(canvases, rows, num_tokens, 1)


num_rejected = step_rows.num_rejected


def test_without_rounding_to_blocks_runs_differ(model, twin, monkeypatch):
    expected = twin.quiet_run(prompt(model.size + 1), model.params())
    ruined = model.engine(True, max_num_batched_tokens=260)
    monkeypatch.setattr(step_rows, "num_rejected", no_tails)
    run = started_run(ruined, prompt(model.size + 1), model.params())
    assert run.difference(expected) > 100 * RUN_TOLERANCE
