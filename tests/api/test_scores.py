"""Scores of a given text are those of a plain loop in transformers, for each family of masks."""

import asyncio
import math
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi import HTTPException
from pydantic import ValidationError
from vllm.exceptions import VLLMValidationError

from dllm.api import scores
from dllm.api.engine_requests import finished
from dllm.models.unmasking.reference import DecodingRule, load_model
from tests.support.mask_engines import MASKS, TOLERANCE, prompts
from tests.support.masked_pass import logits_of

pytest_plugins = ["tests.support.mask_engines"]

SAMPLES = 3


@pytest.mark.parametrize("field", ["model", "prompt", "text", "cache_salt"])
def test_half_of_a_surrogate_pair_is_refused_where_it_is_read(field):
    with pytest.raises(ValidationError, match="string_unicode"):
        scores.ScoreRequest(**{"prompt": "a", "text": "b", field: "\ud800"})


def looped(model: Any, rule: DecodingRule, prompt: list[int], text: list[int], read: Any) -> Any:
    """Log-probabilities of a read's masks: one pass over everything up to the canvas's end."""
    context = prompt + text[: read.start]
    width = rule.canvas_length or rule.block_size
    width -= len(context) % rule.block_size
    canvas = [rule.mask_token_id] * width
    for at, token in enumerate(read.tokens):
        canvas[at] = rule.mask_token_id if at in read.masked else token
    start, size = len(context), rule.block_size
    logits = logits_of(model, context + canvas, start, size, rule.is_shifted)[start:]
    logits[:, rule.mask_token_id] = -torch.inf
    return [float(logits[at].log_softmax(-1)[read.tokens[at]]) for at in read.masked]


@pytest.mark.parametrize("name", [name for name in MASKS if not name.endswith("causal")])
def test_scores_are_those_of_a_loop(engine_of, name):
    """Prompts that end in a block and at its end, and a text of several blocks."""
    engine, path = engine_of(name)
    model, rule = load_model(path), DecodingRule.of_checkpoint(path)
    settings = engine.runner.model_state.algorithm.settings
    text = prompts(1)[0] * 9
    for prompt in prompts():
        scores.check(prompt, text, settings, 512)
        blocks = list(scores.blocks(len(prompt), len(text), settings))
        assert [place for block in blocks for place in block] == list(range(len(text)))
        places = [0, 1, 6, 40, len(text) - 1]
        reads = scores.chosen(text, blocks, places)
        reads += scores.drawn(text, blocks, SAMPLES, seed=1)
        contexts = [prompt + text[: read.start] for read in reads]
        outputs = engine.outputs(contexts, [read.params(settings) for read in reads])
        found = [read.logprobs(output) for read, output in zip(reads, outputs, strict=True)]
        expected = [looped(model, rule, prompt, text, read) for read in reads]
        for ours, theirs in zip(found, expected, strict=True):
            # Random weights find a text at -30 nats, where fp32 has fewer digits behind the point.
            assert ours == pytest.approx(theirs, abs=TOLERANCE, rel=1e-5)
        first = len(reads) - SAMPLES * len(blocks)
        told = scores.token_logprobs(text, reads[:first], found[:first])
        assert [at for at, number in enumerate(told) if number is not None] == places
        mean, error = scores.estimate(reads[first:], found[first:], SAMPLES)
        sums = [0.0] * SAMPLES
        for n, (read, numbers) in enumerate(zip(reads[first:], expected[first:], strict=True)):
            sums[n // len(blocks)] += sum(numbers) * len(read.tokens) / len(read.masked)
        assert mean == pytest.approx(statistics.fmean(sums), abs=len(text) * TOLERANCE)
        assert error == pytest.approx(statistics.stdev(sums) / math.sqrt(SAMPLES), abs=1e-2)


def test_drawn_masks_are_as_many_as_the_bound_says_and_follow_from_the_seed():
    blocks, text = [range(0, 3), range(3, 7)], list(range(7))
    reads = scores.drawn(text, blocks, 400, seed=5)
    assert reads == scores.drawn(text, blocks, 400, seed=5) != scores.drawn(text, blocks, 400, 6)
    for block in blocks:
        masked = [read.masked for read in reads if read.start == block.start]
        for count in range(1, len(block) + 1):  # evenly: 5 standard deviations
            share = sum(len(one) == count for one in masked) / len(masked)
            assert share == pytest.approx(1 / len(block), abs=5 * 0.5 / math.sqrt(400))
        assert {at for one in masked for at in one} == set(range(len(block)))
    # Were a token's log-probability the same whatever is masked, each estimate would be exact.
    flat = [[-2.0 * (read.start + at) for at in read.masked] for read in reads]
    mean, error = scores.estimate(reads, flat, 400)
    assert abs(mean - -2.0 * sum(text)) < 4 * error


SETTINGS = SimpleNamespace(never_emitted=(9,), begins_causally=False, canvas_length=4, block_size=4)
REFUSED = [
    ("model", [1], [2], {"never_emitted": ()}),
    ("model", [1], [2], {"begins_causally": True}),
    ("model", [1], [2], {"canvas_length": 256}),
    ("prompt", [], [2], {}),
    ("text", [1], [], {}),
    ("text", [1], [2] * 8, {}),
    ("text", [1], [2, 9], {}),
]


@pytest.mark.parametrize(("parameter", "prompt", "text", "settings"), REFUSED)
def test_what_cannot_be_scored_is_refused(parameter, prompt, text, settings):
    with pytest.raises(VLLMValidationError) as refused:
        scores.check(prompt, text, SimpleNamespace(**vars(SETTINGS) | settings), 8)
    assert refused.value.parameter == parameter


@pytest.mark.parametrize("places", [[], [0, 0], [3]])
def test_places_are_those_of_the_text(places):
    with pytest.raises(VLLMValidationError, match="places"):
        scores.chosen([5, 6, 7], [range(0, 3)], places)


def test_places_are_read_in_a_bounded_number_of_passes():
    blocks = [range(at, at + 1) for at in range(scores.MAX_READS + 1)]
    text, places = [5] * len(blocks), list(range(len(blocks)))
    assert len(scores.chosen(text, blocks, places[1:])) == scores.MAX_READS
    with pytest.raises(VLLMValidationError, match="places in 1601 blocks"):
        scores.chosen(text, blocks, places)


def test_reads_of_a_request_are_bounded():
    with pytest.raises(VLLMValidationError, match="samples"):
        scores.drawn([5] * 10, [range(n, n + 1) for n in range(10)], scores.MAX_READS // 10 + 1, 0)


def test_a_read_that_was_aborted_is_no_answer():
    async def results():
        yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason="abort")])

    with pytest.raises(HTTPException) as refused:
        asyncio.run(finished(results()))
    assert refused.value.status_code == 503
