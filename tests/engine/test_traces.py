"""Traces are enough to compute the same log-probabilities again, in transformers.

With masks from tokens and steps alone. With uniform noise the seed is needed, too.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from dllm.models.unmasking.reference import DecodingRule, additive, block_causal, load_model
from tests.support import hf_reference
from tests.support.engine_harness import Engine, get_engine
from tests.support.family_checkpoints import (
    A2D_QWEN2,
    A2D_QWEN3,
    LLADA2,
    NEMOTRON,
    SDAR,
    SDAR_MOE,
    STABLE_DIFFCODER,
    write,
)

MASKS = {
    "sdar": SDAR,
    "sdar-moe": SDAR_MOE,
    "a2d-qwen3": A2D_QWEN3,
    "a2d-qwen2": A2D_QWEN2,
    "stable-diffcoder": STABLE_DIFFCODER,
    "nemotron": NEMOTRON,
    "llada2": LLADA2,
}
HEAT = 0.7
EXTRAS = ["entropy", "behind_stop"]
TOLERANCE = 1e-4  # of log-probabilities; fp32 products of two libraries
LISTS = ("token_ids", "reveal_steps", "logprobs", "sampling_logprobs", "entropies")


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Engine, Path]]:
    root = tmp_path_factory.mktemp("traces")

    def start(name: str) -> tuple[Engine, Path]:
        path = root / name
        if not path.exists():
            write(path, MASKS[name], seed=1)
        return get_engine(path, max_num_batched_tokens=256), path

    return start


def prompts(count: int = 3) -> list[list[int]]:
    draw = torch.Generator().manual_seed(2)
    lengths = (5, 32, 42)[:count]
    return [torch.randint(20, 800, (length,), generator=draw).tolist() for length in lengths]


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


@torch.no_grad()
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
            at = torch.arange(len(ids))
            seen = block_causal(at, rule.block_size) | (at >= len(context))[:, None]
            logits = model(
                input_ids=torch.tensor([ids]), attention_mask=additive(seen[None]), use_cache=False
            ).logits[0]
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
    extra = {"diffusion_begins_causally": True} if False else {}
    outputs = engine.outputs(prompts(), params(extra, n=2, logprobs=0))
    for prompt, output in zip(prompts(), outputs, strict=True):
        first, second = (one.diffusion_trace for one in output.outputs)
        assert first != second
        for one in output.outputs:
            trace = one.diffusion_trace
            assert trace["token_ids"] == list(one.token_ids)
            assert max(trace["reveal_steps"]) > 1
            kept = [scores[token].logprob for token, scores in zip(one.token_ids, one.logprobs)]
            if name != "nemotron":  # there a first token is scored on the canvas, too
                assert kept == pytest.approx(trace["sampling_logprobs"], abs=1e-5)
            assert_is(whole(trace), replayed_masks(model, rule, prompt, whole(trace)))
