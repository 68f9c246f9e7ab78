"""64 requests at once, every parameter among them: each gets what it gets alone."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.test_server import chat, complete, prompt
from tests.support.patience import HANG_S
from tests.support.server_harness import CANVAS, FLAGS, Server, serving

pytestmark = pytest.mark.slow

NUM_REQUESTS = 64
# Enough room for 64 canvases and as many blocks to commit in one step.
MIXED_FLAGS = (
    *(f for f in FLAGS if not f.startswith(("--max-num-seqs", "--max-num-batched-tokens"))),
    f"--max-num-seqs={NUM_REQUESTS}",
    f"--max-num-batched-tokens={2 * NUM_REQUESTS * CANVAS}",
)
SEED_CANVAS = prompt(CANVAS, salt=9)

# What sixteen kinds of clients ask for; the harness adds a seed to every one.
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 1.7, "top_p": 0.8},
    {"temperature": 1.7, "extra_body": {"top_k": 4}},
    {"temperature": 1.7, "extra_body": {"min_p": 0.1}},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "extra_body": {"repetition_penalty": 1.2}},
    {"logit_bias": {str(token): 6 for token in range(40, 60)}, "logprobs": 2},
    {"extra_body": {"allowed_token_ids": list(range(30, 200)), "bad_words": ["a", "the "]}},
    {"extra_body": {"min_tokens": 20, "ignore_eos": False}, "logit_bias": {"1": 7, "6": 7}},
    {"n": 2, "extra_body": {"stop_token_ids": list(range(100, 120))}},
    {"echo": True, "logprobs": 1},
    {"logprobs": 2, "extra_body": {"logprob_token_ids": [40, 41]}},
    {
        "extra_body": {
            "vllm_xargs": {
                "diffusion_seed_canvas": SEED_CANVAS,
                "diffusion_pinned": [0, 1, 2],
                "diffusion_max_steps": 5,
                "diffusion_eos_stop": False,
            }
        }
    },
    {
        "logprobs": 3,
        "extra_body": {
            "logprob_token_ids": [40, 41, 42],
            "vllm_xargs": {"diffusion_constrained": True, "diffusion_read_only": True},
        },
    },
    {
        "extra_body": {
            "vllm_xargs": {
                "diffusion_canvas_length": 9,
                "diffusion_confidence": 0.3,
                "diffusion_entropy_bound": 2.0,
                "diffusion_t_min": 0.2,
                "diffusion_t_max": 1.2,
            }
        }
    },
    {"stop": ["e", "1"], "extra_body": {"prompt_logprobs": 0}},
]


@pytest.fixture(scope="module")
def server(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    yield from serving(checkpoint(), tmp_path_factory, MIXED_FLAGS)


def ask(client: openai.OpenAI, index: int) -> dict[str, Any]:
    """What the index-th client gets: every token, every reason, every logprob to four digits."""
    options = dict(KINDS[index % len(KINDS)])
    options["extra_body"] = dict(options.get("extra_body", {}))
    options |= {"seed": index, "max_tokens": 33 + index}
    if index % 16 == 0:
        return described(chat(client, f"Sort {index} numbers", **options))
    return described(complete(client, prompt(5 + 4 * index, salt=index), **options))


def described(answer: Any) -> dict[str, Any]:
    choices = []
    for choice in answer.choices:
        logprobs = getattr(choice.logprobs, "token_logprobs", None) or []
        top = getattr(choice.logprobs, "top_logprobs", None) or []
        choices.append(
            {
                "tokens": choice.token_ids,
                "end": (choice.finish_reason, choice.stop_reason),
                "logprobs": [x for x in logprobs if x is not None],
                "top": [sorted(row.values()) for row in top if row],
            }
        )
    return {"choices": choices, "usage": answer.usage.completion_tokens}


def assert_same(together: dict[str, Any], alone: dict[str, Any]) -> None:
    """Tokens are equal; logprobs differ by what another batch size rounds differently."""
    assert together["usage"] == alone["usage"]
    for ours, theirs in zip(together["choices"], alone["choices"], strict=True):
        assert ours["tokens"] == theirs["tokens"] and ours["end"] == theirs["end"]
        assert ours["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-3)
        assert len(ours["top"]) == len(theirs["top"])
        for row, expected in zip(ours["top"], theirs["top"], strict=True):
            assert row == pytest.approx(expected, abs=1e-3)


def test_64_mixed_requests_at_once_get_what_each_gets_alone(server):
    client = server.client().with_options(timeout=HANG_S)
    alone = [ask(client, index) for index in range(NUM_REQUESTS)]
    assert len({str(answer) for answer in alone}) == NUM_REQUESTS
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        together = list(pool.map(lambda index: ask(client, index), range(NUM_REQUESTS)))
    for index in range(NUM_REQUESTS):
        assert_same(together[index], alone[index])
    assert server.is_healthy()
