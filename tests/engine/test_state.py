"""Per-slot state: what a reset leaves, and the canvas that a request brings."""

import torch
from vllm import SamplingParams

from dllm.engine.state import CanvasState, request_seed
from dllm.models.gemma.settings import GemmaSettings
from dllm.settings.admission import admit
from dllm.settings.denoising import NO_TOKEN
from dllm.settings.request import RequestOptions
from tests.support.denoise_cases import family

VOCAB, CANVAS, SLOTS = 30, 6, 3
CONFIG = GemmaSettings(CANVAS, 10, 0.4, 0.8, 0.1, 0.2, 1, "symmetric")


def options(**params) -> RequestOptions:
    return admit(SamplingParams(**params), CONFIG, VOCAB)


def state() -> CanvasState:
    return CanvasState(family(CONFIG, VOCAB), SLOTS, VOCAB, torch.float32, torch.device("cpu"))


def test_a_reset_forgets_the_last_request():
    canvases = state()
    seeded = {"diffusion_seed_canvas": [1, 2, 3, 4, 5, 6], "diffusion_pinned": [0, 4]}
    seeded |= {"diffusion_read_only": True}
    canvases.reset(1, options(stop_token_ids=[3, 9], temperature=0, extra_args=seeded), 7, 12)
    canvases.apply_staged_writes()
    canvases.steps_done[1], canvases.carried["stable_count"][1] = 4, 3
    assert canvases.is_stop[1].nonzero().flatten().tolist() == [3, 9]
    assert canvases.is_greedy[1] and canvases.is_read_only[1] and canvases.given_from[1] == 12
    canvases.reset(1, options(), 8, 12)
    canvases.apply_staged_writes()
    assert not canvases.is_stop[1].any()
    assert not canvases.is_greedy[1] and not canvases.is_read_only[1]
    assert canvases.given_from[1] == -1 and canvases.seeds[1] == 8
    assert canvases.steps_done[1] == 0 and not canvases.carried["stable_count"][1].any()


def test_the_canvas_that_a_request_brings_is_its_first():
    canvases = state()
    ids = [9, 8, 7, 6, 5, 4]
    extra = {"diffusion_seed_canvas": ids, "diffusion_pinned": [0, 4]}
    canvases.reset(0, options(extra_args=extra), 1, 12)
    canvases.apply_staged_writes()
    canvases.reset(1, options(), 1, 12)
    canvases.apply_staged_writes()
    slots = torch.tensor([0, 1, 0, 0])
    starts = torch.tensor([12, 12, 13, 5])
    drawn = torch.full((4, CANVAS), 2)
    result = canvases.with_seeds(slots, starts, drawn)
    assert result.tolist() == [ids, [2] * CANVAS, [2, 2, 2, 5, 2, 2], [2] * CANVAS]
    pins = canvases.pins(slots, starts)
    assert pins[0].tolist() == [9, -1, -1, -1, 5, -1]
    assert (pins[1] == -1).all()
    # Canvases of the same answer that start elsewhere see the same positions.
    assert pins[2].tolist() == [-1, -1, -1, 5, -1, -1]


def test_pins_are_in_the_canvas_that_they_fall_into_and_noise_is_drawn_where_asked():
    canvases = state()
    extra = {"diffusion_seed_canvas": [9, -1, -1, 6, -1, 4]}
    extra |= {"diffusion_pin_at": [1, 7, 95], "diffusion_pin_ids": [20, 21, 22]}
    canvases.reset(0, options(extra_args=extra), 1, 12)
    canvases.apply_staged_writes()
    slots, starts = torch.zeros(4, dtype=torch.int64), torch.tensor([12, 18, 104, 108])
    drawn = torch.full((4, CANVAS), 2)
    assert canvases.with_seeds(slots, starts, drawn).tolist() == [
        [9, 20, 2, 6, 2, 4],
        [2, 21, 2, 2, 2, 2],
        [2, 2, 2, 22, 2, 2],  # the last position that can be pinned is 95
        [2] * CANVAS,
    ]
    canvases.reset(0, options(extra_args={"diffusion_pin_at": [2], "diffusion_pin_ids": [5]}), 1, 3)
    canvases.apply_staged_writes()
    first = canvases.with_seeds(slots[:1], torch.tensor([3]), drawn[:1])
    assert first.tolist() == [[2, 2, 5, 2, 2, 2]]  # nothing is left of the last request


def test_only_held_pins_have_to_be_emitted():
    canvases = state()
    pin = {"diffusion_pin_at": [1], "diffusion_pin_ids": [7]}
    canvases.reset(0, options(extra_args=pin), 1, 12)
    canvases.apply_staged_writes()
    canvases.reset(1, options(extra_args=pin | {"diffusion_pin_mode": "hold"}), 1, 12)
    canvases.apply_staged_writes()
    slots, starts = torch.tensor([0, 1]), torch.tensor([12, 12])
    pins = canvases.pins(slots, starts)
    assert pins[:, 1].tolist() == [7, 7]
    ids = torch.zeros(2 * CANVAS, dtype=torch.int64)
    held = canvases.canvases(slots, ids, torch.full_like(ids, NO_TOKEN), pins).held
    assert held.tolist() == [[-1] * CANVAS, [-1, 7, -1, -1, -1, -1]]


def test_a_narrow_canvas_that_a_request_brings():
    canvases = state()
    extra = {"diffusion_seed_canvas": [9, 8], "diffusion_canvas_length": 2}
    canvases.reset(2, options(extra_args=extra), 1, 3)
    canvases.apply_staged_writes()
    drawn = torch.full((1, CANVAS), 2)
    result = canvases.with_seeds(torch.tensor([2]), torch.tensor([3]), drawn)
    assert result[0, :2].tolist() == [9, 8]


def test_a_request_without_a_seed_has_one_of_its_own():
    own = [request_seed(options(), name, 0) for name in ("a", "b", "a")]
    assert own[0] == own[2] != own[1]
    assert request_seed(options(), "a", 1) != own[0]
    assert request_seed(options(seed=-4), "a", 0) == -4
