"""Tensor parallelism: heads, experts, vocabulary and the soft-embedding product are sharded."""

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
from tests.support.engine_harness import RUN_TOLERANCE, Engine, get_engine
from tests.support.family_checkpoints import FAMILIES
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


GRAMMAR = SamplingParams(
    max_tokens=2 * CANVAS,
    seed=11,
    structured_outputs=StructuredOutputsParams(regex="([a-f]{3}-){9,30}[0-9]{2}"),
)
# Prefills without any canvas row, several blocks, requests at different points; and what needs the
# logits of the whole vocabulary, such as a constrained request, which the built-in class refuses.
REQUESTS = [
    (prompt(130), params()),
    (prompt(9, salt=3), params(min_p=0.05, top_k=20, prompt_logprobs=1)),
    (
        prompt(40),
        params(presence_penalty=1.0, bad_words=["a"], logit_bias={33: 8.0}, logprobs=2),
    ),
    (
        prompt(20),
        params(logprob_token_ids=[40, 41, 300], extra_args={"diffusion_constrained": True}),
    ),
    (prompt(30), GRAMMAR),
]
# The same of families with masks: prompts of several blocks, and such that end within a block.
OF_MASKS = [
    (prompt(130), params(temperature=0.0, logprobs=2)),
    (prompt(9, salt=3), params(min_p=0.05, top_k=20)),
    (prompt(64), params(presence_penalty=1.0, bad_words=["a"], logit_bias={33: 8.0}, logprobs=2)),
    (prompt(35), params(logprob_token_ids=[40, 41, 300], extra_args={"diffusion_max_steps": 3})),
    (
        prompt(31),
        params(
            extra_args={
                "diffusion_pin_at": [3, 40],
                "diffusion_pin_ids": [50, 51],
                "diffusion_pin_mode": "hold",
            }
        ),
    ),
    (prompt(30), GRAMMAR),
]
EDITING = params(
    extra_args={"diffusion_editing": 1, "diffusion_threshold": 0.2, "diffusion_max_post_steps": 3}
)
REQUESTS_OF = dict.fromkeys(FAMILIES, OF_MASKS) | {
    "gemma": REQUESTS,
    "llada2": [*OF_MASKS, (prompt(17), EDITING)],
}


def answers(engine: Engine, requests: list[Any]) -> list[Any]:
    """Of each request its tokens, and the logprobs that it asked for, in a form for JSON."""
    outputs = [output.outputs[0] for output in engine.outputs(*zip(*requests, strict=True))]
    return [
        [
            list(answer.token_ids),
            [
                {str(token): entry.logprob for token, entry in of_token.items()}
                for of_token in answer.logprobs or []
            ],
        ]
        for answer in outputs
    ]


# Each family with what it has of its own: experts and copies of key-value heads, dense layers, such
# copies beside a tied head, Llama's rotation, canvases that start anywhere.
CASES = [("gemma", "loop"), ("llada2", "loop")]
MORE_CASES = [
    ("gemma", "asynchronous"),
    ("sdar", "loop"),
    ("a2d-qwen2", "loop"),
    ("stable-diffcoder", "loop"),
    ("sdar-moe", "asynchronous"),
    ("nemotron", "asynchronous"),
]


@pytest.mark.parametrize("cases", [CASES, MORE_CASES], ids=["some", "more"])
def test_two_ranks_generate_the_tokens_of_one(checkpoint, family, cases):
    """Two worker processes that speak gloo: tokens are equal, logprobs but for sums over shards."""
    # vLLM wants a NUMA node per rank, unless it is told not to bind threads. Spawned, each rank
    # would import everything again.
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    models = [str(checkpoint() if name == "gemma" else family(name)) for name, _ in cases]
    given = json.dumps([(path, *case) for path, case in zip(models, cases, strict=True)])
    printed = printed_json(run_python("-m", __name__, given, environment=environment))
    for path, case, found in zip(models, cases, printed, strict=True):
        expected = answers(get_engine(path, max_num_batched_tokens=256), REQUESTS_OF[case[0]])
        for ours, theirs in zip(found, expected, strict=True):
            assert ours[0] == theirs[0], case
            for of_token, expected_entry in zip(ours[1], theirs[1], strict=True):
                # Of unlikely tokens fp32 has fewer digits behind the point.
                close = pytest.approx(expected_entry, abs=RUN_TOLERANCE, rel=2e-5)
                assert of_token == close, case


def on_two_ranks(model: str, family: str, scheduling: str) -> list[Any]:
    """The answers of an engine with two ranks."""
    options: dict[str, Any] = dict(tensor_parallel_size=2, max_num_batched_tokens=256)
    if scheduling == "loop":
        # Each rank reads its own clock, and still both take the same number of passes.
        options["additional_config"] = {"dllm": {"denoise_loop_ms": 60_000}}
        engine = Engine(model, **options)
    else:
        engine = get_async_engine(model, **options)
    found = answers(engine, REQUESTS_OF[family])
    engine.llm.llm_engine.engine_core.shutdown()
    return found


if __name__ == "__main__":  # the other side of the test
    print(json.dumps([on_two_ranks(*case) for case in json.loads(sys.argv[1])]))
