"""Ours against Hugging Face transformers, on random weights in fp32, through the real engine."""

import pytest
import torch
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig
from vllm import SamplingParams

from dllm.models.gemma import rule as denoise
from tests.support import hf_reference
from tests.support.engine_harness import blocks_of, get_engine, relative_error

CANVAS, WINDOW = 32, 64
# Contexts below, at and above (window - canvas), around the window, and three times above it.
CONTEXTS = (1, 17, WINDOW - CANVAS, WINDOW - CANVAS + 1, WINDOW, WINDOW + 1, 3 * WINDOW + 5)
# fp32 GEMMs of two libraries, four layers deep; 4e-6 was measured.
RELATIVE_TOLERANCE = 1e-4
ONE_TOKEN = SamplingParams(max_tokens=1, seed=5, ignore_eos=True)


def prompt(length: int, salt: int = 0) -> list[int]:
    """Ordinary tokens, none of them special."""
    return [20 + (7 * i + salt + i * i // 5) % 450 for i in range(length)]


@pytest.fixture(scope="module")
def hf_model(checkpoint):
    return hf_reference.load_hf(checkpoint())


def assert_steps_agree(engine, hf_model, context):
    """Two denoise steps: without self-conditioning, then with it."""
    _, steps = engine.denoised(context, ONE_TOKEN)
    reference = hf_reference.one_step_logits(hf_model, context, steps[0].canvas)
    assert relative_error(steps[0].logits, reference) < RELATIVE_TOLERANCE
    config = engine.runner.model_state.algorithm.settings
    temperature = denoise.temperature(
        torch.tensor([0]), config.max_denoising_steps, config.t_min, config.t_max
    )
    reference = hf_reference.one_step_logits(
        hf_model, context, steps[1].canvas, prev_logits=steps[0].logits / temperature
    )
    assert relative_error(steps[1].logits, reference) < RELATIVE_TOLERANCE
    # The second step is not the first: self-conditioning was really on.
    plain = hf_reference.one_step_logits(hf_model, context, steps[1].canvas)
    assert relative_error(steps[1].logits, plain) > 10 * RELATIVE_TOLERANCE


@pytest.mark.parametrize("context_len", CONTEXTS)
def test_one_step_logits_of_the_mixture_of_experts(engine, hf_model, context_len):
    assert_steps_agree(engine, hf_model, prompt(context_len))


def test_one_step_logits_of_the_dense_model(checkpoint):
    """The reference has no dense variant: its experts are muted instead."""
    engine = get_engine(checkpoint(num_experts=None), max_num_batched_tokens=256)
    hf_model = hf_reference.load_hf(checkpoint(mute_experts=True))
    for context_len in (1, WINDOW - CANVAS + 1, 3 * WINDOW + 5):
        assert_steps_agree(engine, hf_model, prompt(context_len))


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 3, -9])
@pytest.mark.parametrize("context_len", [3, 140])
def test_three_blocks_are_token_identical_under_the_same_noise(engine, hf_model, context_len, seed):
    context = prompt(context_len, salt=seed % 11)
    params = SamplingParams(max_tokens=3 * CANVAS, seed=seed, ignore_eos=True)
    tokens, steps = engine.denoised(context, params)
    reference = hf_reference.generate_with_noise(hf_model, context, num_blocks=3, seed=seed)
    assert tokens == reference.tokens
    assert blocks_of(steps) == reference.steps_per_block
    # Every noisy canvas on the way was the same, too.
    canvases = [canvas for block in reference.canvases for canvas in block]
    assert [step.canvas for step in steps] == canvases


HOT = {"diffusion_t_min": 0.8, "diffusion_t_max": 3.0}  # uncertain enough for the others to matter
HF_HOT = {"t_min": 0.8, "t_max": 3.0}
SCHEDULES = {
    "temperature": ({"temperature": 0.5}, {}, {"t_min": 0.2, "t_max": 0.4}),
    "t_min and t_max": ({}, HOT, HF_HOT),
    "entropy_bound": (
        {},
        HOT | {"diffusion_entropy_bound": 5.0},
        HF_HOT | {"sampler_config": EntropyBoundSamplerConfig(5.0)},
    ),
    "confidence": ({}, {"diffusion_confidence": 1e-9}, {"confidence_threshold": 1e-9}),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_requests_own_schedule_is_the_references_with_these_values(engine, hf_model, name):
    """Every noisy canvas of two blocks; and the values do change them."""
    options, extra, generation = SCHEDULES[name]
    canvases = []
    without = HOT if extra.keys() > HOT.keys() else {}
    for given, args in (({}, without), (options, extra)):
        sampling = SamplingParams(
            max_tokens=2 * CANVAS, seed=3, ignore_eos=True, extra_args=args, **given
        )
        _, steps = engine.denoised(prompt(30), sampling)
        canvases.append([step.canvas for step in steps])
    reference = hf_reference.generate_with_noise(hf_model, prompt(30), 2, seed=3, **generation)
    assert canvases[1] == [canvas for block in reference.canvases for canvas in block]
    assert canvases[0] != canvases[1]


def test_the_symmetric_window_departs_from_the_reference_beyond_window_minus_canvas(checkpoint):
    """Why `anchored` exists: `symmetric` (the vLLM post's) agrees only on short contexts."""
    engine = get_engine(
        checkpoint(),
        max_num_batched_tokens=256,
        hf_overrides={"canvas_window": "symmetric"},
    )
    hf_model = hf_reference.load_hf(checkpoint())
    errors = {}
    for context_len in (WINDOW - CANVAS, 3 * WINDOW):
        context = prompt(context_len)
        _, steps = engine.denoised(context, ONE_TOKEN)
        reference = hf_reference.one_step_logits(hf_model, context, steps[0].canvas)
        errors[context_len] = relative_error(steps[0].logits, reference)
    assert errors[WINDOW - CANVAS] < RELATIVE_TOLERANCE
    assert errors[3 * WINDOW] > 10 * RELATIVE_TOLERANCE
