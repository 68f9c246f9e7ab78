"""Pairs that several files share: drafts are mostly right, or mostly wrong."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.drafter_pairs import write_repeating_target

    return write_repeating_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.drafter_pairs import write_repeating_drafter

    return write_repeating_drafter(tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="session")
def random_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.drafter_pairs import write_target

    return write_target(tmp_path_factory.mktemp("random_target"))


@pytest.fixture(scope="module")
def plain(target: Path) -> Any:
    """An engine of the target without speculation."""
    from tests.support.drafter_harness import plain_engine

    return plain_engine(target, skip_tokenizer_init=True)
