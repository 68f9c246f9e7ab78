"""What is not finite in a model's output ends its request with an error, and no other one."""

from typing import Any
from unittest import mock

import pytest
import torch

from dllm.attention.cpu_backend import CanvasCPUImpl
from tests.engine.test_parity import prompt
from tests.support.engine_models import Model


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=["nan", "inf"])
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


def test_values_that_are_not_finite_stay_with_their_request(model: Model) -> None:
    """Others get its pages of the KV cache, and the kernel reads behind their own values."""
    engine = model.engine(num_gpu_blocks_override=24, enable_prefix_caching=False)
    prompts = [prompt(12), prompt(12, salt=9)]
    expected = engine.generate(prompts, model.params())
    update = CanvasCPUImpl.do_kv_cache_update

    def broken(self: Any, layer: Any, key: Any, value: torch.Tensor, *rest: Any) -> None:
        update(self, layer, key, torch.full_like(value, torch.nan), *rest)

    with mock.patch.object(CanvasCPUImpl, "do_kv_cache_update", broken):
        [spoilt] = engine.outputs([prompt(300)], model.params())
    assert spoilt.outputs[0].finish_reason == "error"
    assert engine.generate(prompts, model.params()) == expected
