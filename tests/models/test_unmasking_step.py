"""From logits to a proposal: which distribution tokens are drawn from, and how sure they are."""

from collections.abc import Sequence

import pytest
import torch
from vllm import SamplingParams

from bench import local
from dllm.engine.algorithm import Canvases
from dllm.models.llada2.settings import LLaDA2Settings
from dllm.models.unmasking.settings import UnmaskingSettings
from dllm.models.unmasking.step import Unmasking
from dllm.ops.filters import RowFilters
from dllm.settings.denoising import NO_TOKEN
from dllm.settings.request import RequestOptions
from tests.support import llada2_pipeline as pipeline
from tests.support.denoise_cases import no_thoughts, whole_canvases

VOCAB, BLOCK, MASK = 40, 8, 39
SETTINGS = LLaDA2Settings(VOCAB, BLOCK, MASK, BLOCK, 0.5, 0, 0.5, 16)
FAMILY = Unmasking(SETTINGS)


def test_a_request_cannot_raise_the_servers_numbers_of_steps():
    """Or one request could keep its canvas for ever."""
    asked = {"max_steps": 10**6, "max_post_steps": 10**6, "threshold": 0.3}
    parameters = SETTINGS.of_request(asked, 1.0)
    assert parameters == {"max_steps": BLOCK, "max_post_steps": 16, "threshold": 0.3}
    fewer = {"max_steps": 1, "max_post_steps": 2}
    assert SETTINGS.of_request(fewer, 1.0) == fewer


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, (0.6, 1, 0.2, 5)),  # the server's
        ({"diffusion_mode": "plain"}, (0.95, 0, 0.5, 5)),
        ({"diffusion_mode": "quality"}, (0.7, 1, 0.5, 5)),
        ({"diffusion_mode": "speed"}, (0.5, 1, 0.0, 5)),
        (
            {"diffusion_mode": "speed", "diffusion_threshold": 0.9, "diffusion_editing": 0},
            (0.9, 0, 0.0, 5),
        ),
    ],
)
def test_a_mode_is_four_numbers_and_explicit_ones_win(extra, expected) -> None:
    """The server's number of steps that edit, here 5, is not raised by a mode either."""
    settings = LLaDA2Settings(VOCAB, BLOCK, MASK, BLOCK, 0.6, 1, 0.2, 5)
    parameters = RequestOptions.read(SamplingParams(extra_args=extra), settings).parameters
    names = ("threshold", "editing", "editing_threshold", "max_post_steps")
    assert tuple(parameters[name] for name in names) == expected


def fresh_canvases(
    seeds: Sequence[int],
    temperature: float | None = None,
    settings: UnmaskingSettings = SETTINGS,
    width: int = BLOCK,
) -> Canvases:
    """A canvas of masks for each seed; without a temperature they are greedy."""
    count = len(seeds)
    numbers = RequestOptions.read(SamplingParams(), settings).parameters
    return Canvases(
        ids=torch.full((count * width,), settings.mask_token_id),
        seeds=torch.tensor(seeds),
        steps_done=torch.zeros(count, dtype=torch.int64),
        argmax_canvas=torch.zeros(count, settings.block_size, dtype=torch.int64),
        chosen=torch.full((count * width,), NO_TOKEN),
        temperature=torch.full((count,), temperature or 1.0),
        is_greedy=torch.full((count,), temperature is None),
        is_stop=torch.zeros(count, settings.vocab_size, dtype=torch.bool),
        held=torch.full((count, settings.block_size), NO_TOKEN),
        parameters={name: torch.full((count,), number) for name, number in numbers.items()},
        step_state={"post_steps": torch.zeros(count, dtype=torch.int32)},
        thoughts=no_thoughts(count),
    )


def random_logits(count: int) -> torch.Tensor:
    """The same rows for every canvas; a mask is never an answer."""
    torch.manual_seed(0)
    logits = (torch.randn(BLOCK, VOCAB) * 2).repeat(count, 1)
    logits[:, MASK] = -torch.inf
    return logits


def filters(count: int, top_k: int, top_p: float) -> RowFilters:
    rows = count * BLOCK
    return RowFilters(
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.zeros(rows),
    )


@pytest.mark.skipif(not local.is_installed(), reason=local.MISSING)
@pytest.mark.parametrize(("top_k", "top_p"), [(VOCAB, 1.0), (5, 1.0), (VOCAB, 0.7), (6, 0.6)])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_are_drawn_as_in_diffusers(temperature: float, top_k: int, top_p: float) -> None:
    """The same filters and probabilities; 4000 draws of each row agree with them."""
    count = 4000
    logits = random_logits(count)
    rows = whole_canvases(torch.full((count,), 16), BLOCK)
    canvases = fresh_canvases(range(count), temperature)
    proposal, _, _ = FAMILY.proposed(logits, rows, canvases, filters(count, top_k, top_p))
    reference = pipeline.scheduler(BLOCK, BLOCK)
    scaled = logits[:BLOCK] / temperature
    kept = reference._top_p_filtering(reference._top_k_filtering(scaled, top_k), top_p)
    probs = kept.softmax(-1)  # [BLOCK, VOCAB]
    expected = probs.expand(count, -1, -1).gather(2, proposal.token[..., None]).squeeze(2)
    torch.testing.assert_close(proposal.confidence, expected, rtol=1e-5, atol=1e-6)
    drawn = torch.stack([(proposal.token == token).float().mean(0) for token in range(VOCAB)], 1)
    deviation = (probs * (1 - probs) / count).sqrt()
    # Five standard deviations, which one of the 3800 frequencies here exceeds once in 400 runs.
    assert ((drawn - probs).abs() <= 5 * deviation + 1e-6).all()


def test_a_greedy_request_takes_the_likeliest_token_at_temperature_one() -> None:
    logits = random_logits(2)
    rows = whole_canvases(torch.tensor([16, 24]), BLOCK)
    proposal, _, _ = FAMILY.proposed(logits, rows, fresh_canvases(range(2)), None)
    confidence, token = logits.softmax(-1).max(-1)
    assert torch.equal(proposal.token.flatten(), token)
    torch.testing.assert_close(proposal.confidence.flatten(), confidence)


def test_the_mask_is_never_proposed_and_a_canvas_fills_up() -> None:
    state = fresh_canvases([0], 1.0)
    rows = whole_canvases(torch.tensor([16]), BLOCK)
    num_masks = [BLOCK]
    assert (FAMILY.fresh_canvas(state.seeds, rows.seq_lens) == MASK).all()
    while num_masks[-1]:
        result = FAMILY.denoise(random_logits(1), rows, state, None)
        assert (result.argmax_canvas != MASK).all()
        num_masks.append(int((result.canvas == MASK).sum()))
        assert num_masks[-1] < num_masks[-2], "a step without progress"
        assert bool(result.converged) == (num_masks[-1] == 0)
        state = state._replace(
            ids=result.canvas.flatten(), steps_done=result.steps_done, step_state=result.step_state
        )
