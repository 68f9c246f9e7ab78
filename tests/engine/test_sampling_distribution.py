"""What a denoise step draws, from the request's parameters to the next canvas, as a distribution.

Each bound is a chi-square one with error probability 1e-6, and the noise is a function of seeds
that are fixed here: a failure is a change.
"""

import pytest
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from dllm.engine.algorithm import Denoised
from dllm.engine.records import Records
from dllm.engine.state import CanvasState
from dllm.engine.step_rows import denoise_rows
from dllm.models.gemma.settings import GemmaSettings
from dllm.ops.filters import RowFilters
from dllm.settings.admission import admit
from dllm.settings.denoising import NO_TOKEN
from tests.ops.test_noise import assert_drawn_from, uniform
from tests.support.denoise_cases import family, whole_canvases

VOCAB, CANVAS, SLOTS = 24, 16, 800
CONFIG = GemmaSettings(
    canvas_length=CANVAS,
    max_denoising_steps=10,
    t_min=0.4,
    t_max=0.8,
    entropy_bound=1e5,  # every candidate is accepted
    confidence_threshold=0.0,
    stability_threshold=1,
    canvas_window="symmetric",
)
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5


def step(steps_done: int = 0, entropy_bound: float = 1e5, **options) -> Denoised:
    """One step of 800 requests with seeds of their own and the same logits everywhere."""
    params = SamplingParams(extra_args={"diffusion_entropy_bound": entropy_bound}, **options)
    parsed = admit(params, CONFIG, VOCAB)
    gemma = family(CONFIG, VOCAB)
    canvases = CanvasState.allocate(gemma, SLOTS, VOCAB, torch.float32, torch.device("cpu"))
    records = Records(canvases)
    for slot in range(SLOTS):
        records.reset(slot, parsed, seed=1000 + slot, prompt_len=5)
    records.send()
    canvases.steps_done[:] = steps_done
    num_rows = SLOTS * CANVAS
    rows = whole_canvases(torch.full((SLOTS,), 5), CANVAS)
    top_k = params.top_k if params.top_k > 0 else VOCAB
    filters = RowFilters(
        torch.full((num_rows,), top_k, dtype=torch.int32),
        torch.full((num_rows,), params.top_p),
        torch.full((num_rows,), params.min_p),
    )
    logits = LOGITS.expand(num_rows, VOCAB).contiguous()
    ids = torch.zeros(num_rows, dtype=torch.int32)
    return denoise_rows(logits, ids, torch.full_like(ids, NO_TOKEN), rows, canvases, gemma, filters)


def distribution(
    temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0
) -> Tensor:
    """Of one token, with vLLM's own filters, in its order: [V] float64."""
    scaled = (LOGITS / temperature)[None]
    scaled[scaled < scaled.amax() + torch.tensor(min_p).log()] = -torch.inf
    k = torch.tensor([top_k or VOCAB])
    filtered = apply_top_k_top_p(scaled, k, torch.tensor([top_p]))
    return filtered[0].double().softmax(-1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_p": 0.7, "temperature": 1.5},
        {"min_p": 0.1, "temperature": 1.5},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.05, "temperature": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("steps_done", [0, 7])
def test_candidates_are_drawn_at_the_schedules_temperature_times_the_requests(options, steps_done):
    result = step(steps_done, **options)
    schedule = CONFIG.t_min + (CONFIG.t_max - CONFIG.t_min) * (10 - steps_done) / 10
    scale = options.get("temperature", 1.0)
    expected = distribution(
        schedule * scale, **{key: x for key, x in options.items() if key != "temperature"}
    )
    assert_drawn_from(torch.bincount(result.canvas.flatten(), minlength=VOCAB), expected)
    # What is committed is the argmax, which no filter excludes.
    assert (result.argmax_canvas == LOGITS.argmax()).all()
    assert expected[LOGITS.argmax()] > 0


def test_greedy_takes_the_argmax_and_renoises_at_random():
    """With a bound so small that one position a canvas is accepted, the leftmost of equals."""
    canvas = step(entropy_bound=1e-9, temperature=0).canvas
    assert (canvas[:, 0] == LOGITS.argmax()).all()
    assert_drawn_from(torch.bincount(canvas[:, 1:].flatten(), minlength=VOCAB), uniform(VOCAB))
    accepted = step(temperature=0).canvas
    assert (accepted == LOGITS.argmax()).all()


def test_entropies_of_a_greedy_request_are_those_of_the_models_schedule():
    greedy, plain = step(temperature=0), step()
    assert torch.equal(greedy.stats.entropy, plain.stats.entropy)
    assert not torch.equal(step(temperature=0.5).stats.entropy, plain.stats.entropy)


def test_positions_and_requests_draw_independently():
    """Disjoint pairs of neighbours, in a canvas and in a slot, against the product of two draws."""
    canvas = step(temperature=1.5).canvas
    likely = distribution(CONFIG.t_max * 1.5)
    order = likely.argsort(descending=True)
    rank = torch.empty(VOCAB, dtype=torch.int64).scatter(0, order, torch.arange(VOCAB)).clamp(max=5)
    mass = torch.zeros(6, dtype=torch.float64).scatter_add(0, rank, likely)
    pairs = {
        "positions": (canvas[:, ::2], canvas[:, 1::2]),
        "requests": (canvas[::2], canvas[1::2]),
    }
    for name, (a, b) in pairs.items():
        counts = torch.bincount((rank[a] * 6 + rank[b]).flatten(), minlength=36)
        assert_drawn_from(counts, (mass[:, None] * mass).flatten(), what=name)
