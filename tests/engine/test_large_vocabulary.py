"""A vocabulary of several tiles through the engine, where statistics and soft embeddings skip.

The vocabulary of the other tests is small: for it the definition itself is run.
"""

import pytest
from vllm import SamplingParams

from dllm.ops import soft_embedding
from dllm.ops.dispatch import SMALLEST_VOCABULARY
from tests.engine.test_parity import CANVAS, prompt
from tests.support.engine_harness import assert_same_runs, get_engine
from tests.support.recorded_calls import record_calls

VOCAB = SMALLEST_VOCABULARY + 1000
CONTEXTS = [prompt(40), prompt(9, salt=3), prompt(70, salt=5)]


def requests() -> list[SamplingParams]:
    options = [dict(), dict(temperature=0.0), dict(top_p=0.9, top_k=50)]
    return [
        SamplingParams(max_tokens=2 * CANVAS, seed=seed, ignore_eos=True, **given)
        for seed, given in enumerate(options)
    ]


@pytest.fixture(scope="module")
def engines(checkpoint):
    path = checkpoint(vocab_size=VOCAB)
    return {
        option: get_engine(
            path,
            max_num_batched_tokens=256,
            additional_config={"dllm": {"soft_embedding": option}},
        )
        for option in ("sparse", "exact")
    }


def test_sparse_and_exact_soft_embeddings_generate_the_same(engines, monkeypatch):
    """In fp32 what is left out is 2^-24 of the probability: nothing against rounding."""
    bags = record_calls(monkeypatch, soft_embedding, "_bag")
    sparse = engines["sparse"].runs(CONTEXTS, requests())
    assert bags
    bags.clear()
    exact = engines["exact"].runs(CONTEXTS, requests())
    assert not bags
    assert_same_runs(sparse, exact)


def test_the_engine_draws_what_the_definition_draws(engines, monkeypatch):
    ours = engines["sparse"].runs(CONTEXTS, requests())
    engines["sparse"].reset_prefix_cache()
    # Up to this size the definition runs, here for any vocabulary.
    monkeypatch.setattr("dllm.ops.dispatch.SMALL_VOCABULARY", VOCAB)
    assert_same_runs(engines["sparse"].runs(CONTEXTS, requests()), ours)
