"""Tensor parallelism: the vocabulary is sharded, and so is the soft-embedding product."""

import itertools
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from dllm.models.gemma import self_conditioning
from dllm.ops.dispatch import row_stats
from tests.engine.test_parity import CANVAS, prompt
from tests.support.async_engine import get_async_engine
from tests.support.engine_harness import Engine
from tests.support.process import printed_json, run_python

pytestmark = pytest.mark.slow

VOCAB, HIDDEN, ROWS = 50, 16, 7
NORMALIZER = torch.tensor(HIDDEN**0.5)


def shard(table: torch.Tensor, start: int, end: int, padding: int) -> SimpleNamespace:
    """One rank's part of a table, as VocabParallelEmbedding holds it: padded, with NaN here."""
    weight = torch.cat([table[start:end], torch.full((padding, HIDDEN), float("nan"))])
    indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=end)
    return SimpleNamespace(weight=weight, shard_indices=indices)


@pytest.mark.parametrize("cuts", [(0, 25, 50), (0, 32, 50), (0, 16, 32, 48, 50), (0, 50)])
@pytest.mark.parametrize("is_exact", [True, False])
def test_partial_products_of_the_shards_sum_to_the_whole(monkeypatch, cuts, is_exact):
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(VOCAB, HIDDEN, generator=generator)
    logits, temperature = torch.randn(ROWS, VOCAB, generator=generator), torch.ones(ROWS)
    keys = torch.zeros(ROWS, 2, dtype=torch.int64)
    stats = row_stats(logits, temperature, keys, torch.float32 if is_exact else None)
    partial = []
    monkeypatch.setattr(
        self_conditioning,
        "tensor_model_parallel_all_reduce",
        lambda part: partial.append(part) or part,
    )
    for start, end in itertools.pairwise(cuts):
        embedding = shard(table, start, end, padding=3)
        result = self_conditioning.soft_embeddings(
            logits, temperature, stats, embedding, NORMALIZER
        )
        torch.testing.assert_close(result, partial[-1] * NORMALIZER)
    # fp32, 50 terms in another order.
    torch.testing.assert_close(sum(partial), logits.softmax(-1) @ table, rtol=1e-5, atol=1e-6)


def params(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=2 * CANVAS, seed=11, ignore_eos=True, **options)


# Prefills without any canvas row, several blocks, requests at different points; and what needs the
# logits of the whole vocabulary, such as a constrained request, which the built-in class refuses.
CONTEXTS = [prompt(130), prompt(9, salt=3), prompt(40), prompt(20), prompt(30)]
PARAMS = [
    params(),
    params(min_p=0.05, top_k=20, prompt_logprobs=1),
    params(presence_penalty=1.0, bad_words=["a"], logit_bias={33: 8.0}, logprobs=2),
    params(logprob_token_ids=[40, 41, 300], extra_args={"diffusion_constrained": True}),
    SamplingParams(
        max_tokens=2 * CANVAS,
        seed=11,
        structured_outputs=StructuredOutputsParams(regex="([a-f]{3}-){9,30}[0-9]{2}"),
    ),
]


@pytest.mark.parametrize(
    "scheduling", ["loop", pytest.param("asynchronous", marks=pytest.mark.nightly)]
)
def test_two_ranks_generate_the_tokens_of_one(engine, checkpoint, scheduling):
    """Heads, experts and vocabulary are sharded over two worker processes that speak gloo."""
    # vLLM wants a NUMA node per rank, unless it is told not to bind threads. Spawned, each rank
    # would import everything again.
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    finished = run_python("-m", __name__, str(checkpoint()), scheduling, environment=environment)
    assert printed_json(finished) == engine.generate(CONTEXTS, PARAMS)


def generate_on_two_ranks(model: str, scheduling: str) -> None:
    """The other side of the test: prints the tokens."""
    options: dict[str, Any] = dict(tensor_parallel_size=2, max_num_batched_tokens=256)
    if scheduling == "loop":
        # Each rank reads its own clock, and still both take the same number of passes.
        options["additional_config"] = {"dllm": {"denoise_loop_ms": 60_000}}
        engine = Engine(model, **options)
    else:
        engine = get_async_engine(model, **options)
    tokens = engine.generate(CONTEXTS, PARAMS)
    engine.llm.llm_engine.engine_core.shutdown()
    print(json.dumps(tokens))


if __name__ == "__main__":
    generate_on_two_ranks(*sys.argv[1:])
