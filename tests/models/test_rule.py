"""The denoise step against Hugging Face's own classes, and a whole generation against `generate`.

Where two floating-point formulas can differ in the last digit (entropies), equality of a decision
is asked for only where the decision does not hang on that digit; where the inputs are the same
numbers, it is asked for always and to the bit.
"""

import math
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
    LinearTemperatureScheduleLogitsProcessor,
    StableAndConfidentStoppingCriteria,
)

from dllm.engine.algorithm import Canvases
from dllm.engine.canvas_rows import CanvasRows
from dllm.models.gemma import rule as denoise
from dllm.ops import noise
from dllm.ops.row_stats import RowStats

INF = math.inf
NONE_HELD = torch.zeros(1, 1, dtype=torch.bool)
SMALL = settings(max_examples=150, derandomize=True)


class Rules(NamedTuple):
    """The parameters of a step, each a number or [R]: the defaults of HF's generation config."""

    max_steps: float | Tensor = 48
    entropy_bound: float | Tensor = 0.1
    confidence: float | Tensor = 0.005
    stability_window: int = 2


class State(NamedTuple):
    """What is kept of R canvases: [R, C], [R, C], [R]."""

    argmax_canvas: Tensor
    stable_count: Tensor
    steps_done: Tensor


class Inputs(NamedTuple):
    """What a step decides from, [R, C] each; token ids below 100."""

    argmax: Tensor
    sample: Tensor
    entropy: Tensor
    noise_tokens: Tensor
    is_stop: Tensor
    is_held: Tensor


class Outcome(NamedTuple):
    """The state after a step, and what it decided."""

    canvas: Tensor
    argmax_canvas: Tensor
    stable_count: Tensor
    steps_done: Tensor
    converged: Tensor


def take_step(state: State, inputs: Inputs, width: Tensor, rules: Rules) -> Outcome:
    """`rule.denoise_step` of canvases whose positions have likeliest tokens of their own."""
    num_rows, length = inputs.argmax.shape
    offsets = 100 * torch.arange(length)  # so that a token can be a stop at one position only
    argmax, index = inputs.argmax + offsets, torch.arange(num_rows * length)
    is_stop = torch.zeros(num_rows, 100 * length, dtype=torch.bool).scatter(
        1, argmax, inputs.is_stop
    )
    canvases = Canvases(
        **dict.fromkeys(Canvases._fields)
        | dict(
            steps_done=state.steps_done,
            argmax_canvas=state.argmax_canvas + offsets,
            is_stop=is_stop,
            held=torch.where(inputs.is_held, 0, -1),
            parameters={
                name: value if isinstance(value, Tensor) else torch.full((num_rows,), value)
                for name, value in zip(Rules._fields[:3], rules, strict=False)
            },
            step_state={"stable_count": state.stable_count},
        )
    )
    rows = CanvasRows(
        slots=torch.arange(num_rows),
        widths=width,
        starts=torch.zeros_like(width),
        seq_lens=width,
        request_of=index // length,
        place=index % length,
        padded=index.view(num_rows, length),
    )
    stats = RowStats(
        **dict.fromkeys(RowStats._fields)
        | dict(
            argmax=argmax.flatten(),
            sample=inputs.sample.flatten(),
            entropy=inputs.entropy.flatten(),
        )
    )
    drawn = noise.StepNoise(inputs.noise_tokens, inputs.noise_tokens)
    step = denoise.denoise_step(
        canvases, rows, stats, drawn, inputs.entropy.flatten(), rules.stability_window
    )
    return Outcome(
        step.canvas,
        step.argmax_canvas - offsets,
        step.step_state["stable_count"],
        step.steps_done,
        step.converged,
    )


def hf_accept(logits: Tensor, bound: float) -> Tensor:
    """The accept mask of HF's sampler: logits [R, C, V], already divided by T, to [R, C] bool."""
    num_rows, width, vocab_size = logits.shape
    sampler = EntropyBoundSampler(EntropyBoundSamplerConfig(bound), width, vocab_size, 48)
    canvas = torch.zeros(num_rows, width, dtype=torch.int64)
    sampler.accept_canvas(canvas, canvas, logits, 1)
    assert sampler.accepted_token_mask is not None
    return sampler.accepted_token_mask


def hf_entropy(logits: Tensor) -> Tensor:
    """The entropies that HF's sampler and stopping rule use: [..., V] to [...]."""
    return torch.distributions.Categorical(logits=logits).entropy()


def canvas_logits(seed: int, num_rows: int, width: int, vocab_size: int = 40) -> Tensor:
    """Logits with what decisions stumble over: [R, C, V] fp32.

    Positions range from certain (entropy 0) to almost uniform; some tokens are excluded (-inf),
    some positions have one token left, some repeat another position bit for bit (ties).
    """
    g = torch.Generator().manual_seed(seed)
    sharpness = 10 ** (torch.rand(num_rows, width, 1, generator=g) * 3 - 1)
    logits = 30 * torch.tanh(torch.randn(num_rows, width, vocab_size, generator=g) * sharpness / 30)
    excluded = torch.rand(logits.shape, generator=g) < 0.3 * torch.rand(1, width, 1, generator=g)
    excluded[..., 0] = False
    single = torch.rand(num_rows, width, 1, generator=g) < 0.1
    excluded = excluded | (single & (torch.arange(vocab_size) > 0))
    logits = logits.masked_fill(excluded, -INF)
    source = torch.randint(width, (num_rows, width), generator=g)
    repeat = torch.rand(num_rows, width, generator=g) < 0.3
    source = torch.where(repeat, source, torch.arange(width))
    return logits.gather(1, source[..., None].expand_as(logits))


def full(num_rows: int, width: int) -> Tensor:
    """Every row uses the whole canvas: [R] int64."""
    return torch.full((num_rows,), width)


# --- temperature ---------------------------------------------------------------------------------


@SMALL
@given(st.integers(1, 100), st.floats(0.01, 2.0), st.floats(0.001, 2.0))
def test_temperature_is_the_schedule_to_the_bit(max_steps: int, t_min: float, span: float) -> None:
    t_max = t_min + span
    schedule = LinearTemperatureScheduleLogitsProcessor(t_min, t_max, max_steps)
    logits = torch.randn(max_steps, 50, generator=torch.Generator().manual_seed(max_steps))
    steps_done = torch.arange(max_steps)
    plain = denoise.temperature(steps_done, max_steps, t_min, t_max)
    per_row = [torch.full((max_steps,), value, dtype=torch.float64) for value in (t_min, t_max)]
    rows = denoise.temperature(steps_done, torch.full((max_steps,), max_steps), *per_row)
    assert plain.dtype == rows.dtype == torch.float32
    for done in range(max_steps):
        cur_step = torch.tensor(max_steps - done, dtype=torch.int32)  # as `generate` passes it
        expected = schedule(None, logits[done], cur_step=cur_step)
        assert torch.equal(logits[done] / plain[done], expected)
        assert torch.equal(logits[done] / rows[done], expected)


# --- accept --------------------------------------------------------------------------------------


@SMALL
@given(st.integers(0, 10**6), st.integers(1, 40), st.sampled_from([1e-6, 0.1, 0.7, 3.0, 1e3]))
def test_accept_mask_equals_hugging_face(seed: int, width: int, bound: float) -> None:
    """Bit for bit, ties included, once HF's sort is the stable one (see the next test)."""
    logits = canvas_logits(seed, 3, width)
    sort = torch.sort
    with patch.object(torch, "sort", lambda *args, **kwargs: sort(*args, stable=True, **kwargs)):
        expected = hf_accept(logits, bound)
    entropy = hf_entropy(logits)
    assert torch.equal(denoise.accept_mask(entropy, full(3, width), bound), expected)
    bounds = torch.tensor([bound, bound, 0.3])
    per_row = denoise.accept_mask(entropy, full(3, width), bounds)
    assert torch.equal(per_row[:2], expected[:2])


def test_accept_takes_every_certain_position_and_no_position_without_a_distribution() -> None:
    entropy = torch.tensor([[0.0, INF, 0.0, 5.0, math.nan, 0.0]])
    assert denoise.accept_mask(entropy, full(1, 6), 1e-9)[0].tolist() == [1, 0, 1, 1, 0, 1]
    nothing = torch.tensor([[INF, math.nan]])
    assert not denoise.accept_mask(nothing, full(1, 2), 1e9).any()


# --- stop ----------------------------------------------------------------------------------------


@SMALL
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 3), st.floats(0.001, 3.0))
def test_stop_decision_equals_hugging_face(
    seed: int, width: int, threshold: int, confidence: float
) -> None:
    """Twelve steps of random logits that repeat now and then; the same entropies on both sides."""
    criteria = StableAndConfidentStoppingCriteria(threshold, confidence)
    repeats = torch.Generator().manual_seed(seed)
    count = previous = torch.zeros(2, width, dtype=torch.int64)
    logits = canvas_logits(seed, 2, width)
    for done in range(12):
        if torch.rand((), generator=repeats) < 0.4:
            logits = canvas_logits(seed + done, 2, width)
        argmax, entropy = logits.argmax(-1), hf_entropy(logits)
        count = denoise.count_stable(argmax, previous, count)
        previous = argmax
        ours = denoise.has_settled(
            count, entropy, full(2, width), NONE_HELD, confidence, stability_window=threshold + 1
        )
        assert torch.equal(ours, criteria(argmax, logits))


def test_a_mean_entropy_at_the_threshold_is_not_confident() -> None:
    logits = torch.zeros(1, 4, 8)
    mean = hf_entropy(logits)[0, 0].item()
    assert not StableAndConfidentStoppingCriteria(0, mean)(logits.argmax(-1), logits)
    count = torch.ones(1, 4, dtype=torch.int64)
    entropy = hf_entropy(logits)
    assert not denoise.has_settled(count, entropy, full(1, 4), NONE_HELD, mean, 1)


# --- the stop token ------------------------------------------------------------------------------


def stop_step(stable: list[int], entropy: list[float], stop: int | None) -> bool:
    """Whether a canvas of four with these counts and entropies converges by the stop rule."""
    state, inputs = random_step(1, 1, 4)
    state = state._replace(
        argmax_canvas=inputs.argmax,
        stable_count=torch.tensor([stable]) - 1,
        steps_done=torch.tensor([0]),
    )
    is_stop = torch.zeros(1, 4, dtype=torch.bool)
    if stop is not None:
        is_stop[0, stop] = True
    inputs = inputs._replace(entropy=torch.tensor([entropy]), is_stop=is_stop)
    return bool(take_step(state, inputs, full(1, 4), Rules(confidence=0.1)).converged)


@pytest.mark.parametrize(
    ("stable", "entropy", "stop", "converged"),
    [
        ([2, 2, 1, 1], [0.0, 0.0, 9.0, 9.0], 1, True),  # the tail need not
        ([2, 2, 1, 1], [0.0, 0.0, 9.0, 9.0], None, False),  # without a stop token it must
        ([2, 2, 1, 1], [0.0, 0.0, 9.0, 9.0], 2, False),  # a stop token that is not stable
        ([1, 2, 2, 2], [0.0, 0.0, 9.0, 9.0], 1, False),  # before it something is not
        ([2, 2, 2, 2], [0.0, 0.3, 0.0, 0.0], 1, True),  # the whole canvas is confident
        ([2, 2, 1, 2], [0.0, 0.3, 0.0, 0.0], 1, False),  # but not what is emitted of it
        ([3, 2, 1, 1], [0.0, 0.1999, 9.0, 9.0], 1, True),  # mean over what is emitted
        ([3, 2, 1, 1], [0.0, 0.2001, 9.0, 9.0], 1, False),
        ([2, 1, 1, 1], [0.05, 9.0, 9.0, 9.0], 0, True),  # at once
        ([2, 2, 2, 1], [0.0, 0.0, INF, 9.0], 1, True),
    ],
)
def test_the_tail_behind_a_stop_token_need_not_converge(stable, entropy, stop, converged) -> None:
    assert stop_step(stable, entropy, stop) == converged


@SMALL
@given(st.integers(0, 10**6), st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_the_stop_rule_is_the_reference_on_a_canvas_cut_behind_the_stop(
    seed: int, widths: list[int]
) -> None:
    """It only adds convergence, changes nothing else, and never converges later."""
    state, inputs = random_step(seed, len(widths), 9)
    width = torch.tensor(widths)
    generator = torch.Generator().manual_seed(seed)
    is_stop = torch.rand(len(widths), 9, generator=generator) < 0.2
    with_stop = take_step(state, inputs._replace(is_stop=is_stop), width, ROW_RULES)
    reference = take_step(state, inputs, width, ROW_RULES)
    assert all(torch.equal(*pair) for pair in zip(with_stop[:4], reference[:4], strict=True))
    cut = denoise.width_to_stop(is_stop, width)
    on_cut = take_step(state, inputs, cut, ROW_RULES).converged
    assert torch.equal(with_stop.converged, reference.converged | on_cut)


# --- the step, widths and rows -------------------------------------------------------------------


def random_step(seed: int, num_rows: int, width: int) -> tuple[State, Inputs]:
    """A state and what its next step decides from, all random, without a stop token."""
    g = torch.Generator().manual_seed(seed)

    def ids() -> Tensor:
        return torch.randint(3, (num_rows, width), generator=g)

    steps_done = torch.randint(4, (num_rows,), generator=g)
    stable_count = torch.randint(1, 4, (num_rows, width), generator=g)
    argmax = ids()
    keep = torch.rand(num_rows, 1, generator=g) < 0.5
    previous = torch.where(keep, argmax, ids())
    state = State(previous, stable_count, steps_done)
    entropy = torch.rand(num_rows, width, generator=g) * 0.2
    is_stop = torch.zeros(num_rows, width, dtype=torch.bool)
    is_held = torch.zeros_like(is_stop)
    return state, Inputs(argmax, ids(), entropy, ids(), is_stop, is_held)


ROW_RULES = Rules(confidence=0.11, entropy_bound=0.3, max_steps=4)


@SMALL
@given(st.integers(0, 10**6), st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_a_row_of_smaller_width_is_that_smaller_canvas(seed: int, widths: list[int]) -> None:
    """Each padded row equals the same row alone and cut to its width; garbage beyond is unread."""
    state, inputs = random_step(seed, len(widths), 9)
    width = torch.tensor(widths)
    beyond = ~denoise.valid_positions(width, 9)
    garbage = (math.nan, 0.0, -5.0)[seed % 3]
    poison = {torch.float32: garbage, torch.int64: 99, torch.bool: True}
    spoiled = Inputs(*(x.masked_fill(beyond, poison[x.dtype]) for x in inputs))
    together = take_step(state, spoiled, width, ROW_RULES)
    for r, w in enumerate(widths):
        assert torch.equal(together.canvas[r, w:], spoiled.noise_tokens[r, w:])
        assert torch.equal(together.argmax_canvas[r, w:], state.argmax_canvas[r, w:])
        assert torch.equal(together.stable_count[r, w:], state.stable_count[r, w:])
        if w == 0:
            assert together.steps_done[r] == state.steps_done[r]
            assert not together.converged[r]
            continue
        row = slice(r, r + 1)
        cut = State(
            state.argmax_canvas[row, :w],
            state.stable_count[row, :w],
            state.steps_done[row],
        )
        small = Inputs(*(x[row, :w] for x in inputs))
        alone = take_step(cut, small, full(1, w), ROW_RULES)
        assert torch.equal(together.canvas[row, :w], alone.canvas)
        assert torch.equal(together.argmax_canvas[row, :w], alone.argmax_canvas)
        assert torch.equal(together.stable_count[row, :w], alone.stable_count)
        assert torch.equal(together.steps_done[row], alone.steps_done)
        assert torch.equal(together.converged[row], alone.converged)


def test_a_step_writes_nothing_in_place() -> None:
    state, inputs = random_step(1, 4, 6)
    before = [x.clone() for x in (*state, *inputs)]
    take_step(state, inputs, torch.tensor([6, 3, 0, 1]), ROW_RULES)
    assert all(torch.equal(a, b) for a, b in zip(before, (*state, *inputs), strict=True))


def test_compiled_step_equals_eager() -> None:
    with torch._dynamo.config.patch(disable=False):
        compiled = torch.compile(take_step, dynamic=True, fullgraph=True)
        for num_rows, width in ((2, 8), (5, 24)):
            state, inputs = random_step(num_rows, num_rows, width)
            widths = torch.arange(num_rows) * 3 % (width + 1)
            bound = torch.linspace(0.1, 0.5, num_rows)
            limits = ROW_RULES._replace(entropy_bound=bound)
            ours = compiled(state, inputs, widths, limits)
            eager = take_step(state, inputs, widths, limits)
            assert all(torch.equal(a, b) for a, b in zip(ours, eager, strict=True))
