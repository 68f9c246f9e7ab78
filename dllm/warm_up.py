"""Warm-up: imaginary requests through the real worker, so that no real one waits for a compiler.

Every shape that is compiled apart is visited: prompt chunks (no logit rows at all), canvases on
their own, heads with canvases, one request and several.
"""

from collections.abc import Callable, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

# With one denoise step per block every pass emits: prompt, canvas, head + canvas.
PARAMS = SamplingParams(max_tokens=1, seed=0, extra_args={"diffusion_max_steps": 1})


def warm_up(runner: Any, execute_model: Callable[[SchedulerOutput], Any]) -> None:
    """Serve two, then one imaginary request of three passes each, then one with a narrow canvas.

    Two come first: with one, the logit rows are as many as the canvas is long, and the compiler
    would take the two sizes for the same.

    Args:
        runner: the worker's Model Runner V2, with its KV cache allocated.
        execute_model: the worker's method of that name.
    """
    canvas_length = runner.num_speculative_steps
    for num_reqs, width in ((2, canvas_length), (1, canvas_length), (1, canvas_length // 2 or 1)):
        pages = [
            -(-3 * canvas_length // group.kv_cache_spec.block_size)
            for group in runner.kv_cache_config.kv_cache_groups
        ]
        fits_cache = num_reqs * sum(pages) < runner.kv_cache_config.num_blocks
        fits_budget = num_reqs * 2 * canvas_length <= runner.max_num_tokens
        fits_length = 3 * canvas_length <= runner.max_model_len
        if fits_cache and fits_budget and fits_length and num_reqs <= runner.max_num_reqs:
            req_ids = [f"_warmup_{i}_" for i in range(num_reqs)]
            _serve(req_ids, width, pages, runner, execute_model)


def _serve(
    req_ids: Sequence[str],
    width: int,
    pages: Sequence[int],
    runner: Any,
    execute_model: Callable[[SchedulerOutput], Any],
) -> None:
    length = runner.num_speculative_steps
    prompt = [0] * length
    output = SchedulerOutput.make_empty()
    next_page = 1  # page 0 is vLLM's null page
    for req_id in req_ids:
        block_ids = []
        for count in pages:
            block_ids.append(list(range(next_page, next_page + count)))
            next_page += count
        output.scheduled_new_reqs.append(
            NewRequestData(
                req_id=req_id,
                prompt_token_ids=prompt,
                mm_features=[],
                sampling_params=PARAMS,
                pooling_params=None,
                block_ids=tuple(block_ids),
                num_computed_tokens=0,
                lora_request=None,
                prefill_token_ids=prompt,
            )
        )
    passes = [(0, length, 0), (length, width, width), (length, 2 * width, width)]
    for num_computed, num_scheduled, num_canvas in passes:
        if num_computed:
            output = SchedulerOutput.make_empty()
            output.scheduled_cached_reqs = _running(req_ids, num_computed)
        output.num_scheduled_tokens = dict.fromkeys(req_ids, num_scheduled)
        output.total_num_scheduled_tokens = len(req_ids) * num_scheduled
        output.num_spec_tokens_to_schedule = length
        if num_canvas:
            output.scheduled_spec_decode_tokens = {req_id: [0] * num_canvas for req_id in req_ids}
        execute_model(output)
        runner.sample_tokens(None)
    finish = SchedulerOutput.make_empty()
    finish.finished_req_ids = set(req_ids)
    execute_model(finish)


def _running(req_ids: Sequence[str], num_computed: int) -> CachedRequestData:
    cached = CachedRequestData.make_empty()
    cached.req_ids = list(req_ids)
    cached.num_computed_tokens = [num_computed] * len(req_ids)
    cached.num_output_tokens = [0] * len(req_ids)
    cached.new_block_ids = [None] * len(req_ids)
    return cached
