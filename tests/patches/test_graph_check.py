"""Which CUDA graphs serve when some of them are wrong.

``tests/graphs/test_tape_plants.py`` compares those of real engines.
"""

from contextlib import nullcontext
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from dllm.patches import graph_check
from dllm.patches.gpu_worker import CanvasGPURunner
from dllm.patches.graph_check import FULL, LEAST, MOST, PIECES, TIMES, error_of, rounding

FULL_GRAPH = SimpleNamespace(cg_mode=FULL, num_reqs=4)
IN_PIECES = SimpleNamespace(cg_mode=PIECES, num_reqs=None)
BOTH = [FULL_GRAPH, IN_PIECES]
ONES = torch.ones(2, 4, 8)


def runner_of(graphs: dict[int, list], **options) -> SimpleNamespace:
    """A runner with these graphs, by number of tokens."""
    return SimpleNamespace(
        execute_model=None,
        kv_caches=[],
        cudagraph_manager=SimpleNamespace(_candidates=graphs),
        vllm_config=SimpleNamespace(
            additional_config={"dllm": options},
        ),
        lora_config=None,
        maybe_setup_dummy_loras=lambda config: nullcontext(),
    )


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch):
    """Runs the check on a server with some wrong graphs; what is left of both kinds."""

    def run(wrong=(), counts=(1, 2, 4), adapters=0, ranks=bool, **options):
        runner = runner_of({32: BOTH, 40: [IN_PIECES]}, **options)
        made_up = [None, *range(1, 1 + adapters)]
        graphs = runner.cudagraph_manager
        served: list[int] = []
        asked: set[int | None] = set()
        cache = torch.ones(3)  # of what was served before
        runner.kv_caches = [cache]

        def serve(given, execute_model, num_reqs, adapter=None):
            served.append(num_reqs)
            asked.add(adapter)
            used = [*chain(*graphs._candidates.values())]
            prompts, canvases = (
                any(graph in wrong for graph in used if graph.cg_mode in modes)
                for modes in ({PIECES}, {PIECES, FULL})
            )
            assert not cache.any(), "keys of other steps are there"
            cache.fill_(1)
            return [ONES + prompts, ONES + canvases]

        monkeypatch.setattr(graph_check, "serve_made_up", serve)
        monkeypatch.setattr(graph_check, "all_engines_say_yes", ranks)
        monkeypatch.setattr(graph_check, "made_up_adapters", lambda runner: nullcontext(made_up))
        graph_check.drop_wrong_graphs(runner)
        assert served == list(counts) * (len(served) // len(counts))
        assert asked == ({*made_up} if served else set())
        return graphs._candidates

    return run


@pytest.mark.parametrize(
    ("wrong", "options", "left"),
    [
        ([], {}, BOTH),
        ([FULL_GRAPH], {}, [IN_PIECES]),
        ([IN_PIECES], {}, [FULL_GRAPH]),
        (BOTH, {}, []),
        (BOTH, {"self_test": False}, BOTH),
        ([FULL_GRAPH], {"adapters": 1}, [IN_PIECES]),
        ([], {"ranks": lambda answer: False}, []),  # on another rank, or in another engine
    ],
)
def test_graphs_that_differ_from_steps_without_are_dropped(check, wrong, options, left):
    assert check(wrong, **options) == {32: left, 40: [IN_PIECES] * (IN_PIECES in left)}


def test_a_step_that_fails_ends_the_start_and_names_the_switch(monkeypatch):
    def broken(*given):
        raise ValueError("out of memory")

    monkeypatch.setattr(graph_check, "serve_made_up", broken)
    with pytest.raises(RuntimeError, match="self_test"):
        graph_check.drop_wrong_graphs(runner_of({32: BOTH}))


@pytest.mark.parametrize(
    ("noise", "error", "serves"),
    [
        (0.0, 0.9 * LEAST, True),
        (0.0, 1.1 * LEAST, False),
        (0.01, 0.9 * TIMES * 0.01, True),
        (0.01, 1.1 * TIMES * 0.01, False),
        (1.0, 1.1 * MOST, False),
    ],
)
def test_what_is_allowed_follows_from_what_rounding_changes(monkeypatch, noise, error, serves):
    runner = runner_of({32: [FULL_GRAPH]})
    graphs = runner.cudagraph_manager

    def serve(given, execute_model, num_reqs, adapter=None):
        """Prompts are shorter for more requests; another number of them rounds otherwise."""
        off = error if graphs._candidates[32] else 0.0
        states = torch.ones(num_reqs, 8 // num_reqs, 8) * (1 + off)
        return [states * (1 + noise * (num_reqs > 1))]

    monkeypatch.setattr(graph_check, "serve_made_up", serve)
    told: list[object] = []
    log = SimpleNamespace(info=lambda text, *given: told.extend(given), error=lambda *given: None)
    monkeypatch.setattr(graph_check, "logger", log)
    monkeypatch.setattr(graph_check, "all_engines_say_yes", bool)
    graph_check.drop_wrong_graphs(runner)
    assert graphs._candidates == {32: [FULL_GRAPH] * serves}
    assert told[1] == {"FULL": pytest.approx(error, rel=0.05)}


@pytest.mark.parametrize(
    ("captured", "counts"),
    [
        (set(), [1, 2]),
        ({1}, [1, 2]),
        ({4}, [1, 2, 4]),  # one and two are padded
        ({1, 2, 3, 4}, [1, 2, 4]),  # nothing is padded
        ({1, 2, 3, 4, 6, 8}, [1, 2, 5, 8]),
    ],
)
def test_a_full_graph_is_compared_with_padding_where_there_is_any(captured, counts):
    assert graph_check.numbers_of_requests(captured) == counts


def test_rounding_is_seen_where_prompts_are_the_same():
    few, many = torch.ones(1, 8, 4), torch.ones(2, 4, 4)
    many[0, 2] *= 1.5
    many[1] *= 9.0  # another request
    assert rounding([[few], [], [many, many * 7]]) == pytest.approx(0.5 / 1.5 / 4)
    assert rounding([[few]]) == rounding([[], []]) == 0.0


def test_the_error_is_of_the_request_that_is_farthest_off():
    for change, error in ((0.0, 0.0), (0.5, 0.5 / 4), (torch.nan, torch.inf)):
        found = ONES.clone()
        found[1, 2] += change
        assert error_of(found, ONES) == pytest.approx(error)


def test_graphs_are_checked_when_they_are_captured(monkeypatch):
    """Not those of vLLM's memory profile, which it throws away."""
    monkeypatch.setattr(GPUModelRunner, "capture_model", lambda self, *, profile_only=False: 5)
    checked: list[object] = []
    runner = object.__new__(CanvasGPURunner)
    runner.check_code, runner.check_graphs = lambda runner: checked.append("code"), checked.append
    assert runner.capture_model(profile_only=True) == 5 and not checked
    assert runner.capture_model() == 5 and checked == ["code", runner]
