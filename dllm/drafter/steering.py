"""The steering of drafts in a worker: what happens around a draft pass of a speculator of vLLM.

The scheduler says with each step whether it is drafted for (``scheduler``), and gets the drafts.
None of it changes the text, or with rejection sampling its distribution (``verification``).
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

from dllm.drafter.metrics import DraftReport
from dllm.drafter.pair import end_ids
from dllm.drafter.recording import make_recorder
from dllm.drafter.step import TargetStep
from dllm.drafter.widths.make import may_skip_passes
from dllm.drafter.widths.pilot import PilotLengths
from dllm.engine.metrics import Counts
from dllm.settings.server import options_of

# vLLM's ``propose`` of a step: stores the step's context and drafts, [rows, N] token ids. With
# ``num_speculative_tokens=0`` it only stores the context.
DraftPass = Callable[..., torch.Tensor]


class Steering:
    """Drafts with a speculator, now or late, and reports to the scheduler."""

    def __init__(
        self, speculator: "Steered", vllm_config: VllmConfig, device: torch.device
    ) -> None:
        options, parallel = options_of(vllm_config).drafter, vllm_config.parallel_config
        is_ahead = bool(vllm_config.scheduler_config.async_scheduling)
        self.speculator = speculator
        self.num_rows, self.num_drafts = speculator.draft_tokens.shape
        self.counts = Counts()  # of the steps after the last report
        self.reads_confidence = options.policy == "adaptive" and not is_ahead
        # The drafter's probability of its likeliest token, 0 where that ends the answer: [rows, N].
        self.confidence = torch.zeros(speculator.draft_tokens.shape, device=device)
        self.end_ids = torch.tensor(sorted(end_ids(vllm_config)), device=device)
        self.lengths: PilotLengths | None = None  # drafts of each request's blocks
        if options.pilot is not None:
            self.lengths = PilotLengths(self.num_rows, options.pilot)
        self.block_lengths: np.ndarray | None = None  # [rows] of the last step; None: N drafts each
        self.is_renewed = False  # the drafter has other weights than at the last report
        self._may_skip = may_skip_passes(vllm_config)
        self._recorder = make_recorder(vllm_config)
        # On a CPU the draft pass runs after the tokens were sent (`draft_late`), unless somebody
        # waits for it right after the step: other replicas or pipeline stages, which take part in
        # the pass, another server, which reads the pages, or a step that is scheduled already.
        self._drafts_late = (
            device.type == "cpu"
            and parallel.data_parallel_size == parallel.pipeline_parallel_size == 1
            and vllm_config.kv_transfer_config is None
            and not is_ahead
        )
        self._undrafted: tuple[TargetStep, DraftPass, bool] | None = None  # waits for `draft_late`
        self._drafted = False  # there was a draft pass behind the last step

    def follow(self, step: TargetStep, draft: DraftPass, num_drafts: int | None) -> torch.Tensor:
        """Draft now, or in ``draft_late``: ``[rows, N]`` int64 ids, any values until then.

        ``num_drafts`` is what vLLM asks for: fewer at large batches, which have to be made at once;
        none if our scheduler says so, or (from vLLM 0.33 on) if no request can use any; None: N.
        """
        following = step, draft, num_drafts != 0
        if self._drafts_late and num_drafts in (None, 0, self.num_drafts):
            self._undrafted = following
            return self.speculator.draft_tokens[: step.batch.num_reqs]
        return self._follow(*following)

    def draft_late(self, states: RequestState, handler: DraftTokensHandler) -> None:
        """On a CPU: draft for the last step, after its tokens have been sent: drafting inside of
        ``propose`` would delay them. What that returned, in the runner's ``states`` and
        ``handler``, is written over.
        """
        if self._undrafted is None:
            return
        (step, draft, is_wanted), self._undrafted = self._undrafted, None
        drafts = self._follow(step, draft, is_wanted)
        if self._drafted:
            states.draft_tokens[step.batch.idx_mapping] = drafts
            handler.set_draft_tokens(step.batch, drafts)

    def save_context_only(self) -> None:
        """Instead of ``draft_late`` after a step that finished every request: nothing is drafted.

        Other requests may reuse the step's pages through the prefix cache, so its context is kept.
        """
        if self._undrafted is None:
            return
        (step, draft, _), self._undrafted = self._undrafted, None
        self._follow(step, draft, False)

    def _follow(self, step: TargetStep, draft: DraftPass, is_wanted: bool) -> torch.Tensor:
        """Draft, or keep the step's context without drafting: ``[rows, N]`` token ids."""
        self._observe(step)
        # Timed from here: the recorder waits for the target's step, which is not drafting time.
        start, batch = time.perf_counter(), step.batch
        self.block_lengths = None
        if is_wanted and self.lengths is not None:
            self.block_lengths = np.where(
                is_prompt_unfinished(batch), 0, self.lengths.of(batch.idx_mapping_np)
            )
            is_wanted = bool(self.block_lengths.any()) or not self._may_skip
        self._drafted = is_wanted
        if is_wanted:
            drafts = self.speculator.draft(step, draft)
        else:
            self.speculator.keep_context(step, draft)
            drafts = self.speculator.draft_tokens[: batch.num_reqs]
        self.counts.add("drafting_seconds", time.perf_counter() - start)
        return drafts

    def _observe(self, step: TargetStep) -> None:
        if self._recorder is not None:
            self._recorder.observe(step)
        if self.lengths is not None and len(ended := step.ended_prompts):
            start = time.perf_counter()
            logits = self.speculator.target_logits(step.hidden_behind(ended))
            self.lengths.read_prompts(step.batch.idx_mapping_np[ended], logits)
            self.counts.add("pilot_choices", len(ended))
            self.counts.add("pilot_seconds", time.perf_counter() - start)
        self.speculator.after_step()

    def report(self, drafts: DraftTokenIds) -> DraftReport:
        kept, confidence = drafts.draft_token_ids, None
        if self.block_lengths is not None:
            lengths = self.block_lengths.tolist()
            kept = [tokens[:length] for tokens, length in zip(kept, lengths, strict=True)]
        if self.reads_confidence and self._drafted:
            confidence = self.confidence[: len(kept)].cpu().numpy()
        is_renewed, self.is_renewed = self.is_renewed, False
        return DraftReport(drafts.req_ids, kept, self.counts.take(), confidence, is_renewed)


def is_prompt_unfinished(batch: InputBatch) -> np.ndarray:
    """``[rows]`` bool: part of the row's prompt is not computed yet after this step."""
    computed = batch.num_computed_prefill_tokens_np + batch.num_scheduled_tokens
    is_unfinished: np.ndarray = computed < batch.prefill_len_np
    return is_unfinished


class Steered(DraftModelSpeculator):
    """A base class in front of a speculator of vLLM."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._samples_drafts = self.speculative_config.draft_sample_method == "probabilistic"
        if options_of(vllm_config).drafter.verification != "rejection":
            self.draft_logits = None  # vLLM's copy of the drafter's distributions: nobody reads it
        self.steering = Steering(self, vllm_config, device)

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
        """vLLM's hook after a step of the target: arguments as ``TargetStep``'s, result as
        ``follow``'s.
        """
        outcome = (num_sampled, num_rejected, last_sampled)
        step = TargetStep(input_batch, aux_hidden_states, *outcome, last_hidden_states)
        hidden_states = (last_hidden_states, aux_hidden_states)
        arguments = (input_batch, attn_metadata, slot_mappings, *hidden_states, *outcome, *others)
        draft = partial(super().propose, *arguments, dummy_run=dummy_run, **options)
        if dummy_run:
            return draft()
        return self.steering.follow(step, draft, options.get("num_speculative_tokens"))

    def draft(self, step: TargetStep, draft: DraftPass) -> torch.Tensor:
        """Run the draft pass: ``[rows, N]`` token ids."""
        return draft()

    def keep_context(self, step: TargetStep, draft: DraftPass) -> None:
        """Let the drafter read a step that is not drafted for, because later drafts build on it."""
        draft(num_speculative_tokens=0)

    def after_step(self) -> None:
        """A step of the target is over, and was not drafted for yet."""

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(target_model)
        self._target: list[Any] = [target_model]  # in a list, so that it is no submodule

    def target_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[rows, vocab]``, before any sampling parameter."""
        logits: torch.Tensor = self._target[0].compute_logits(hidden_states)
        return logits

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
        """``[rows * N]``; drawn with the target's random numbers unless by rejection sampling."""
        if not self._samples_drafts or self.draft_logits is not None:
            tokens = hidden_states, sample_src_positions, idx_mapping
            rest = temperature, seeds, draft_step, *others
            return super().sample_draft(*tokens, *rest, **options)
        logits = self.compute_draft_logits(hidden_states, options.get("spec_step_idx", 0))
        self._maybe_predict_acceptance(logits, idx_mapping, draft_step)
        at = idx_mapping, temperature, seeds, sample_src_positions
        return self._sample_coupled(logits, *at)

    def _sample_coupled(self, logits: torch.Tensor, *at: torch.Tensor) -> torch.Tensor:
        """Draw drafts ``[rows]`` from ``[rows, vocab]``, with the target's random numbers.

        ``at``: slots, temperature and seeds by slot, and positions in front of the drafts.
        """
        fp64 = self.use_fp64_gumbel
        return gumbel_sample(logits, *at, apply_temperature=True, is_drafting=False, use_fp64=fp64)

    def _maybe_predict_acceptance(
        self, logits: torch.Tensor, idx_mapping: torch.Tensor, draft_step: torch.Tensor
    ) -> None:
        """``logits``: ``[rows, vocab]`` of the place ``draft_step``, or ``[rows * N, vocab]``."""
        super()._maybe_predict_acceptance(logits, idx_mapping, draft_step)
        if not self.steering.reads_confidence:
            return
        likeliest, tokens = logits.float().softmax(-1).max(-1)
        useful, confidence = self._useful(likeliest, tokens), self.steering.confidence
        if draft_step.ndim:
            useful = useful.view(-1, self.num_speculative_steps)
            confidence[: len(useful)] = useful
        else:
            place = draft_step.view(1).long()
            confidence[: len(useful)].index_copy_(1, place, useful[:, None])

    def _useful(self, probabilities: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The probabilities, 0 where a token ends the answer."""
        # Not torch.isin: with many ids it waits for the device, which a CUDA graph cannot.
        ends = (tokens[..., None] == self.steering.end_ids).any(-1)
        return probabilities.masked_fill(ends, 0.0)
