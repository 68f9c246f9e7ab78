"""What several files ask of each family, and of both ways to schedule."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module", params=["gemma", "sdar", "llada2", "nemotron"])
def model(request: pytest.FixtureRequest, model_named: Callable[[str], Any]) -> Any:
    return model_named(request.param)


@pytest.fixture(scope="module", params=["sdar", "llada2"])
def of_blocks(request: pytest.FixtureRequest, model_named: Callable[[str], Any]) -> Any:
    return model_named(request.param)


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)
