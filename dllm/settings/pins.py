"""Pins of a request: tokens of the answer that are given, and how firmly.

    diffusion_pin_at, diffusion_pin_ids   answer positions, and the token of each; in any block
    diffusion_seed_canvas, _pinned        what the first canvas starts as (-1: the server's noise),
                                          and which of its positions are pins
    diffusion_pin_mode                    hint: the model sees the pins, and may emit others
                                          hold: the answer has the pins

A position counts tokens of the answer, from 0.
"""

from collections.abc import Collection, Mapping
from typing import Any

from dllm.settings.denoising import NO_TOKEN

SEED_CANVAS, PINNED = "diffusion_seed_canvas", "diffusion_pinned"
PIN_AT, PIN_IDS = "diffusion_pin_at", "diffusion_pin_ids"
PIN_MODE = "diffusion_pin_mode"
PIN_ARGS = (SEED_CANVAS, PINNED, PIN_AT, PIN_IDS, PIN_MODE)

# Pins may be in so many canvases from the start of the answer on; the worker has a table of them.
PINNED_CANVASES = 16


def pins_of(extra: Mapping[str, Any]) -> dict[int, int]:
    """The tokens of an admitted request's pins, by answer position, in order."""
    canvas = extra.get(SEED_CANVAS) or ()
    pins = {place: canvas[place] for place in extra.get(PINNED) or ()}
    pins |= zip(extra.get(PIN_AT) or (), extra.get(PIN_IDS) or (), strict=True)
    return dict(sorted(pins.items()))


def holds(extra: Mapping[str, Any]) -> bool:
    """Whether an admitted request's pins are emitted."""
    return extra.get(PIN_MODE) == "hold"


def without_noise(extra: dict[str, Any]) -> dict[str, Any]:
    """Extra arguments with an id in the place of every NO_TOKEN, as vLLM's own check wants them."""
    canvas = extra.get(SEED_CANVAS) or ()
    if NO_TOKEN not in canvas:
        return extra
    return extra | {SEED_CANVAS: [max(token, 0) for token in canvas]}


def held_length(pins: Mapping[int, int], stops: Collection[int]) -> int:
    """How many tokens an answer has before the last one that it needs for its held pins.

    Of ``pins``, in order, that is the first that ends the answer, else the last; 0 without pins.
    """
    end = next((place for place, token in pins.items() if token in stops), None)
    return max(pins, default=0) if end is None else end
