"""Engines of random models with masks.

Files with ``pytest_plugins = ["tests.support.mask_engines"]`` share the fixture ``engine_of``.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.engine_harness import Engine, get_engine
from tests.support.family_checkpoints import FAMILIES, NEMOTRON, write

MASKS = FAMILIES | {"nemotron-causal": NEMOTRON}
TOLERANCE = 5e-4  # of log-probabilities; the reference in fp32 is up to 4e-4 off what it is in fp64


@pytest.fixture(scope="session")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Engine, Path]]:
    root = tmp_path_factory.mktemp("masks")

    def start(name: str) -> tuple[Engine, Path]:
        path = root / name
        if not path.exists():
            write(path, MASKS[name], seed=1)
            first = "causal" if name.endswith("causal") else "mask"
            (path / "generation_config.json").write_text(json.dumps({"first_token": first}))
        return get_engine(path, max_num_batched_tokens=256), path

    return start


def prompts(count: int = 3, vocab_size: int = 800) -> list[list[int]]:
    draw = torch.Generator().manual_seed(2)
    lengths = (5, 32, 42)[:count]
    return [torch.randint(20, vocab_size, (length,), generator=draw).tolist() for length in lengths]
