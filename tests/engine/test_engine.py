"""Requests through vLLM's real engine: whatever else happens, the tokens are those of a quiet run.

The quiet run itself is held to Hugging Face in ``test_parity.py``.
"""

from collections.abc import Sequence

import psutil
import torch
from vllm import SamplingParams

from dllm.patches import cpu_worker
from dllm.patches.cpu_worker import padded_size, return_free_memory
from tests.engine.test_parity import CANVAS, prompt
from tests.support.engine_harness import assert_same_runs, get_engine
from tests.support.recorded_calls import record_calls

# Below the size from which glibc asks the system for each block of memory.
NUM_BLOCKS, BLOCK_BYTES = 1000, 100_000


def params(
    blocks: float = 3, seed: int = 1, bad_word_ids: Sequence[Sequence[int]] = (), **options
) -> SamplingParams:
    """`blocks` canvases of output, not ended by end-of-sequence; bad words as token ids."""
    options = {"ignore_eos": True, "max_tokens": int(blocks * CANVAS), "seed": seed} | options
    result = SamplingParams(**options)
    if bad_word_ids:
        result._bad_words_token_ids = [list(word) for word in bad_word_ids]
    return result


def scheduled_spans(outputs) -> list[tuple[int, int, int]]:
    """(tokens past the prompt so far, tokens scheduled, canvas tokens among them), per request."""
    prompt_lens, spans = {}, []
    for output in outputs:
        computed = {new.req_id: 0 for new in output.scheduled_new_reqs}
        prompt_lens |= {new.req_id: len(new.prompt_token_ids) for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for req_id, count in output.num_scheduled_tokens.items():
            canvas = output.scheduled_spec_decode_tokens.get(req_id, ())
            spans.append((computed[req_id] - prompt_lens[req_id], count, len(canvas)))
    return spans


# --- the core rule -------------------------------------------------------------------------------


def test_an_emitted_block_is_committed_at_the_head_of_the_next_pass(engine):
    _, steps = engine.denoised(prompt(10), params(blocks=3))
    emitting = [i for i, step in enumerate(steps) if step.num_emitted]
    assert [steps[i].num_emitted for i in emitting] == [CANVAS] * 3
    # The first pass carries the prompt, causal, in front of the canvas; the pass after an emission
    # carries the block. No other pass has a causal span, and the last block is never committed.
    causal_lens = {i: step.causal_len for i, step in enumerate(steps) if step.causal_len}
    assert causal_lens == {0: 10} | {i + 1: CANVAS for i in emitting[:-1]}
    assert emitting[-1] == len(steps) - 1


# --- key-value cache -----------------------------------------------------------------------------


def first_pages(engine) -> list[int]:
    """The first page of the only request, of each KV cache group."""
    (slot,) = engine.runner.req_states.req_id_to_index.values()
    return [int(table.gpu[slot, 0]) for table in engine.runner.block_tables.block_tables]


def page_contents(engine, pages: Sequence[int] | None = None) -> list[torch.Tensor]:
    """The raw contents of a page of each KV cache group, for every layer; by default the first."""
    layers = engine.runner.vllm_config.compilation_config.static_forward_context
    groups = engine.runner.kv_cache_config.kv_cache_groups
    return [
        layers[name].kv_cache[page].clone()
        for group, page in zip(groups, pages or first_pages(engine), strict=True)
        for name in group.layer_names
    ]


def test_the_kv_of_generated_blocks_equals_that_of_the_same_tokens_prefilled(engine):
    """Page by page, every layer: causal rows get the encoder's input and layer scalar."""
    page = engine.runner.block_tables.block_sizes[0]
    context = prompt(page - 2 * CANVAS - 3)
    sampling = params(blocks=4)
    contents = {}
    tokens = None
    for name in ("generated", "prefilled"):
        engine.reset_prefix_cache()
        ids = context if tokens is None else context + tokens[: 3 * CANVAS]
        req_id = engine.add(ids, sampling if tokens is None else params(blocks=1))
        finished, pages = {}, None
        while engine.llm.llm_engine.has_unfinished_requests():
            finished |= {output.request_id: output for output in engine.step()}
            pages = pages or first_pages(engine)
        tokens = tokens or list(finished[req_id].outputs[0].token_ids)
        contents[name] = page_contents(engine, pages)
    assert len(contents["generated"]) == 4  # layers
    for generated, prefilled in zip(contents["generated"], contents["prefilled"], strict=True):
        torch.testing.assert_close(generated, prefilled, rtol=1e-4, atol=1e-4)


# --- batches, budgets, interruptions -------------------------------------------------------------


def test_prompts_longer_than_the_token_budget_and_budgets_smaller_than_the_batch(
    engine, checkpoint, monkeypatch
):
    """Budget 72: prompts come in chunks, and a 64-token block and canvas often do not fit."""
    small = get_engine(checkpoint(), max_num_batched_tokens=72)
    contexts = [prompt(length, salt=length) for length in (200, 100, 30)]
    expected = [engine.quiet_run(context, params()) for context in contexts]
    small.reset_prefix_cache()
    outputs = record_calls(monkeypatch, small.scheduler, "schedule")
    with small.one_pass_a_step():
        assert_same_runs(small.runs(contexts, params()), expected)
    spans = scheduled_spans(output for _, output in outputs)
    assert any(done < 0 and count == 72 for done, count, _ in spans), "no prompt chunk"
    assert any(done >= 0 and canvas == 0 for done, _, canvas in spans), "no block went alone"
    assert any(span[1:] == (2 * CANVAS, CANVAS) for span in spans), "nor with its canvas"
    # A canvas is scheduled whole or not at all.
    assert {canvas for *_, canvas in spans} == {0, CANVAS}


# --- noise ---------------------------------------------------------------------------------------


def test_without_a_seed_every_request_draws_its_own_noise(engine):
    same = [prompt(20)] * 3
    outputs = engine.generate(same, SamplingParams(max_tokens=CANVAS, ignore_eos=True))
    assert len({tuple(tokens) for tokens in outputs}) == 3


# --- on a CPU ------------------------------------------------------------------------------------


def test_a_padded_size_is_at_most_an_eighth_larger_and_one_of_few():
    sizes = [padded_size(count) for count in range(1, 2049)]
    assert sizes[:16] == list(range(1, 17))
    assert all(count <= size <= count * 9 / 8 for count, size in enumerate(sizes, 1))
    assert len(set(sizes)) == 16 + 7 * 8


def test_a_pass_on_a_cpu_has_a_padded_size_and_no_more_than_fits(engine):
    """Prompts of any length share what oneDNN compiles for a number of rows."""
    rows = []

    def note(model, arguments, inputs):
        rows.append(len(inputs["inputs_embeds"]))

    lengths, most = range(100, 133), engine.runner.max_num_tokens
    with engine.runner.model.register_forward_pre_hook(note, with_kwargs=True):
        for length in lengths:
            engine.generate([prompt(length)], params(blocks=1))
        engine.generate([prompt(2 * most - 1)], params(blocks=1))
    assert set(rows) <= {*map(padded_size, range(most)), most}
    assert len(set(rows)) < len(lengths)


def test_gaps_in_the_heap_go_back_to_the_system(engine, monkeypatch):
    """Once at the first step after the time has come, not at each."""
    worker, returned = engine.core.model_executor.driver_worker.worker, []
    process = psutil.Process()

    def measured():
        before = process.memory_info().rss
        return_free_memory()
        returned.append(before - process.memory_info().rss)

    monkeypatch.setattr(cpu_worker, "return_free_memory", measured)
    blocks = [bytearray(b"x" * BLOCK_BYTES) for _ in range(NUM_BLOCKS)]
    kept = blocks[::100]  # the last of these holds the end of the heap
    del blocks
    monkeypatch.setattr(worker, "_trim_at", 0.0)
    engine.generate([prompt(10)], params(blocks=2))
    assert len(returned) == 1 and returned[0] > NUM_BLOCKS * BLOCK_BYTES / 2, returned
    assert len(kept) == NUM_BLOCKS // 100
