"""Drafting in vLLM's engine on a CPU: the drafts are the definition's, the output the target's."""

import itertools
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from dllm.drafter.widths.adaptive import AdaptiveWidth
from dllm.drafter.widths.policy import FixedWidth, VerifiedStep
from tests.support.drafter_harness import (
    CASES,
    Bursts,
    RandomWidth,
    assert_close,
    assert_drafts,
    assert_greedy,
    drafting_engine,
    greedy,
    make_policy,
    plain_engine,
    policy_of,
    prompt,
    reference,
    unused_drafts,
    watch_drafts,
)
from tests.support.drafter_pairs import (
    drafter_config,
    random_drafter,
    speculators_config,
    write_drafter,
)
from tests.support.engine_harness import assert_same_logprobs
from tests.support.recorded_calls import record_calls

NUM_DRAFTS = 5


@pytest.fixture(scope="module")
def plain(random_target):
    return plain_engine(random_target)


@pytest.fixture(scope="module")
def drafting(random_target, tmp_path_factory):
    """A random drafter in z-lab's format, and a cache too small for four long requests."""
    drafter = write_drafter(tmp_path_factory.mktemp("drafter"))
    return drafting_engine(random_target, drafter, NUM_DRAFTS, num_gpu_blocks_override=24)


@pytest.fixture(scope="module")
def engine(target, drafter):
    """Its drafts are mostly right."""
    limits = dict(max_num_seqs=40, max_num_batched_tokens=256)
    return drafting_engine(target, drafter, NUM_DRAFTS, skip_tokenizer_init=True, **limits)


WINDOW = 40


def reduced_drafter() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Half the vocabulary, a causal sliding layer, in the speculators format."""
    config = speculators_config(draft_vocab_size=256)
    config["transformer_layer_config"] |= {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 33,
    }
    weights = random_drafter()
    generator = torch.Generator().manual_seed(7)
    chosen = torch.randperm(512, generator=generator)[:256].sort().values
    weights["d2t"] = chosen - torch.arange(256)
    weights["t2d"] = torch.zeros(512, dtype=torch.bool).index_fill(0, chosen, True)
    weights["lm_head.weight"] = torch.randn(256, 64, generator=generator)
    return weights, config


@pytest.fixture(scope="module")
def windowed(random_target, tmp_path_factory):
    """Reduced vocabulary, a mask row of its own, a draft window."""
    weights, config = reduced_drafter()
    path = write_drafter(tmp_path_factory.mktemp("windowed"), config, weights)
    mask = torch.randn(64, generator=torch.Generator().manual_seed(8))
    torch.save({"mask_token_id": 500, "embedding": mask}, path / "mask_embedding.pt")
    limits = dict(max_model_len=400, num_gpu_blocks_override=72)  # pages change hands all the time
    engine = drafting_engine(random_target, path, NUM_DRAFTS, {"window": WINDOW}, **limits)
    return engine, weights, mask


# --- the drafts are those of the definition -------------------------------------------------------


@pytest.fixture(scope="module")
def definition(random_target, drafting):
    return reference(random_target, drafting)


def test_drafts_are_those_of_the_definition(drafting, definition):
    """In mixed batches: prompts in chunks, cached prefixes, drafts rejected all the time."""
    drafting.reset_prefix_cache()
    prompts = [prompt(3), prompt(40, 1), prompt(90, 2), prompt(100, 2)]
    with watch_drafts(drafting) as seen:
        drafting.generate(prompts, greedy(8))
        drafting.generate(prompts, greedy(8))  # from cached prefixes
    assert len(seen) > 50
    assert_drafts(definition, seen[::4])


def test_every_option_at_once_drafts_as_the_definition(random_target, windowed):
    """Speculators' format, reduced vocabulary, mask row, causal layer, window."""
    engine, weights, mask = windowed
    with watch_drafts(engine) as seen:
        engine.generate([prompt(30), prompt(100, 5)], greedy(10))
    expected = reference(random_target, engine, weights)
    config = expected.config
    layers = [(layer.mask.window, layer.is_causal) for layer in config.layers]
    assert layers == [(33, True), (41, False)]
    ids = torch.arange(256) + weights["d2t"]
    with torch.inference_mode():
        expected.target.model.embed_tokens.weight[config.mask_token_id] = mask
        for draft in seen[::3]:
            block = [draft.tokens[-1]] + [config.mask_token_id] * NUM_DRAFTS
            logits = expected.logits(draft.tokens[:-1], block)[1:]
            assert draft.drafts == ids[logits.argmax(-1)].tolist()
            assert_close(draft.logits[:, ids], logits)
            assert bool(draft.logits.isneginf().sum(-1).eq(512 - 256).all())


def test_context_that_was_left_for_later_is_there_when_drafting(drafting, definition, monkeypatch):
    """Also that of generated tokens, when their pages are another request's cached prefix.

    Of the drafts of two steps in nine the target verifies nothing.
    """
    drafting.reset_prefix_cache()
    speculator = drafting.runner.speculator
    stored = []
    store = speculator._store_context
    monkeypatch.setattr(
        speculator, "_store_context", lambda: (stored.append(len(speculator._context)), store())
    )
    prompts = [prompt(20, 7), prompt(50, 8)]
    with policy_of(drafting, Bursts(NUM_DRAFTS, 0, 2, 9)), watch_drafts(drafting) as seen:
        outputs = drafting.generate(prompts, greedy(50))
    with policy_of(drafting, FixedWidth(NUM_DRAFTS, 0)):
        drafting.generate([prompt(9, 9)], greedy(40))
    longer = [given + output for given, output in zip(prompts, outputs, strict=True)]
    with watch_drafts(drafting) as later:
        drafting.generate(longer, greedy(4))
    assert max(stored) >= 10  # tokens, of two requests
    assert len(seen) > 10 and len(later) > 4
    assert_drafts(definition, seen + later)


def test_nobody_drafts_behind_a_step_in_which_all_end_and_its_context_is_not_lost(
    drafting, definition
):
    """What the last step computed is another request's cached prefix."""
    drafting.reset_prefix_cache()
    prompts = [prompt(40, 3), prompt(41, 4)]
    with watch_drafts(drafting) as seen:
        outputs = [drafting.generate([given], greedy(57))[0] for given in prompts]
    whole = [given + output for given, output in zip(prompts, outputs, strict=True)]
    assert len(seen) > 10 and all(draft.tokens not in whole for draft in seen)
    with watch_drafts(drafting) as later:
        drafting.generate([tokens + [5] for tokens in whole], greedy(4))
    assert len(later) > 1
    assert_drafts(definition, later)


def test_steps_whose_drafts_nobody_uses_count_nothing_and_keep_their_context(drafting, definition):
    drafting.reset_prefix_cache()
    given = prompt(150, 11)
    with watch_drafts(drafting) as seen:
        assert not unused_drafts(drafting, given)
    assert not seen
    with watch_drafts(drafting) as later:
        (output,) = drafting.outputs([[*given, 5]], greedy(8))
    assert output.num_cached_tokens >= 64
    assert len(later) > 1
    assert_drafts(definition, later)


def test_the_time_of_such_a_step_is_no_drafting_time(drafting):
    """A request ends in it while another waits for room; the next step is that one's alone."""
    drafting.reset_prefix_cache()
    now, times = [0.0], []
    policy = AdaptiveWidth(NUM_DRAFTS, 4, clock=lambda: now[0])
    policy.costs.observe = lambda *observed: times.append(observed[-1])  # type: ignore[method-assign]
    scheduler = drafting.scheduler

    def step() -> None:
        drafting.step()
        now[0] += 1

    with policy_of(drafting, policy):
        drafting.add(prompt(5, 12), greedy(2))
        drafting.add(prompt(6, 13), greedy(12))
        step()
        requests, limit = list(scheduler.running), scheduler.max_num_scheduled_tokens
        scheduler.max_num_scheduled_tokens = 1 + len(requests[0].spec_token_ids)
        step()
        scheduler.max_num_scheduled_tokens = limit
        assert [one.num_output_tokens for one in requests] == [2, 1]
        while drafting.llm.llm_engine.has_unfinished_requests():
            step()
    assert set(times) == {1000.0}


def test_pages_behind_the_window_are_freed(windowed):
    """A long request holds as many pages of draft KV as a window needs, and all of the target's."""
    engine, *_ = windowed
    engine.add(prompt(300), greedy(60))
    while not any(request.num_output_tokens > 50 for request in engine.scheduler.running):
        engine.step()
    manager = engine.scheduler.kv_cache_manager.coordinator
    held = {}
    for group, single in zip(
        engine.scheduler.kv_cache_config.kv_cache_groups, manager.single_type_managers, strict=True
    ):
        (blocks,) = single.req_to_blocks.values()
        held[type(group.kv_cache_spec).__name__] = sum(not block.is_null for block in blocks)
    engine.run()
    assert held["FullAttentionSpec"] >= 350 // 32
    assert held["SlidingWindowSpec"] <= 4


# --- the output is the target's -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["5", "random", "0", "adaptive"])
def test_greedy_output_is_the_targets(random_target, drafting, monkeypatch, kind):
    """Four long requests in mixed batches, in chunks, through preemptions; drafts mostly wrong."""
    drafting.reset_prefix_cache()
    policy = make_policy(kind, drafting)
    prompts = [prompt(length, length) for length in (5, 60, 90, 130)]
    preempted = record_calls(monkeypatch, drafting.scheduler, "_preempt_request")
    with policy_of(drafting, policy):
        outputs = drafting.generate(prompts, greedy(160))
    assert preempted, "the cache was large enough for everybody"
    for given, output in zip(prompts, outputs, strict=True):
        assert len(output) == 160
        assert_greedy(random_target, given, output)


def test_without_drafts_the_context_is_stored_and_the_drafter_does_not_run(windowed, monkeypatch):
    """With a window the context cannot wait. vLLM's own step would run a draft pass, too."""
    engine, *_ = windowed
    engine.reset_prefix_cache()
    speculator = engine.runner.speculator
    generate = Mock(wraps=speculator._generate_draft)
    store = Mock(wraps=speculator.model.precompute_and_store_context_kv)
    monkeypatch.setattr(speculator, "_generate_draft", generate)
    monkeypatch.setattr(speculator.model, "precompute_and_store_context_kv", store)
    with policy_of(engine, FixedWidth(NUM_DRAFTS, 0)):
        engine.generate([prompt(30)], greedy(10))
    assert not generate.called
    assert sum(len(call.args[1]) for call in store.call_args_list) == 30 + 9  # positions


@pytest.mark.parametrize("kind", ["0", "random"])
def test_greedy_output_is_the_targets_with_a_window(random_target, windowed, kind):
    """Pages that the window leaves behind become the target's: nothing late is written there."""
    engine, *_ = windowed
    engine.reset_prefix_cache()
    prompts = [prompt(10 + 7 * index, index) for index in range(12)]
    with policy_of(engine, make_policy(kind, engine)):
        outputs = engine.generate(prompts, greedy(90))
    for given, output in zip(prompts, outputs, strict=True):
        assert_greedy(random_target, given, output)


@pytest.mark.parametrize("kind", ["5", "random", "adaptive"])
def test_greedy_output_is_the_targets_when_drafts_are_right(target, engine, monkeypatch, kind):
    engine.reset_prefix_cache()
    policy = make_policy(kind, engine)
    prompts = [prompt(length, length, vocab=14) for length in (3, 40, 70)]
    chosen = record_calls(monkeypatch, policy, "widths")
    with policy_of(engine, policy), watch_drafts(engine) as seen:
        outputs = engine.generate(prompts, greedy(200))
    for given, output in zip(prompts, outputs, strict=True):
        assert len(output) == 200
        assert_greedy(target, given, output)
    if kind == "random":
        assert any(len(set(widths)) > 1 for _, widths in chosen), "every request had the same width"
    if kind == "5":
        # 200 tokens in fewer than 70 steps: more than two of three came from drafts.
        assert len(seen) < 3 * 70


def test_adaptive_widths_follow_each_request(engine, monkeypatch):
    """Side by side, one whose drafts are mostly kept and one whose tokens are nearly random."""
    engine.reset_prefix_cache()
    policy = make_policy("adaptive", engine)
    params = [greedy(60), greedy(60, temperature=2.0, seed=1)]
    chosen = record_calls(monkeypatch, policy, "widths")
    with policy_of(engine, policy):
        engine.generate([prompt(3, 3, vocab=14), prompt(4, 3, vocab=14)], params)
    pairs = np.array([widths for _, widths in chosen if len(widths) == 2])
    assert len(pairs) > 5
    kept, random = pairs.mean(axis=0)
    assert abs(kept - random) > 1, pairs


def test_a_policy_is_told_what_happened(engine, monkeypatch):
    engine.reset_prefix_cache()
    speculator = engine.runner.speculator
    monkeypatch.setattr(speculator.steering, "end_ids", torch.zeros(0, dtype=torch.int64))
    prompts = [prompt(length, length, vocab=14) for length in (9, 300)]
    with policy_of(engine, RandomWidth(NUM_DRAFTS)) as policy:
        engine.generate(prompts, greedy(30))
    steps: list[VerifiedStep] = policy.steps
    assert sum(step.in_prompt.sum() for step in steps) > len(prompts)  # chunks
    emitted = sum(int((step.accepted + 1)[~step.in_prompt].sum()) for step in steps)
    # The first token of each is its prompt's; what ran beyond max_tokens is cut.
    assert 58 <= emitted <= 58 + 2 * NUM_DRAFTS
    assert {step.drafted for step in steps} == {True, False}
    for step in steps:
        assert (step.accepted <= step.verified).all()
    assert max(step.verified.max() for step in steps) == NUM_DRAFTS
    assert any((step.verified[~step.in_prompt] == 0).any() for step in steps)
    assert all(((each > 0) & (each <= 1)).all() for each in policy.confidence)


def test_the_drafter_is_never_sure_of_a_draft_that_ends_the_answer(engine, monkeypatch):
    steering = engine.runner.speculator.steering
    end: list[int] = []
    runs = []
    for _ in range(2):
        engine.reset_prefix_cache()
        monkeypatch.setattr(steering, "end_ids", torch.tensor(end, dtype=torch.int64))
        with policy_of(engine, RandomWidth(NUM_DRAFTS)) as policy, watch_drafts(engine) as seen:
            engine.generate([prompt(9, 9, vocab=14)], greedy(60))
        runs.append((policy, [draft.drafts for draft in seen]))
        end = [seen[-1].drafts[1]]
    (without, drafts), (with_end, same_drafts) = runs
    assert drafts == same_drafts  # the same random widths, and the text depends on nothing
    for before, after in zip(without.confidence, with_end.confidence, strict=True):
        assert ((before == after) | (after == 0)).all()
    assert any((after == 0).any() for after in with_end.confidence)


def test_a_draft_that_ends_the_answer_counts_as_rejected_with_those_behind_it(engine):

    def steps(max_tokens: int) -> list[VerifiedStep]:
        engine.reset_prefix_cache()
        with policy_of(engine, RandomWidth(NUM_DRAFTS)) as policy:
            engine.generate([prompt(9, 9, vocab=14)], greedy(max_tokens))
        return policy.steps

    whole, lasts = steps(60), []
    for max_tokens in range(30, 36):  # by its length: any token may end it
        pairs = list(zip(whole, steps(max_tokens), strict=False))
        assert all((before.accepted == after.accepted).all() for before, after in pairs[:-1])
        lasts.append(pairs[-1])
    assert all((after.accepted <= before.accepted).all() for before, after in lasts)
    assert any((after.accepted < before.accepted).any() for before, after in lasts)


def test_an_aborted_request_leaves_nothing_behind(random_target, drafting):
    drafting.reset_prefix_cache()
    doomed = drafting.add(prompt(50, 4), greedy(100))
    kept = drafting.add(prompt(20, 9), greedy(30))
    for _ in range(8):
        drafting.step()
    drafting.llm.llm_engine.abort_request([doomed])
    late = drafting.add(prompt(33, 5), greedy(30))
    finished = drafting.run()
    for req_id, given in ((kept, prompt(20, 9)), (late, prompt(33, 5))):
        assert_greedy(random_target, given, list(finished[req_id].outputs[0].token_ids))
    drafting.reset_prefix_cache()  # asserts that no KV block leaked


# --- every sampling parameter ---------------------------------------------------------------------

PLAIN = ("greedy", "one candidate", "tiny nucleus", "certain")


@pytest.fixture(scope="module")
def answers(plain, drafting):
    """What both engines answer to every case, alone and beside others."""
    contexts = [prompt(3), prompt(40, 1)]
    pairs = list(itertools.product(CASES, contexts))
    params = [greedy(24, **CASES[name]) for name, _ in pairs]
    both = []
    for engine in (plain, drafting):
        engine.reset_prefix_cache()
        outputs = engine.generate([context for _, context in pairs], params)
        named: dict[str, list[list[int]]] = {}
        for (name, _), output in zip(pairs, outputs, strict=True):
            named.setdefault(name, []).append(output)
        both.append(named)
    return both


@pytest.mark.parametrize("case", CASES)
def test_a_sampling_parameter_does_the_same_with_drafts(answers, case):
    without, with_drafts = answers
    assert with_drafts[case] == without[case]
    assert (without[case] == without["greedy"]) == (case in PLAIN)


def test_logprobs_are_the_targets(plain, drafting):
    params = greedy(12, logprobs=3, prompt_logprobs=2)
    ours, theirs = (engine.outputs([prompt(20, 3)], params)[0] for engine in (drafting, plain))
    assert_same_logprobs(ours.prompt_logprobs, theirs.prompt_logprobs)
    assert_same_logprobs(ours.outputs[0].logprobs, theirs.outputs[0].logprobs)


def test_a_prompt_of_one_token_beside_another_request_has_no_logprobs(drafting):
    drafting.add(prompt(20, 3), greedy(30))
    drafting.step()
    short = drafting.add(prompt(1), greedy(3, prompt_logprobs=0))
    assert drafting.run()[short].prompt_logprobs == [None]


# --- refused when the server starts ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (random_drafter(features=3), r"\[64, 192\].*\[64, 128\]"),
        (random_drafter() | {"norm.weight": None}, r"lacks norm\.weight"),
        (random_drafter() | {"d2t": torch.zeros(512)}, r"lacks lm_head\.weight"),
        (
            random_drafter() | {"d2t": torch.ones(512), "lm_head.weight": torch.zeros(512, 64)},
            "d2t names tokens 1 to 512",
        ),
    ],
)
def test_weights_that_contradict_the_config_are_refused(random_target, tmp_path, weights, words):
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    with pytest.raises((ValueError, AssertionError), match=words):
        drafting_engine(random_target, write_drafter(tmp_path, drafter_config(), kept), NUM_DRAFTS)


def test_a_drafter_with_another_tokenizer_is_refused_at_start(random_target, tmp_path):
    text = (random_target / "tokenizer.json").read_text()
    drafter = write_drafter(tmp_path)
    (drafter / "tokenizer.json").write_text(text.replace('"a":', '"aa":', 1))
    with pytest.raises(ValueError, match="tokenizer"):
        drafting_engine(random_target, drafter, NUM_DRAFTS)
