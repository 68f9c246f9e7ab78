"""What each kind of server is served with on a CPU (on CUDA: ``test_cuda_start``)."""

from typing import Any
from unittest import mock

import cloudpickle
import pytest
from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

from dllm.patches.contract import (
    ASYNC_DRAFTING_SCHEDULER,
    CPU_WORKER,
    DRAFTING_SCHEDULER,
    REMOTE_SCHEDULER,
    SCHEDULER,
)
from dllm.patches.cpu import is_cpu_without_triton
from dllm.patches.drafts import REMOTE_DRAFTS, Draft, draft_of
from dllm.patches.neighbours import vllm_version
from tests.support.forced_async import asynchronous_platform
from tests.support.process import ROOT

pytestmark = pytest.mark.skipif(not is_cpu_without_triton(), reason="a GPU, or a CPU with Triton")

VLLMS = "vllm.v1.worker.cpu_worker.CPUWorker"
NAMED = "vllm.v1.core.sched.scheduler.Scheduler"


def drafts(method: str, **given: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "num_speculative_tokens": 3} | given}


def dflash(**given: Any) -> dict[str, Any]:
    return drafts("dflash", model=str(ROOT / "checkpoints/tiny-drafter"), **given)


def options(**given: Any) -> dict[str, Any]:
    return {"additional_config": {"dllm": given}}


def config_of(model: str, **flags: Any) -> Any:
    load_general_plugins()
    arguments = EngineArgs(str(ROOT / "checkpoints" / model), enforce_eager=True, **flags)
    return arguments.create_engine_config()


def configured(model: str, **flags: Any) -> tuple[str, Any]:
    """The worker and the scheduler of a server."""
    config = config_of(model, **flags)
    return config.parallel_config.worker_cls, config.scheduler_config.scheduler_cls


DFLASH, NGRAM = dflash(), drafts("ngram", prompt_lookup_max=3)
REMOTE = drafts("custom_class", model=REMOTE_DRAFTS)
REMOTE |= options(remote={"workers": ["/nowhere/w.sock"]})
RECORD = options(drafter={"record": "/nowhere", "record_layers": [1]})
TARGET = str(ROOT / "checkpoints/tiny-ar")
ADAPTIVE = options(drafter={"policy": "adaptive"})
LOOKUP = options(drafter={"policy": "adaptive", "prompt_lookup": True})


@pytest.mark.parametrize(
    ("model", "flags", "worker", "scheduler"),
    [
        ("tiny-dllm", {}, CPU_WORKER, SCHEDULER),
        ("tiny-dllm", {"worker_cls": VLLMS}, VLLMS, SCHEDULER),
        ("tiny-ar", DFLASH, CPU_WORKER, DRAFTING_SCHEDULER),
        ("tiny-ar", DFLASH | {"scheduler_cls": NAMED}, CPU_WORKER, NAMED),
        ("tiny-ar", REMOTE, CPU_WORKER, REMOTE_SCHEDULER),
        ("tiny-ar", RECORD, CPU_WORKER, None),
        ("tiny-ar", options(draft_worker=True), CPU_WORKER, None),
        ("tiny-ar", {}, VLLMS, None),
        ("tiny-nemotron", options(decoding="ar"), CPU_WORKER, None),
        ("tiny-nemotron", options(decoding="self_speculation"), CPU_WORKER, DRAFTING_SCHEDULER),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("tiny") else "",
)
def test_worker_and_scheduler(model, flags, worker, scheduler):
    assert configured(model, **flags) == (worker, scheduler)


@pytest.mark.parametrize(
    ("model", "flags", "longer"),
    [
        ("tiny-dllm", {}, {"text_config": {"max_position_embeddings": 8192}}),
        ("tiny-ar", DFLASH, {"max_position_embeddings": 8192}),
    ],
)
def test_no_request_is_longer_than_the_table_of_positions(model, flags, longer):
    """vLLM would read what is in memory behind it: NaN, among others."""
    flags = flags | {"max_model_len": 8192}
    message = "--max-model-len 8192: the model has 4096 positions"
    with mock.patch.dict(envs.__dict__, {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": True}):
        with pytest.raises(ValueError, match=message):
            configured(model, **flags)
        configured(model, **flags, hf_overrides=longer)


@pytest.mark.parametrize(
    ("model", "flags", "draft"),
    [
        ("tiny-ar", DFLASH, Draft.NETWORK),
        ("tiny-ar", drafts("draft_model", model=TARGET) | ADAPTIVE, Draft.SOURCE),
        ("tiny-ar", NGRAM | LOOKUP, Draft.TEXTS),
        ("tiny-ar", NGRAM, None),
        ("tiny-ar", REMOTE, Draft.REMOTE),
        ("tiny-nemotron", options(decoding="self_speculation"), Draft.ITSELF),
        ("tiny-nemotron", options(decoding="ar"), None),
    ],
)
def test_every_process_of_a_server_knows_what_drafts(model, flags, draft):
    config = config_of(model, **flags)
    for known in (config, cloudpickle.loads(cloudpickle.dumps(config))):
        assert draft_of(known.speculative_config) is draft


def test_drafter_batches_that_are_not_padded_wait_for_each_step_with_vllm_0_32_alone():
    with asynchronous_platform():
        _, scheduler = configured("tiny-ar", **dflash(disable_padded_drafter_batch=True))
    is_old = vllm_version().startswith("0.32.")
    assert scheduler == (DRAFTING_SCHEDULER if is_old else ASYNC_DRAFTING_SCHEDULER)


def test_where_steps_are_scheduled_ahead_nobody_reads_how_likely_drafts_are():
    given = dflash(use_local_argmax_reduction=True) | options(drafter={"policy": "adaptive"})
    with asynchronous_platform():
        assert configured("tiny-ar", **given) == (CPU_WORKER, ASYNC_DRAFTING_SCHEDULER)
        with pytest.raises(ValueError, match="use_local_argmax_reduction does not work"):
            configured("tiny-ar", **given, async_scheduling=False)
