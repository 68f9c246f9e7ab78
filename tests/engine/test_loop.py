"""The denoise loop and the overlapped first step: fewer engine steps and passes, equal tokens."""

import itertools
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.engine.core import EngineCoreProc

from dllm.engine.channels import RepeatableSchedule
from dllm.engine.loop import DenoiseLoop
from dllm.patches.engine_core import CanvasCore
from tests.engine.test_engine import page_contents, params, scheduled_spans
from tests.engine.test_parity import CANVAS, prompt
from tests.support.engine_harness import Engine, assert_same_runs, get_engine
from tests.support.recorded_calls import record_calls

UNBOUNDED = 10**9
BOUNDS = (1, 2, 8, UNBOUNDED)


@contextmanager
def switched(engine: Engine, passes: int, are_separate: bool = False) -> Iterator[None]:
    """The engine, with passes apart or not, and at most ``passes`` of them in an engine step.

    The loop's clock moves by a second with every pass.
    """
    loop, scheduler = engine.loop, engine.scheduler
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "bound", passes if passes > 1 else 0)
        # An engine step of n passes reads the clock n times, and once at its start.
        patch.setattr(loop, "clock", itertools.count().__next__)
        patch.setattr(scheduler, "_separates_passes", are_separate)
        yield


@contextmanager
def passes_of_steps(engine: Engine) -> Iterator[list[int]]:
    """How many passes each engine step with a canvas took."""
    taken: list[int] = []
    sampler = type(engine.runner.sampler)
    call = sampler.__call__

    def spy(self: Any, hidden: Any, batch: Any) -> Any:
        output = call(self, hidden, batch)
        if batch.num_draft_tokens:
            taken.append(self.loop.num_passes)
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "__call__", spy)
        yield taken


# --- exactness -----------------------------------------------------------------------------------

REQUESTS = [
    (prompt(70), params(blocks=3, seed=3)),
    (prompt(9, salt=3), params(blocks=2, seed=4, logprobs=2)),
    (prompt(1), params(seed=5, presence_penalty=1.0, frequency_penalty=0.5)),
    (prompt(40), params(blocks=2, seed=6, bad_words=["a"], logit_bias={33: 8.0})),
    (prompt(33), params(blocks=1.5, seed=7, top_k=20, min_p=0.05, prompt_logprobs=1)),
    (prompt(20), params(blocks=2, seed=8, extra_args={"diffusion_canvas_length": 13})),
    (prompt(64), params(blocks=2, seed=9, stop=["e"], ignore_eos=False)),
]


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[Any]:
    """Each request alone: one pass an engine step; prompts and commits in passes of their own."""
    with switched(engine, passes=1, are_separate=True):
        return [engine.quiet_run(*request) for request in REQUESTS]


@pytest.mark.parametrize(
    ("passes", "are_separate"),
    [*((passes, False) for passes in BOUNDS), (UNBOUNDED, True), (2, True)],
)
def test_tokens_and_logits_do_not_depend_on_the_switches(engine, expected, passes, are_separate):
    with switched(engine, passes, are_separate), passes_of_steps(engine) as taken:
        assert_same_runs([engine.quiet_run(*request) for request in REQUESTS], expected)
        engine.reset_prefix_cache()
        assert_same_runs(engine.runs(*zip(*REQUESTS, strict=True)), expected)
    assert max(taken) <= passes
    assert max(taken) > 1 or passes == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU draws one in each denoise step")
def test_on_a_cpu_a_canvas_is_drawn_when_one_begins(engine, monkeypatch):
    """Behind the prompt and behind each block, and in no other denoise step."""
    begun = record_calls(monkeypatch, engine.runner.sampler, "_begin_rows")
    with passes_of_steps(engine) as taken:
        engine.quiet_run(prompt(20), params(blocks=3, seed=3))
    assert len(begun) == 1 + 3 < sum(taken)


def test_a_request_aborted_in_mid_loop_leaves_nothing_behind(engine, monkeypatch):
    """vLLM takes aborts after the worker has answered: the output is of a dead request."""
    contexts = [prompt(33), prompt(12)]
    alone = [engine.quiet_run(context, params(seed=4)) for context in contexts]
    engine.reset_prefix_cache()
    with switched(engine, UNBOUNDED):
        doomed = engine.add(prompt(50), params(blocks=8))
        survivor = engine.add(contexts[1], params(seed=4))
        update = engine.scheduler.update_from_output
        aborted = []

        def abort_first(scheduled: Any, answer: Any) -> Any:
            if not aborted:
                aborted.append(answer.num_passes)
                engine.llm.llm_engine.abort_request([doomed])
            return update(scheduled, answer)

        monkeypatch.setattr(engine.scheduler, "update_from_output", abort_first)
        with engine.watch(keep_logits=True) as watched:
            finished = engine.run()
        assert aborted[0] > 1, "the engine step had a single pass"
        assert set(finished) == {survivor}
        assert list(finished[survivor].outputs[0].token_ids) == alone[1].tokens
        assert len(watched[survivor]) * CANVAS == len(alone[1].logits)
        assert_same_runs(engine.runs(contexts[:1], params(seed=4)), alone[:1])
    engine.reset_prefix_cache()  # asserts that no KV block leaked


def test_the_kv_of_a_whole_page_of_prompt_is_that_of_a_prompt_alone(engine):
    page = engine.runner.block_tables.block_sizes[0]
    contents = []
    for are_separate in (True, False):
        engine.reset_prefix_cache()
        with switched(engine, 1, are_separate):
            engine.add(prompt(page), params(1))
            engine.step()
            contents.append(page_contents(engine))
            engine.run()
    assert len(contents[0]) == 4  # layers
    for alone, beside in zip(*contents, strict=True):
        # Another number of rows in a product rounds differently.
        torch.testing.assert_close(alone, beside, rtol=1e-4, atol=1e-4)


# --- what ends a loop ----------------------------------------------------------------------------


def test_a_loop_ends_with_the_pass_in_which_a_canvas_converges(engine):
    with switched(engine, UNBOUNDED), passes_of_steps(engine) as taken:
        _, steps = engine.denoised(prompt(20), params(blocks=3))
    emitting = [i for i, step in enumerate(steps) if step.num_emitted]
    # One engine step a block, whose last pass emits.
    assert list(itertools.accumulate(taken)) == [i + 1 for i in emitting]
    assert len(taken) == 3


@pytest.mark.parametrize("passes", [2, 3, 8])
def test_a_visit_takes_no_more_passes_than_the_bound_has_time_for(engine, passes):
    slow = params(blocks=1, extra_args={"diffusion_max_steps": 16, "diffusion_confidence": 0})
    with switched(engine, passes), passes_of_steps(engine) as taken:
        engine.generate([prompt(20)], slow)
    whole, rest = divmod(16, passes)
    assert taken == [passes] * whole + [rest] * bool(rest)


def loop(bound_ms: float | str, clock: Any, *, on_cpu: bool = True, replicas: int = 1) -> Any:
    """A loop of a worker that is not there."""
    config = SimpleNamespace(
        additional_config={"dllm": {"denoise_loop_ms": bound_ms}},
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=replicas),
    )
    return DenoiseLoop(config, on_cpu, None, clock)  # type: ignore[arg-type]


def test_the_default_is_a_loop_on_a_cpu_and_none_on_a_gpu():
    assert loop("auto", None).bound == 0.05
    assert loop("auto", None, on_cpu=False).bound == 0
    assert loop(20, None, on_cpu=False).bound == 0.02
    # Replicas of a mixture of experts make every pass together.
    assert loop(20, None, replicas=2).bound == 0


def test_a_pass_that_would_end_too_late_does_not_begin():
    moments = iter([0.0, 0.010, 0.020, 0.034])
    one = loop(47, moments.__next__)
    one.begin_engine_step(True)
    nothing = torch.zeros(2, dtype=torch.int32)
    assert one.begin_next_pass(nothing)  # 10 ms, and the next would end at 20 ms
    assert one.begin_next_pass(nothing)
    assert not one.begin_next_pass(nothing)  # 34 ms; the next would take 14 ms and end at 48 ms
    assert one.num_passes == 3


def test_the_time_of_a_pass_includes_the_device():
    """A device that is done 20 ms after the pass was launched, when its answer is read."""
    now = itertools.count(step=0.020)
    time_s = [0.0]

    class OnDevice:
        def any(self) -> bool:
            time_s[0] = next(now)
            return False

    next(now)
    one = loop(50, lambda: time_s[0])
    one.begin_engine_step(True)
    assert one.begin_next_pass(OnDevice())  # 20 ms; the next ends at 40 ms
    assert not one.begin_next_pass(OnDevice())  # 40 ms; the next would end at 60 ms


def test_an_arriving_request_ends_the_loop():
    nothing = torch.zeros(2, dtype=torch.int32)
    one = loop(60_000, itertools.count().__next__)
    one.begin_engine_step(True)
    assert one.begin_next_pass(nothing)
    one.has_arrived = lambda: True
    assert not one.begin_next_pass(nothing)


def test_the_engine_core_tells_the_loop_of_its_queue(engine, monkeypatch):
    """The core's own loop is not run: only what happens before it."""
    kind = type("Core", (CanvasCore, EngineCoreProc), {})
    core, other = object.__new__(kind), object.__new__(kind)
    core.input_queue, core.model_executor = queue.Queue(), engine.core.model_executor
    monkeypatch.setattr(engine.loop, "has_arrived", None)  # is put back
    # vLLM's loop fails at the first thing that `core` lacks.
    with pytest.raises(AttributeError):
        core.run_busy_loop()
    assert not engine.loop.has_arrived()
    core.input_queue.put("a message")
    assert engine.loop.has_arrived()
    other.model_executor = SimpleNamespace()  # of a worker in another process
    with pytest.raises(AttributeError):
        other.run_busy_loop()


def test_no_loop_unless_the_scheduler_allows_it():
    def batch(*widths: int, num_rows: int) -> Any:
        return SimpleNamespace(num_draft_tokens_per_req=np.array(widths), num_draft_tokens=num_rows)

    canvases = batch(3, 3, num_rows=6)
    one = loop(1000, itertools.count().__next__)
    one.begin_engine_step(False)
    assert not one.may_repeat(canvases)
    one.begin_engine_step(True)
    assert one.may_repeat(canvases)
    assert not one.may_repeat(batch(3, 3, num_rows=4))  # two tokens take no part in the step
    # A prompt that goes on in the next engine step.
    assert not one.may_repeat(batch(3, 0, num_rows=3))
    switched_off = loop(0, itertools.count().__next__)
    switched_off.begin_engine_step(True)
    assert not switched_off.may_repeat(canvases)


def permissions(monkeypatch: pytest.MonkeyPatch, engine: Engine, is_crowded: Any) -> list[Any]:
    """For each engine step to come (whether it ``is_crowded``, whether it may have more passes)."""
    messages: list[tuple[bool, bool]] = []
    schedule = type(engine.scheduler).schedule

    def spy(self: Any, throttle_prefills: bool = False) -> Any:
        output = schedule(self, throttle_prefills)
        messages.append((is_crowded(self, output), isinstance(output, RepeatableSchedule)))
        return output

    monkeypatch.setattr(type(engine.scheduler), "schedule", spy)
    return messages


def test_one_pass_a_step_while_a_request_waits_for_admission(engine, monkeypatch):
    contexts = [prompt(20, salt=salt) for salt in range(6)]  # of which four run at once
    with switched(engine, UNBOUNDED), passes_of_steps(engine) as taken:
        messages = permissions(monkeypatch, engine, lambda self, _: len(self.waiting) > 0)
        engine.generate(contexts, params(blocks=2))
    assert {allowed for waiting, allowed in messages if waiting} == {False}
    assert {allowed for waiting, allowed in messages if not waiting} == {True}
    assert taken[0] == 1 and max(taken) > 1


def test_one_pass_a_step_while_a_running_request_found_no_room(checkpoint, monkeypatch):
    """Budget 72: an emitted block with its canvas leaves no room for another canvas."""
    small = get_engine(checkpoint(), max_num_batched_tokens=72)

    def leaves_one_out(self: Any, output: Any) -> bool:
        return bool({r.request_id for r in self.running} - set(output.num_scheduled_tokens))

    messages = permissions(monkeypatch, small, leaves_one_out)
    small.reset_prefix_cache()
    with switched(small, UNBOUNDED):
        small.generate([prompt(20), prompt(9, salt=3)], params(blocks=3))
    assert {allowed for left_out, allowed in messages if left_out} == {False}
    assert {allowed for left_out, allowed in messages if not left_out} == {True}


def test_one_pass_a_step_while_a_prompt_is_read_in_chunks(engine, checkpoint):
    small = get_engine(checkpoint(), max_num_batched_tokens=72)
    small.reset_prefix_cache()
    with switched(small, UNBOUNDED), passes_of_steps(small) as taken:
        first = small.add(prompt(10), params(blocks=8))
        small.step()
        before = len(taken)
        small.add(prompt(130, salt=3), params(blocks=1))
        for _ in range(2):
            small.step()
        assert taken[before:] == [1, 1]
        assert first in small.run()


# --- the first step with the last chunk of the prompt --------------------------------------------


def spans_of(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, requests: list[Any]
) -> list[tuple[int, int, int]]:
    outputs = record_calls(monkeypatch, engine.scheduler, "schedule")
    with engine.one_pass_a_step():
        engine.generate(*zip(*requests, strict=True))
    return scheduled_spans(output for _, output in outputs)


def test_a_prompt_that_fits_takes_its_canvas_along(engine, monkeypatch):
    engine.reset_prefix_cache()
    spans = spans_of(engine, monkeypatch, [(prompt(50), params(1))])
    assert spans[0] == (-50, 50 + CANVAS, CANVAS)


def test_the_last_chunk_takes_the_canvas_along_if_both_fit(engine, checkpoint, monkeypatch):
    small = get_engine(checkpoint(), max_num_batched_tokens=72)
    for length, last in ((100, (-28, 60, 32)), (72 + 40, (-40, 72, 32)), (72 + 41, (-41, 41, 0))):
        small.reset_prefix_cache()
        with monkeypatch.context() as patch:
            spans = spans_of(small, patch, [(prompt(length), params(1))])
        assert spans[0] == (-length, 72, 0)
        assert spans[1] == last


def test_a_prompt_that_is_cached_as_a_whole_takes_the_canvas_along(engine, monkeypatch):
    page = engine.runner.block_tables.block_sizes[0]
    context = prompt(2 * page)
    engine.reset_prefix_cache()
    first = engine.generate([context], params(1))
    hits = record_calls(monkeypatch, engine.scheduler, "_get_local_prefix_cache_hit")
    outputs = record_calls(monkeypatch, engine.scheduler, "schedule")
    assert engine.generate([context], params(1)) == first
    assert [result[1] for _, result in hits] == [page]  # vLLM computes the last page again
    (message,) = (output for _, output in outputs if output.scheduled_new_reqs)
    assert list(message.num_scheduled_tokens.values()) == [page + CANVAS]


def test_without_kv_pages_for_the_canvas_the_prompt_goes_alone(engine, monkeypatch):
    expected = engine.quiet_run(prompt(50), params(2))
    engine.reset_prefix_cache()
    manager = engine.scheduler.kv_cache_manager
    allocate, refused = manager.allocate_slots, []

    def refuse_canvas(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        if num_new_tokens == CANVAS and not refused:
            return refused.append(request)
        return allocate(request, num_new_tokens, *args, **kwargs)

    monkeypatch.setattr(manager, "allocate_slots", refuse_canvas)
    outputs = record_calls(monkeypatch, engine.scheduler, "schedule")
    assert_same_runs(engine.runs([prompt(50)], params(2)), [expected])
    assert refused
    assert [span[1:] for span in scheduled_spans(o for _, o in outputs)][:2] == [(50, 0), (32, 32)]


# --- what is counted -----------------------------------------------------------------------------


@pytest.mark.parametrize("passes", [1, UNBOUNDED])
def test_vllms_counters_count_passes_and_not_engine_steps(checkpoint, monkeypatch, passes):
    counting = get_engine(checkpoint(), max_num_batched_tokens=256, disable_log_stats=False)
    made = record_calls(monkeypatch, counting.scheduler, "make_stats")
    with switched(counting, passes), counting.watch() as watched:
        counting.generate([prompt(20), prompt(30)], params(blocks=2))
    num_steps = sum(len(steps) for steps in watched.values())
    counts = [stats.spec_decoding_stats for _, stats in made if stats.spec_decoding_stats]
    assert sum(one.num_drafts for one in counts) == num_steps
    assert sum(one.num_draft_tokens for one in counts) == num_steps * CANVAS
    assert sum(one.num_accepted_tokens for one in counts) == 2 * 2 * CANVAS
