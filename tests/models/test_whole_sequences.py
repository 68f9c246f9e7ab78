"""LLaDA-8B and Dream, token for token, against the plain loops of ``tests.support.whole_loop``."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from dllm.patches import routes
from tests.support.engine_harness import Engine, get_engine
from tests.support.family_checkpoints import MASK, WHOLE_SEQUENCES
from tests.support.masked_pass import random_prompts
from tests.support.whole_loop import GEN_LENGTH, SEED, Loop, Setting

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
PROMPTS = random_prompts([1, 8, 31, 33, 75], seed=4)


@pytest.fixture(scope="module", params=WHOLE_SEQUENCES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(name: str, family: Callable[[str], Path]) -> Path:
    return family(name)


@pytest.fixture(scope="module")
def loop(name: str, path: Path) -> Loop:
    return Loop(name, path)


@pytest.fixture(scope="module")
def engine(path: Path) -> Engine:
    return get_engine(path)


def params(max_tokens: int = GEN_LENGTH, **extra: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, temperature=0, seed=SEED, ignore_eos=True, extra_args=extra
    )


@pytest.mark.parametrize("number", range(6))
def test_tokens_are_those_of_the_loop(engine: Engine, loop: Loop, number: int) -> None:
    """More prompts than run at a time."""
    setting = [*loop.settings.values()][number]
    found = engine.generate(PROMPTS, params(**setting.of_request()))
    assert found == [loop.answer(prompt, setting)[0] for prompt in PROMPTS]
    assert number > 0 or found == engine.generate(PROMPTS, params())


def several_blocks(
    loop: Loop, prompt: list[int], size: int, bound: float, add_threshold: float
) -> list[int]:
    """After ``generate_multi_block`` of hao-ai-lab/d3LLM, without an early stop."""
    ids, num_open = prompt + [MASK] * GEN_LENGTH, 1
    starts = range(len(prompt), len(ids), size)
    blocks = [range(start, min(start + size, len(ids))) for start in starts]
    while MASK in ids:
        left = [[at for at in block if ids[at] == MASK] for block in blocks]
        progress = 1 - len(left[num_open - 1]) / len(blocks[num_open - 1])
        num_open += num_open < len(blocks) and progress >= add_threshold
        p = loop.rows(ids).softmax(-1)
        nats = entropies(p)
        masks = [at for block in left[:num_open] for at in block]
        taken = {at for at in masks if nats[at] < bound}
        if not loop.is_dream:
            taken.add(min(masks, key=lambda at: nats[at]))
        first = next(block for block in left if block)
        if not taken & set(first):
            taken.add(min(first, key=lambda at: nats[at]))
        for at in taken:
            ids[at] = int(p[at].argmax())
    return ids[len(prompt) :]


def entropies(p: torch.Tensor) -> list[float]:
    nats: list[float] = torch.special.entr(p).sum(-1).tolist()
    return nats


@pytest.mark.parametrize(
    ("size", "part", "add_threshold"), [(16, 0.5, 0.1), (24, 0.3, 0.5), (8, 0.7, 0.05)]
)
def test_several_blocks_are_decided_at_once(
    engine: Engine, loop: Loop, size: int, part: float, add_threshold: float
) -> None:
    """``part``: of the first prompt's masks, those whose entropies are below the bound."""
    first = PROMPTS[0]
    nats = entropies(loop.rows(first + [MASK] * GEN_LENGTH)[len(first) :].softmax(-1))
    bound = sum(sorted(nats)[int(part * GEN_LENGTH) :][:2]) / 2
    asked = {
        "diffusion_strategy": "entropy_threshold",
        "diffusion_block_length": GEN_LENGTH,
        "diffusion_sub_block": size,
        "diffusion_entropy_bound": bound,
        "diffusion_block_add_threshold": add_threshold,
    }
    with engine.watch() as watched:
        found = engine.generate(PROMPTS, params(**asked))
    assert found == [several_blocks(loop, each, size, bound, add_threshold) for each in PROMPTS]
    assert all(len(steps) < GEN_LENGTH for steps in watched.values())


@pytest.mark.parametrize("passes", ["one a step", "many a step"])
def test_context_of_a_block_may_be_cached(path: Path, loop: Loop, passes: str) -> None:
    """More prompts than run at a time, and more than the cache holds."""
    setting = loop.settings["fast"]._replace(steps=32, block_length=16)
    option = {"context_cache": "block", "denoise_loop_ms": 0 if passes == "one a step" else 60_000}
    cached = get_engine(
        path,
        additional_config={"dllm": option},
        max_model_len=160,
        max_num_batched_tokens=300,
        block_size=32,
        num_gpu_blocks_override=14,
    )
    found = cached.generate(PROMPTS, params(**setting.of_request()))
    assert found == [loop.answer(prompt, setting, is_cached=True)[0] for prompt in PROMPTS]
    assert found != [loop.answer(prompt, setting)[0] for prompt in PROMPTS]


def test_an_answer_takes_the_passes_of_the_loop(engine: Engine, loop: Loop) -> None:
    prompt, setting = PROMPTS[-1], loop.settings["fast"]
    tokens, passes = loop.answer(prompt, setting)
    with engine.watch() as watched:
        assert engine.generate([prompt], params(**setting.of_request())) == [tokens]
    (steps,) = watched.values()
    assert len(steps) == passes == setting.steps


# --- what the reference has no words for ---------------------------------------------------------


def test_an_answer_may_be_shorter_or_longer_than_the_masks(
    engine: Engine, loop: Loop, name: str, path: Path
) -> None:
    """Shorter than a block: only its tokens are masks. Longer: ``gen_length`` masks at a time."""
    prompt = PROMPTS[2]
    (short,) = engine.generate([prompt], params(10, diffusion_strategy="low_confidence_static"))
    assert short == Loop(name, path, length=10).answer(prompt, Setting(10, 10))[0]
    setting = loop.settings["default"]
    (long,) = engine.generate([prompt], params(GEN_LENGTH + 32))
    first, _ = loop.answer(prompt, setting)
    assert long[: setting.block_length] == first[: setting.block_length]
    assert len(long) == GEN_LENGTH + 32


def test_an_end_token_ends_the_answer(engine: Engine, loop: Loop) -> None:
    """Also one in the first block: nothing behind it is computed."""
    prompt = PROMPTS[1]
    setting = loop.settings["default"]
    expected, _ = loop.answer(prompt, setting)
    stop = expected[20]
    with engine.watch() as watched:
        (found,) = engine.generate(
            [prompt], SamplingParams(max_tokens=GEN_LENGTH, temperature=0, stop_token_ids=[stop])
        )
    assert found == expected[: expected.index(stop) + 1]
    (steps,) = watched.values()
    assert len(steps) <= setting.block_length


def test_requests_that_preempt_each_other_have_the_same_answers(path: Path, engine: Engine) -> None:
    """A step has room for two of the sequences, the cache for three; greedy and sampled."""
    tight = get_engine(
        path,
        max_model_len=160,
        max_num_batched_tokens=300,
        block_size=32,
        num_gpu_blocks_override=14,
    )
    asked = [
        SamplingParams(max_tokens=GEN_LENGTH, temperature=t, seed=7, ignore_eos=True)
        for t in (0, 0.8, 1.2, 0, 1)
    ]
    alone = [engine.generate([prompt], one)[0] for prompt, one in zip(PROMPTS, asked, strict=True)]
    assert tight.generate(PROMPTS, asked) == alone
    assert alone[1] != engine.generate([PROMPTS[1]], params())[0]


def test_pins_are_seen_and_emitted_wherever_they_are(engine: Engine, loop: Loop) -> None:
    """The masks of the first block see a pin in the second one."""
    prompt, at = PROMPTS[0], [3, 40, 63]
    pinned = params(diffusion_pin_at=at, diffusion_pin_ids=[100, 200, 300])
    with engine.watch(keep_logits=True) as watched:
        (found,) = engine.generate([prompt], pinned)
    assert [found[place] for place in at] == [100, 200, 300]
    (steps,) = watched.values()
    ids = prompt + [MASK] * GEN_LENGTH
    for place, token in zip(at, (100, 200, 300), strict=True):
        ids[len(prompt) + place] = token
    logits = steps[0].logits
    assert logits is not None
    expected = loop.rows(ids)[len(prompt) : len(prompt) + len(logits)]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("asked", [{"seed_canvas": [5] * GEN_LENGTH}, {"read_only": True}])
def test_a_canvas_has_no_width_of_its_own(engine: Engine, asked: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError, match="the rest of a block, or of the answer"):
        engine.add(PROMPTS[0], params(**{f"diffusion_{name}": asked[name] for name in asked}))


def test_a_grammar_is_held(engine: Engine) -> None:
    """An answer of three blocks that is complete within ``max_tokens``."""
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 9, "maxItems": 12}
    asked = SamplingParams(
        max_tokens=60,
        temperature=0,
        structured_outputs=StructuredOutputsParams(json=schema),
        extra_args={"diffusion_block_length": 16},
    )
    (output,) = engine.outputs([PROMPTS[1]], asked)
    jsonschema.validate(json.loads(output.outputs[0].text), schema)


# --- what is chosen or refused at start ----------------------------------------------------------


def test_nothing_is_cached(engine: Engine) -> None:
    assert not engine.core.vllm_config.cache_config.enable_prefix_caching


@pytest.mark.parametrize(
    ("request_of", "field"),
    [
        (lambda **more: ChatCompletionRequest(messages=[], **more), "max_completion_tokens"),
        (lambda **more: ResponsesRequest(input="a", **more), "max_output_tokens"),
    ],
    ids=["chat", "responses"],
)
def test_an_answer_without_a_number_of_tokens_has_gen_length(
    engine: Engine, request_of: Any, field: str
) -> None:
    serving = SimpleNamespace(engine_client=SimpleNamespace(vllm_config=engine.core.vllm_config))
    for given in ({}, {field: None}, {field: 7}, {field: 0}):  # 0: vLLM refuses it
        request = request_of(**given)
        routes._choose_length(serving, request)
        assert getattr(request, field) == (GEN_LENGTH if given.get(field) is None else given[field])


def test_a_request_of_tokens_names_its_length_elsewhere(engine: Engine) -> None:
    serving = SimpleNamespace(engine_client=SimpleNamespace(vllm_config=engine.core.vllm_config))
    request = GenerateRequest(token_ids=[1], sampling_params=SamplingParams(max_tokens=7))
    routes._choose_length(serving, request)
    assert request.sampling_params.max_tokens == 7
