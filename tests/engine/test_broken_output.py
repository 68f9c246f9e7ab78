"""What is not finite in a model's output ends its request with an error, and no other one."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from tests.engine.test_parity import prompt
from tests.support.engine_models import Model


@pytest.fixture(params=["gemma", "sdar", "llada2", "nemotron"])
def model(request: pytest.FixtureRequest, model_named: Callable[[str], Model]) -> Model:
    return model_named(request.param)


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_request_with_a_broken_canvas_ends_with_an_error(
    model: Model, is_async: bool, value: float
) -> None:
    """One logit of the last row of a pass is enough. The next requests are answered."""
    engine = model.engine(is_async)
    prompts = [prompt(12), prompt(12, salt=9)]
    expected = engine.generate(prompts, model.params())
    compute = engine.runner.model.compute_logits

    def broken(hidden: torch.Tensor) -> Any:
        logits = compute(hidden)
        if len(hidden) > model.size:  # canvases of both
            logits[-1, 30] = value
        return logits

    with mock.patch.object(engine.runner.model, "compute_logits", broken):
        good, bad = engine.outputs(prompts, model.params())
    assert list(good.outputs[0].token_ids) == expected[0]
    assert good.outputs[0].finish_reason == "length"
    assert bad.outputs[0].finish_reason == "error"
    assert engine.generate(prompts, model.params()) == expected
