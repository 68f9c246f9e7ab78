"""Shared fixtures: checkpoints written once, engines started once.

Imports that take seconds stand in the fixtures: tests of light modules start without them, and so
does the process that hands out tests.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.levels import pytest_itemcollected  # noqa: F401  a hook of pytest
from tests.support.workers import (  # noqa: F401  hooks of pytest
    pytest_collection_modifyitems,
    pytest_xdist_make_scheduler,
)

# How long an example takes says how busy the machine is.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a random checkpoint, once per set of arguments.

    ``checkpoint(seed=3, generation={...}, sliding_window=64, ...)``; every keyword that
    ``write_variant`` does not take is one of ``tiny_config``.
    """
    from bench.toys.tiny import tiny_config
    from tests.support.gemma_variants import write_variant

    written: dict[str, Path] = {}

    def write(seed: int = 3, generation: dict[str, Any] | None = None, **overrides: Any) -> Path:
        key = repr((seed, generation, sorted(overrides.items(), key=lambda item: item[0])))
        if key not in written:
            names = ("encoder_scalars", "decoder_scalars", "encoder_copies", "mute_experts")
            names += ("image_processor",)
            options = {name: overrides.pop(name) for name in names if name in overrides}
            config = tiny_config(**({"dtype": "float32"} | overrides))
            path = tmp_path_factory.mktemp("checkpoint") / "model"
            write_variant(path, config, seed, generation=CONFIDENT | (generation or {}), **options)
            written[key] = _steady(path)
        return written[key]

    return write


# Random weights never get sure; this lets blocks converge at different steps.
CONFIDENT = {"confidence_threshold": 0.6}


def _steady(path: Path) -> Path:
    """Turn self-conditioning down to a tenth.

    At full strength random weights are chaotic from step to step: a rounding difference of 4e-6
    between two correct implementations grows tenfold per denoise step and ends in other tokens.
    At a tenth it stays where it is, and self-conditioning still moves the logits a thousand times
    more than rounding does.
    """
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    weights["model.decoder.self_conditioning.down_proj.weight"] *= 0.1
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes a random checkpoint of a family with masks, once: ``family("sdar")``.

    Tests of one process share it, and so the engines that ``get_engine`` starts of it.
    """
    from tests.support import family_checkpoints as families

    @functools.cache
    def write(name: str) -> Path:
        every = families.FAMILIES | families.WHOLE_SEQUENCES
        return families.write(tmp_path_factory.mktemp(name) / "model", every[name])

    return write


@pytest.fixture(scope="session")
def model_named(
    checkpoint: Callable[..., Path], family: Callable[[str], Path]
) -> Callable[[str], Any]:
    """An ``engine_models.Model`` of a family, DiffusionGemma included: ``model_named("gemma")``."""
    from tests.support.engine_models import model_of

    return lambda name: model_of(name, checkpoint() if name == "gemma" else family(name))


@pytest.fixture(scope="session")
def engine(checkpoint: Callable[..., Path]) -> Any:
    """The engine most tests share: fp32, anchored window 64, canvas 32, canvases of 2-16 steps."""
    from tests.support.engine_harness import get_engine

    return get_engine(checkpoint(), max_num_batched_tokens=256)
