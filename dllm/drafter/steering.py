"""The steering of drafts: what happens around a draft pass of any speculator of vLLM.

vLLM's speculator drafts, or nobody does where drafts are looked up alone (method "ngram" with
``prompt_lookup``); a class here is put in front of it. It decides whether a step drafts,
whether from the request's own text (``prompt_lookup``), and how many of its drafts are verified.
None of it changes the text, or with rejection sampling its distribution (``verification``).
``sources`` has what is special of each speculator.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler
from vllm.v1.worker.gpu.states import RequestState

from dllm.drafter.metrics import CountedDrafts, Counts
from dllm.drafter.pair import end_ids
from dllm.drafter.prompt_lookup import Lookup, lookup_of
from dllm.drafter.recording import make_recorder
from dllm.drafter.step import TargetStep
from dllm.drafter.widths.make import make_policy, may_skip_passes
from dllm.drafter.widths.policy import FixedWidth, VerifiedStep, WidthPolicy
from dllm.engine.ranks import answer_of_first_rank
from dllm.settings.drafting import always_verifies_all
from dllm.settings.server import options_of

# vLLM's ``propose`` of a step: stores the step's context and drafts, [rows, N] token ids. With
# ``num_speculative_tokens=0`` it only stores the context.
DraftPass = Callable[..., torch.Tensor]


class Steered(DraftModelSpeculator):
    """A base class in front of a speculator of vLLM, whose constructor is followed by ``steer``."""

    def steer(self, vllm_config: VllmConfig, req_states: RequestState) -> None:
        """Set up what the server's options ask for.

        Args:
            req_states: the runner's.
        """
        options = options_of(vllm_config).drafter
        self._req_states = req_states
        self._looks_up = options.prompt_lookup
        num_drafts = self.num_speculative_steps
        # Of steps that are scheduled ahead the scheduler chooses the widths (`drafter.scheduler`).
        chooses = not vllm_config.scheduler_config.async_scheduling
        # What never changes while serving.
        self._trims = chooses and not always_verifies_all(options, num_drafts)
        self._samples_drafts = self.speculative_config.draft_sample_method == "probabilistic"
        if options.verification != "rejection":
            self.draft_logits = None  # vLLM's copy of the drafter's distributions: nobody reads it
        self._end_ids = torch.tensor(sorted(end_ids(vllm_config)), device=self.device)
        # On a CPU the draft pass runs after the tokens were sent (`draft_late`), unless somebody
        # waits for it right after the step: other replicas or pipeline stages, which take part in
        # the pass, another server, which reads the pages, or a step that is scheduled already.
        self._drafts_late = (
            self.device.type == "cpu"
            and self.dp_size == vllm_config.parallel_config.pipeline_parallel_size == 1
            and vllm_config.kv_transfer_config is None
            and chooses
        )
        self.policy: WidthPolicy = FixedWidth(num_drafts)
        if chooses:
            self.policy = make_policy(options, num_drafts, self.max_num_reqs)
        self.policy.may_skip = may_skip_passes(vllm_config)
        self._recorder = make_recorder(vllm_config)
        self._counts = Counts()  # of the steps after the last report
        # [rows, N]: the drafter's probability of its likeliest token, 0 where that ends the answer.
        self._confidence = torch.zeros(self.draft_tokens.shape, device=self.device)
        # [rows] of the last step: drafts to be verified.
        self._widths = np.zeros(0, dtype=np.int64)
        self._drafted = False  # there was a draft pass behind the last step
        self._undrafted: tuple[TargetStep, DraftPass] | None = None  # waits for `draft_late`

    # --- what a step of the target is followed by -------------------------------------------------

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
            last_hidden_states: ``[tokens, hidden]``, output of the target's last layer.
            aux_hidden_states: the same for each layer that the drafter reads.
            num_sampled, num_rejected: ``[rows]``, tokens emitted, and drafts rejected in the step.
            last_sampled: ``[slots, 1]``, the last token of each request.

        Returns:
            ``[rows, N]`` int64 token ids; any values where nothing has been drafted (yet).
        """
        outcome = (num_sampled, num_rejected, last_sampled)
        step = TargetStep(input_batch, aux_hidden_states, *outcome, last_hidden_states)
        hidden_states = (last_hidden_states, aux_hidden_states)
        arguments = (input_batch, attn_metadata, slot_mappings, *hidden_states, *outcome, *others)
        draft = partial(super().propose, *arguments, dummy_run=dummy_run, **options)
        if dummy_run:
            return draft()
        # vLLM may ask for fewer drafts at large batches; those have to be made at once. It asks for
        # none if a scheduler of ours says so, or (from 0.33 on) if no request of the step can use
        # any.
        num_drafts = options.get("num_speculative_tokens")
        if num_drafts == 0:
            self._leave_out_drafts(step, draft)
            return self.draft_tokens[: input_batch.num_reqs]
        if self._drafts_late and num_drafts in (None, self.num_speculative_steps):
            self._undrafted = step, draft
            return self.draft_tokens[: input_batch.num_reqs]
        return self._follow(step, draft)

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
        drafts = self._follow(step, draft)
        req_states.draft_tokens[step.batch.idx_mapping] = drafts
        handler.set_draft_tokens(step.batch, drafts)

    def save_context_only(self) -> None:
        """Called instead of ``draft_late`` after a step that finished every request.

        Nothing is drafted. The step's context is still kept, because other requests may reuse its
        pages through the prefix cache.
        """
        if self._undrafted is None:
            return
        (step, draft), self._undrafted = self._undrafted, None
        self._leave_out_drafts(step, draft)

    def _leave_out_drafts(self, step: TargetStep, draft: DraftPass) -> None:
        """Nobody needs drafts of this step: none are counted, and its time teaches nothing."""
        self._observe(step)
        self.policy.note_wait(None)
        self._keep_context(step, draft)
        self._widths, self._drafted = np.zeros(step.batch.num_reqs, dtype=np.int64), False

    def _follow(self, step: TargetStep, draft: DraftPass) -> torch.Tensor:
        """Draft, or keep the step's context without drafting: ``[rows, N]`` token ids."""
        self._observe(step)
        # Timed from here: `_observe` waits for the target's step, which is not drafting time.
        start = time.perf_counter()
        batch = step.batch
        lookup = self._wanted_lookup(batch) if self._looks_up else None
        self._drafted = passes = lookup is None and self._wants_drafts(batch)
        if passes:
            drafts = self._draft(step, draft)
        else:
            self._keep_context(step, draft)
            drafts = self.draft_tokens[: batch.num_reqs]
            if lookup is not None:
                drafts = self._take_over(batch, lookup)
        if passes or lookup is not None:
            self._widths = self._choose_widths(batch)
        else:
            self._widths = np.zeros(batch.num_reqs, dtype=np.int64)
        self._count(batch, passes, time.perf_counter() - start)
        return drafts

    def _draft(self, step: TargetStep, draft: DraftPass) -> torch.Tensor:
        """Run the draft pass: ``[rows, N]`` token ids."""
        return draft()

    def _keep_context(self, step: TargetStep, draft: DraftPass) -> None:
        """Let the drafter read a step that is not drafted for, because later drafts build on it."""
        draft(num_speculative_tokens=0)

    def _wanted_lookup(self, batch: InputBatch) -> Lookup | None:
        """Drafts from the requests' own texts, if the policy takes them; all ranks get the same."""
        rows = self._rows_with_use(batch)
        if not len(rows):
            return None
        # A text has its whole prompt, and the token that this step has sampled.
        longest = max(batch.seq_lens_cpu_upper_bound.max().item() + 1, batch.prefill_len_np.max())
        num_drafts = self.num_speculative_steps
        lookup = lookup_of(self._req_states, batch.idx_mapping, int(longest), num_drafts)
        confidence = lookup.confidence(self._end_ids).cpu().numpy()
        wants = self.policy.wants_lookup(batch.idx_mapping_np[rows], confidence[rows])
        return lookup if answer_of_first_rank(wants) else None

    def _take_over(self, batch: InputBatch, lookup: Lookup) -> torch.Tensor:
        """Let looked-up drafts ``[rows, N]`` stand in the place of the drafter's.

        Behind ``_keep_context``: a pass that reads the step's tokens may leave a draft, too.
        """
        self._confidence[: batch.num_reqs] = lookup.confidence(self._end_ids)
        if self.draft_logits is not None:
            slots, drafts = batch.idx_mapping.long()[:, None], lookup.tokens
            places = torch.arange(drafts.shape[1], device=slots.device)
            self.draft_logits[slots[:, 0]] = -torch.inf
            self.draft_logits[slots, places, drafts] = 0.0
        return lookup.tokens

    # --- the policy -------------------------------------------------------------------------------

    def _observe(self, step: TargetStep) -> None:
        if self.policy.reads_outcomes:
            self.policy.observe(self._verified(step))
        if self._recorder is not None:
            self._recorder.observe(step)

    def _verified(self, step: TargetStep) -> VerifiedStep:
        """A record of the target's step for the policy; waits for the device."""
        batch, in_prompt, verified = step.batch, step.in_prompt, step.verified
        accepted = np.where(verified > 0, verified - step.rejected, 0)
        if accepted.any():
            accepted = np.minimum(accepted, self._before_end(batch))
        return VerifiedStep(batch.idx_mapping_np, in_prompt, verified, accepted, self._drafted)

    def _before_end(self, batch: InputBatch) -> np.ndarray:
        """``[rows]``: verified drafts before the first that ends the answer; N if none does."""
        num_drafts = self.num_speculative_steps
        firsts = batch.query_start_loc_np[: batch.num_reqs, None] + 1
        places = np.minimum(firsts + np.arange(num_drafts), batch.num_tokens - 1)
        tokens = batch.input_ids[torch.from_numpy(places).to(self.device)]
        ends = torch.isin(tokens, self._end_ids).cpu().numpy()
        before: np.ndarray = np.where(ends.any(axis=1), ends.argmax(axis=1), num_drafts)
        return before

    def _wants_drafts(self, batch: InputBatch) -> bool:
        """Whether the drafter runs in this step; all ranks get the same answer."""
        rows = self._rows_with_use(batch)
        wants = self.policy.wants_drafts(batch.idx_mapping_np[rows])
        if not self.policy.may_skip:
            return True
        wants = wants and len(rows) > 0
        return bool(answer_of_first_rank(wants)) if self.policy.reads_outcomes else wants

    def _choose_widths(self, batch: InputBatch) -> np.ndarray:
        """``[rows]``: how many drafts of each row the policy lets the next step verify."""
        rows, confidence = self._rows_with_use(batch), None
        if self.policy.reads_confidence:
            confidence = self._confidence[: batch.num_reqs].cpu().numpy()[rows]
        widths = np.zeros(batch.num_reqs, dtype=np.int64)
        widths[rows] = self.policy.widths(batch.idx_mapping_np[rows], confidence)
        assert ((widths >= 0) & (widths <= self.num_speculative_steps)).all(), widths
        return widths

    @staticmethod
    def _is_prompt_unfinished(batch: InputBatch) -> np.ndarray:
        """``[rows]`` bool: part of the row's prompt is not computed yet after this step."""
        computed = batch.num_computed_prefill_tokens_np + batch.num_scheduled_tokens
        is_unfinished: np.ndarray = computed < batch.prefill_len_np
        return is_unfinished

    def _rows_with_use(self, batch: InputBatch) -> np.ndarray:
        """Rows that can use drafts: vLLM discards those of unfinished prompts."""
        return np.flatnonzero(~self._is_prompt_unfinished(batch))

    # --- what the scheduler is told ---------------------------------------------------------------

    def report(self, drafts: DraftTokenIds) -> CountedDrafts:
        """The message to the scheduler: each row's first ``width`` drafts, and the counts."""
        kept = drafts.draft_token_ids
        if self._trims:
            assert len(kept) == len(self._widths), (len(kept), len(self._widths))
            widths = self._widths.tolist()
            kept = [tokens[:width] for tokens, width in zip(kept, widths, strict=True)]
        return CountedDrafts(drafts.req_ids, kept, self._counts.take())

    def _count(self, batch: InputBatch, is_drafting: bool, seconds: float) -> None:
        """Count a step, without drafts of unfinished prompts, which vLLM discards."""
        self._counts.add("drafting_seconds", seconds)
        if is_drafting:
            self._counts.add("draft_passes")
            each = self._widths.mean() if self.policy.narrows else self.num_speculative_steps
            self._counts.add("drafted_tokens", float(batch.num_reqs * each))
        for width in self._widths[~self._is_prompt_unfinished(batch)].tolist():
            self._counts.add("draft_widths", label=str(width))

    # --- the draft pass ---------------------------------------------------------------------------

    def sample_draft(
        self,
        hidden_states: torch.Tensor,
        sample_src_positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        draft_step: torch.Tensor,
        *others: Any,
        **options: Any,
    ) -> torch.Tensor:
        """The drafts ``[rows * N]``, the likeliest or sampled ones.

        Sampled drafts use the target's random numbers of their positions, but not with rejection
        sampling (``verification``).
        """
        if not self._samples_drafts or self.draft_logits is not None:
            tokens = hidden_states, sample_src_positions, idx_mapping
            rest = temperature, seeds, draft_step, *others
            return super().sample_draft(*tokens, *rest, **options)
        logits = self.compute_draft_logits(hidden_states, options.get("spec_step_idx", 0))
        self._maybe_predict_acceptance(logits, idx_mapping, draft_step)
        at = idx_mapping, temperature, seeds, sample_src_positions
        return self._sample_coupled(logits, *at)

    def _sample_coupled(self, logits: torch.Tensor, *at: torch.Tensor) -> torch.Tensor:
        """Draw drafts ``[rows]`` with the target's random numbers.

        Args:
            logits: ``[rows, vocab]``, of the target's vocabulary.
            at: slots, temperature and seeds by slot, and positions in front of the drafts.
        """
        fp64 = self.use_fp64_gumbel
        return gumbel_sample(logits, *at, apply_temperature=True, is_drafting=False, use_fp64=fp64)

    def _maybe_predict_acceptance(
        self, logits: torch.Tensor, idx_mapping: torch.Tensor, draft_step: torch.Tensor
    ) -> None:
        """Store how sure the drafter is.

        Args:
            logits: ``[rows, vocab]`` of one place, or ``[rows * N, vocab]`` of all.
            draft_step: the place, or that of each row of ``logits``.
        """
        super()._maybe_predict_acceptance(logits, idx_mapping, draft_step)
        if not self.policy.reads_confidence:
            return
        likeliest, tokens = logits.float().softmax(-1).max(-1)
        useful = self._useful(likeliest, tokens)
        if draft_step.ndim:
            useful = useful.view(-1, self.num_speculative_steps)
            self._confidence[: len(useful)] = useful
        else:
            place = draft_step.view(1).long()
            self._confidence[: len(useful)].index_copy_(1, place, useful[:, None])

    def _useful(self, probabilities: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The probabilities, 0 where a token ends the answer."""
        # Not torch.isin: with many ids it waits for the device, which a CUDA graph cannot.
        return probabilities.masked_fill((tokens[..., None] == self._end_ids).any(-1), 0.0)
