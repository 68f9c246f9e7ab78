"""Rejection sampling of drafts: every token has the target's distribution.

Draws follow from fixed seeds: a test that has passed once passes always.
"""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from dllm.drafter.verification import RatioSampler, ratio_test
from tests.ops.test_noise import assert_drawn_from
from tests.support.drafter_harness import drafting_engine, greedy, make_policy, policy_of
from tests.support.drafter_pairs import SMALL_VOCAB
from tests.support.engine_harness import Engine

VOCAB, NUM_DRAFTS = 6, 2


def draw(*shape: int, seed: int) -> torch.Tensor:
    return 1.5 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def without(logits: torch.Tensor, *tokens: int) -> torch.Tensor:
    return logits.index_fill(1, torch.tensor(tokens), -torch.inf)


PAIRS = {  # target, drafter
    "different": (draw(5, VOCAB, seed=0), draw(5, VOCAB, seed=1)),
    "equal": (draw(5, VOCAB, seed=0), draw(5, VOCAB, seed=0)),
    "tokens that only one of them has": (
        without(draw(5, VOCAB, seed=0), 1),
        without(draw(5, VOCAB, seed=1), 2, 3),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_sum_over_all_drafts_is_the_targets_distribution(name):
    """Exact: each draft with its probability, kept or replaced."""
    target, proposed = (each.double().softmax(1) for each in PAIRS[name])
    found = torch.zeros_like(target)
    for draft in range(VOCAB):
        drafts = torch.full((len(target),), draft)
        ratio, residual = ratio_test(target, proposed, drafts)
        kept = ratio.clamp(max=1).where(proposed[:, draft] > 0, 0)
        found[:, draft] += proposed[:, draft] * kept
        rest = residual / residual.sum(1, keepdim=True).clamp(min=1e-300)
        found += (proposed[:, draft] * (1 - kept))[:, None] * rest
    torch.testing.assert_close(found, target, rtol=0, atol=1e-12)


def test_a_draft_that_is_a_point_is_kept_with_the_targets_probability():
    target = draw(VOCAB, VOCAB, seed=0).double().softmax(1)
    ratio, residual = ratio_test(target, None, torch.arange(VOCAB))
    torch.testing.assert_close(ratio, target.diagonal())
    found = torch.diag(ratio) + (1 - ratio)[:, None] * residual / residual.sum(1, keepdim=True)
    torch.testing.assert_close(found, target)


NUM_REQUESTS = 60_000


@pytest.mark.parametrize("is_sampled, dtype", [(True, torch.bfloat16), (False, torch.float32)])
def test_tokens_of_many_requests_have_the_targets_distribution(engine, is_sampled, dtype):
    """Two drafts each. What stands behind the first depends on it; temperatures are 0, 1 and 2.

    The engine has put kernels for a CPU in the place of vLLM's.
    """
    slots = torch.arange(NUM_REQUESTS)
    temperature = torch.tensor([1.0, 2.0, 0.0]).repeat(NUM_REQUESTS // 3)
    target, proposed = (draw(VOCAB, VOCAB, seed=seed).to(dtype).float() for seed in (0, 1))
    drafts = [torch.full((NUM_REQUESTS,), 3)]
    draft_logits = torch.zeros(NUM_REQUESTS, NUM_DRAFTS, VOCAB)
    for place in range(NUM_DRAFTS):
        logits = proposed[drafts[-1]]
        draft_logits[:, place] = logits
        drafts.append(
            gumbel_sample(
                logits.clone(), slots, temperature, slots, slots * 0 + place,
                apply_temperature=True, is_drafting=True,
            )
            if is_sampled
            else logits.argmax(1)
        )  # fmt: skip
    inputs = torch.stack(drafts, 1)  # [requests, 3]: the last token, and the drafts
    heat = temperature.where(temperature > 0, 1)
    logits = (target[inputs] / heat[:, None, None]).flatten(0, 1).to(dtype)  # exact
    states = SimpleNamespace(
        temperature=SimpleNamespace(gpu=temperature), seeds=SimpleNamespace(gpu=slots)
    )
    sampler = SimpleNamespace(
        apply_sampling_params=lambda logits, *others: logits,
        sampling_states=states,
        use_fp64_gumbel=False,
    )
    config = engine.runner.speculative_config
    rows = slots.repeat_interleave(3), torch.arange(3).repeat(NUM_REQUESTS)
    starts = 3 * torch.arange(NUM_REQUESTS + 1)
    flat = inputs.flatten()
    _, tokens, num_emitted = RatioSampler(sampler, config, torch.device("cpu"))._verify(
        logits, draft_logits if is_sampled else None, flat, rows[1], starts, slots, slots.numpy(),
        *rows, slots.numpy(), flat,
    )  # fmt: skip
    for heat in (1.0, 2.0):
        asked = temperature == heat
        assert_drawn_from(tokens[asked, 0].bincount(minlength=VOCAB), (target[3] / heat).softmax(0))
        for token in range(VOCAB):
            for place in (1, 2):  # a token behind drafts that were kept, and the one behind both
                behind = asked & (num_emitted > place) & (tokens[:, place - 1] == token)
                if behind.sum() > 200:
                    counts = tokens[behind, place].bincount(minlength=VOCAB)
                    assert_drawn_from(counts, (target[token] / heat).softmax(0))
    is_greedy = temperature == 0
    assert (tokens[is_greedy, 0] == target[3].argmax()).all()
    assert {1, 2, 3} == set(num_emitted.tolist())


# --- in vLLM's engine ----------------------------------------------------------------------------

PROMPT, HEAT, NUM_ANSWERS = [5, 6, 7], 2.0, 1200


@pytest.fixture(scope="module")
def engine(target, drafter) -> Engine:
    options = {"verification": "rejection", "policy": "adaptive", "prompt_lookup": True}
    speculative = {"draft_sample_method": "probabilistic"}
    return drafting_engine(
        target, drafter, NUM_DRAFTS, options, skip_tokenizer_init=True, speculative=speculative
    )


def test_greedy_text_is_that_of_plain_decoding(engine, plain):
    prompts, params = [PROMPT, [1], [2] * 70], greedy(30)
    for kind in ("2", "random", "adaptive"):
        with policy_of(engine, make_policy(kind, engine)):
            assert engine.generate(prompts, params) == plain.generate(prompts, params)


@pytest.mark.parametrize("kind", ["2", "lookup"])
def test_served_tokens_have_the_targets_distribution(engine, plain, kind):
    """The second token of an answer is the first that is verified. Both kinds of drafts."""
    params = [greedy(3, temperature=HEAT, seed=seed) for seed in range(NUM_ANSWERS)]
    policy = make_policy("2", engine)
    if kind == "lookup":
        policy.wants_lookup = lambda slots, confidence: True
    with policy_of(engine, policy):
        answers = torch.tensor(engine.generate([PROMPT] * NUM_ANSWERS, params))
    likeliest = answers[:, 0].mode().values.item()
    for prefix in ([], [likeliest]):
        (output,) = plain.outputs([PROMPT + prefix], greedy(1, logprobs=SMALL_VOCAB))
        found = {token: one.logprob for token, one in output.outputs[0].logprobs[0].items()}
        logprobs = torch.tensor([found[token] for token in range(SMALL_VOCAB)]).double()
        here = answers if not prefix else answers[answers[:, 0] == likeliest]
        counts = here[:, len(prefix)].bincount(minlength=SMALL_VOCAB)
        assert_drawn_from(counts, (logprobs / HEAT).softmax(0))


def test_drafts_are_drawn_by_vllm_with_numbers_of_their_own(engine):
    """It keeps what they are drawn from."""
    kept = engine.runner.speculator.draft_logits.zero_()
    with policy_of(engine, make_policy("2", engine)):
        engine.generate([PROMPT], greedy(4, temperature=HEAT, seed=1))
    assert kept.any()
