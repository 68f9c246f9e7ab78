"""Wrong configuration stops a server at start, with the key, the value and what is allowed.

``create_engine_config`` is what ``vllm serve`` does before it loads anything.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from dllm.engine.async_scheduler import CanvasAsyncScheduler
from dllm.engine.scheduler import CanvasScheduler
from dllm.models.gemma.settings import GemmaSettings
from dllm.patches.contract import IN_PROCESS_EXECUTOR
from dllm.patches.cpu import is_cpu_without_triton
from dllm.settings.server import options_of
from tests.support import family_checkpoints
from tests.support.edited import with_fields
from tests.support.forced_async import asynchronous_platform

CANVAS = 32

on_cpu_without_triton = pytest.mark.skipif(
    not is_cpu_without_triton(), reason="elsewhere vLLM forks, or Triton's own runtime serves"
)


def engine_config(model: Path, **flags: Any) -> Any:
    """The configuration that a server with these flags would start with."""
    load_general_plugins()
    return EngineArgs(
        str(model), enforce_eager=True, max_model_len=512, **flags
    ).create_engine_config()


def refusal(model: Path, **flags: Any) -> str:
    with pytest.raises(ValueError) as error:
        engine_config(model, **flags)
    return str(error.value)


@pytest.fixture
def edited(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """The tests' checkpoint with changes in one of its JSON files; None removes a field."""

    def edit(file: str = "generation_config.json", **changes: Any) -> Path:
        return with_fields(checkpoint(), tmp_path / "edited", file, **changes)

    return edit


# --- the checkpoint ------------------------------------------------------------------------------


def test_a_missing_value_can_be_given_on_the_command_line(edited):
    config = engine_config(edited(t_min=None), override_generation_config={"t_min": 0.3})
    assert GemmaSettings.from_vllm(config).t_min == 0.3


# --- the command line ----------------------------------------------------------------------------


def denoising(model: Path, **flags: Any) -> GemmaSettings:
    return GemmaSettings.from_vllm(engine_config(model, **flags))


def test_the_checkpoint_decides_unless_told_otherwise(checkpoint):
    assert denoising(checkpoint()) == GemmaSettings(
        canvas_length=CANVAS,
        max_denoising_steps=16,
        t_min=0.4,
        t_max=0.8,
        entropy_bound=1.0,
        confidence_threshold=0.6,
        stability_threshold=1,
        canvas_window="anchored",
    )


def test_override_generation_config(checkpoint):
    overrides = {"t_min": 0.1, "stability_threshold": 2, "sampler_config": {"entropy_bound": 0.25}}
    config = denoising(checkpoint(), override_generation_config=overrides)
    assert (config.t_min, config.stability_threshold, config.entropy_bound) == (0.1, 2, 0.25)
    assert config.t_max == 0.8  # what was not named stays


def test_diffusion_config(checkpoint):
    config = denoising(
        checkpoint(), diffusion_config={"canvas_length": 16, "max_denoising_steps": 5}
    )
    assert (config.canvas_length, config.max_denoising_steps) == (16, 5)
    # Without it the model's canvas is what vLLM schedules, too.
    assert engine_config(checkpoint()).diffusion_config.canvas_length == CANVAS


@pytest.mark.parametrize(
    ("given", "window"),
    [("anchored", "anchored"), ("symmetric", "symmetric"), ("auto", "symmetric")],
)
def test_hf_overrides_choose_the_canvas_window(edited, given, window):
    other = edited("config.json", canvas_window=None)
    assert denoising(other).canvas_window == "symmetric"
    assert denoising(other, hf_overrides={"canvas_window": given}).canvas_window == window


def test_plugin_options_arrive(checkpoint):
    config = engine_config(checkpoint(), additional_config={"dllm": {"self_test": False}})
    assert not options_of(config).self_test


@pytest.mark.parametrize("tensor", [1, 2])
def test_replicas_are_engines_of_their_own(checkpoint, tensor):
    flags = {"tensor_parallel_size": tensor}
    single = engine_config(checkpoint(), **flags)
    replica = engine_config(checkpoint(), data_parallel_size=2, **flags)
    assert single.model_config.is_moe and not replica.model_config.is_moe
    executors = [each.parallel_config.distributed_executor_backend for each in (single, replica)]
    assert executors[0] == executors[1]


def test_the_smallest_budget_is_one_canvas(checkpoint):
    config = engine_config(checkpoint(), max_num_batched_tokens=CANVAS, max_num_seqs=4)
    assert config.scheduler_config.max_num_batched_tokens == CANVAS


@pytest.mark.parametrize(("given", "served"), [(None, 64), (7, 7), (128, 128), (200, 200)])
def test_how_many_requests_run_at_a_time(checkpoint, given, served):
    config = engine_config(checkpoint(), max_num_seqs=given)
    assert config.scheduler_config.max_num_seqs == served


def test_our_parts_are_chosen_without_a_flag(checkpoint):
    config = engine_config(checkpoint())
    assert config.scheduler_config.scheduler_cls == "dllm.engine.scheduler.CanvasScheduler"
    assert not config.scheduler_config.async_scheduling
    assert config.cache_config.prefix_cache_retention_interval is None


# --- asynchronous scheduling ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "is_async"),
    [
        ({}, True),  # vLLM's default
        ({"async_scheduling": True}, True),
        ({"async_scheduling": False}, False),
        ({"additional_config": {"dllm": {"denoise_loop_ms": 0}}}, True),
        ({"additional_config": {"dllm": {"denoise_loop_ms": 20}}}, False),
    ],
)
def test_scheduling_is_asynchronous_where_vllms_is(checkpoint, flags, is_async):
    with asynchronous_platform():
        config = engine_config(checkpoint(), **flags)
    assert config.scheduler_config.async_scheduling is is_async
    assert config.scheduler_config.get_scheduler_cls() is (
        CanvasAsyncScheduler if is_async else CanvasScheduler
    )
    assert config.max_concurrent_batches == (2 if is_async else 1)


@pytest.mark.parametrize(
    ("block_size", "given", "is_async"),
    [(4, None, False), (4, True, True), (32, None, True), (32, False, False)],
)
def test_short_blocks_are_scheduled_asynchronously_if_asked_for(
    tmp_path, block_size, given, is_async
):
    fields = family_checkpoints.SDAR | {"block_size": block_size}
    blocks = family_checkpoints.write(tmp_path / "sdar", fields)
    with asynchronous_platform():
        config = engine_config(blocks, async_scheduling=given)
    assert config.scheduler_config.async_scheduling is is_async


def test_the_loop_and_asynchronous_scheduling_exclude_each_other(checkpoint):
    loop = {"dllm": {"denoise_loop_ms": 20}}
    with asynchronous_platform():
        expected = "--async-scheduling does not work: denoise_loop_ms is 20"
        assert expected in refusal(checkpoint(), async_scheduling=True, additional_config=loop)


def test_an_executor_without_asynchronous_scheduling(checkpoint, monkeypatch):
    monkeypatch.setattr(
        UniProcExecutor, "supports_async_scheduling", classmethod(lambda cls: False)
    )
    with asynchronous_platform():
        assert not engine_config(checkpoint()).scheduler_config.async_scheduling
        assert "--distributed-executor-backend supports none" in refusal(
            checkpoint(), async_scheduling=True
        )


# --- how processes start --------------------------------------------------------------------------

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
FORK = {METHOD: "fork", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@pytest.fixture
def asked_to_fork(monkeypatch) -> None:
    for name, value in FORK.items():
        monkeypatch.setenv(name, value)


@on_cpu_without_triton
def test_a_server_that_is_asked_to_fork_does(checkpoint, asked_to_fork):
    engine_config(checkpoint())
    assert os.environ[METHOD] == "fork"


@on_cpu_without_triton
@pytest.mark.parametrize("name", FORK)
def test_openmp_that_has_to_be_set_up_needs_a_fresh_process(
    checkpoint, asked_to_fork, monkeypatch, name
):
    """More than one thread or a binding; and without being asked vLLM's choice is left alone."""
    monkeypatch.delenv(name)
    engine_config(checkpoint())
    assert os.environ[METHOD] == "spawn"


@on_cpu_without_triton
@pytest.mark.parametrize("chosen", [None, "128"])
def test_onednn_keeps_few_products_unless_the_user_says_how_many(checkpoint, monkeypatch, chosen):
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    monkeypatch.setenv(name, chosen or "")
    if chosen is None:
        monkeypatch.delenv(name)
    engine_config(checkpoint())
    assert os.environ[name] == (chosen or "64")


@on_cpu_without_triton
def test_other_models_start_as_vllm_starts_them(asked_to_fork):
    load_general_plugins()
    config = VllmConfig()
    assert os.environ[METHOD] == "spawn"
    assert config.parallel_config.distributed_executor_backend != IN_PROCESS_EXECUTOR


@on_cpu_without_triton
@pytest.mark.parametrize(
    ("asked", "missing", "expected"),
    [
        (None, None, UniProcExecutor),
        ("uni", None, UniProcExecutor),
        ("mp", None, MultiprocExecutor),
        (None, "OMP_NUM_THREADS", MultiprocExecutor),
        (None, "VLLM_CPU_OMP_THREADS_BIND", MultiprocExecutor),
    ],
)
def test_whose_process_the_worker_runs_in(
    checkpoint, asked_to_fork, monkeypatch, asked, missing, expected
):
    """The engine's, unless the user or OpenMP needs another."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    if missing:
        monkeypatch.delenv(missing)
    config = engine_config(checkpoint(), distributed_executor_backend=asked)
    assert Executor.get_class(config) is expected


# --- the type of weights -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("has_units", "flags", "dtype"),
    [
        (False, {}, torch.float32),
        (False, {"dtype": "bfloat16"}, torch.bfloat16),
        (True, {}, torch.bfloat16),
    ],
)
def test_the_dtype_of_a_cpu(checkpoint, monkeypatch, has_units, flags, dtype):
    load_general_plugins()
    monkeypatch.setattr("dllm.patches.cpu.computes_bf16", lambda: has_units)
    assert engine_config(checkpoint(), **flags).model_config.dtype == dtype


def test_targets_of_drafters_and_other_models(monkeypatch):
    load_general_plugins()
    monkeypatch.setattr("dllm.patches.cpu.computes_bf16", lambda: False)
    drafter = {"method": "dflash", "model": "checkpoints/tiny-drafter"}
    target = EngineArgs("checkpoints/tiny-ar", speculative_config=drafter)
    assert target.create_model_config().dtype == torch.float32
    assert EngineArgs("checkpoints/tiny-ar").create_model_config().dtype == torch.bfloat16
