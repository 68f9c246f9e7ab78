"""CanvasScheduler: schedules a canvas whole or not at all, and counts only causal KV.

To vLLM's scheduler a canvas is draft tokens (``request.spec_token_ids``). It needs their number
only; the token ids stay in the worker. The first canvas of a request is scheduled with the last
chunk of its prompt, unless the request asks for prompt logprobs: vLLM's worker takes whatever is
scheduled together with a prompt for a part of it, and would score the canvas, too.

When a block is emitted, its tokens are added to ``request.num_tokens`` but not to
``num_computed_tokens``. So vLLM's scheduler schedules the block's tokens once more in the next
step, in front of the next canvas. That pass is causal, and writes the KV that is kept.
"""

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from dllm import LOGGER
from dllm.engine.channels import CanvasAnswer, RepeatableSchedule
from dllm.engine.derived import as_one_of
from dllm.engine.emitted_blocks import GrammarCapacity, capacity_for, most_searched
from dllm.engine.frames import FrameMail
from dllm.engine.metrics import Counts, send
from dllm.engine.sessions import SessionScheduler
from dllm.engine.thoughts import Thought
from dllm.settings.denoising import NO_TOKEN, WHOLE_SEQUENCE, block_size_of
from dllm.settings.request import requested_canvas_width
from dllm.settings.server import options_of
from dllm.settings.thoughts import marks_of

logger = init_logger(LOGGER)


class CanvasScheduler(SessionScheduler):
    def __init__(self, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*args, **kwargs)
        options = options_of(self.vllm_config)
        self._separates_passes = options.separate_passes
        # Of requests that have not emitted anything yet: fields of the worker's answer, by request.
        self._prompt_logprobs: dict[str, dict[str, Any]] = {
            "prompt_logprobs_dict": {},
            "prompt_token_id_logprobs_dict": {},
        }
        self._block_length = block_size_of(self.vllm_config)
        self._keeps_context = options.context_cache == "block"
        # Lets the base class ask `_mamba_block_aligned_split` how long a prompt chunk may be.
        self.need_mamba_block_aligned_split |= self._block_length > 1
        self._marks = marks_of(self.vllm_config)
        self._thoughts: dict[str, Thought | None] = {}  # of requests that have emitted something
        self._counts = Counts()  # of what happened after the last statistics were made
        self._num_passes = 1  # of the engine step whose output is being counted
        vocab_size = self.vllm_config.model_config.get_vocab_size()
        num_requests = self.scheduler_config.max_num_seqs
        self._grammar_capacity = GrammarCapacity(
            capacity_for(num_requests, vocab_size), most_searched(num_requests)
        )

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """vLLM's; the tail of a causal span does not count as computed: its block is not whole yet.

        With ``context_cache: block`` it does, until its canvas emits.

        Of structured outputs vLLM hears nothing: the worker masks canvases itself. Else vLLM would
        make masks here, which an asynchronous engine step would wait for, and copy every canvas to
        the host for them.
        """
        super()._update_after_schedule(scheduler_output)
        scheduler_output.has_structured_output_requests = False
        scheduler_output.pending_structured_output_tokens = False
        for req_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[req_id]
            has_canvas = req_id in scheduler_output.scheduled_spec_decode_tokens
            if not request.is_prefill_chunk and not (self._keeps_context and has_canvas):
                request.num_computed_tokens -= request.num_tokens % self._block_length

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """A request waits, too, until there is room for the table of its grammar."""
        admits = self._grammar_capacity.admits(request)
        return admits and super()._handle_blocked_waiting_request(request)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._grammar_capacity.release(request)
        self._thoughts.pop(request.request_id, None)
        return super()._free_request(request, delay_free_blocks)

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        """A piece of streamed input may have a thinking budget of its own."""
        super()._update_request_as_session(session, update)
        self._thoughts.pop(session.request_id, None)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Behind an engine step: each request behind its prompt has a canvas.

        vLLM's would cut the canvas where a grammar does not allow its tokens.
        """
        for req_id in draft_token_ids.req_ids:
            request = self.requests.get(req_id)
            if request is not None and not request.is_finished():
                width = 0 if request.is_prefill_chunk else self._canvas_width(request)
                request.spec_token_ids = [NO_TOKEN] * width

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """vLLM's cuts draft tokens to the token budget that is left, and a cut canvas would be
        denoised as if it were complete. So one that does not fit is taken out for this step.
        """
        if not self._separates_passes:
            self._give_canvases_to_chunked_prompts()
        withheld = self._withhold_canvases_that_do_not_fit()
        output = super().schedule(throttle_prefills)
        for request, canvas in withheld:
            # Give the canvas back, except in two cases: a request that is scheduled without its
            # canvas gets it back from the worker, and a preempted request starts a new canvas.
            is_running = request.status == RequestStatus.RUNNING
            if is_running and request.request_id not in output.num_scheduled_tokens:
                request.spec_token_ids = canvas
        if not self._separates_passes:
            self._give_canvases_to_new_requests(output)
        if self._may_repeat(output):
            output = as_one_of(RepeatableSchedule, output)
        return output

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """How much of ``num_new_tokens`` to schedule: what has to end a block is rounded down.

        That is a chunk of a prompt that is not the last: what follows the end of a block would be
        computed once more. And behind the prompt whatever is scheduled without a canvas: a tail
        alone leaves nothing. vLLM has this hook for models whose chunks end at certain positions.
        """
        start = request.num_computed_tokens + num_new_local_computed_tokens
        start += num_external_computed_tokens
        is_last = start + num_new_tokens >= request.num_tokens
        reads = request.status != RequestStatus.RUNNING or request.is_prefill_chunk
        if is_last and (reads or request.spec_token_ids):
            return num_new_tokens
        return num_new_tokens - num_new_tokens % self._block_length

    def _may_repeat(self, output: SchedulerOutput) -> bool:
        """No request waits for admission, or for room in the next step."""
        all_scheduled = all(one.request_id in output.num_scheduled_tokens for one in self.running)
        return all_scheduled and not self.waiting and not self.kv_holding_waiting

    def _canvas_width(self, request: Request) -> int:
        """A canvas ends where the model's context ends; with blocks, where the block does.

        Where every token sees all others, the canvas is what is left of the answer.
        """
        width = requested_canvas_width(request.sampling_params, self.num_spec_tokens)
        if self._block_length == WHOLE_SEQUENCE:
            width = min(width, request.max_tokens - request.num_output_tokens)
        elif self._block_length > 1:
            width = self._block_length - request.num_tokens % self._block_length
        return max(min(width, self.max_model_len - request.num_tokens), 0)

    def _give_canvases_to_chunked_prompts(self) -> None:
        """It is taken out again unless the rest of the prompt and the canvas fit into this step."""
        for request in self.running:
            if request.is_prefill_chunk and not _asks_for_prompt_logprobs(request):
                request.spec_token_ids = [NO_TOKEN] * self._canvas_width(request)

    def _give_canvases_to_new_requests(self, output: SchedulerOutput) -> None:
        """Behind every prompt that was admitted whole; vLLM gives those no draft tokens.

        Without token budget or KV pages for the canvas the prompt goes alone.
        """
        cap = self.scheduler_config.long_prefill_token_threshold or self.max_num_scheduled_tokens
        for data in output.scheduled_new_reqs:
            request = self.requests[data.req_id]
            width = self._canvas_width(request)
            scheduled = output.num_scheduled_tokens[data.req_id]
            left = self.max_num_scheduled_tokens - output.total_num_scheduled_tokens
            if request.is_prefill_chunk or not 0 < width <= min(left, cap - scheduled):
                continue
            if _asks_for_prompt_logprobs(request):
                continue
            # The prompt's whole blocks count as computed, so the new pages are those of the canvas
            # and the tail. The prompt counts as in flight, too, so no page of it is freed.
            tail = request.num_tokens % self._block_length
            if self.kv_cache_manager.allocate_slots(request, tail + width) is None:
                continue
            data.block_ids = self.kv_cache_manager.get_block_ids(data.req_id)
            if pages := self._get_new_block_ids_to_zero():
                output.new_block_ids_to_zero = [*(output.new_block_ids_to_zero or ()), *pages]
            output.num_scheduled_tokens[data.req_id] += width
            output.total_num_scheduled_tokens += width
            output.scheduled_spec_decode_tokens[data.req_id] = [NO_TOKEN] * width
            request.num_computed_tokens += width + (tail if self._keeps_context else 0)
            request.num_in_flight_tokens += width

    def _withhold_canvases_that_do_not_fit(self) -> list[tuple[Request, list[int]]]:
        """With ``separate_passes``, also the canvas behind an emitted block.

        Under asynchronous scheduling a canvas is scheduled behind those in flight, and is withheld
        where it would end beyond the model's context.
        """
        budget = self.max_num_scheduled_tokens
        cap = self.scheduler_config.long_prefill_token_threshold or budget
        withheld = []
        for request in self.running:
            width = self._canvas_width(request) if request.spec_token_ids else 0
            canvas = [NO_TOKEN] * width
            num_known = request.num_tokens + request.num_output_placeholders
            causal_len = num_known - request.num_computed_tokens
            needed = causal_len + len(canvas)
            # The causal span ends at least one block, or it is only the tail that precedes every
            # canvas.
            is_block = causal_len >= self._block_length and not request.is_prefill_chunk
            commits_alone = self._separates_passes and is_block
            is_beyond = num_known + len(canvas) > self.max_model_len
            if canvas and (needed > min(budget, cap) or commits_alone or is_beyond):
                withheld.append((request, canvas))
                canvas, needed = [], causal_len
                if not request.is_prefill_chunk:
                    needed -= needed % self._block_length  # a tail goes with its canvas
            request.spec_token_ids = canvas
            budget -= min(needed, budget, cap)
        return withheld

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self._end_broken_requests(model_runner_output)
        self._postpone_prompt_logprobs(model_runner_output)
        passes = model_runner_output if isinstance(model_runner_output, CanvasAnswer) else None
        self._num_passes = passes.num_passes if passes else 1
        frames = FrameMail(passes.frames if passes else [], self.requests)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        frames.add_to(outputs)
        return outputs

    def _end_broken_requests(self, answer: ModelRunnerOutput) -> None:
        """Let vLLM end a request with an error, and without its canvas, if that is not finite.

        ``num_nans_in_logits`` has rows of logits (``step_rows.denoise_rows``).
        """
        for req_id, num_broken in (answer.num_nans_in_logits or {}).items():
            if num_broken and req_id in self.requests:
                logger.error("dllm: the model's output is not finite (request %s)", req_id)
                answer.sampled_token_ids[answer.req_id_to_index[req_id]] = []
                self.encoder_cache_mismatch_reqs.add(req_id)

    def _postpone_prompt_logprobs(self, answer: ModelRunnerOutput) -> None:
        """Replace a step's prompt logprobs by those of the requests that emit in it.

        vLLM's worker returns them behind a prompt's last chunk, and its scheduler asserts that the
        first token comes with them.
        """
        for name, kept in self._prompt_logprobs.items():
            kept |= getattr(answer, name)
        if not any(self._prompt_logprobs.values()):
            return
        emitted = answer.sampled_token_ids
        emitting = {
            req_id for req_id, at in answer.req_id_to_index.items() if emitted and emitted[at]
        }
        for name, kept in self._prompt_logprobs.items():
            setattr(answer, name, {req_id: kept[req_id] for req_id in emitting & kept.keys()})
            waiting = (kept.keys() & self.requests.keys()) - emitting
            self._prompt_logprobs[name] = {req_id: kept[req_id] for req_id in waiting}

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """Append an emitted block to its request without counting the block's KV as computed.

        vLLM counts all that it schedules as computed, and takes off rejected drafts: all of a
        canvas that goes on. Those of one that is emitted are taken off here: a bidirectional pass
        wrote their KV, which the prefix cache must not get.
        """
        if not is_stale:
            request.num_computed_tokens -= len(new_token_ids)
        if self._keeps_context and new_token_ids:
            request.num_computed_tokens = 0
        updated = super()._update_request_with_output(request, new_token_ids, is_stale)
        self._count_thoughts(request, updated[0])
        return updated

    def _count_thoughts(self, request: Request, tokens: list[int]) -> None:
        """Read the tokens with which a request ends so far."""
        params, prompt = request.sampling_params, request.prompt_token_ids
        if params is None or params.thinking_token_budget is None:
            return
        if request.request_id not in self._thoughts:
            thought = Thought.of_request(params, prompt or [], self._marks)
            self._thoughts[request.request_id] = thought
        thought, start = self._thoughts[request.request_id], request.num_tokens - len(tokens)
        if thought is not None and (num_full := thought.read(tokens, start)):
            self._counts.add("thoughts_ended_by_budget", num_full)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and self._counts:
            send(stats, self._counts.take())
        return stats

    def make_spec_decoding_stats(self, spec_decoding_stats: Any, *args: Any, **of: Any) -> Any:
        """A canvas counts once in each pass; none converges but in the last of a step."""
        add, stats = super().make_spec_decoding_stats, spec_decoding_stats
        for _ in range(self._num_passes - 1):
            stats = add(stats, *args, **of | {"num_accepted_tokens": 0})
        return add(stats, *args, **of)


def _asks_for_prompt_logprobs(request: Request) -> bool:
    params = request.sampling_params
    return params is not None and (
        params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None
    )
