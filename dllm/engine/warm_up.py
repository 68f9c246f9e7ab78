"""Runs made-up requests through the worker at start, so that no real request waits for a compiler.

They visit every kind of batch that is compiled separately: prompt chunks (without logits), canvases
alone, causal spans with canvases, one request and several, with and without top-k, top-p and min-p.
Every canvas is emitted. Some requests have edited logits, logprobs of the prompt and of blocks, or
a grammar: each of these has kernels of its own, which a GPU compiles when they are first run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers


def warm_up(runner: Any, execute_model: Callable[[SchedulerOutput], Any]) -> None:
    """Two requests come first. With one, the number of logit rows equals the canvas length, and
    ``torch.compile`` would assume that the two sizes are always equal.
    """
    longest = min(runner.num_speculative_steps, runner.max_model_len - 1)
    # With one denoise step per block each canvas is emitted at once. So three passes see all there
    # is: a prompt, a canvas, and an emitted block (causal span) with the next canvas.
    one_step = dict(runner.model_state.algorithm.settings.one_step)
    # An output as long as its canvas needs the logits of all of it.
    plain = SamplingParams(max_tokens=longest, seed=0, extra_args=one_step)
    filtered = SamplingParams(
        max_tokens=longest, seed=0, top_k=2, top_p=0.5, min_p=0.1, extra_args=one_step
    )
    for params in (plain, filtered):
        for num_reqs, width in ((2, longest), (1, longest), (1, longest // 2 or 1)):
            _CanvasRequests([[0]] * num_reqs, params, width).serve(runner, execute_model)
    # A typed decision has logits for its first tokens alone.
    read = SamplingParams(max_tokens=1, seed=0, extra_args=one_step)
    _CanvasRequests([[0]], read, longest).serve(runner, execute_model)
    scored = SamplingParams(
        max_tokens=longest,
        seed=0,
        extra_args=one_step,
        logprobs=1,
        logprob_token_ids=[0],
        prompt_logprobs=1,
        logit_bias={0: 0.0},
        min_tokens=1,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        _bad_words_token_ids=[[0], [0, 0]],
    )
    # The last token of a prompt has no logprobs of its own: it takes two to have some.
    width = min(longest, runner.max_model_len - 2)
    scored_and_filtered = scored.clone()
    scored_and_filtered.top_k = 2
    # On a GPU logits that are not raw have kernels of their own for filters (``engine.sampler``).
    for params in (scored, scored_and_filtered) if runner.device.type == "cuda" else (scored,):
        for num_reqs in (2, 1):
            _CanvasRequests([[0, 0]] * num_reqs, params, width).serve(runner, execute_model)
    free = SamplingParams(max_tokens=longest, seed=0, stop_token_ids=[0], extra_args=one_step)
    constrained = _with_any_text(free, runner.model_config.get_vocab_size())
    _CanvasRequests([[0]], constrained, longest).serve(runner, execute_model)


def serve_made_up(
    runner: Any,
    execute_model: Callable[[SchedulerOutput], Any],
    num_reqs: int,
    params: SamplingParams | None = None,
    adapter: LoRARequest | None = None,
) -> list[torch.Tensor]:
    """Passes of prompts, canvases, and emitted blocks, the same each time.

    Prompts are longer where there are few requests, so that their keys are computed in parts, and
    no multiples of a canvas, so that a CUDA graph of their tokens is padded. A canvas may become
    one token alone, so that what follows does not depend on a rounding. With ``params`` canvases go
    on: the third pass denoises them once more.

    Returns the hidden states ``[requests, tokens, hidden]`` of as many passes as there is room for.
    """
    width = min(runner.num_speculative_steps, runner.max_model_len - 1)
    vocab_size = runner.model_config.get_vocab_size()
    is_async = runner.vllm_config.scheduler_config.async_scheduling
    is_in_place = is_async or params is not None
    if params is None:
        params = SamplingParams(
            allowed_token_ids=[vocab_size // 2],
            extra_args=dict(runner.model_state.algorithm.settings.one_step),
        )
    params.max_tokens, params.seed = width, 0
    behind = width if is_in_place else 2 * width
    room = min((runner.max_model_len - behind) // width, runner.max_num_tokens // width // num_reqs)
    prompt_len = max(1, min(room, max(1, 8 // num_reqs)) * width)
    if runner.model_state.algorithm.settings.block_size == 1:  # else canvases begin with blocks
        prompt_len -= min(3, prompt_len - 1)
    prompts = [[(n + i) % vocab_size for i in range(prompt_len)] for n in range(num_reqs)]
    requests = _CanvasRequests(prompts, params, width, is_in_place, adapter)
    return requests.serve(runner, execute_model)


@contextmanager
def made_up_adapters(runner: Any) -> Iterator[list[LoRARequest | None]]:
    """No adapter, and one of vLLM's, which are zeros and change nothing: it is made random."""
    with runner.maybe_setup_dummy_loras(runner.lora_config):
        if runner.lora_config is None:
            yield [None]
            return
        random = torch.Generator().manual_seed(0)
        layers = runner.lora_manager._adapter_manager.get_adapter(1).loras.values()
        with torch.inference_mode():
            for matrix in tree_leaves([(layer.lora_a, layer.lora_b) for layer in layers]):
                if matrix is not None:
                    matrix.normal_(std=matrix.shape[-1] ** -0.5, generator=random)
        yield [None, LoRARequest("warmup_1", 1, "/not/a/real/path")]


def _with_any_text(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """A grammar that allows every text."""
    # Not imported in the worker of vLLM's own diffusion model, which has this module, too.
    from dllm.grammar.constraint import Constraint
    from dllm.grammar.table import Table
    from dllm.settings.request import with_grammar

    table = Table.of_any_text(vocab_size)
    return with_grammar(params, Constraint.serialize(table.to_bytes(), None))


def canvas_batch(buffers: InputBuffers, num_reqs: int, canvas_length: int) -> InputBatch:
    """The step that needs the most memory; ``buffers`` are written to, as by vLLM's own batches."""
    num_reqs = min(num_reqs, buffers.max_num_tokens // canvas_length)
    num_rows = num_reqs * canvas_length
    batch = InputBatch.make_dummy(num_reqs, num_rows, buffers)
    starts = np.arange(num_reqs + 1, dtype=np.int32) * canvas_length
    places = torch.arange(canvas_length, dtype=torch.int32, device=buffers.device)
    return replace(
        batch,
        num_draft_tokens=num_rows,
        num_draft_tokens_per_req=np.diff(starts),
        expanded_idx_mapping=batch.idx_mapping.repeat_interleave(canvas_length),
        expanded_local_pos=places.repeat(num_reqs),
        logits_indices=torch.arange(num_rows, device=buffers.device),
        cu_num_logits=torch.from_numpy(starts).to(buffers.device),
        cu_num_logits_np=starts,
    )


@dataclass(frozen=True)
class _CanvasRequests:
    """Requests with prompts of one length and canvases of ``width`` tokens, as messages."""

    prompts: Sequence[list[int]]
    params: SamplingParams
    width: int
    is_in_place: bool = False  # an emitted block is written where its canvas is
    adapter: LoRARequest | None = None

    def serve(
        self, runner: Any, execute_model: Callable[[SchedulerOutput], Any]
    ) -> list[torch.Tensor]:
        """Hidden states of a prompt, a canvas, an emitted block, as far as there is room."""
        prompt_len, causal_len = len(self.prompts[0]), 0 if self.is_in_place else self.width
        found: list[torch.Tensor] = []
        most = min(prompt_len + self.width + causal_len, runner.max_model_len)
        pages = self.pages(runner, most)
        if pages is None:
            return found
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = self.arriving(pages)
        # For each pass: tokens computed before it, tokens scheduled, and how many of the scheduled
        # tokens are canvas tokens.
        for before, scheduled, canvas in (
            (0, prompt_len, 0),
            (prompt_len, self.width, self.width),
            (prompt_len, causal_len + self.width, self.width),
        ):
            fits_budget = self.num_reqs * scheduled <= runner.max_num_tokens
            if not fits_budget or before + scheduled > runner.max_model_len:
                continue
            if before:
                output = SchedulerOutput.make_empty()
                output.scheduled_cached_reqs = self.running(before)
            output.num_scheduled_tokens = dict.fromkeys(self.req_ids, scheduled)
            output.total_num_scheduled_tokens = self.num_reqs * scheduled
            output.num_spec_tokens_to_schedule = runner.num_speculative_steps
            if canvas:
                output.scheduled_spec_decode_tokens = dict.fromkeys(self.req_ids, [0] * canvas)
            execute_model(output)
            hidden = runner.execute_model_state.hidden_states[: self.num_reqs * scheduled].clone()
            found.append(hidden.unflatten(0, (self.num_reqs, scheduled)))
            # Wait for the pass. vLLM writes what passes read into two buffers in turn: with more
            # passes on their way, one could read what was written for another.
            runner.sample_tokens(None).get_output()
        execute_model(self.leaving())
        return found

    @property
    def num_reqs(self) -> int:
        return len(self.prompts)

    @property
    def req_ids(self) -> list[str]:
        return [f"_warmup_{i}_" for i in range(self.num_reqs)]

    def pages(self, runner: Any, length: int) -> list[int] | None:
        """A request's KV pages in each group; None if there are too few of them, or of slots."""
        groups = runner.kv_cache_config.kv_cache_groups
        pages = [-(-length // group.kv_cache_spec.block_size) for group in groups]
        has_slots = self.num_reqs <= runner.max_num_reqs
        if not has_slots or self.num_reqs * sum(pages) >= runner.kv_cache_config.num_blocks:
            return None
        return pages

    def arriving(self, pages: Sequence[int]) -> list[NewRequestData]:
        """No two requests share a page. ``pages``: of ``pages``."""
        requests, next_page = [], 1  # page 0 is vLLM's null page
        for req_id, prompt in zip(self.req_ids, self.prompts, strict=True):
            block_ids = []
            for count in pages:
                block_ids.append(list(range(next_page, next_page + count)))
                next_page += count
            requests.append(
                NewRequestData(
                    req_id=req_id,
                    prompt_token_ids=prompt,
                    mm_features=[],
                    sampling_params=self.params,
                    pooling_params=None,
                    block_ids=tuple(block_ids),
                    num_computed_tokens=0,
                    lora_request=self.adapter,
                    prefill_token_ids=prompt,
                )
            )
        return requests

    def running(self, num_computed: int) -> CachedRequestData:
        cached = CachedRequestData.make_empty()
        cached.req_ids = self.req_ids
        cached.num_computed_tokens = [num_computed] * self.num_reqs
        cached.num_output_tokens = [0] * self.num_reqs
        cached.new_block_ids = [None] * self.num_reqs
        return cached

    def leaving(self) -> SchedulerOutput:
        """Frees their slots."""
        finish = SchedulerOutput.make_empty()
        finish.finished_req_ids = set(self.req_ids)
        return finish
