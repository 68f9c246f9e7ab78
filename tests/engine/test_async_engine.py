"""Asynchronous scheduling through vLLM's engine: the tokens and logits of the synchronous twin.

The twin takes one pass an engine step, and gives every emitted block a pass of its own.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats

from dllm.engine import metrics
from dllm.engine.channels import take_out
from dllm.engine.frame_taker import FrameTaker
from dllm.engine.frames import FrameMail, frame_of
from dllm.engine.model_state import DiffusionModelState
from dllm.engine.warm_up import warm_up
from dllm.models.gemma import algorithm
from tests.engine.test_loop import REQUESTS, params, passes_of_steps, switched
from tests.engine.test_parity import CANVAS, prompt
from tests.support.async_engine import get_async_engine, rows_taken
from tests.support.engine_harness import Engine, Run, assert_same_runs
from tests.support.recorded_calls import record_calls

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ours(checkpoint: Any) -> Engine:
    return get_async_engine(checkpoint(), max_num_batched_tokens=256)


def twin_runs(engine: Engine, requests: Any) -> list[Run]:
    with switched(engine, passes=1, are_separate=True):
        return [engine.quiet_run(*request) for request in requests]


# --- exactness ------------------------------------------------------------------------------------


def test_tokens_and_logits_are_those_of_the_synchronous_twin(engine, ours):
    expected = twin_runs(engine, REQUESTS)
    with rows_taken() as alone:
        assert_same_runs([ours.quiet_run(*request) for request in REQUESTS], expected)
    ours.reset_prefix_cache()
    with rows_taken() as together:
        assert_same_runs(ours.runs(*zip(*REQUESTS, strict=True)), expected)
    assert alone["deferred commit"] and together["deferred commit"] and together["mixed batch"]


def test_nobody_reads_the_rows_of_deferred_commits(ours, monkeypatch):
    """And those of all canvases are read."""
    calls = record_calls(monkeypatch, algorithm, "row_stats")
    contexts = [prompt(40), prompt(9, salt=3)]
    of_whole_canvases = SamplingParams(max_tokens=3 * CANVAS, seed=1, ignore_eos=True)
    with rows_taken() as taken:
        ours.runs(contexts, [of_whole_canvases] * 2)
    rows = Counter(is_read for given, _ in calls for is_read in given[5].tolist())
    assert rows[False] == taken["deferred commit"] * CANVAS > 0
    assert rows[True] == taken["canvas"] * CANVAS


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
def test_metrics_count_the_denoise_steps_of_the_twin(engine, ours, monkeypatch, together):
    """And passes that only write a block's KV apart from them."""
    monkeypatch.setattr(
        Scheduler,
        "make_stats",
        lambda self, steps, *_, **__: SchedulerStats(spec_decoding_stats=steps),
    )
    counts, commits = {}, {}
    for name, one in (("twin", engine), ("ours", ours)):
        monkeypatch.setattr(one.scheduler, "log_stats", True)
        one.scheduler._counts.clear()  # of what ran without statistics
        made = record_calls(monkeypatch, one.scheduler, "make_stats")
        one.reset_prefix_cache()
        with rows_taken() as taken:
            for batch in [REQUESTS] if together else [[request] for request in REQUESTS]:
                one.generate(*zip(*batch, strict=True))
        stats = [stats for _, stats in made]
        steps = [one.spec_decoding_stats for one in stats if one.spec_decoding_stats]
        fields = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        counts[name] = [sum(getattr(step, field) for step in steps) for field in fields]
        sent = [count for one in stats for count in take_out(one, metrics.KEY) or ()]
        commits[name] = sum(amount for name, _, amount in sent if name == "commit_passes")
    assert counts["ours"] == counts["twin"]
    assert counts["ours"][0] == taken["canvas"] > 0
    assert commits == {"twin": 0, "ours": taken["deferred commit"]} and commits["ours"] > 0


def test_a_block_that_does_not_fit_into_the_next_step(engine, checkpoint):
    """Two canvases fit into an engine step. The second request's only fits into every other one.

    Its canvas would end beyond the context if the one in flight were emitted. So the third request
    is in every other engine step, too: none of its canvases is in flight when a block is counted.
    """
    small = get_async_engine(checkpoint(), max_num_batched_tokens=72, max_model_len=288)
    slow = {"diffusion_max_steps": 16, "diffusion_confidence": 0}
    fast = {"diffusion_max_steps": 2}
    requests = [
        (prompt(100), params(blocks=4, extra_args=slow)),
        (prompt(288 - CANVAS - 5, salt=1), params(blocks=2, extra_args=slow)),
        (prompt(30, salt=2), params(blocks=5, seed=5, extra_args=fast)),
    ]
    expected = twin_runs(engine, requests)
    with rows_taken() as taken:
        runs = small.runs(*zip(*requests, strict=True))
    assert runs[1].tokens == expected[1].tokens[: CANVAS + 5]
    assert_same_runs(runs[::2], expected[::2])
    assert taken["deferred commit"] and taken["block before a canvas"] and taken["block alone"], (
        taken
    )


# --- request options ------------------------------------------------------------------------------


def test_frames_of_watched_canvases(engine, ours, monkeypatch):
    """One for each denoise step; none of the passes that only write a block's KV."""
    seen: list[Any] = []
    add_request = FrameTaker.add_request
    asked = SamplingParams(extra_args={"diffusion_stream": "canvas"})
    monkeypatch.setattr(
        FrameTaker, "add_request", lambda self, slot, _: add_request(self, slot, asked)
    )

    def keep(self: FrameMail, outputs: Any) -> None:
        seen[-1] += [frame_of(output) for output, *_ in self._frames]

    monkeypatch.setattr(FrameMail, "add_to", keep)
    for one in (engine, ours):
        seen.append([])
        with rows_taken() as taken:
            one.quiet_run(prompt(20), params(blocks=3))
    assert taken["deferred commit"] == 3 and len(seen[0]) > 6
    expected, frames = (
        [(f.offset, f.step, f.is_final, f.canvas.tolist(), f.argmax.tolist()) for f in of_engine]
        for of_engine in seen
    )
    assert frames == expected


def test_the_kv_of_an_answer_that_needs_few_logits(checkpoint):
    """It is shorter than its canvas. A later prompt that begins with it finds it in the cache."""
    ours = get_async_engine(checkpoint(), max_num_batched_tokens=256, block_size=32)
    context, one_step = prompt(30), {"diffusion_max_steps": 1}
    ours.reset_prefix_cache()
    with rows_taken() as taken:
        (answer,) = ours.generate(
            [context], SamplingParams(max_tokens=10, ignore_eos=True, extra_args=one_step)
        )
    assert taken["deferred commit"] and len(answer) == 10 < CANVAS
    longer = [*context, *answer, *prompt(12, salt=1)]
    hits = [ours.runs([longer], params())]
    hits.append([ours.quiet_run(longer, params())])
    assert_same_runs(*hits)


# --- attention ------------------------------------------------------------------------------------


def test_a_full_graph_gets_the_same_sequences(ours, monkeypatch):
    """Where each row is one sequence, in tensors that stay in place."""
    describe, met = DiffusionModelState._metadata_of_sequences, Counter()

    def spy(self: Any, batch: Any, tables: Any) -> Any:
        sequences = describe(self, batch, tables)
        believed = torch.from_numpy(self._sequences(batch).seq_lens)
        met["late"] += bool((sequences["seq_lens"] < believed).any())
        met["commit"] += bool(self.canvases.commits[batch.idx_mapping].any())
        if sequences["num_reqs"] == batch.num_reqs:
            in_place = self._metadata_of_full_graph(batch, tables)
            for name in ("query_start_loc_gpu", "seq_lens", "causal"):
                whole = in_place[name][: len(sequences[name])]
                assert whole.tolist() == sequences[name].tolist(), name
            for whole, gathered in zip(tables, sequences["block_tables"], strict=True):
                assert torch.equal(whole[: batch.num_reqs], gathered)
            assert not in_place["causal"][batch.num_reqs :].any()
            met["in place"] += 1
        return sequences

    monkeypatch.setattr(DiffusionModelState, "_metadata_of_sequences", spy)
    ours.reset_prefix_cache()
    ours.generate(*zip(*REQUESTS, strict=True))
    assert met["late"] and met["commit"] and met["in place"]


def test_no_sequence_is_longer_than_the_host_believes(ours, monkeypatch):
    """Not in the warm-up either: attention plans its memory with the host's bound."""
    described = record_calls(monkeypatch, DiffusionModelState, "_metadata_of_sequences")
    warm_up(ours.runner, ours.core.model_executor.driver_worker.worker.execute_model)
    ours.reset_prefix_cache()
    ours.generate(*zip(*REQUESTS, strict=True))
    assert len(described) > 30
    assert all(int(of["seq_lens"].max()) <= of["max_seq_len"] for _, of in described)


def test_no_step_repeats_its_batch(ours, monkeypatch):
    """Neither side asks for it: the next engine step is on its way."""
    monkeypatch.setattr(ours.loop, "bound", 1e9)
    with passes_of_steps(ours) as passes:
        ours.generate([prompt(20)], params(blocks=2))
    assert set(passes) == {1} and len(passes) > 4
