"""Draws scenarios: requests of every kind that meet in an engine, and what happens to them there.

A scenario follows from its seed. An engine with few pages and a small budget serves its requests,
which come in chunks, wait for room, find each other's prompts in the cache, are preempted and
aborted, and lose their pages. Whatever happens to a request, it is answered as it is alone.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from dllm.models.unmasking.rule import STRATEGIES
from tests.engine.test_grammars import KINDS, text_of
from tests.engine.test_parity import prompt
from tests.support.async_engine import rows_taken
from tests.support.engine_harness import TIGHT, Engine
from tests.support.engine_models import Model
from tests.support.tape_jobs import PARSER

START, END = 7, 8  # of thoughts, under the names that PARSER reads
NO_THOUGHTS = {START: -100.0, END: -100.0}
SHARED = prompt(70, salt=5)  # how many prompts begin
LENGTH = 286  # of a request and its answer
MOST_STEPS = 4000
Given = dict[str, Any]  # parameters of a request; those under ``extra`` are its extra arguments


@dataclass
class Ask:
    """A request.

    Attributes:
        arrives: the engine step before which it does.
        aborted: how many engine steps later it is aborted; None: it is not.
    """

    kind: str
    context: list[int]
    params: SamplingParams
    arrives: int
    aborted: int | None


@dataclass
class Scenario:
    """Requests in the order in which they arrive.

    Attributes:
        is_async: whether engine steps are scheduled ahead.
        has_loop: whether an engine step may take several passes.
        reset: the engine step before which the pages of all requests are dropped; None: none.
    """

    seed: int
    is_async: bool
    has_loop: bool
    reset: int | None
    asks: list[Ask] = field(default_factory=list)


def draw(seed: int, model: Model) -> Scenario:
    dice = Random(f"{model.name} {seed}")
    reset = dice.choice([None, dice.randrange(3, 40)])
    made = Scenario(seed, dice.random() < 0.5, dice.random() < 0.5, reset)
    for _ in range(dice.randint(3, 7)):
        kind = dice.choice([*DRAWN])
        context = SHARED[: dice.choice([0, 0, 33, 70])]
        context = context + prompt(dice.randint(1, 60), salt=dice.randrange(40))
        given: Given = {
            "max_tokens": dice.randint(1, 3 * max(model.size, 16)),
            "seed": dice.randrange(99),
            "temperature": dice.choice([0.0, 1.0]),
            "ignore_eos": True,
            "extra": {},
        }
        given |= DRAWN[kind](dice, model, given["max_tokens"])
        if kind == "grammar":  # behind a thought that is over
            context += [START, 40, END]
        elif kind == "model's end":
            context += prompt(dice.randint(90, 140), salt=9)
        elif kind == "thought":
            context += [START, 41][: dice.randint(1, 2)]
        # Equal tokens alone prove little: a random model repeats itself.
        if dice.random() < 0.7:
            given["extra"] = given["extra"] | {"diffusion_trace": True}
        elif "logprob_token_ids" not in given:
            given = {"logprobs": dice.choice([0, 2])} | given
        bad_words, extra = given.pop("bad_word_ids", None), given.pop("extra")
        params = SamplingParams(extra_args=extra, **given)
        if bad_words:
            params._bad_words_token_ids = bad_words
        aborted = dice.randint(1, 20) if dice.random() < 0.15 else None
        made.asks.append(Ask(kind, context, params, dice.randint(0, 25), aborted))
    made.asks.sort(key=lambda ask: ask.arrives)
    return made


# --- kinds of requests ----------------------------------------------------------------------------


def some(dice: Random, every: Given, count: int) -> Given:
    return {name: every[name] for name in dice.sample(sorted(every), count)}


def of_steps(dice: Random, model: Model, most: int) -> Given:
    """How its canvases are denoised."""
    every: Given = {"diffusion_max_steps": dice.randint(1, 9)}
    if model.name != "gemma":
        every["diffusion_threshold"] = dice.choice([0.0, 0.3, 1.0])
    if model.name == "sdar":
        every |= {"diffusion_strategy": dice.choice([*STRATEGIES]), "diffusion_entropy_bound": 2.0}
    elif model.name == "llada2":
        every |= {"diffusion_editing": 1, "diffusion_editing_threshold": dice.choice([0.0, 0.1])}
        every |= {"diffusion_max_post_steps": 3}
    elif model.name == "gemma":
        every |= {"diffusion_confidence": dice.random(), "diffusion_entropy_bound": dice.random()}
        every["diffusion_t_max"] = dice.uniform(0.8, 1.5)
    return {"extra": some(dice, every, dice.randint(1, len(every)))}


def of_canvas(dice: Random, model: Model, most: int) -> Given:
    """What its first canvas holds, and how wide it is, where a request may say so."""
    if model.name != "gemma":
        return of_steps(dice, model, most)
    ids = [dice.choice([-1, dice.randrange(20, 400)]) for _ in range(model.size)]
    given = [at for at, token in enumerate(ids) if token >= 0]
    seed_canvas = {"diffusion_seed_canvas": ids, "diffusion_pinned": dice.sample(given, 3)}
    width = {"diffusion_canvas_length": dice.randint(1, model.size)}
    read = seed_canvas | {"diffusion_read_only": 1, "diffusion_max_steps": 1}
    return {"extra": dice.choice([seed_canvas, width, read])}


def of_edits(dice: Random, model: Model, most: int) -> Given:
    every = {
        "logit_bias": {dice.randrange(20, 400): dice.uniform(-5, 5) for _ in range(9)},
        **{"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": -0.3},
        "allowed_token_ids": sorted(dice.sample(range(20, 400), 90)),
        **{"top_k": 5, "top_p": 0.7, "min_p": 0.1},
    }
    return some(dice, every, 3)


def of_bad_words(dice: Random, model: Model, most: int) -> Given:
    """Blocks are cut, and the next one starts at an odd place."""
    likely = {30: 20.0, 31: 20.0}
    words = [[30, 30], [31, 31, 30]]
    return {"bad_word_ids": words, "logit_bias": likely, "frequency_penalty": 0.3}


def of_ends(dice: Random, model: Model, most: int) -> Given:
    stops = dice.sample(range(20, 400), 60)
    early = {"stop_token_ids": stops, "min_tokens": dice.randint(0, most), "ignore_eos": False}
    return early | {"extra": dice.choice([{}, {"diffusion_eos_stop": False}])}


def of_grammar(dice: Random, model: Model, most: int) -> Given:
    """Long enough for every text, or for a beginning."""
    heavy = {token: 30.0 for token in range(40, 90)}
    penalties = {"repetition_penalty": 1.8, "presence_penalty": 2.0, "frequency_penalty": 2.0}
    beside = dice.choice([{}, {"logit_bias": heavy}, {"top_k": 5}, penalties, {"min_p": 0.9}])
    asked = StructuredOutputsParams(**KINDS[dice.choice([*KINDS])][0])
    length = dice.choice([most, 128])
    return {"structured_outputs": asked, "ignore_eos": False, "max_tokens": length, **beside}


def of_pins(dice: Random, model: Model, most: int) -> Given:
    places = dice.sample(range(most), min(3, most))
    pins = {"diffusion_pin_at": places, "diffusion_pin_ids": [40 + at % 7 for at in places]}
    return {"extra": pins | {"diffusion_pin_mode": dice.choice(["hold", "hint"])}}


def of_thought(dice: Random, model: Model, most: int) -> Given:
    """One that never ends by itself, and perhaps a grammar behind it."""
    given: Given = {"logit_bias": NO_THOUGHTS, "thinking_token_budget": dice.randint(0, 40)}
    if dice.random() < 0.4:
        asked = StructuredOutputsParams(regex="(ab|cd|ef){3,9}!")
        given |= {"structured_outputs": asked, "ignore_eos": False, "max_tokens": 120}
    return given


def of_samples(dice: Random, model: Model, most: int) -> Given:
    return {"n": 2, "temperature": 1.0}


def of_scores(dice: Random, model: Model, most: int) -> Given:
    if model.name != "gemma":
        return {"logprobs": 3}
    ids = {"logprob_token_ids": [30, 31, 32], "extra": {"diffusion_constrained": 1}}
    return dice.choice([ids, {"logprobs": 3, "prompt_logprobs": 1}])


def of_length(dice: Random, model: Model, most: int) -> Given:
    """More than there are positions; the last one ends within a block."""
    return {"max_tokens": LENGTH}


DRAWN = {
    "steps": of_steps,
    "canvas": of_canvas,
    "edits": of_edits,
    "bad words": of_bad_words,
    "ends": of_ends,
    "grammar": of_grammar,
    "pins": of_pins,
    "thought": of_thought,
    "samples": of_samples,
    "scores": of_scores,
    "model's end": of_length,
}


# --- what has to be true --------------------------------------------------------------------------


def tight_engine(model: Model, is_async: bool) -> Engine:
    pages = 24 if model.name == "gemma" else 14
    budget = max(2 * model.size + 8, 40)
    few = {"num_gpu_blocks_override": pages, "max_num_batched_tokens": budget}
    limits = TIGHT | few | {"max_model_len": LENGTH}
    return model.engine(is_async, reasoning_parser=PARSER, **limits)


def alone(model: Model, ask: Ask) -> Any:
    """The output of a request that has an engine with an empty cache to itself."""
    engine = model.engine(reasoning_parser=PARSER, max_model_len=LENGTH)
    engine.reset_prefix_cache()
    (output,) = engine.outputs([ask.context], ask.params)
    return output


@contextmanager
def counted(engine: Engine, made: Scenario, names: list[str], met: Counter[str]) -> Iterator[None]:
    """Counts whom an engine preempts, which rows it takes, and whose canvas waits for room."""
    scheduler = engine.scheduler
    preempt, schedule = scheduler._preempt_request, scheduler.schedule

    def count(request: Any, *given: Any, **more: Any) -> None:
        name = request.request_id.split("-")[0].split("_")[-1]  # of a sample, that of its request
        met[f"{made.asks[names.index(name)].kind}, preempted"] += 1
        preempt(request, *given, **more)

    def spy(*given: Any) -> Any:
        output = schedule(*given)
        running = {request.request_id for request in scheduler.running}
        met["waits"] += len(running - output.num_scheduled_tokens.keys())
        return output

    patches = {"_preempt_request": count, "schedule": spy}
    block_size = engine.runner.model_state.algorithm.settings.block_size
    with mock.patch.multiple(scheduler, **patches), rows_taken(block_size) as taken:
        yield
    met.update(taken)


def served(engine: Engine, made: Scenario, met: Counter[str]) -> list[Any]:
    """The outputs of all requests; None of one that was aborted. Counts what happened to them."""
    scheduler, finished = engine.scheduler, {}
    names: list[str] = []
    aborts: dict[int, list[str]] = {}
    left_over = list(scheduler.requests)  # of a scenario that failed
    engine.llm.llm_engine.abort_request(left_over, internal=True)
    engine.reset_prefix_cache()
    passes = nullcontext() if made.has_loop else engine.one_pass_a_step()
    with passes, counted(engine, made, names, met):
        for step in range(MOST_STEPS):
            while len(names) < len(made.asks) and made.asks[len(names)].arrives <= step:
                ask = made.asks[len(names)]
                names.append(engine.add(ask.context, ask.params))
                if ask.aborted is not None:
                    aborts.setdefault(step + ask.aborted, []).append(names[-1])
            for name in aborts.pop(step, ()):
                met["aborted"] += name not in finished
                engine.llm.llm_engine.abort_request([name])
            if step == made.reset:
                assert engine.llm.reset_prefix_cache(reset_running_requests=True)
            if engine.llm.llm_engine.has_unfinished_requests():
                finished |= {output.request_id: output for output in engine.step()}
            elif len(names) == len(made.asks):
                break
        else:
            raise AssertionError(f"requests unfinished after {MOST_STEPS} engine steps")
    assert not scheduler.requests, "a request stays with the scheduler"
    engine.reset_prefix_cache()  # asserts that no block leaked
    return [finished.get(name) for name in names]


def scores_of(rows: Any) -> list[dict[int, float]]:
    """Of tokens that are possible: all others are alike, and which are shown is open."""
    return [
        {token: one.logprob for token, one in row.items() if one.logprob > -math.inf}
        for row in rows or ()
        if row
    ]


def assert_same(ours: Any, expected: Any) -> None:
    """The same answers; numbers but for rounding, which a batch of another size does otherwise."""
    for mine, theirs in zip(ours.outputs, expected.outputs, strict=True):
        assert list(mine.token_ids) == list(theirs.token_ids)
        assert (mine.finish_reason, mine.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
        pairs = [(scores_of(mine.logprobs), scores_of(theirs.logprobs))]
        pairs.append((scores_of(ours.prompt_logprobs), scores_of(expected.prompt_logprobs)))
        for own, other in pairs:
            for row, expected_row in zip(own, other, strict=True):
                assert row == pytest.approx(expected_row, abs=2e-3)
        trace, other_trace = (getattr(one, "diffusion_trace", None) for one in (mine, theirs))
        assert (trace is None) == (other_trace is None)
        for name, values in (trace or {}).items():
            assert values == pytest.approx(other_trace[name], abs=2e-3), name


def assert_kept(engine: Engine, ask: Ask, output: Any) -> None:
    """What it asked for is in the answer."""
    extra = ask.params.extra_args or {}
    for answer in output.outputs:
        tokens = list(answer.token_ids)
        if ask.kind == "grammar" and answer.finish_reason == "stop":
            (is_right,) = (judge for given, judge in KINDS.values() if of_kind(ask, given))
            assert is_right(text_of(engine, answer))
        if extra.get("diffusion_pin_mode") == "hold":
            pins = zip(extra["diffusion_pin_at"], extra["diffusion_pin_ids"], strict=True)
            assert all(tokens[at] == token for at, token in pins)
        if ask.kind == "thought":
            begun = len(ask.context) - 1 - ask.context[::-1].index(START)
            place = ask.params.thinking_token_budget - (len(ask.context) - 1 - begun)
            assert tokens[max(place, 0)] == END if len(tokens) > place else END not in tokens


def of_kind(ask: Ask, given: dict[str, Any]) -> bool:
    """Whether a request asks for this form."""
    ((name, value),) = given.items()
    return getattr(ask.params.structured_outputs, name) == value


def check(model: Model, made: Scenario, met: Counter[str]) -> None:
    """Serve a scenario. Raises AssertionError: an answer differs, or something is left over."""
    engine = tight_engine(model, made.is_async)
    for ask, output in zip(made.asks, served(engine, made, met), strict=True):
        if output is None:
            assert ask.aborted is not None
            continue
        met["cached"] += bool(output.num_cached_tokens)
        met["other samples"] += len({tuple(one.token_ids) for one in output.outputs}) > 1
        assert_kept(engine, ask, output)
        assert_same(output, alone(model, ask))
