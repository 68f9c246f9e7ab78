"""What one HTTP request starts is counted over all that it multiplies."""

import pytest
from vllm.exceptions import VLLMValidationError

from dllm.api.tally import MAX_REQUESTS, Tally


def test_all_that_is_added_counts_together():
    tally = Tally()
    tally.add(MAX_REQUESTS - 1, "prompt")
    tally.add(1, "prompt")
    with pytest.raises(VLLMValidationError) as refusal:
        tally.add(1, "n")
    assert refusal.value.parameter == "n"
