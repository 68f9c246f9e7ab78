"""One drafting step: store the context, draft with a pass over [last token, MASK x N], set widths.

vLLM's DFlash speculator prepares the step (positions, cache slots, CUDA graphs). This subclass adds
the network, several passes over the draft block, and the decision how many drafts are verified.

A draft is the most likely token and is treated as certain (a proposal distribution with all of its
mass on one token). Rejection sampling is then exact for any draft, however it was made.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler
from vllm.v1.worker.gpu.states import RequestState

from dllm import LOGGER
from dllm.drafter.deferred import DeferredContext
from dllm.drafter.metrics import CountedDrafts, DraftingCounts
from dllm.drafter.pair import drafter_options, end_ids
from dllm.drafter.recording import make_recorder, recorded_step
from dllm.drafter.schedule import reveal_counts, reveal_surest
from dllm.drafter.step import TargetStep
from dllm.drafter.widths.adaptive import AdaptiveWidth
from dllm.drafter.widths.choice import make_policy
from dllm.drafter.widths.policy import VerifiedStep, WidthPolicy
from dllm.drafter.widths.rehearsal import Rehearsal, measure_costs
from dllm.settings.drafting import CHOSEN, always_verifies_all

logger = init_logger(LOGGER)

Logits = Callable[[torch.Tensor], torch.Tensor]


class Drafter(DFlashSpeculator):
    """vLLM's speculator with our network and a width policy."""

    _speculator_name = "dllm drafter"

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        options = drafter_options(vllm_config)
        num_drafts = self.num_speculative_steps
        self.policy: WidthPolicy = make_policy(options, num_drafts, self.max_num_reqs)
        self._trims = not always_verifies_all(options, num_drafts)
        self._reveal_counts = reveal_counts(
            options.noise_schedule, num_drafts, options.denoise_steps
        )
        # [rows] of the step that was drafted last: drafts to be verified. Used if `_trims`.
        self._widths = np.zeros(0, dtype=np.int64)
        self._is_skipped = False  # no draft pass in this step
        self._narrows = options.block == CHOSEN
        # On a CPU the draft pass runs after the tokens were sent (`draft_late`). Not where other
        # ranks take part in the pass, or another server reads the pages, right after the step.
        self._drafts_late = (
            device.type == "cpu"
            and self.dp_size == vllm_config.parallel_config.pipeline_parallel_size == 1
            and vllm_config.kv_transfer_config is None
        )
        # [rows], of the step that is drafted now; None where blocks are full.
        self._block_widths: np.ndarray | None = None
        # The last step and vLLM's function that drafts for it, until `draft_late` calls it.
        self._undrafted: tuple[TargetStep, Callable[[], torch.Tensor]] | None = None
        self._end_ids = np.array(sorted(end_ids(vllm_config)), dtype=np.int64)
        self._recorder = make_recorder(vllm_config)
        self._deferred = DeferredContext()
        self._counts = DraftingCounts.none(num_drafts)  # of the steps after the last report
        # [rows, N]: the drafter's probability of each draft.
        self._confidence = torch.zeros(self.draft_tokens.shape, device=device)

    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        *others: Any,
        dummy_run: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """vLLM's hook after every step of the target: draft for each row, now or in ``draft_late``.

        Args:
            input_batch: the target's step.
            last_hidden_states: ``[tokens, hidden]``, output of the target's last layer.
            aux_hidden_states: the same for each layer that the drafter reads.
            num_sampled, num_rejected: ``[rows]``, tokens emitted, and drafts rejected in the step.
            last_sampled: ``[slots, 1]``, the last token of each request.

        Returns:
            ``[rows, N]`` int64 token ids; any values where nothing has been drafted (yet).
        """
        outcome = (num_sampled, num_rejected, last_sampled)
        step = TargetStep(input_batch, last_hidden_states, aux_hidden_states, *outcome)
        hidden_states = (last_hidden_states, aux_hidden_states)
        arguments = (input_batch, attn_metadata, slot_mappings, *hidden_states, *outcome, *others)
        draft = partial(super().propose, *arguments, dummy_run=dummy_run, **options)
        if dummy_run:
            self._is_skipped, self._block_widths = False, None
            return draft()
        # vLLM may ask for fewer drafts at large batches; those have to be made at once.
        num_drafts = options.get("num_speculative_tokens")
        if self._drafts_late and num_drafts in (None, self.num_speculative_steps):
            self._undrafted = step, draft
            return self.draft_tokens[: input_batch.num_reqs]
        return self._draft(step, draft)

    def draft_late(self, req_states: RequestState, handler: DraftTokensHandler) -> None:
        """On a CPU: draft for the last step, after its tokens have been sent to the clients.

        A CPU does one thing at a time: drafting inside ``propose`` would delay the tokens.

        Args:
            req_states, handler: the runner's, which hold what ``propose`` returned; the drafts are
                written over it.
        """
        if self._undrafted is None:
            return
        (step, draft), self._undrafted = self._undrafted, None
        drafts = self._draft(step, draft)
        req_states.draft_tokens[step.batch.idx_mapping] = drafts
        handler.set_draft_tokens(step.batch, drafts)

    def save_context_only(self) -> None:
        """Called instead of ``draft_late`` after a step that finished every request.

        Nothing is drafted. The step's context is still stored, or kept to be stored later, because
        other requests may reuse its pages through the prefix cache.
        """
        if self._undrafted is None:
            return
        (step, draft), self._undrafted = self._undrafted, None
        self._observe(step)
        self._is_skipped = True
        self._store_and_draft(step, draft)

    def _draft(self, step: TargetStep, draft: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Decide whether to draft, draft, and choose widths: ``[rows, N]`` token ids."""
        slots = step.batch.idx_mapping_np
        self._observe(step)
        only_prompts = bool(self._is_prompt_unfinished(step.batch).all())
        self._is_skipped = only_prompts or self.policy.limit(slots) == 0
        # Timed from here: `_observe` waits for the target's step, which is not drafting time.
        start = time.perf_counter()
        drafts = self._store_and_draft(step, draft)
        if self._trims:
            self._widths = self._choose_widths(slots, drafts)
        self._count(step.batch, time.perf_counter() - start)
        return drafts

    def _store_and_draft(self, step: TargetStep, draft: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Store the step's context and, unless skipped, draft; or keep the context for later."""
        if self._defers_context(step.batch):
            cache_slots = self.block_tables.slot_mappings
            self._deferred.append(step, cache_slots, self.draft_kv_cache_group_ids)
            return self.draft_tokens[: step.batch.num_reqs]
        self._store_deferred()
        slots = step.batch.idx_mapping_np
        self._block_widths = self.policy.block_widths(slots) if self._narrows else None
        return draft()

    def _observe(self, step: TargetStep) -> None:
        """Tell the policy and the recorder what the target's step did."""
        if self.policy.reads_outcomes:
            self.policy.observe(self._verified(step))
        if self._recorder is not None and not isinstance(self.policy, Rehearsal):
            self._recorder.observe(recorded_step(step))

    def _defers_context(self, batch: InputBatch) -> bool:
        """Whether this step's context is kept for later (``deferred``) instead of stored now.

        Stored now where several ranks draft together, or where KV transfer may copy the pages. Also
        with several KV cache groups (a draft window, sliding layers): a page that is freed while
        its context is kept may become a page of the target, and the late write would destroy it.
        """
        return (
            self._is_skipped
            and self.pcp_manager is None
            and self.dp_size == 1
            and self.vllm_config.kv_transfer_config is None
            and len(self.kv_cache_config.kv_cache_groups) == 1
            and self._deferred.admits(batch.num_tokens)
        )

    def _store_deferred(self) -> None:
        """Compute and store all of the kept context, in one product."""
        if not len(self._deferred):
            return
        context = self._deferred.take()
        assert self._layer_group_idx is not None, "our network names its layers"
        self.model.precompute_and_store_context_kv(
            self.model.combine_hidden_states(context.features),
            context.positions,
            [context.slots[group] for group in self._layer_group_idx],
        )

    def measure_costs(self, runner: Any, execute_model: Callable[[SchedulerOutput], Any]) -> None:
        """Measure what steps cost here, if the policy uses costs. Before the first request.

        Args:
            runner: the worker's Model Runner V2.
            execute_model: the worker's method of that name.
        """
        policy = self.policy
        if not isinstance(policy, AdaptiveWidth):
            return
        options = drafter_options(self.vllm_config)
        twin = make_policy(options, self.num_speculative_steps, self.max_num_reqs)
        self.policy = rehearsal = Rehearsal(twin)

        def wait() -> None:
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)

        try:
            costs = measure_costs(runner, execute_model, rehearsal, wait)
        finally:
            self.policy = policy
            self._counts = DraftingCounts.none(self.num_speculative_steps)
        if costs is not None:
            policy.costs = costs
            logger.info("Cost of a step, %s", costs)

    def report(self, drafts: DraftTokenIds) -> CountedDrafts:
        """The message to the scheduler: each row's first ``width`` drafts, and the counts."""
        drafts = self._trim(drafts)
        counts, self._counts = self._counts, DraftingCounts.none(self.num_speculative_steps)
        return CountedDrafts(drafts.req_ids, drafts.draft_token_ids, counts)

    def _count(self, batch: InputBatch, seconds: float) -> None:
        """Add a step to the counts. vLLM discards drafts of unfinished prompts: not counted."""
        num_drafts = self.num_speculative_steps
        self._counts.seconds += seconds
        if not self._is_skipped:
            self._counts.passes += 1
            self._counts.drafted += batch.num_reqs * num_drafts
        widths = self._widths if self._trims else np.full(batch.num_reqs, num_drafts)
        for width in widths[~self._is_prompt_unfinished(batch)].tolist():
            self._counts.widths[width] += 1

    @staticmethod
    def _is_prompt_unfinished(batch: InputBatch) -> np.ndarray:
        """``[rows]`` bool: part of the row's prompt is not computed yet after this step."""
        computed = batch.num_computed_prefill_tokens_np + batch.num_scheduled_tokens
        is_unfinished: np.ndarray = computed < batch.prefill_len_np
        return is_unfinished

    def _trim(self, drafts: DraftTokenIds) -> DraftTokenIds:
        """Each row's first ``width`` drafts."""
        if not self._trims:
            return drafts
        assert len(drafts.req_ids) == len(self._widths), (len(drafts.req_ids), len(self._widths))
        kept = [
            tokens[:width]
            for tokens, width in zip(drafts.draft_token_ids, self._widths.tolist(), strict=True)
        ]
        return DraftTokenIds(drafts.req_ids, kept)

    def _choose_widths(self, slots: np.ndarray, drafts: torch.Tensor) -> np.ndarray:
        """``[rows]``: how many drafts of each row the policy lets the next step verify."""
        if self._is_skipped:
            return np.zeros(len(slots), dtype=np.int64)
        confidence = None
        if self.policy.reads_confidence:
            confidence = self._confidence[: len(slots)].cpu().numpy()
        widths = self.policy.widths(slots, confidence, self._before_end(drafts))
        assert widths.shape == slots.shape, (widths.shape, slots.shape)
        assert ((widths >= 0) & (widths <= self.num_speculative_steps)).all(), widths
        return widths

    def _before_end(self, drafts: torch.Tensor) -> np.ndarray:
        """``[rows]``: number of drafts before the first that ends the answer; N if none does."""
        ends = np.isin(drafts.cpu().numpy(), self._end_ids)
        before: np.ndarray = np.where(ends.any(axis=1), ends.argmax(axis=1), ends.shape[1])
        return before

    def _verified(self, step: TargetStep) -> VerifiedStep:
        """What the target's step did, for the policy; waits for the device."""
        batch = step.batch
        in_prompt = np.asarray(batch.is_prefilling_np)
        samples = step.num_sampled.cpu().numpy() > 0
        verified = np.zeros(batch.num_reqs, dtype=np.int64)
        if batch.num_draft_tokens_per_req is not None:
            verified = np.where(in_prompt, 0, batch.num_draft_tokens_per_req)
        accepted = np.where(verified > 0, verified - step.num_rejected.cpu().numpy(), 0)
        logits = None
        if self.policy.reads_prompt:
            # Index of the one logit row of each prompt that ended in this step.
            ends = torch.from_numpy(batch.cu_num_logits_np[:-1][in_prompt & samples])
            rows = batch.logits_indices[ends.to(batch.logits_indices.device)]
            logits = self._target_logits(step.last_hidden_states[rows])
        return VerifiedStep(batch.idx_mapping_np, in_prompt, samples, verified, accepted, logits)

    def load_draft_model(
        self, target_model: torch.nn.Module, target_attn_layer_names: set[str]
    ) -> torch.nn.Module:
        """Load the network. It shares the target's embedding and head unless it has its own."""
        self._target_logits = cast(Logits, target_model.compute_logits)
        return super().load_draft_model(target_model, target_attn_layer_names)

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, object] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        """vLLM's hook: fill ``draft_tokens`` by one pass over the draft block, or by several.

        Of several passes each one decides some positions; the others are masked in the next pass.
        """
        if self._is_skipped:
            return
        arguments = (attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode)
        if len(self._reveal_counts) == 1:
            super()._generate_draft(num_reqs, num_tokens_padded, *arguments)
            return
        # Indices of the block's masked positions on the flat token axis, [rows * N].
        places = self.sample_indices[: num_reqs * self.num_speculative_steps]
        drafts, confidence = self.draft_tokens[:num_reqs], self._confidence[:num_reqs]
        is_masked = torch.ones_like(drafts, dtype=torch.bool)
        for count in self._reveal_counts:
            hidden = self._run_model(num_tokens_padded, *arguments)
            logits = self.model.compute_logits(hidden[places]).view(*drafts.shape, -1)
            reveal_surest(drafts, confidence, is_masked, logits, count)
            tokens = drafts.masked_fill(is_masked, self.parallel_drafting_token_id)
            self.input_buffers.input_ids[places] = tokens.view(-1).to(torch.int32)

    def _build_attn_metadata(
        self, num_reqs: int, *others: Any, **options: Any
    ) -> dict[str, Any] | None:
        """vLLM's hook before the pass; shortens ``seq_lens`` of rows with a narrower block.

        No position sees the masks after the shortened end. So a row's first w drafts are the same
        as those of a block with only w masks.
        """
        if self._block_widths is not None:
            firsts = self.input_buffers.positions[: num_reqs * self.num_query_per_req]
            firsts = firsts[:: self.num_query_per_req]  # [rows], position of the last token
            ends = firsts + 1 + torch.from_numpy(self._block_widths).to(firsts.device)
            self.input_buffers.seq_lens[:num_reqs] = ends.clamp_(max=self.max_model_len)
        return super()._build_attn_metadata(num_reqs, *others, **options)

    def _maybe_predict_acceptance(
        self, logits: torch.Tensor, idx_mapping: torch.Tensor, draft_step: torch.Tensor
    ) -> None:
        """vLLM's hook after a single pass: store the drafter's probability of each draft."""
        super()._maybe_predict_acceptance(logits, idx_mapping, draft_step)
        if self.policy.reads_confidence:
            likeliest = logits.float().softmax(-1).amax(-1).view(-1, self.num_speculative_steps)
            self._confidence[: len(likeliest)] = likeliest
