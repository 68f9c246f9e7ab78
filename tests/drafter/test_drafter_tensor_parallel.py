"""Drafting on two tensor-parallel ranks: the text stays the target's."""

import itertools
import json
import sys

import numpy as np
import pytest

from dllm.drafter.widths.adaptive import AdaptiveWidth
from tests.support.draft_sources import write_eagle_3
from tests.support.drafter_harness import drafting_engine, greedy, plain_engine, prompt
from tests.support.drafter_pairs import write_drafter, write_target
from tests.support.process import printed_json, run_python

NUM_DRAFTS = 5
PROMPTS = [prompt(30 + salt, salt) for salt in range(3)]
PARAMS = [greedy(40), greedy(40, temperature=1.0, seed=3), greedy(40)]


@pytest.mark.parametrize(
    ("method", "write"), [("dflash", write_drafter), ("eagle3", write_eagle_3)]
)
def test_ranks_draft_where_the_schedule_says_so(tmp_path, method, write):
    target, drafter = write_target(tmp_path / "target"), write(tmp_path / "drafter")
    # vLLM wants a NUMA node for each rank, unless it is told not to bind threads.
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    arguments = str(target), str(drafter), method
    finished = run_python("-m", __name__, *arguments, environment=environment)
    assert printed_json(finished) == plain_engine(target).generate(PROMPTS, PARAMS)


class EveryThird(AdaptiveWidth):
    """Drafts in every third step."""

    _steps = itertools.count()

    def wants_drafts(self, slots: np.ndarray) -> bool:
        super().wants_drafts(slots)
        self._wants = next(self._steps) % 3 == 0
        return self._wants


def generate_on_two_ranks(target: str, drafter: str, method: str) -> None:
    """The other side of the test: prints the tokens."""
    from dllm.drafter.widths import make

    assert make.AdaptiveWidth is AdaptiveWidth, "make_policy takes it from there"
    make.AdaptiveWidth = EveryThird  # type: ignore[misc]
    engine = drafting_engine(
        target,
        drafter,
        NUM_DRAFTS,
        {"policy": "adaptive"},
        speculative={"method": method},
        tensor_parallel_size=2,
    )
    tokens = engine.generate(PROMPTS, PARAMS)
    engine.llm.llm_engine.engine_core.shutdown()
    print(json.dumps(tokens))


if __name__ == "__main__":
    generate_on_two_ranks(*sys.argv[1:])
