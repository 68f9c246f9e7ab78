"""The dashboard of packaging/grafana.json beside a server: every series that it names is there."""

import pytest

from tests.support.dashboard import named_by_row, served
from tests.support.server_harness import MODEL

pytest_plugins = ["tests.support.server_harness"]

# Of a drafter alone: tests/drafter/test_drafter_server.py.
OF_DRAFTS = "Drafts"
# Begins with the first such pass, under asynchronous scheduling: tests/engine/test_metrics.py.
OF_A_GPU = "dllm:commit_passes_total"
QUESTION = {"type": "predicate", "instructions": "Ann has more than 20"}


@pytest.fixture(scope="module")
def series(server, client) -> set[str]:
    client.completions.create(model=MODEL, prompt="Sort these numbers", max_tokens=8, seed=1)
    client.decisions.create(model=MODEL, input="Ann has 34.", questions=[QUESTION])
    return served(server.get("/metrics").text)


ROWS = [row for row in named_by_row() if row != OF_DRAFTS]


@pytest.mark.parametrize("row", ROWS)
def test_every_series_of_a_row_exists(series, row):
    assert named_by_row()[row] - {OF_A_GPU} <= series


def test_the_server_has_no_series_of_drafts(series):
    assert not named_by_row()[OF_DRAFTS] & series
