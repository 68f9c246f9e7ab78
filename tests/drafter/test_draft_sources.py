"""vLLM's own speculators under our steering: the text is plain decoding's, for every source."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.output import SchedulerOutput

from dllm.drafter.scheduler import AsyncDraftingScheduler
from dllm.drafter.sources import SteeredMarkov
from dllm.drafter.widths.adaptive import AdaptiveWidth
from dllm.drafter.widths.policy import FixedWidth, WidthPolicy
from dllm.patches.contract import CPU_WORKER
from dllm.patches.drafting import steering_limits
from tests.drafter.test_drafter_recorder_engine import assert_recorded
from tests.drafter.test_prompt_lookup import Any as AnyLookup
from tests.support.draft_sources import SOURCES, write_dflash_2, write_lilicorr
from tests.support.drafter_harness import (
    LIMITS,
    SAMPLED,
    AllDrafts,
    Bursts,
    RandomWidth,
    drafting_engine,
    greedy,
    make_policy,
    plain_engine,
    policy_of,
    prompt,
    take_counts,
    watch_passes,
)
from tests.support.drafter_pairs import write_target
from tests.support.engine_harness import Engine, get_engine
from tests.support.forced_async import asynchronous_platform
from tests.support.recorded_calls import record_calls

N = 5
TIGHT = dict(num_gpu_blocks_override=24)  # too small for four long requests
PROMPTS = [prompt(length, length) for length in (5, 60, 90, 130)]
REGEX = {"structured_outputs": StructuredOutputsParams(regex="[a-c]{12}")}
PARAMS = {
    "greedy": [greedy(160)] * 4,
    "sampled": [
        greedy(60, **SAMPLED),
        greedy(60, **SAMPLED | {"min_p": 0.05}),
        greedy(60, **SAMPLED | {"logit_bias": {100: 5.0, 30: 4.0}}),
        greedy(60, **SAMPLED | REGEX),
    ],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("sources")


def written(folders: Path, write: Callable[[Path], Path]) -> Path:
    path = folders / write.__name__
    return path if path.exists() else write(path)


def target_of(folders: Path, name: str) -> Path:
    return written(folders, SOURCES[name].write_target)


def engine_with(folders: Path, name: str, options: dict[str, Any], **more: Any) -> Engine:
    """An engine with a draft source."""
    source, target = SOURCES[name], target_of(folders, name)
    drafter = target if source.write_drafter is None else written(folders, source.write_drafter)
    speculative = {"method": source.method} | source.more
    return drafting_engine(target, drafter, N, options, speculative=speculative, **more)


class Pair:
    """A target, plain and with a draft source."""

    def __init__(self, folders: Path, name: str) -> None:
        self.name = name
        self.plain = plain_engine(target_of(folders, name))
        options = {"policy": "adaptive", "prompt_lookup": True}
        self.drafting = engine_with(folders, name, options, **TIGHT)

    @property
    def speculator(self) -> Any:
        return self.drafting.runner.speculator


@pytest.fixture(scope="module", params=[*SOURCES])
def pair(request, folders) -> Pair:
    return Pair(folders, request.param)


_texts: dict[tuple[int, str], list[list[int]]] = {}


def plain_texts(engine: Engine, kind: str) -> list[list[int]]:
    """What plain decoding answers; computed once for each target."""
    key = id(engine), kind
    if key not in _texts:
        engine.reset_prefix_cache()
        _texts[key] = engine.generate(PROMPTS, PARAMS[kind])
    return _texts[key]


@pytest.mark.parametrize(
    ("kind", "params"),
    [("5", "greedy"), ("random", "greedy"), ("random", "sampled"), ("lookup", "sampled")],
)
def test_the_text_is_that_of_plain_decoding(pair, monkeypatch, kind, params):
    """Prompts in chunks, preemptions, random widths, drafts looked up in half of the steps.

    All but the first of these find prompts in the prefix cache.
    """
    expected = plain_texts(pair.plain, params)
    policy = AnyLookup() if kind == "lookup" else make_policy(kind, pair.drafting)
    preempted = record_calls(monkeypatch, pair.drafting.scheduler, "_preempt_request")
    with policy_of(pair.drafting, policy):
        assert pair.drafting.generate(PROMPTS, PARAMS[params]) == expected
    assert preempted or params != "greedy", "the cache was large enough for everybody"
    assert kind != "lookup" or (policy.num_lookups > 10 and policy.num_passes > 10)


@contextmanager
def drafts_behind(engine: Engine) -> Iterator[dict[tuple[int, ...], list[int]]]:
    """What is drafted behind each text, by draft passes alone."""
    seen: dict[tuple[int, ...], list[int]] = {}
    with watch_passes(engine, lambda _, text, drafts: seen.update({tuple(text): drafts})):
        yield seen


OTHERS = [name for name in SOURCES if "draft_model" not in name]


@pytest.mark.parametrize("pair", OTHERS, indirect=True)
def test_what_was_not_drafted_for_is_context_of_later_drafts(pair):
    """The drafts behind a text do not depend on the steps in which nothing was drafted."""
    given, params = [prompt(40, 3), prompt(70, 8)], greedy(50)
    found, policies = [], [FixedWidth(N), Bursts(N, N, 3, 7)]
    for policy in policies:
        pair.drafting.reset_prefix_cache()
        with policy_of(pair.drafting, policy), drafts_behind(pair.drafting) as seen:
            pair.drafting.generate(given, params)
        found.append(seen)
    always, sometimes = found
    both = always.keys() & sometimes.keys()
    assert len(both) > 10 and len(sometimes) < 0.8 * 2 * 50
    assert {text: sometimes[text] for text in both} == {text: always[text] for text in both}
    confidence = np.concatenate(policies[1].confidence)
    assert ((confidence >= 0) & (confidence <= 1)).all() and (confidence > 0).mean() > 0.9
    assert len(np.unique(confidence)) > confidence.size / 2


@pytest.mark.parametrize("pair", ["draft_model", "draft_model, sampled"], indirect=True)
@pytest.mark.parametrize("policy", [FixedWidth(N), Bursts(N, N, 3, 7)], ids=["always", "in bursts"])
def test_all_drafts_of_a_target_for_itself_are_kept(pair, policy):
    """Sampled ones are drawn with the random numbers of the target."""
    pair.drafting.reset_prefix_cache()
    params = greedy(50, **SAMPLED) if "sampled" in pair.name else greedy(50)
    given = [prompt(40, 3), prompt(70, 8)]
    with policy_of(pair.drafting, policy), drafts_behind(pair.drafting) as seen:
        texts = pair.drafting.generate(given, params)
    checked = 0
    for whole in (tuple(a + b) for a, b in zip(given, texts, strict=True)):
        for text, drafts in seen.items():
            if whole[: len(text)] == text:
                behind = whole[len(text) : len(text) + N]
                assert tuple(drafts[: len(behind)]) == behind
                checked += 1
    assert checked > 10
    if not isinstance(policy, Bursts):
        assert checked <= 2 * 50 / (N + 1) + 2  # six tokens in each step


def test_a_small_model_makes_one_pass_where_nothing_is_drafted(folders, monkeypatch):
    pair = Pair(folders, "draft_model")
    passes = record_calls(monkeypatch, type(pair.speculator), "_run_model")
    with policy_of(pair.drafting, FixedWidth(N, 0)):
        pair.drafting.generate([prompt(20)], greedy(10))
    assert [len(input_ids) for (_, input_ids, *_), _ in passes] == [21] + [2] * 9


def test_what_is_counted_reaches_the_scheduler(pair):
    take_counts(pair.drafting)
    with policy_of(pair.drafting, FixedWidth(N)):
        pair.drafting.generate([prompt(20, 11)], greedy(20))
    counts = pair.drafting.scheduler._counts.take()
    assert counts["draft_passes", ""] >= 20 // (N + 1)
    assert counts["drafted_tokens", ""] == N * counts["draft_passes", ""]
    assert counts["draft_widths", str(N)] == counts["draft_passes", ""]


@contextmanager
def chosen_ahead(engine: Engine, policy: WidthPolicy) -> Iterator[list[SchedulerOutput]]:
    """Let another policy choose the widths of steps that are scheduled ahead; the steps."""
    scheduler, steps = engine.scheduler, []
    schedule = scheduler.schedule

    def spy(*args: Any) -> SchedulerOutput:
        output = schedule(*args)
        if output.num_scheduled_tokens:
            steps.append(output)
        return output

    chooses = mock.patch.object(scheduler.driver, "policy", policy)
    with chooses, mock.patch.object(scheduler, "schedule", spy):
        yield steps


def widths_of(steps: Iterable[SchedulerOutput]) -> set[int]:
    """Drafts that requests behind their prompt have verified."""
    drafts = [(each.scheduled_spec_decode_tokens, each.scheduled_cached_reqs) for each in steps]
    return {len(tokens.get(name, ())) for tokens, running in drafts for name in running.req_ids}


@pytest.mark.parametrize("name", ["draft_model, sampled", "eagle3", "dflash 2"])
def test_the_scheduler_chooses_widths_of_steps_that_are_scheduled_ahead(folders, monkeypatch, name):
    """Prompts in chunks, preemptions, random widths and none; the policy learns what happened."""
    with asynchronous_platform():
        options = {"policy": "adaptive"}
        engine = engine_with(folders, name, options, async_scheduling=True, **TIGHT)
    assert type(engine.scheduler) is AsyncDraftingScheduler
    assert isinstance(engine.scheduler.driver.policy, AdaptiveWidth)
    plain = plain_engine(target_of(folders, name))
    preempted = record_calls(monkeypatch, engine.scheduler, "_preempt_request")
    adaptive = make_policy("adaptive", engine)
    adaptive.reads_confidence = False
    for kind, policy in (
        ("greedy", RandomWidth(N, reads_confidence=False)),
        ("sampled", RandomWidth(N, reads_confidence=False)),
        ("sampled", adaptive),
        ("sampled", FixedWidth(N)),
    ):
        with chosen_ahead(engine, policy) as steps:
            assert engine.generate(PROMPTS, PARAMS[kind]) == plain_texts(plain, kind)
        if isinstance(policy, RandomWidth):
            assert widths_of(steps) == set(range(N + 1))
            drafted = [each.num_spec_tokens_to_schedule > 0 for each in steps]
            assert {True, False} == set(drafted[-20:])
            assert [step.drafted for step in policy.steps[1:]] == drafted[: len(policy.steps) - 1]
    assert preempted, "the cache was large enough for everybody"
    # A request that a token ends is in the next step as well: what that step takes tells nothing.
    waits: list[float | None] = []
    told = RandomWidth(N, reads_confidence=False)
    monkeypatch.setattr(told, "note_wait", waits.append)
    last = plain_texts(plain, "greedy")[0][5]
    with chosen_ahead(engine, told):
        engine.generate(PROMPTS, greedy(40, stop_token_ids=[last]))
    assert set(waits) == {None}
    if SOURCES[name].write_drafter is None:  # a target that drafts for itself
        no_ends = torch.zeros(0, dtype=torch.int64)
        monkeypatch.setattr(engine.runner.speculator.steering, "end_ids", no_ends)
        seen = AllDrafts(N)
        with chosen_ahead(engine, seen):
            engine.generate([prompt(40, 3)], greedy(50, **SAMPLED))
        # Behind its last token, too, a step was scheduled.
        assert seen.num("verified") > 40
        assert seen.num("verified") - seen.num("accepted") <= 2 * N
        told = RandomWidth(N, reads_confidence=False)
        with chosen_ahead(engine, told):
            engine.generate([prompt(40, 3)], greedy(50, **SAMPLED))
        assert all((step.accepted == step.verified).all() for step in told.steps[:-3])
        assert told.num("verified") > 20


@pytest.mark.parametrize("name", ["eagle3", "dspark"])
def test_what_a_source_reads_of_the_target_is_recorded(folders, tmp_path, name):
    """Also of tokens that were drafted, and not of those that were rejected."""
    folder = tmp_path / "buffer"
    engine = engine_with(folders, name, {"policy": "adaptive", "record": str(folder)})
    with policy_of(engine, make_policy("random", engine)):
        texts = engine.generate(PROMPTS, greedy(20))
    engine.runner.speculator.steering._recorder.close()
    layers = {"eagle3": [0, 1, 2], "dspark": [1, 3]}[name]
    assert_recorded(folder, target_of(folders, name), layers, PROMPTS, texts)


def test_a_named_worker_steers_without_options(folders):
    """It has kernels for what ours steers, and not for vLLM's rule of verification."""
    target = target_of(folders, "draft_model")
    speculative = {"method": "draft_model", "model": str(target), "num_speculative_tokens": N}
    named = dict(worker_cls=CPU_WORKER, speculative_config=speculative) | LIMITS
    engine = get_engine(target, **named)
    params = [greedy(20), greedy(20, **SAMPLED | {"min_p": 0.05})]
    plain = plain_engine(target)
    assert engine.generate(PROMPTS[:2], params) == plain.generate(PROMPTS[:2], params)
    with pytest.raises(VLLMValidationError, match="logprob_token_ids"):
        engine.add(prompt(3), greedy(3, logprob_token_ids=[5]))


def test_a_reduced_vocabulary_of_dspark_is_told_apart_from_the_targets():
    """How sure it is counts for nothing where the target's id ends an answer."""
    speculator: Any = object.__new__(SteeredMarkov)
    speculator.num_speculative_steps, speculator.acceptance_estimator = 2, None
    speculator.steering = steering = SimpleNamespace(reads_confidence=True)
    steering.end_ids, steering.confidence = torch.tensor([11]), torch.zeros(3, 2)
    speculator.model = SimpleNamespace(map_draft_to_target=lambda ids: ids + 10)
    logits = torch.tensor([[9.0, 0.0], [0.0, 9.0]])  # ids 10 and 11
    speculator._maybe_predict_acceptance(logits, torch.arange(2), torch.tensor(1))
    assert (steering.confidence > 0.9).tolist() == [[False, True], [False, False], [False] * 2]


@pytest.mark.parametrize(("size", "is_refused"), [(400, True), (512, False), (640, False)])
def test_sampled_drafts_of_dspark_need_the_targets_vocabulary(size, is_refused):
    """A larger one is padded."""
    hf_config = SimpleNamespace(draft_vocab_size=size, vocab_size=512)
    speculative = SimpleNamespace(
        method="dspark",
        num_speculative_tokens=2,
        draft_sample_method="probabilistic",
        use_local_argmax_reduction=False,
        draft_model_config=SimpleNamespace(hf_config=hf_config),
    )
    config = SimpleNamespace(
        speculative_config=speculative,
        model_config=SimpleNamespace(get_vocab_size=lambda: 512),
        scheduler_config=SimpleNamespace(scheduler_cls=None),
        lora_config=None,
        additional_config=None,
    )
    refused = [why for is_given, _, why in steering_limits(config) if is_given]
    assert ["reduced vocabulary" in why for why in refused] == [True] * is_refused


# --- refused when the server starts ---------------------------------------------------------------


@pytest.mark.parametrize("write", [write_dflash_2, write_lilicorr])
def test_sampled_drafts_of_a_selector_are_refused_at_start(tmp_path, write):
    target, drafter = write_target(tmp_path / "target"), write(tmp_path / "drafter")
    sampled = {"draft_sample_method": "probabilistic"}
    with pytest.raises(ValueError, match="a selector of candidates cannot"):
        drafting_engine(target, drafter, N, speculative=sampled)
