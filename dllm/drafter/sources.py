"""Speculators of vLLM's Model Runner V2 that are steered (``steering``): what is special of each.

They differ in how they keep up with a step that is not drafted for:

    one by one   drafts are tokens of a small model, or of a layer behind the target, which reads
                 every token of the text: one pass of it cannot be left out
    blocks       DFlash, DFlash 2, LiLiCorr, DSpark: nothing but the target's hidden states is read,
                 and can wait until drafting starts again
"""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.lilicorr.speculator import LiLiCorrSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from dllm.drafter.context import DeferredContext
from dllm.drafter.steering import DraftPass, Steered
from dllm.drafter.step import TargetStep


class SteeredEagle(Steered, EagleSpeculator):
    """EAGLE-3: a layer behind the target."""


class SteeredModule(Steered, MTPSpeculator):
    """One MTP module of the target."""


class SteeredModel(Steered, StandaloneARSpeculator):
    """A small model beside the target."""

    _reads_only = False

    def keep_context(self, step: TargetStep, draft: DraftPass) -> None:
        self._reads_only = True
        try:
            draft()
        finally:
            self._reads_only = False

    def _multi_step_decode(self, *args: Any, **options: Any) -> None:
        """The passes behind the first, which has read the step's tokens and drafted one."""
        if not self._reads_only:
            super()._multi_step_decode(*args, **options)


class SteeredBlocks(Steered, DFlashSpeculator):
    """A speculator that drafts blocks with keys and values made of the target's hidden states."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._context = DeferredContext()

    def draft(self, step: TargetStep, draft: DraftPass) -> torch.Tensor:
        self._store_context()
        return draft()

    def keep_context(self, step: TargetStep, draft: DraftPass) -> None:
        """Stored at once where KV transfer may copy the pages, or with several KV cache groups.

        There (a draft window, sliding layers) a page that is freed while its context waits may
        become a page of the target, and the late write would destroy it.
        """
        if not self._context.admits(step.batch.num_tokens):
            self._store_context()
        self._context.append(step, self.block_tables.slot_mappings, self.draft_kv_cache_group_ids)
        has_groups = len(self.kv_cache_config.kv_cache_groups) > 1
        is_full = not self._context.admits(0)  # a single step may be larger than the limit
        if is_full or has_groups or self.vllm_config.kv_transfer_config is not None:
            self._store_context()

    def _store_context(self) -> None:
        if not len(self._context):
            return
        context = self._context.take()
        assert self._layer_group_idx is not None, "the network names its layers"
        self.model.precompute_and_store_context_kv(
            self.model.combine_hidden_states(context.features),
            context.positions,
            [context.slots[group] for group in self._layer_group_idx],
        )


class SteeredSelector(SteeredBlocks, DFlash2Speculator):
    """DFlash 2, whose selector walks through the likeliest tokens of each place."""

    def _generate_draft(self, num_reqs: int, *args: Any, **options: Any) -> None:
        """How sure it is: the selector's probability of the token that it has taken."""
        super()._generate_draft(num_reqs, *args, **options)
        if self.steering.reads_confidence:
            taken = self.candidate_sampler.scores[:num_reqs].softmax(-1).amax(-1)
            useful = self._useful(taken, self.draft_tokens[:num_reqs])
            self.steering.confidence[:num_reqs] = useful


class SteeredLattice(SteeredSelector, LiLiCorrSpeculator):
    """LiLiCorr, which is DFlash 2 with other scores for the selector."""


class SteeredMarkov(SteeredBlocks, DSparkSpeculator):
    """DSpark, which samples the places of a block one behind the other."""

    def _useful(self, probabilities: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens are ids of the drafter's vocabulary, which may be a part of the target's."""
        return super()._useful(probabilities, self.model.map_draft_to_target(tokens))

    def _sample_logits(
        self, logits: torch.Tensor, idx_map: torch.Tensor, sample_pos: torch.Tensor, step: int
    ) -> torch.Tensor:
        if not self._samples_drafts:
            return super()._sample_logits(logits, idx_map, sample_pos, step)
        self._maybe_predict_acceptance(logits, idx_map, self._step_cols[step])
        at = idx_map, self.temperature, self.seeds, sample_pos - 1
        return self._sample_coupled(logits, *at)


# By the method of ``--speculative-config``; of the method "dflash" by the drafter's architecture.
STEERED: dict[str, type[Steered]] = {
    "draft_model": SteeredModel,
    "eagle3": SteeredEagle,
    "mtp": SteeredModule,
    "dspark": SteeredMarkov,
    "DFlash2DraftModel": SteeredSelector,
    "LiLiCorrDraftModel": SteeredLattice,
}


def make_steered(vllm_config: VllmConfig, device: torch.device) -> Steered:
    speculative = vllm_config.speculative_config
    assert speculative is not None, "no drafter"
    names = [speculative.method]
    if speculative.method == "dflash":
        names = speculative.draft_model_config.architectures
    kind = next(STEERED[name] for name in names if name in STEERED)
    return kind(vllm_config, device)
