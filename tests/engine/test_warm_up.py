"""What the server runs before it is ready: the largest step, for memory, and every shape."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams, envs
from vllm.v1.worker import gpu_worker as vllm_worker
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.warmup import warmup_kernels

from dllm.engine.channels import LateAnswer
from dllm.engine.grammars import Written
from dllm.engine.warm_up import canvas_batch, serve_made_up, warm_up
from dllm.patches import gpu_worker
from dllm.patches.worker import OurRunners
from dllm.settings.request import LEAST_ROWS
from tests.support.engine_harness import Engine, Run, assert_same_runs, get_engine
from tests.support.patience import HANG_S
from tests.support.process import ROOT, printed_json, run_python
from tests.support.recorded_calls import record_calls

pytestmark = pytest.mark.slow

CANVAS = 32


@contextmanager
def sampled(engine: Engine) -> Iterator[list[list[int]]]:
    """The canvas widths of every batch that the sampler is given."""
    batches: list[list[int]] = []
    sampler = type(engine.runner.sampler)
    call = sampler.__call__

    def spy(self: Any, hidden: torch.Tensor, batch: Any) -> Any:
        widths = np.diff(batch.cu_num_logits_np[: batch.num_reqs + 1]).tolist()
        batches.append(widths if batch.num_draft_tokens else [])
        return call(self, hidden, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "__call__", spy)
        yield batches


def test_memory_is_profiled_with_as_many_canvases_as_a_step_holds(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = engine.runner.sampler.loop
    loop.begin_engine_step(allows_more_passes=True)  # as an engine step before may have
    monkeypatch.setattr(loop, "begin_next_pass", lambda _: pytest.fail("it is repeated"))
    logprobs, num_reqs = engine.runner.sampler.logprobs, engine.runner.max_num_reqs
    monkeypatch.setattr(logprobs, "_is_async", True)  # scores all canvases
    scored = record_calls(monkeypatch, logprobs, "of_blocks")
    with sampled(engine) as batches:
        engine.runner.profile_run()
    assert batches == [[CANVAS] * num_reqs]
    ((_, largest),) = scored  # as many logprobs as --max-logprobs allows, and the token's own
    assert largest.logprobs.shape == (num_reqs * CANVAS, 21)
    assert (engine.runner.sampler.sampling_states.num_logprobs[:num_reqs] == -1).all()


def test_the_largest_step_fits_the_token_budget() -> None:
    batch = canvas_batch(InputBuffers(4, 100, torch.device("cpu")), 4, CANVAS)
    assert batch.num_reqs == 3 and batch.num_tokens == batch.num_draft_tokens == 3 * CANVAS
    assert batch.num_scheduled_tokens.tolist() == [CANVAS] * 3
    assert batch.expanded_idx_mapping.tolist() == [0] * CANVAS + [1] * CANVAS + [2] * CANVAS
    assert batch.expanded_local_pos.tolist() == list(range(CANVAS)) * 3
    assert batch.cu_num_logits.tolist() == batch.cu_num_logits_np.tolist() == [0, 32, 64, 96]


@dataclass
class Warmed:
    """What a warm-up did, in which no pass began before the last one had ended.

    What a pass reads lies in buffers of vLLM that the next pass but one writes again.
    """

    batches: list[list[int]] = field(default_factory=list)  # canvas widths that are sampled
    emitted: list[list[int]] = field(default_factory=list)  # tokens, of each step
    scores: list[int] = field(default_factory=list)  # rows of logprobs, of batches that ask
    prompts: int = 0  # that had logprobs
    written: list[Written] = field(default_factory=list)  # by grammars
    num_passes: int = 0
    requests: list[dict[str, int]] = field(default_factory=list)  # before and behind it


@pytest.fixture(scope="module")
def warmed(engine: Engine) -> Warmed:
    found, runner, running = Warmed(), engine.runner, []
    worker, sampler = engine.core.model_executor.driver_worker.worker, runner.sampler
    sample, get_output = runner.sample_tokens, LateAnswer.get_output
    of_blocks = sampler.logprobs.of_blocks

    def execute_model(scheduled: Any) -> Any:
        assert not running
        return worker.execute_model(scheduled)

    def sample_tokens(grammar_output: Any) -> Any:
        found.num_passes += 1
        running.append(sample(grammar_output))
        return running[-1]

    def wait(output: Any) -> Any:
        running.remove(output)
        return get_output(output)

    def spy_blocks(record):
        scored = of_blocks(record)
        if sampler.logprobs.are_wanted(record.tile.batch):
            found.scores.append(0 if scored is None else len(scored.logprobs))
        return scored

    # An aborted request of another test leaves with the next step, which is not ours to take.
    found.requests.append(dict(runner.req_states.req_id_to_index))
    with pytest.MonkeyPatch.context() as patch, sampled(engine) as found.batches:
        patch.setattr(runner, "sample_tokens", sample_tokens)
        patch.setattr(LateAnswer, "get_output", wait)
        patch.setattr(sampler.logprobs, "of_blocks", spy_blocks)
        stored = record_calls(patch, sampler, "_store_rows")
        prompts = record_calls(patch, runner.prompt_logprobs_worker, "compute_prompt_logprobs")
        written = record_calls(patch, type(sampler.grammars), "write_")
        warm_up(runner, execute_model)
    assert not running
    found.emitted = [emitted[rows.widths > 0].tolist() for (emitted, _, rows, *_), _ in stored]
    found.prompts = sum(len(scored) for _, scored in prompts)
    found.written = [result for _, result in written]
    found.requests.append(dict(runner.req_states.req_id_to_index))
    return found


def test_the_warm_up_visits_every_kind_of_batch(warmed: Warmed) -> None:
    # A prompt, a canvas, a head with a canvas; two requests, one, a narrow one; then with filters;
    # a read; then with logprobs.
    one, two, narrow = [CANVAS], [CANVAS] * 2, [CANVAS // 2]
    once = [[], two, two, [], one, one, [], narrow, narrow]
    read = [[], [LEAST_ROWS], [LEAST_ROWS]]
    scored, constrained = [[], two, two, [], one, one], [[], one, one]
    assert warmed.batches == once * 2 + read + scored + constrained
    before, behind = warmed.requests
    assert behind == before
    assert warmed.num_passes > 20  # each of which began behind the end of the one before


def test_the_warm_up_emits_and_scores_blocks(warmed: Warmed) -> None:
    assert all(count > 0 for counts in warmed.emitted for count in counts)
    # Forbidden words may shorten a block, but not to nothing.
    assert len(warmed.scores) == 4 and min(warmed.scores) > 0
    assert warmed.prompts == 3  # of two requests, then of one


def test_the_warm_up_runs_a_grammar(warmed: Warmed) -> None:
    """Its kernels are compiled before the first request that has one."""
    # A canvas, and behind a head.
    assert [list(one.paths) for one in warmed.written] == [[0]] * 2


def test_the_warm_up_leaves_no_trace(engine: Engine) -> None:
    """Tokens, logits and logprobs of the requests after it are those of the requests before it."""
    worker = engine.core.model_executor.driver_worker.worker
    prompts = [[20 + i for i in range(9)], [7, 8, 9]]
    asked = SamplingParams(max_tokens=2 * CANVAS, seed=5, ignore_eos=True)
    scored = SamplingParams(
        max_tokens=2 * CANVAS, seed=5, ignore_eos=True, logprobs=2, presence_penalty=0.5
    )

    def answers() -> tuple[list[Run], list[list[int]]]:
        outputs = engine.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], scored, use_tqdm=False
        )
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        return engine.runs(prompts, [asked, asked]), tokens

    engine.llm.reset_prefix_cache()
    before, tokens_before = answers()
    free = list(engine.runner.req_states.free_indices)
    warm_up(engine.runner, worker.execute_model)
    engine.llm.reset_prefix_cache()
    assert sorted(engine.runner.req_states.free_indices) == sorted(free)
    assert not engine.runner.prompt_logprobs_worker.in_progress_prompt_logprobs
    after, tokens_after = answers()
    assert_same_runs(after, before)
    assert tokens_after == tokens_before


def test_vllms_warm_up_ends_within_six_canvases(checkpoint) -> None:
    """Which is what a shorter model has no room for (``patches.gpu_worker``)."""
    engine = get_engine(checkpoint(), max_model_len=6 * CANVAS + 1, max_num_seqs=2)
    worker, positions = engine.core.model_executor.driver_worker.worker, []

    def execute_model(scheduled: Any) -> Any:
        output = worker.execute_model(scheduled)
        if state := engine.runner.execute_model_state:
            positions.append(int(state.input_batch.positions.max()))
        return output

    with sampled(engine) as batches:
        warmup_kernels(engine.runner, execute_model, worker.sample_tokens)
    assert len(batches) == 6 and 2 * CANVAS < max(positions) <= 6 * CANVAS
    assert not engine.runner.req_states.req_id_to_index


@pytest.mark.parametrize(
    ("max_model_len", "lengths"),
    [(300, [1, 256]), (512, [1, 256]), (640, [1, 256, 512]), (768, [253, 256, 512])],
)
def test_made_up_requests_fit_a_short_model(checkpoint, max_model_len, lengths) -> None:
    """vLLM's table of pages has no room behind the longest request."""
    engine = get_engine(checkpoint(canvas_length=256), max_model_len=max_model_len, max_num_seqs=2)
    worker = engine.core.model_executor.driver_worker.worker
    warm_up(engine.runner, worker.execute_model)
    served = [serve_made_up(engine.runner, worker.execute_model, count) for count in (1, 2)]
    assert [hidden.shape[1] for hidden in served[0]] == lengths
    assert not engine.runner.req_states.req_id_to_index


@pytest.mark.parametrize("name", ["tiny-dllm", "tiny-sdar"])
def test_a_cpu_serves_a_model_as_short_as_a_canvas(name: str) -> None:
    """vLLM's made-up requests, for kernels that a CPU does not have, would be longer."""
    options: dict[str, Any] = {"enforce_eager": False, "compilation_config": {"mode": 0}}
    engine = get_engine(ROOT / "checkpoints" / name, max_model_len=CANVAS, **options)
    (tokens,) = engine.generate([[20, 21, 22]], SamplingParams(max_tokens=20, ignore_eos=True))
    assert len(tokens) == 20


@pytest.mark.parametrize(
    ("serves_canvases", "warms_kernels", "max_model_len", "runs"),
    [
        (True, True, 1537, ["ours", "sent", "there", "vllm"]),
        (True, True, 1536, ["ours", "vllm"]),
        (False, True, 1536, ["sent", "vllm"]),
        (True, False, 1537, ["vllm"]),
    ],
)
def test_a_gpu_worker_warms_up_before_graphs_are_captured(
    monkeypatch, serves_canvases, warms_kernels, max_model_len, runs
) -> None:
    """Of canvases, vLLM's made-up passes are waited for: a later one may write what one reads."""
    ran: list[str] = []

    class Output(LateAnswer):
        def __init__(self) -> None:
            ran.append("sent")

        def get_output(self) -> Any:
            ran.append("there")

    def of_vllm(worker: Any) -> None:
        if worker.vllm_config.kernel_config.enable_jit_warmup:
            worker.sample_tokens(None)
        ran.append("vllm")

    monkeypatch.setattr(vllm_worker.Worker, "sample_tokens", lambda *given: Output())
    monkeypatch.setattr(gpu_worker, "warm_up", lambda *arguments: ran.append("ours"))
    monkeypatch.setattr(OurRunners, "compile_or_warm_up_model", of_vllm)
    worker = object.__new__(gpu_worker.CanvasGPUWorker)
    worker.serves_canvases = serves_canvases
    worker.model_runner = SimpleNamespace(max_model_len=max_model_len, decode_query_len=256)
    kernels = SimpleNamespace(enable_jit_warmup=warms_kernels)
    worker.vllm_config = SimpleNamespace(kernel_config=kernels)
    worker.compile_or_warm_up_model()
    assert ran == runs
    assert isinstance(worker.sample_tokens(None), Output), "a server's steps are not waited for"


# --- compiled -------------------------------------------------------------------------------------


@dataclass
class CompiledStarts:
    """Starts of one model with one cache, one after the other."""

    model: Path
    cache: Path

    def start(self) -> dict[str, Any]:
        # Inductor's own cache is under vLLM's, once the backbone is compiled.
        caches = {"VLLM_CACHE_ROOT": str(self.cache), "TORCHINDUCTOR_CACHE_DIR": str(self.cache)}
        # -O0: the same code; the instructions that the processor names are not tried.
        less_time = {"TORCHINDUCTOR_DEBUG_COMPILE": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}
        environment = {"TORCHDYNAMO_DISABLE": "0", "OMP_NUM_THREADS": "1"} | caches | less_time
        worker = ("-m", "tests.support.compiled_start_worker", str(self.model))
        return printed_json(run_python(*worker, environment=environment, timeout=HANG_S))


@pytest.fixture(scope="module")
def starts(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> CompiledStarts:
    cache = tmp_path_factory.mktemp("cache")
    # What vLLM noted about model classes, which takes another process, is no compilation.
    noted = Path(envs.VLLM_CACHE_ROOT) / "modelinfos"
    noted.mkdir(parents=True, exist_ok=True)
    (cache / noted.name).symlink_to(noted)
    return CompiledStarts(checkpoint(layer_types=["full_attention"]), cache)


@pytest.fixture(scope="module")
def first(starts: CompiledStarts) -> dict[str, Any]:
    return starts.start()


@pytest.fixture(scope="module")
def restart(starts: CompiledStarts, first: dict[str, Any]) -> dict[str, Any]:
    """A start whose cache has a library that is cut short, which ends a process that loads it."""
    library = min(starts.cache.rglob("*.main.so"))
    os.truncate(library, 4096)
    report = starts.start()
    assert library.stat().st_size > 4096, "it was not compiled again"
    return report


@pytest.fixture(params=["first", "restart"])
def started(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.getfixturevalue(request.param)


def test_no_request_waits_for_a_compiler(started: dict[str, Any]) -> None:
    assert started["traced"] > 0
    assert set(started["traced_later"].values()) == {0}, started["traced_later"]


def test_nothing_is_compiled_twice_at_start(started: dict[str, Any]) -> None:
    assert started["traced_again"] == []


def test_what_does_not_change_is_not_checked_in_every_step(started: dict[str, Any]) -> None:
    assert started["checked"]
    assert max(started["checked"]) < 50  # 300 with fixed arguments and modules


def test_a_restart_loads_the_compiled_backbone(
    first: dict[str, Any], restart: dict[str, Any]
) -> None:
    assert (first["compiled"], first["loaded"]) == (1, 0)
    assert (restart["compiled"], restart["loaded"]) == (0, 1)
    assert restart["tokens"] == first["tokens"]
