"""Traces are enough to compute the same log-probabilities again, in transformers.

With masks from tokens and steps alone. With uniform noise the seed is needed, too.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from dllm.engine.traces import BlockTraces
from dllm.models.gemma.rule import accept_mask
from dllm.models.unmasking.reference import DecodingRule, load_model
from tests.engine.test_sampling_engine import schedule
from tests.support import hf_reference
from tests.support.engine_harness import Engine, get_engine
from tests.support.mask_engines import MASKS, TOLERANCE, prompts
from tests.support.masked_pass import logits_of

pytest_plugins = ["tests.support.mask_engines"]

HEAT = 0.7
EXTRAS = ["entropy", "behind_stop"]
LISTS = ("token_ids", "reveal_steps", "logprobs", "sampling_logprobs", "entropies")


def params(extra: dict[str, Any] | None = None, **given: Any) -> SamplingParams:
    extra = {"diffusion_trace": EXTRAS} | (extra or {})
    options = {"max_tokens": 40, "seed": 3, "temperature": HEAT, "ignore_eos": True} | given
    return SamplingParams(extra_args=extra, **options)


def whole(trace: dict[str, Any]) -> dict[str, Any]:
    """A trace with the tokens behind the stop in its last block."""
    behind = trace.get("behind_stop", {})
    lengths = list(trace["block_lengths"])
    lengths[-1] += len(behind.get("token_ids", ()))
    lists = {name: trace[name] + behind.get(name, []) for name in LISTS}
    return lists | {"block_lengths": lengths, "block_passes": trace["block_passes"]}


def of_row(logits: torch.Tensor, token: int, heat: float) -> list[float]:
    """Both log-probabilities, and the entropy."""
    hot = (logits / heat).log_softmax(-1)
    entropy = torch.special.entr(hot.exp()).sum()
    return [float(logits.log_softmax(-1)[token]), float(hot[token]), float(entropy)]


def assert_is(trace: dict[str, Any], found: list[list[float]]) -> None:
    """found: of each token what ``of_row`` gives."""
    told = torch.tensor([trace[name] for name in LISTS[2:]]).T
    torch.testing.assert_close(told, torch.tensor(found), rtol=0, atol=TOLERANCE)


def replayed_masks(model: Any, rule: DecodingRule, prompt: list[int], trace: Any) -> Any:
    """The same numbers from tokens and steps: one pass of the whole sequence for each step."""
    tokens, steps = trace["token_ids"], trace["reveal_steps"]
    context, found, done = list(prompt), [], 0
    for length, passes in zip(trace["block_lengths"], trace["block_passes"], strict=True):
        of_block = range(done, done + length)
        rows: dict[int, list[float]] = {}
        for step in range(passes + 1):
            canvas = [tokens[n] if steps[n] < step else rule.mask_token_id for n in of_block]
            ids = context + (canvas if step else [])  # step 0 is the causal pass in front
            logits = logits_of(model, ids, len(context), rule.block_size, rule.is_shifted)
            logits[:, rule.mask_token_id] = -torch.inf
            for n in of_block:
                if steps[n] == step:
                    place = len(context) + n - done if step else -1
                    rows[n] = of_row(logits[place], tokens[n], HEAT)
        found += [rows[n] for n in of_block]
        context += [tokens[n] for n in of_block]
        done += length
    return found


@pytest.mark.parametrize("name", MASKS)
def test_a_replay_of_masks_gives_the_same_numbers(engine_of, name):
    """Three requests in a batch, two samples each; logprobs beside them are the sampled ones."""
    engine, path = engine_of(name)
    model, rule = load_model(path), DecodingRule.of_checkpoint(path)
    outputs = engine.outputs(prompts(), params(n=2, logprobs=0))
    for prompt, output in zip(prompts(), outputs, strict=True):
        first, second = (one.diffusion_trace for one in output.outputs)
        assert first != second
        for one in output.outputs:
            trace = one.diffusion_trace
            assert trace["token_ids"] == list(one.token_ids)
            assert max(trace["reveal_steps"]) > 1
            kept = [
                scores[token].logprob
                for token, scores in zip(one.token_ids, one.logprobs, strict=True)
            ]
            if name != "nemotron-causal":  # there a first token is scored on the canvas, too
                assert kept == pytest.approx(trace["sampling_logprobs"], abs=1e-5)
            assert_is(whole(trace), replayed_masks(model, rule, prompt, whole(trace)))


CHANGED = {
    "grammar": {"structured_outputs": StructuredOutputsParams(regex="[a-f]{9,30}")},
    "edits": {"logit_bias": {50: 4.0}, "repetition_penalty": 1.3, "bad_words": ["a", "b"]},
    "filters": {"top_k": 3, "top_p": 0.8},
    "leftmost": {"extra": {"diffusion_strategy": "leftmost"}},
}


@pytest.mark.parametrize("name", CHANGED)
def test_numbers_are_those_of_the_model_itself(engine_of, name):
    """Whatever a request does to its logits, and in whichever order tokens are decided."""
    engine, _ = engine_of("sdar")
    asked = params(**CHANGED[name] | ({"ignore_eos": False} if name == "grammar" else {}))
    with engine.watch(keep_logits=True) as watched:
        outputs = engine.outputs(prompts(), asked)
    for output in outputs:
        trace, found, start = whole(output.outputs[0].diffusion_trace), [], 0
        passes = iter(watched[output.request_id])
        for length, count in zip(trace["block_lengths"], trace["block_passes"], strict=True):
            logits = [next(passes).logits for _ in range(count)]
            steps = trace["reveal_steps"][start : start + length]
            for place, step in enumerate(steps):
                token = trace["token_ids"][start + place]
                found.append(of_row(logits[step - 1][place], token, HEAT))
            start += length
            if name == "leftmost":  # one token a step
                assert steps == list(range(1, length + 1))
        assert_is(trace, found)


def uniform(checkpoint: Any) -> Path:
    return checkpoint(generation={"confidence_threshold": 0.3})


def test_a_replay_of_uniform_noise_gives_the_same_numbers(checkpoint):
    """Hugging Face's own loop with the noise of the seed."""
    engine = get_engine(uniform(checkpoint), max_num_batched_tokens=256)
    model = hf_reference.load_hf(uniform(checkpoint))
    asked = prompts(vocab_size=500)
    outputs = engine.outputs(asked, params(max_tokens=64, temperature=1.0))
    num_early = 0
    for prompt, output in zip(asked, outputs, strict=True):
        trace = output.outputs[0].diffusion_trace
        reference = hf_reference.generate_with_noise(model, prompt, 2, seed=3)
        assert trace["token_ids"] == reference.tokens
        assert trace["block_passes"] == reference.steps_per_block
        found = []
        for n, token in enumerate(reference.tokens):
            canvases, place = reference.canvases[n // 32], n % 32
            step = len(canvases)
            kept = [accepted(engine, probs)[place] for probs in reference.probs[n // 32]]
            while step > 1 and canvases[step - 1][place] == token and kept[step - 2]:
                step -= 1
            num_early += step < len(canvases)
            assert trace["reveal_steps"][n] == step
            hot = reference.probs[n // 32][step - 1][place].double().log()
            heat = schedule(engine, step)
            found.append([*of_row(hot * heat, token, heat)])
        assert_is(trace, found)
    assert num_early > 10


def accepted(engine: Engine, probs: torch.Tensor) -> list[bool]:
    """Which tokens a step keeps; else noise may be the same token by chance."""
    config = engine.runner.model_state.algorithm.settings
    entropy = torch.special.entr(probs).sum(-1)
    return accept_mask(entropy[None], torch.tensor([32]), config.entropy_bound)[0].tolist()


def test_beside_a_canvas_a_prompt_that_is_read_has_no_rows_to_trace():
    """Of no rows a CPU computes no statistics."""
    state: Any = SimpleNamespace(
        canvas=torch.zeros(4, 8, dtype=torch.int64), holds_pins=torch.zeros(4, dtype=torch.bool)
    )
    traces = BlockTraces(state, stays=True)
    traces.add_request(1, params())
    batch: Any = SimpleNamespace(idx_mapping_np=np.array([0, 1]), num_reqs=2)
    batch.cu_num_logits_np = np.array([0, 8, 8])
    assert traces.rows_of(batch) is None
    batch.cu_num_logits_np = np.array([0, 8, 16])
    rows = traces.rows_of(batch)
    assert rows is not None and rows.tolist() == list(range(8, 16))


def test_given_tokens_have_step_0_and_no_numbers(engine_of, checkpoint):
    pins = {"diffusion_pin_at": [0, 5], "diffusion_pin_ids": [77, 78], "diffusion_pin_mode": "hold"}
    for path in (engine_of("sdar")[1], uniform(checkpoint)):
        engine = get_engine(path, max_num_batched_tokens=256)
        (output,) = engine.outputs(prompts(1, 500), params(pins, max_tokens=32))
        trace = output.outputs[0].diffusion_trace
        assert [trace["token_ids"][at] for at in (0, 5)] == [77, 78]
        is_given = [at in (0, 5) for at in range(32)]
        assert [step == 0 for step in trace["reveal_steps"]] == is_given
        for name in LISTS[2:]:
            assert [number is None for number in trace[name]] == is_given


def test_what_stands_behind_the_stop_is_told_where_it_is_asked(engine_of):
    engine, _ = engine_of("llada2")
    (free,) = engine.outputs(prompts(1), params(max_tokens=27))
    whole_block = free.outputs[0].diffusion_trace
    stop = whole_block["token_ids"][3]
    end = whole_block["token_ids"].index(stop) + 1
    for asked, behind in ((["behind_stop"], 27 - end), (["entropy"], None), (True, None)):
        extra = {"diffusion_trace": asked, "diffusion_eos_stop": False}
        (output,) = engine.outputs(prompts(1), params(extra, stop_token_ids=[stop]))
        trace = output.outputs[0].diffusion_trace
        assert trace["token_ids"] == list(output.outputs[0].token_ids)
        assert trace["block_lengths"] == [end] and len(trace["reveal_steps"]) == end
        assert ("entropies" in trace) == (asked == ["entropy"])
        found = trace.get("behind_stop")
        assert behind == (None if found is None else len(found["logprobs"]))
