"""No hidden wait: the worker's code between kernels, run as if its tensors were on a GPU.

A host that waits for the device in the middle of an engine step cannot queue the next kernels
meanwhile, and the device runs out of work. What is left to wait for: in the resident loop one
number a pass, whether a canvas has converged; with logprobs one more, which tokens were emitted.
vLLM's runner then waits once an engine step for the emitted tokens.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from dllm.engine import canvas_rows
from tests.engine import test_blocks
from tests.engine.test_blocks import model  # noqa: F401  a fixture: SDAR, LLaDA2
from tests.engine.test_loop import UNBOUNDED, params, switched
from tests.engine.test_parity import prompt
from tests.support.async_engine import get_async_engine
from tests.support.engine_harness import Engine
from tests.support.recorded_calls import record_calls
from tests.support.watched_device import DEVICE, DeviceWatch, on_device
from tests.support.watched_worker import IN_PLACE, WorkerWatch, watched_worker

LOOP, LOGPROBS = "dllm/engine/loop.py", "dllm/engine/logprobs.py"


# --- the watch itself ----------------------------------------------------------------------------


class Snippets:
    """Calls on device tensors, on a host tensor, and on pinned memory."""

    def __init__(self, watch: DeviceWatch) -> None:
        self.x, self.i = on_device(torch.arange(6.0)), on_device(torch.tensor([1, 2]))
        self.mask = self.x > 2
        self.host, self.pinned = torch.ones(6), watch.pinned(torch.ones(6))


WAITS: dict[str, tuple[str, Callable[[Snippets], Any]]] = {
    "item": ("read", lambda s: s.x[0].item()),
    "tolist": ("read", lambda s: s.x.tolist()),
    "bool": ("read", lambda s: bool(s.mask.any())),
    "int": ("read", lambda s: int(s.i.sum())),
    "range": ("read", lambda s: range(s.i.sum())),
    "slice": ("read", lambda s: s.x[: s.i[0]]),
    "select by a device number": ("read", lambda s: s.x[s.i[0]]),
    "numpy": ("read", lambda s: s.x.numpy()),
    "asarray": ("read", lambda s: np.asarray(s.x)),
    "nonzero": ("read", lambda s: s.mask.nonzero()),
    "where": ("read", lambda s: torch.where(s.mask)),
    "mask": ("read", lambda s: s.x[s.mask]),
    "write by mask": ("read", lambda s: s.x.__setitem__(s.mask, s.x[0])),
    "masked_select": ("read", lambda s: s.x.masked_select(s.mask)),
    "unique": ("read", lambda s: torch.unique(s.x)),
    "repeat": ("read", lambda s: torch.repeat_interleave(s.i, s.i)),
    "repeat method": ("read", lambda s: s.i.repeat_interleave(s.i)),
    "repeat by keyword": ("read", lambda s: s.i.repeat_interleave(repeats=s.i)),
    "fill with a device number": ("read", lambda s: s.x.index_fill_(0, s.i, s.x[0])),
    "cpu": ("copy", lambda s: s.x.cpu()),
    "to the host": ("copy", lambda s: s.x.to("cpu")),
    "into pageable": ("copy", lambda s: s.host.copy_(s.x, non_blocking=True)),
    "to the device": ("copy", lambda s: s.host.to(DEVICE)),
    "to the device of": ("copy", lambda s: s.host.to(s.x)),
    "from pageable": ("copy", lambda s: s.host.to(DEVICE, non_blocking=True)),
    "from pinned, blocking": ("copy", lambda s: s.pinned.to(DEVICE)),
    "copy from pageable": ("copy", lambda s: s.x.copy_(s.host, non_blocking=True)),
    "tensor": ("copy", lambda s: torch.tensor([1, 2], device=DEVICE)),
    "new_tensor": ("copy", lambda s: s.x.new_tensor([1.0])),
    "index by a list": ("copy", lambda s: s.x[[1, 2]]),
    "index by an array": ("copy", lambda s: s.x[np.array([1, 2])]),
    "index by a host tensor": ("copy", lambda s: s.x[torch.tensor([1, 2])]),
    "write a host tensor": ("copy", lambda s: s.x.__setitem__(slice(None), s.host)),
    "write a number": ("scalar", lambda s: s.x.__setitem__(3, 1.0)),
    "write a number by index": ("scalar", lambda s: s.x.__setitem__(s.i, True)),
    "host and device": ("mixed", lambda s: s.x + s.host),
    "host first": ("mixed", lambda s: torch.where(s.mask, s.host, s.x)),
}


@pytest.mark.parametrize("name", WAITS)
def test_each_kind_of_wait_is_found(name):
    kind, call = WAITS[name]
    watch = DeviceWatch()
    snippets = Snippets(watch)
    with watch:
        call(snippets)
    found = [finding.kind for finding in watch.findings]
    assert kind in found and set(found) <= {kind, "read"}, watch.findings
    assert {finding.where.split(":")[0] for finding in watch.findings} == {
        "tests/engine/test_hidden_waits.py"
    }


# --- the worker ----------------------------------------------------------------------------------

PINS = {
    "diffusion_seed_canvas": [9, -1, -1, 6] + [-1] * 9,
    "diffusion_pin_at": [1, 7],
    "diffusion_pin_ids": [20, 21],
    "diffusion_canvas_length": 13,
}
TRACE = {"diffusion_trace": ["entropy"]}
GRAMMAR = StructuredOutputsParams(regex="([a-f]{3}-){2,30}[0-9]{2}")
# Longer than what a step may hold (256 tokens), on its own and together with the others.
LONG = (prompt(300), params(blocks=1, seed=8))
CASES: dict[str, list[tuple[list[int], SamplingParams]]] = {
    "one": [(prompt(70), params(blocks=3, seed=3))],
    "two": [(prompt(70), params(blocks=2, seed=3)), (prompt(9), params(blocks=3, seed=4))],
    "a prompt in chunks": [LONG],
    "filters": [(prompt(20), params(blocks=2, top_k=20, top_p=0.9, min_p=0.05))],
    "stops": [(prompt(20), params(blocks=2, ignore_eos=False, stop_token_ids=[3, 4]))],
    "edits": [(prompt(20), params(presence_penalty=1.0, logit_bias={33: 8.0}, min_tokens=5))],
    "bad words": [(prompt(40), params(blocks=2, bad_words=["a", "b c"]))],
    "pins": [(prompt(20), params(blocks=2, extra_args=PINS))],
    "held pins": [(prompt(20), params(extra_args=PINS | {"diffusion_pin_mode": "hold"}))],
    "traces": [(prompt(20), params(blocks=2, extra_args=PINS | TRACE, logit_bias={33: 8.0}))],
    "a grammar": [(prompt(20), params(blocks=2, ignore_eos=False, structured_outputs=GRAMMAR))],
}
CASES["all in one batch, more than there are slots"] = [
    request for case in CASES.values() for request in case
]
# Where nobody asks for anything, and all of it at once.
WORTH_A_RUN = ("one", "a prompt in chunks", "all in one batch, more than there are slots")


def watched_run(
    engine: Engine, requests: list[tuple[list[int], SamplingParams]], passes: int
) -> WorkerWatch:
    """Run requests as on a GPU; their tokens are those of a run that is not watched."""
    prompts, sampling = zip(*requests, strict=True)
    with switched(engine, passes):
        engine.reset_prefix_cache()
        expected = engine.generate(prompts, sampling)
        engine.reset_prefix_cache()
        with watched_worker(engine) as watch:
            assert engine.generate(prompts, sampling) == expected
    assert watch.passes and watch.calls["state.add_request"] and watch.calls["sampler"]
    return watch


def files_of(watch: WorkerWatch) -> Counter[tuple[str, str]]:
    """How often each kind of wait was found in each file."""
    return Counter((one.kind, one.where.split(":")[0]) for one in watch.findings)


@pytest.fixture(scope="module", params=["synchronous", "asynchronous"])
def scheduled(request, checkpoint):
    """An engine for each of the two."""
    if request.param == "synchronous":
        return request.getfixturevalue("engine")
    return get_async_engine(checkpoint(), max_num_batched_tokens=256)


@pytest.mark.parametrize("case", WORTH_A_RUN)
def test_a_visit_of_one_pass_waits_for_nothing(scheduled, case):
    assert not watched_run(scheduled, CASES[case], passes=1).findings


@pytest.mark.parametrize("case", WORTH_A_RUN)
def test_a_pass_of_the_loop_waits_for_one_number(engine, case):
    watch = watched_run(engine, CASES[case], passes=UNBOUNDED)
    found = files_of(watch)
    assert set(found) <= {("read", LOOP)}, watch.findings
    assert found["read", LOOP] <= len(watch.passes)
    if len(CASES[case]) == 1 and CASES[case] != [LONG]:
        assert found["read", LOOP] == len(watch.passes)  # all of them are in loops


@pytest.mark.parametrize("passes", [1, UNBOUNDED])
def test_logprobs_wait_for_one_number_more(engine, passes):
    asked = params(blocks=2, logprobs=3, prompt_logprobs=2)
    watch = watched_run(engine, [(prompt(20), asked), (prompt(33), params(blocks=2))], passes)
    found = files_of(watch)
    assert set(found) <= {("read", LOOP), ("copy", LOGPROBS)}, watch.findings
    assert 0 < found["copy", LOGPROBS] <= len(watch.passes)
    assert found["read", LOOP] <= len(watch.passes)


def test_logprobs_wait_for_nothing_under_asynchronous_scheduling(checkpoint):
    ours = get_async_engine(checkpoint(), max_num_batched_tokens=256)
    asked = params(blocks=2, logprobs=3, prompt_logprobs=2)
    requests = [(prompt(20), asked), (prompt(33), params(blocks=2))]
    assert not watched_run(ours, requests, passes=1).findings


@pytest.mark.parametrize("scored", [None, 2])
@pytest.mark.parametrize("passes", [1, UNBOUNDED])
def test_models_with_blocks_do_not_wait_either(model, passes, scored):  # noqa: F811
    options = {"blocks": 2.5, "logprobs": scored}
    requests = [
        (test_blocks.prompt(37 + salt, salt), model.params(**options, seed=salt, extra_args=extra))
        for salt, extra in enumerate(({}, TRACE))
    ]
    watch = watched_run(model.engine(), requests, passes)
    assert set(files_of(watch)) <= {("read", LOOP)}, watch.findings
    assert len(watch.findings) <= len(watch.passes) * (passes > 1)


def test_the_number_of_operations_does_not_grow_with_the_batch(engine):
    """No Python loop over requests, in a pass and in what prepares it."""
    few, many = (
        watched_run(engine, [(prompt(20), params(blocks=2))] * count, passes=1) for count in (2, 4)
    )
    assert set(few.passes) == set(many.passes)
    for hook in ("state.prepare_inputs", "state.prepare_attn", "sampler.apply_staged_writes"):
        assert set(few.calls[hook]) == set(many.calls[hook])


# What a steady engine step with one request launches beside the model's graph and head: kernels,
# copies, and each compiled function as one. vLLM's runner has its own.
HOOKS = (IN_PLACE, "state.prepare_inputs", "sampler")
LAUNCHES = {"synchronous": 20, "asynchronous": 37}


def test_few_kernels_are_launched_beside_the_graph(scheduled, request):
    """Of the engine steps of one request those that neither read a prompt nor begin a canvas."""
    watch = watched_run(scheduled, CASES["one"], passes=1)
    common = [
        Counter(map(_as_items, watch.engine_steps[hook])).most_common(1)[0][0] for hook in HOOKS
    ]
    launched = sum((Counter(dict(items)) for items in common), Counter())
    assert launched["_denoise_rows"] == launched["_store_rows"] == launched["_condition"] == 1
    assert launched.pop("compute_logits") == 1  # the model's head
    is_async = scheduled.runner.vllm_config.scheduler_config.async_scheduling
    most = LAUNCHES["asynchronous" if is_async else "synchronous"]
    assert launched.total() == most, dict(launched)


def _as_items(launches: Counter[str]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(launches.items()))


def test_canvases_of_requests_with_a_grammar_are_not_copied_to_the_host(engine):
    """vLLM copies drafts for its scheduler, and ours does not ask for their tokens."""
    engine.generate(*zip(*CASES["a grammar"], strict=True))
    handler = engine.runner.draft_tokens_handler
    assert handler.num_draft_tokens and handler.draft_tokens_np is None


def test_a_visit_looks_at_its_rows_once(engine, monkeypatch):
    made = record_calls(monkeypatch, canvas_rows.CanvasRows, "of_batch")
    watch = watched_run(engine, CASES["one"], passes=UNBOUNDED)
    assert len(watch.passes) > len(watch.calls["sampler"])
    assert len(made) <= 2 * len(watch.calls["sampler"])  # of two runs
