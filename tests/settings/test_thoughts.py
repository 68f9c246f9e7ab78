"""Which tokens begin and end thoughts, and which budgets are refused for them."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from dllm.settings.thoughts import Marks, admit_budget, marks_of


def config(
    start: list[int], end: list[int], natural: list[int] | None = None, **structured: Any
) -> Any:
    reasoning = SimpleNamespace(
        reasoning_parser="",
        enabled=bool(start),
        reasoning_start_token_ids=start,
        reasoning_end_token_ids=end,
        natural_reasoning_end_token_ids=end if natural is None else natural,
    )
    outputs = SimpleNamespace(**{"enable_in_reasoning": False} | structured)
    return SimpleNamespace(
        reasoning_config=reasoning,
        structured_outputs_config=outputs,
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB_SIZE),
    )


VOCAB_SIZE = 20
ONE = config([7], [8])
BUDGET = SamplingParams(thinking_token_budget=3)
GRAMMAR = StructuredOutputsParams(regex="a")


def test_a_mark_is_one_token():
    assert marks_of(ONE) == Marks(7, 8)


@pytest.mark.parametrize(
    "server",
    [
        SimpleNamespace(reasoning_config=None),
        config([], []),
        config([7, 9], [8]),
        config([7], [9, 8]),
        config([7], [9, 8], [8]),  # --reasoning-config
        config([7], [VOCAB_SIZE]),  # a token of the tokenizer that the model lacks
    ],
)
def test_without_marks_a_budget_is_refused(server):
    assert marks_of(server) is None
    with pytest.raises(VLLMValidationError, match=r"^thinking_token_budget ") as refusal:
        admit_budget(BUDGET, server)
    assert refusal.value.parameter == "thinking_token_budget"
    admit_budget(SamplingParams(extra_args={"thinking_token_budget": -1}), server)
    admit_budget(SamplingParams(), server)


def test_what_contradicts_a_budget_is_refused():
    admit_budget(BUDGET, ONE)
    admit_budget(SamplingParams(extra_args={"thinking_token_budget": 0}), ONE)
    bound = SamplingParams(thinking_token_budget=3, structured_outputs=GRAMMAR)
    admit_budget(bound, ONE)
    twice = SamplingParams(thinking_token_budget=3, extra_args={"thinking_token_budget": 3})
    pinned = SamplingParams(thinking_token_budget=3, extra_args={"diffusion_pin_mode": "hold"})
    ending = SamplingParams(thinking_token_budget=3, min_tokens=9, stop_token_ids=[8])
    inside = config([7], [8], enable_in_reasoning=True)
    for params, server in ((twice, ONE), (pinned, ONE), (ending, ONE), (bound, inside)):
        with pytest.raises(VLLMValidationError) as refusal:
            admit_budget(params, server)
        assert refusal.value.parameter == "thinking_token_budget"
