"""Typed decisions: probabilities from the engine against the softmax of Hugging Face's models."""

import asyncio
import string
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dllm.api.decisions.labels import Labels
from dllm.api.decisions.protocol import MAX_OPTIONS
from dllm.api.decisions.reads import CanvasReads, Read, WideChoice
from dllm.models.unmasking import reference
from dllm.settings import request
from dllm.settings.decisions import DecisionOptions
from dllm.settings.request import LEAST_ROWS, RequestOptions
from dllm.settings.vllm_names import question_types
from tests.support import family_checkpoints, hf_reference
from tests.support.async_engine import get_async_engine
from tests.support.engine_harness import Engine, get_engine
from tests.support.masked_pass import logits_of
from tests.support.recorded_calls import record_calls

END, WIDTH = 1, 16
WORDS = [chr(code) for code in range(200, 500)]  # a token each
SDAR = Path(__file__).parents[2] / "checkpoints/tiny-sdar"
# Sums of a few log-probabilities in fp32, by GEMMs of two libraries: 2e-5 was measured.
TOLERANCE = 2e-4


def encode(text: str) -> list[int]:
    """A token for each character."""
    return [20 + ord(character) for character in text]


class Client:
    """An engine in this process as an asynchronous client; what arrives together runs together."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._finished, self.name_of = engine, {}, {}
        self.vllm_config = engine.llm.llm_engine.vllm_config
        self.num_added, self.num_steps = 0, 0

    async def generate(
        self, given: Any, params: Any, name: str, **options: Any
    ) -> AsyncIterator[Any]:
        """The finished request alone."""
        added = self._engine.add(given["prompt_token_ids"], params)
        self.name_of[added] = name
        self.num_added += 1
        seen = 0
        while seen < self.num_added:
            seen = self.num_added
            for _ in range(4):  # turns in which another question starts
                await asyncio.sleep(0)
        while added not in self._finished:
            self.num_steps += 1
            self._finished |= {one.request_id: one for one in self._engine.step()}
        yield self._finished[added]


class Reads(CanvasReads):
    """The strategy with a token for each character, and no chat template."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        renderer = SimpleNamespace(_executor=None)
        self.client = Client(engine)
        self.context = SimpleNamespace(
            engine_client=self.client, online_renderer=SimpleNamespace(renderer=renderer)
        )
        self.options = DecisionOptions(read_width=WIDTH, **options)
        self.settings = engine.runner.model_state.algorithm.settings
        self.block_size = self.settings.block_size
        self.width, self.max_model_len = WIDTH, 512
        self.end = END
        self.thought: list[int] = []
        self.tail = self._prompt_end = [0]
        self.labels = Labels(encode, END, WORDS if self.block_size > 1 else None)

    async def _render(self, request: Any, messages: Any) -> tuple[Any, list[int]]:
        ids = encode(messages[-1]["content"])
        return {"prompt_token_ids": ids}, ids

    def ask(self, asked: Sequence[question_types.Question], state: str = "in") -> list[Read]:
        """What is read."""
        options = dict(chat_template_kwargs=None, lora_request=None, priority=0)
        return asyncio.run(self.read(asked, None, state, request_id="r", **options))


def choice(place: int, names: Sequence[str]) -> question_types.Question:
    options = tuple(map(question_types.Option, names))
    return question_types.Question(str(place), WideChoice(), "a", options, tuple(names))


# A pair, letters, and more options than there are letters, of one to three tokens each; some begin
# as others do.
SPELLED = [f"{n:b}"[-3:] + "x" * (n % 2) for n in range(8, 16)] + [f"o{n}" for n in range(22)]
QUESTIONS = [choice(0, ["a", "b"]), choice(1, "abcde"), choice(2, SPELLED)]


def brute_force(reads: Reads, asked: Any, logits: torch.Tensor) -> torch.Tensor:
    """The probability of each option: its tokens on the rows, one by one."""
    scores = logits.double().log_softmax(-1)
    labels = reads.labels_of(asked)
    sums = [sum(scores[at, token] for at, token in enumerate(one)) for one in labels.tokens]
    return torch.tensor(sums)


def compare(
    reads: Reads,
    found: list[Read],
    logits: list[torch.Tensor],
    samples: int,
    questions: Sequence[question_types.Question] = QUESTIONS,
) -> None:
    for place, (asked, read) in enumerate(zip(questions, found, strict=True)):
        score = partial(brute_force, reads, asked)
        sums = torch.stack([score(one) for one in logits[place * samples : (place + 1) * samples]])
        probabilities = sums.softmax(-1)
        expected = probabilities.mean(0)
        assert read.probs == pytest.approx(expected.tolist(), rel=TOLERANCE, abs=1e-12)
        assert read.label_mass == pytest.approx(float(sums.exp().sum(-1).mean()), rel=TOLERANCE)
        assert read.samples == samples
        if samples > 1:
            errors = probabilities.std(0) / samples**0.5
            assert read.standard_errors == pytest.approx(errors.tolist(), rel=1e-2, abs=1e-9)


def whole(canvas: list[int]) -> list[int]:
    """A canvas of a read, of which the sampler sees the first tokens only."""
    return canvas + [END] * (WIDTH - len(canvas))


@pytest.mark.parametrize("samples", [1, 3])
def test_noise(engine, checkpoint, samples):
    model = hf_reference.load_hf(checkpoint())
    reads = Reads(engine, samples=samples)
    with engine.watch(keep_logits=True) as watched:
        found = reads.ask(QUESTIONS)
    prompts = [
        encode(plan.text) for plan in reads._plan(QUESTIONS, "in", samples) for _ in range(samples)
    ]
    watched = {
        name: watched[name] for name in sorted(watched, key=reads.client.name_of.__getitem__)
    }
    context_of = dict(zip(watched, prompts, strict=True))
    expected = {
        name: hf_reference.one_step_logits(model, context_of[name], whole(steps[0].canvas))
        for name, steps in watched.items()
    }
    assert all(len(steps) == 1 for steps in watched.values())
    compare(reads, found, list(expected.values()), samples)
    rows = [reads.labels_of(asked).num_rows for asked in QUESTIONS for _ in range(samples)]
    for steps, num_rows in zip(watched.values(), rows, strict=True):
        assert whole(steps[0].canvas)[num_rows:] == [END] * (WIDTH - num_rows)


def test_masks_on_a_canvas(family):
    """Of a model whose canvases start where the prompt ends: masks, and the end behind them."""
    path = family("nemotron")
    model, mask = reference.load_model(path), family_checkpoints.MASK
    reads = Reads(get_engine(path, max_num_batched_tokens=256))
    found = reads.ask(QUESTIONS)
    expected = []
    for plan in reads._plan(QUESTIONS, "in", 1):
        ids = encode(plan.text)
        canvas = whole([mask] * plan.labels.num_rows)
        logits = logits_of(model, ids + canvas, len(ids))[len(ids) :]
        logits[:, mask] = -torch.inf  # a mask is never an answer
        expected.append(logits)
    compare(reads, found, expected, 1)


@pytest.mark.parametrize("name", ["tiny-sdar", "blocks of 4"])
def test_masks_behind_a_prompt_of_any_length(family, name):
    """With blocks, labels fit whatever the prompt leaves of its block, up to 255 of them."""
    path = SDAR if name == "tiny-sdar" else family("sdar")
    engine = get_engine(path, max_num_batched_tokens=512)
    model, rule = reference.load_model(path), reference.DecodingRule.of_checkpoint(path)
    size, asked = rule.block_size, [*QUESTIONS, choice(3, [f"{n}" for n in range(MAX_OPTIONS)])]
    reads, rooms = Reads(engine), set()
    for state in ("i" * n for n in range(size)):
        found = reads.ask(asked[:3], state)
        expected = []
        for plan in reads._plan(asked[:3], state, 1):
            ids = encode(plan.text)
            room = size - len(ids) % size
            rooms.add((plan.question.id, room))
            logits = logits_of(model, ids + [rule.mask_token_id] * room, len(ids), size)
            logits[:, rule.mask_token_id] = -torch.inf  # a mask is never an answer
            expected.append(logits[len(ids) :])
        compare(reads, found, expected, 1, asked[:3])
    assert len(rooms) == 3 * size
    assert reads.labels_of(asked[3]).num_rows == 1


def probabilities(reads: list[Read]) -> list[list[float]]:
    return [one.probs for one in reads]


@pytest.mark.parametrize("get", [get_engine, get_async_engine])
def test_48_reads_are_one_pass_and_alike_alone_and_in_a_crowd(engine, checkpoint, get):
    """On a model of uniform noise, which reads only as many rows as it is asked for."""
    wide = get(checkpoint(), max_num_seqs=48, max_num_batched_tokens=4096)
    asked = [choice(n, ["a", "b", f"c{n}"]) for n in range(48)]
    alone = [Reads(engine, samples=1).ask([one])[0] for one in asked[:4]]
    with wide.watch() as watched:
        crowd = Reads(wide, samples=1).ask(asked)
    assert [len(steps) for steps in watched.values()] == [1] * 48
    assert probabilities(crowd[:4]) == probabilities(alone)
    cached = Reads(wide, samples=1).ask(asked)
    assert probabilities(cached) == probabilities(crowd)


def test_reads_within_the_budget_take_one_step_of_the_engine(engine):
    engine.reset_prefix_cache()
    crowd = Reads(engine, samples=1)
    crowd.ask(QUESTIONS[:2])
    assert crowd.client.num_steps == 1


def test_only_the_rows_of_labels_have_logits(engine, monkeypatch):
    engine.reset_prefix_cache()
    computed = record_calls(monkeypatch, engine.runner.model, "compute_logits")
    few = Reads(engine, samples=1).ask(QUESTIONS)
    labels = [Reads(engine).labels_of(asked).num_rows for asked in QUESTIONS]
    num_computed = sum(len(hidden) for (hidden,), _ in computed)
    assert num_computed == sum(max(LEAST_ROWS, num_rows) for num_rows in labels) < WIDTH * 3
    monkeypatch.setattr(request, "LEAST_ROWS", WIDTH)
    computed.clear()
    engine.reset_prefix_cache()
    every = Reads(engine, samples=1).ask(QUESTIONS)
    assert sum(len(hidden) for (hidden,), _ in computed) == WIDTH * 3
    assert every == few


LONG = "The state of things. " * 8  # longer than the budget below: it comes in chunks


@pytest.mark.parametrize("get", [get_engine, get_async_engine])
def test_a_preempted_read_is_as_it_is_alone(engine, checkpoint, monkeypatch, get):
    """Whatever runs is preempted once, while the prompt comes in chunks; then it comes again."""
    expected = [Reads(engine, samples=1).ask([one], LONG)[0].probs for one in QUESTIONS[:2]]
    tight = get(checkpoint(), max_num_batched_tokens=72)
    preempted: list[int] = []
    step = tight.step

    def step_and_preempt() -> list[Any]:
        finished = step()
        if tight.scheduler.running and not preempted:
            preempted.extend(one.num_computed_tokens for one in tight.scheduler.running)
            assert tight.llm.reset_prefix_cache(reset_running_requests=True)
        return finished

    monkeypatch.setattr(tight, "step", step_and_preempt)
    assert probabilities(Reads(tight, samples=1).ask(QUESTIONS[:2], LONG)) == expected
    assert preempted and preempted[0] >= 72


def test_more_label_tokens_than_are_given_at_once_are_several_reads_of_one_canvas(engine):
    """140 options of two tokens each, and the end."""
    names = [chr(40 + n) + "ab"[n % 2] for n in range(140)]
    reads = Reads(engine, samples=1)
    engine.reset_prefix_cache()
    with engine.watch(keep_logits=True) as watched:
        (read,) = reads.ask([choice(0, names)])
    logits = [steps[0].logits for steps in watched.values()]
    # Both are rows of one GEMM, which sums rows in more orders than one: 2e-5 was measured.
    assert len(logits) == 2 and torch.allclose(*logits, atol=TOLERANCE)
    sums = brute_force(reads, choice(0, names), logits[0])
    assert read.probs == pytest.approx(sums.softmax(-1).tolist(), rel=TOLERANCE, abs=1e-12)


@pytest.mark.parametrize("name", ["llada2", "nemotron"])
def test_a_read_needs_logits_of_its_labels_alone(family, name):
    reads = Reads(get_engine(family(name), max_num_batched_tokens=256))
    (plan,) = reads._plan(QUESTIONS[:1], "in", 1)
    for params in reads._params(plan, encode(plan.text), 1):
        num_rows = RequestOptions.read(params, reads.settings).num_rows
        assert num_rows == max(LEAST_ROWS, plan.labels.num_rows) < reads.settings.canvas_length


def test_labels_that_are_never_said_have_probabilities():
    """Options that begin with the mask, whose logit is minus infinity."""
    engine = get_engine(SDAR, max_num_batched_tokens=512)
    rule = reference.DecodingRule.of_checkpoint(SDAR)
    reads = Reads(engine)
    reads.labels = Labels(lambda text: [rule.mask_token_id, *encode(text)], END)
    (read,) = reads.ask([choice(0, string.ascii_letters)])
    assert sum(read.probs) == pytest.approx(1) and read.label_mass == 0


def test_a_temperature_flattens_and_keeps_the_mass(engine):
    plain, flat = (
        Reads(engine, samples=1, temperature=given).ask(QUESTIONS[1:2])[0]
        for given in ({}, {"choice": 100.0})
    )
    assert max(flat.probs) < max(plain.probs) and flat.hesitation > 0.99
    assert flat.label_mass == plain.label_mass
