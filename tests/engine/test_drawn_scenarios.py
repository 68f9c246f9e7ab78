"""Scenarios of every family that are drawn: each request is answered as it is alone.

``SCENARIOS=1000:1200 pytest tests/engine/test_drawn_scenarios.py`` draws those of other seeds.
"""

import os
from collections import Counter

import pytest

from tests.engine.test_thoughts import model  # noqa: F401  whose tokenizer names thoughts
from tests.support.engine_models import Model
from tests.support.scenarios import check, draw

pytestmark = pytest.mark.slow

FIRST, LAST = map(int, os.environ.get("SCENARIOS", "0:3").split(":"))


def test_whatever_happens_answers_are_those_of_a_quiet_engine(
    model: Model,  # noqa: F811
) -> None:
    met: Counter[str] = Counter()
    wrong = []
    for seed in range(FIRST, LAST):
        try:
            check(model, draw(seed, model), met)
        except Exception as error:  # whatever ends an engine step
            wrong.append(f"{model.name}, seed {seed}: {error!r:.300}")
    assert not wrong, "\n".join(wrong)
    assert met["aborted"] and met["cached"], met
    assert sum(what.endswith("preempted") for what in met) > 2, met  # kinds of requests
