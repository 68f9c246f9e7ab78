"""Each way to denoise and to schedule: whatever happens, tokens are those of a quiet run.

A quiet run has an engine with an empty cache to itself, which schedules synchronously, and in some
tests takes one pass an engine step. It is held to Hugging Face in ``test_parity``, and to diffusers
and plain loops in ``tests/models``.
"""

import pytest
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.test_loop import switched
from tests.engine.test_parity import prompt
from tests.support.async_engine import rows_taken
from tests.support.engine_harness import Engine, assert_same_runs, blocks_of
from tests.support.engine_models import Model
from tests.support.grammar_paths import as_on_a_gpu
from tests.support.recorded_calls import record_calls

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def quiet(model: Model) -> Engine:
    return model.engine()


@pytest.fixture
def ours(model: Model, is_async: bool) -> Engine:
    return model.engine(is_async)


# --- batches, passes, interruptions --------------------------------------------------------------


def test_the_separate_twin_is_identical_and_takes_more_passes(quiet, model, monkeypatch):
    context, params = prompt(2 * model.size + 3), model.params(4)
    passes, runs = [], []
    for are_separate in (False, True):
        with switched(quiet, 1, are_separate), monkeypatch.context() as patch:
            schedules = record_calls(patch, quiet.scheduler, "schedule")
            runs.append(quiet.quiet_run(context, params))
        passes.append(len(schedules))
    assert_same_runs(runs[1:], runs[:1])
    # The last block is never committed. Of models with blocks there are five canvases, as the
    # prompt ends within a block.
    num_commits = 4 if model.has_blocks else 3
    assert passes == [passes[0], passes[0] + num_commits + 1]


def test_a_conversation_continued_from_cache_equals_a_cold_start(quiet, ours, model, monkeypatch):
    page = ours.runner.block_tables.block_sizes[0]
    turn = prompt(page - model.size - 1)
    ours.reset_prefix_cache()
    (answer,) = ours.generate([turn], model.params(3))
    follow_up = turn + answer + prompt(9, salt=4)
    hits = record_calls(monkeypatch, ours.scheduler, "_get_local_prefix_cache_hit")
    continued = ours.runs([follow_up], model.params())
    assert [result[1] for _, result in hits] == [page]  # generated blocks are in it
    assert_same_runs(continued, [quiet.quiet_run(follow_up, model.params())])


def test_asynchronously_a_block_takes_a_pass_more_than_its_denoise_steps(quiet, model):
    """Also behind the last one: its engine step was on its way before anybody knew of the end."""
    # With blocks the answer ends with one: vLLM schedules nothing for a single token that is left.
    blocks = 3 - model.has_blocks / model.size
    steps = []
    for engine in (quiet, model.engine(True)):
        engine.reset_prefix_cache()
        with engine.watch() as watched, rows_taken(model.size if model.has_blocks else 1) as taken:
            engine.generate([prompt(model.size + 1)], model.params(blocks))
        steps += [blocks_of(of_request) for of_request in watched.values()]
    assert steps[0] == steps[1]
    assert taken["canvas"] == sum(steps[1]) and taken["deferred commit"] == len(steps[1])
    assert not taken["block before a canvas"] and not taken["block alone"]


@pytest.mark.parametrize("is_on_device", [False, True], ids=["host", "device"])
def test_asynchronously_no_step_waits_for_the_tokens_of_a_grammar(
    quiet, model, monkeypatch, is_on_device
):
    """The worker makes the masks; on a device with the search of a CPU in place of its kernels."""
    ours = model.engine(True)
    contexts = [prompt(length) for length in (11, 30, model.size, 17, 3)]
    asked = [model.params(2, seed=at, temperature=float(at % 3 > 0)) for at in range(5)]
    for regex, params in zip(["([a-f]{3}-){2,30}[0-9]{2}", "[0-9]{70}"] * 2, asked, strict=False):
        params.structured_outputs = StructuredOutputsParams(regex=regex)
        params.max_tokens, params.ignore_eos = 128, False
    expected = quiet.generate(contexts, asked)
    if is_on_device:
        as_on_a_gpu(ours, monkeypatch)
    schedules = record_calls(monkeypatch, ours.scheduler, "schedule")
    with rows_taken(model.size if model.has_blocks else 1) as taken:
        assert ours.generate(contexts, asked) == expected
    assert not any(output.pending_structured_output_tokens for _, output in schedules)
    assert taken["commit with its tail" if model.has_blocks else "deferred commit"]
    assert taken["mixed batch"]


# --- where generation ends -----------------------------------------------------------------------


def test_max_tokens_is_exact(quiet, ours, model):
    context, size = prompt(model.size + 1), model.size
    long = quiet.quiet_run(context, model.params(3)).tokens
    for max_tokens in (1, 2, size - 1, size, size + 1, int(2.75 * size)):
        params = model.params(max_tokens / size)
        assert ours.quiet_run(context, params).tokens == long[:max_tokens]


def test_a_stop_token_inside_a_canvas_ends_the_request_there(quiet, ours, model):
    context, size = prompt(model.size + 1), model.size
    tokens = quiet.quiet_run(context, model.params(3)).tokens
    stop = tokens[size + size // 3]
    params = model.params(4, stop_token_ids=[stop])
    output = ours.outputs([context], params)[0].outputs[0]
    assert list(output.token_ids) == tokens[: tokens.index(stop) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    if model.has_blocks:
        whole = params.clone()
        whole.extra_args = params.extra_args | {"diffusion_eos_stop": False}
        with ours.watch() as watched:
            early, late = ours.outputs([context] * 2, [params, whole])
        assert early.outputs[0].token_ids == late.outputs[0].token_ids
        assert len(watched[early.request_id]) <= len(watched[late.request_id])


def test_the_last_canvas_is_cut_by_the_model_length(model, is_async):
    """With blocks, each of its tokens then sees fewer: the twin has the same limit."""
    size, limit = model.size, 5 * model.size - 2
    twin, ours = (model.engine(kind, max_model_len=limit) for kind in (False, is_async))
    for length in (2 * size + 1, 4 * size, limit - 1):
        one = prompt(length), model.params(9)
        ours.reset_prefix_cache()
        with ours.watch() as watched, rows_taken(size if model.has_blocks else 1) as taken:
            (output,) = ours.outputs(*([each] for each in one))
        (steps,) = watched.values()
        tokens = list(output.outputs[0].token_ids)
        assert length + len(tokens) == limit and output.outputs[0].finish_reason == "length"
        assert steps[-1].canvas_start + len(steps[-1].canvas) == limit
        assert twin.quiet_run(*one).tokens == tokens
        if is_async:  # near the end a canvas waits until none of its request is in flight
            assert bool(taken["block before a canvas"]) == (length < 4 * size)


# --- request options -----------------------------------------------------------------------------


def test_a_canvas_is_as_wide_as_a_request_asks(ours, model):
    if model.has_blocks:  # where no request may ask: test_blocks
        return
    asked = model.params(1, extra_args={"diffusion_canvas_length": 5})
    with ours.watch() as watched:
        ours.generate([prompt(40), prompt(41)], [asked, model.params(1)])
    widths = [{len(step.canvas) for step in steps} for steps in watched.values()]
    assert widths == [{5}, {model.size}]


def test_a_request_can_cap_its_denoise_steps(ours, model):
    extra = {"diffusion_max_steps": 2}
    extra |= {} if model.name == "gemma" else {"diffusion_threshold": 1.0}
    _, steps = ours.denoised(prompt(model.size), model.params(3, extra_args=extra))
    assert blocks_of(steps) == [2, 2, 2]
