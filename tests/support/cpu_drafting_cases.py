"""Cases for our kernels of drafting and verification, which must do the same as Triton's."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tests.support.cpu_kernel_cases import GPU, Case, f32, i32, i64, poisoned, random_logits, spans
from tests.support.cpu_sampling_cases import SEEDS, VOCAB

UTILS = GPU + "spec_decode.rejection_sampler_utils."


class Verification:
    """A batch of requests with drafts, and all buffers of their verification.

    There are requests with all drafts, with some (the others missing or cut), and with none, at
    temperature 0 and above. Draft logits are close to the target's, so that some drafts are kept
    and some are not.
    """

    slots = [2, 0, 4, 1, 3, 5]
    num_drafts = [3, 3, 2, 0, 3, 3]
    temperatures = [0.7, 0.0, 1.0, 0.0, 1.3, 0.5]
    steps, block_size = 3, 32
    num_blocks = 3

    def __init__(self, rng: np.random.Generator, has_draft_logits: bool) -> None:
        num_logits = [count + 1 for count in self.num_drafts]
        self.cu_num_logits = spans(num_logits)
        self.num_logits = sum(num_logits)
        self.expanded = i64(np.repeat(self.slots, num_logits))
        self.local_pos = i32(np.concatenate([np.arange(count) for count in num_logits]))
        self.pos = i64(rng.integers(0, 5000, self.num_logits))
        self.target = random_logits(rng, self.num_logits, VOCAB)
        draft = torch.full((6, self.steps, VOCAB), -torch.inf)
        drafted = self.local_pos < self.steps
        rows = (self.expanded[drafted], self.local_pos[drafted].long())
        draft[rows] = self.target[drafted] + f32(rng.normal(0, 0.6, VOCAB))
        self.draft = draft if has_draft_logits else None
        self.drafts = self.target.argmax(1).int().roll(1)
        self.drafts[torch.from_numpy(rng.random(self.num_logits) < 0.3)] = 5
        self.drafts[[3, 6]] = -1  # the third draft of the first request, the second of the next

    def local(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A poisoned `local_` buffer."""
        return poisoned(self.num_logits, self.num_blocks, dtype=dtype)

    def blocks(self) -> dict[str, Any]:
        """The filled `local_` buffers; rows that no kernel writes or reads stay poisoned."""
        blocks = {name: self.local() for name in ("target_max", "target_sumexp")}
        blocks |= {name: self.local() for name in ("draft_max", "draft_sumexp")}
        for row in range(self.num_logits):
            slot, step = int(self.expanded[row]), int(self.local_pos[row])
            sources = {"target": self.target[row]}
            if self.draft is not None and step < self.steps and self.temperatures[slot]:
                sources["draft"] = self.draft[slot, step] / self.temperatures[slot]
            for name, logits in sources.items():
                for block, values in enumerate(logits.split(self.block_size)):
                    blocks[name + "_max"][row, block] = values.max()
                    highest = values.max().nan_to_num(neginf=0)
                    blocks[name + "_sumexp"][row, block] = (values - highest).exp().sum()
        named: dict[str, Any] = {}
        for name, values in blocks.items():
            side, _, kind = name.partition("_")
            named |= {f"{side}_local_{kind}_ptr": values, f"{side}_local_{kind}_stride": 3}
        return named

    def logits(self) -> dict[str, Any]:
        """The target's and the drafter's logits."""
        return dict(
            target_logits_ptr=self.target,
            target_logits_stride=VOCAB,
            draft_logits_ptr=self.draft,
            draft_logits_stride_0=self.steps * VOCAB,
            draft_logits_stride_1=VOCAB,
        )

    def cumulative_log_p(self) -> torch.Tensor:
        """Joint ratios that fall along each request, so that rarely all drafts are kept."""
        return -0.1 - self.local_pos.float()


def draft_statistics_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Greedy and sampled requests, with and without draft logits, and rows of -inf."""
    for label, has_draft_logits in [("draft-logits", True), ("one-hot", False)]:
        batch = Verification(rng, has_draft_logits)
        batch.target[0, :32] = -torch.inf
        yield Case(
            UTILS + "_compute_local_logits_stats_kernel",
            label,
            (batch.num_logits, batch.num_blocks),
            dict(
                target_local_argmax_ptr=batch.local(torch.int64),
                target_local_argmax_stride=3,
                target_local_max_ptr=batch.local(),
                target_local_max_stride=3,
                target_local_sumexp_ptr=batch.local(),
                target_local_sumexp_stride=3,
                draft_local_max_ptr=batch.local(),
                draft_local_max_stride=3,
                draft_local_sumexp_ptr=batch.local(),
                draft_local_sumexp_stride=3,
                expanded_idx_mapping_ptr=batch.expanded,
                expanded_local_pos_ptr=batch.local_pos,
                temp_ptr=f32(batch.temperatures),
                vocab_size=VOCAB,
                num_speculative_steps=batch.steps,
                BLOCK_SIZE=batch.block_size,
                HAS_DRAFT_LOGITS=has_draft_logits,
                **batch.logits(),
            ),
            # Sums of exponentials in another order.
            rtol=1e-6,
        )
        yield Case(
            UTILS + "_compute_cumulative_log_p_kernel",
            label,
            (6,),
            dict(
                cumulative_log_p_ptr=poisoned(batch.num_logits, dtype=torch.float32),
                draft_sampled_ptr=batch.drafts,
                cu_num_logits_ptr=batch.cu_num_logits,
                idx_mapping_ptr=i64(batch.slots),
                temp_ptr=f32(batch.temperatures),
                vocab_num_blocks=batch.num_blocks,
                PADDED_VOCAB_NUM_BLOCKS=4,
                HAS_DRAFT_LOGITS=has_draft_logits,
                **batch.logits(),
                **batch.blocks(),
            ),
            rtol=1e-5,
        )


def residual_mass_cases(rng: np.random.Generator) -> Iterator[Case]:
    """First, later and missing drafts of greedy and sampled requests."""
    batch = Verification(rng, True)
    yield Case(
        UTILS + "_compute_local_residual_mass_kernel",
        "draft-logits",
        (batch.num_logits, batch.num_blocks),
        dict(
            local_residual_mass_ptr=batch.local(),
            local_residual_mass_stride=3,
            cumulative_log_p_ptr=batch.cumulative_log_p(),
            draft_sampled_ptr=batch.drafts,
            expanded_idx_mapping_ptr=batch.expanded,
            expanded_local_pos_ptr=batch.local_pos,
            temp_ptr=f32(batch.temperatures),
            vocab_size=VOCAB,
            num_speculative_steps=batch.steps,
            vocab_num_blocks=batch.num_blocks,
            BLOCK_SIZE=batch.block_size,
            PADDED_VOCAB_NUM_BLOCKS=4,
            **batch.logits(),
            **batch.blocks(),
        ),
        # A difference of probabilities that are nearly equal: fp32 rounding of the terms remains.
        rtol=1e-4,
    )


def rejection_cases(rng: np.random.Generator) -> Iterator[Case]:
    """The three rules, synthetic rates, with and without draft logits, on several batches."""
    for label, has_draft_logits, by_block, synthetic in [
        ("ratio", True, False, False),
        ("ratio-one-hot", False, False, False),
        ("block", True, True, False),
        ("block-one-hot", False, True, False),
        ("synthetic", True, False, True),
        *[(f"ratio-{i}", True, False, False) for i in range(3)],
        *[(f"block-{i}", True, True, False) for i in range(3)],
        *[(f"block-one-hot-{i}", False, True, False) for i in range(3)],
    ]:
        batch = Verification(rng, has_draft_logits)
        if synthetic:
            batch.drafts[13] = -1  # the first draft of the greedy request
        argmax = torch.stack([block.argmax(1) for block in batch.target.split(32, 1)], 1)
        residual = f32(rng.random((batch.num_logits, batch.num_blocks)) * 0.1)
        yield Case(
            UTILS + "_rejection_kernel",
            label,
            (6,),
            dict(
                sampled_ptr=poisoned(6, batch.steps + 1, dtype=torch.int64),
                sampled_stride=batch.steps + 1,
                rejected_steps_ptr=poisoned(6),
                target_rejected_logsumexp_ptr=poisoned(6, dtype=torch.float32),
                draft_rejected_logsumexp_ptr=poisoned(6, dtype=torch.float32),
                target_local_argmax_ptr=argmax + torch.arange(3) * 32,
                target_local_argmax_stride=3,
                draft_sampled_ptr=batch.drafts,
                cu_num_logits_ptr=batch.cu_num_logits,
                idx_mapping_ptr=i64(batch.slots),
                temp_ptr=f32(batch.temperatures),
                seed_ptr=i64(SEEDS),
                pos_ptr=batch.pos,
                synthetic_conditional_rates_ptr=f32([1.0, 0.6, 0.3]) if synthetic else None,
                cumulative_log_p_ptr=batch.cumulative_log_p() if by_block else None,
                local_residual_mass_ptr=residual if by_block and has_draft_logits else None,
                local_residual_mass_stride=3,
                vocab_num_blocks=batch.num_blocks,
                PADDED_VOCAB_NUM_BLOCKS=4,
                HAS_DRAFT_LOGITS=has_draft_logits,
                SYNTHETIC_MODE=synthetic,
                USE_BLOCK_VERIFICATION=by_block,
                **batch.logits(),
                **batch.blocks(),
            ),
            rtol=1e-6,
        )


def resample_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Bonus, rejected and missing drafts, with and without draft logits, fp32 and fp64 noise."""
    for label, has_draft_logits, by_block, fp64 in [
        ("draft-logits", True, False, False),
        ("block", True, True, False),
        ("one-hot", False, False, False),
        ("fp64", True, False, True),
    ]:
        batch = Verification(rng, has_draft_logits)
        if not has_draft_logits:
            # Rejected tokens that would win if they were not excluded.
            batch.target[[4, 9, 18], batch.drafts[[5, 10, 19]].long()] += 40
        yield Case(
            UTILS + "_resample_kernel",
            label,
            (6, batch.num_blocks),
            dict(
                resampled_local_argmax_ptr=poisoned(6, 3, dtype=torch.int64),
                resampled_local_argmax_stride=3,
                resampled_local_max_ptr=poisoned(
                    6, 3, dtype=torch.float64 if fp64 else torch.float32
                ),
                resampled_local_max_stride=3,
                target_rejected_logsumexp_ptr=f32(rng.normal(9, 1, 6)),
                draft_rejected_logsumexp_ptr=f32(rng.normal(12, 1, 6)),
                rejected_step_ptr=i32([2, 0, 1, 0, 0, 2]),
                cu_num_logits_ptr=batch.cu_num_logits,
                expanded_idx_mapping_ptr=batch.expanded,
                draft_sampled_ptr=batch.drafts,
                temp_ptr=f32(batch.temperatures),
                seed_ptr=i64(SEEDS),
                pos_ptr=batch.pos,
                cumulative_log_p_ptr=batch.cumulative_log_p() if by_block else None,
                contexts_ptr=None,
                contexts_stride=0,
                watermarking_ptr=None,
                watermarking_skip_mask_ptr=None,
                watermark_key_0=0,
                watermark_key_1=0,
                vocab_size=VOCAB,
                BLOCK_SIZE=batch.block_size,
                HAS_DRAFT_LOGITS=has_draft_logits,
                USE_FP64=fp64,
                USE_BLOCK_VERIFICATION=by_block,
                CONTEXT_WIDTH=1,
                WATERMARK=False,
                DEDUPLICATE_CONTEXTS=False,
                **batch.logits(),
            ),
            # log(1 - ratio) loses digits where the two distributions are close.
            rtol=1e-4,
        )


def insert_resampled_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Kept, rejected and bonus positions, and a NaN among the maxima."""
    batch = Verification(rng, True)
    local_max = f32(rng.normal(0, 1, (6, 3)))
    local_max[0, 1] = torch.nan
    yield Case(
        UTILS + "_insert_resampled_kernel",
        "batch",
        (6,),
        dict(
            sampled_ptr=poisoned(6, 4, dtype=torch.int64),
            sampled_stride=4,
            num_sampled_ptr=i32([2, 1, 2, 0, 0, 3]),
            resampled_local_argmax_ptr=i64(rng.integers(0, VOCAB, (6, 3))),
            resampled_local_argmax_stride=3,
            resampled_local_max_ptr=local_max,
            resampled_local_max_stride=3,
            resample_num_blocks=3,
            cu_num_logits_ptr=batch.cu_num_logits,
            expanded_idx_mapping_ptr=batch.expanded,
            temp_ptr=f32(batch.temperatures),
            PADDED_RESAMPLE_NUM_BLOCKS=4,
        ),
    )


def draft_token_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Draft tokens, which those inside a prompt are not, and the places of sampled tokens."""
    sampler = GPU + "spec_decode.rejection_sampler."
    batch = Verification(rng, False)
    yield Case(
        sampler + "_gather_draft_sampled_kernel",
        "batch",
        (3,),
        dict(
            draft_sampled_ptr=poisoned(batch.num_logits),
            pos_ptr=poisoned(batch.num_logits, dtype=torch.int64),
            input_ids_ptr=i32(rng.integers(0, 99, 40)),
            positions_ptr=i64(np.arange(40) + 10),
            logits_indices_ptr=i64(np.arange(batch.num_logits) + 3),
            expanded_idx_mapping_ptr=batch.expanded,
            expanded_local_pos_ptr=batch.local_pos,
            prefill_len_ptr=i32([5, 60, 14, 8, 21, 30]),
            num_logits=batch.num_logits,
            BLOCK_SIZE=8,
        ),
    )
    yield Case(
        sampler + "_flatten_sampled_kernel",
        "batch",
        (6,),
        dict(
            flat_sampled_ptr=poisoned(batch.num_logits, dtype=torch.int64),
            sampled_ptr=i64(rng.integers(0, 99, (6, 4))),
            sampled_stride=4,
            num_sampled_ptr=i32([4, 1, 2, 0, 3, 4]),
            cu_num_logits_ptr=batch.cu_num_logits,
        ),
    )


def dflash_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Rejected context, evicted blocks, positions at the model's end, rows in mid-prompt."""
    for label, from_anchor in [("masks", False), ("anchor", True)]:
        queries = 3 if from_anchor else 4
        block_table = rng.integers(0, 50, (5, 6))
        block_table[:, 0] = 0
        positions = np.concatenate([np.arange(7) + 9, np.arange(4), np.arange(5) + 18])
        yield Case(
            GPU + "spec_decode.dflash.speculator._prepare_dflash_inputs_kernel",
            label,
            (3, 2),
            dict(
                out_input_ids_ptr=poisoned(30),
                out_query_positions_ptr=poisoned(30, dtype=torch.int64),
                out_query_start_loc_ptr=poisoned(6),
                out_seq_lens_ptr=poisoned(5),
                out_query_slot_mapping_ptr=poisoned(30, dtype=torch.int64),
                out_context_positions_ptr=poisoned(30, dtype=torch.int64),
                out_context_slot_mapping_ptr=poisoned(30, dtype=torch.int64),
                out_sample_indices_ptr=poisoned(15, dtype=torch.int64),
                out_sample_pos_ptr=poisoned(15, dtype=torch.int64),
                out_sample_idx_mapping_ptr=poisoned(15, dtype=torch.int64),
                out_temperature_ptr=poisoned(5, dtype=torch.float32),
                out_seeds_ptr=poisoned(5, dtype=torch.int64),
                target_positions_ptr=i64(positions),
                target_query_start_loc_ptr=spans([7, 4, 5], padding=1),
                idx_mapping_ptr=i64([3, 0, 4]),
                last_sampled_ptr=i64(rng.integers(0, 99, (5, 1))),
                next_prefill_tokens_ptr=i32(rng.integers(100, 199, (1, 5))),
                num_sampled_ptr=i32([3, 0, 1]),
                num_rejected_ptr=i32([4, 0, 0]),
                temperature_ptr=f32(rng.random(5)),
                seeds_ptr=i64(SEEDS[:5]),
                block_table_ptr=i32(block_table),
                block_table_stride=6,
                parallel_drafting_token_id=777,
                block_size=4,
                num_query_per_req=queries,
                num_speculative_steps=3,
                max_num_reqs=5,
                max_num_tokens=28,
                max_model_len=24,
                cp_rank=0,
                SAMPLE_FROM_ANCHOR=from_anchor,
                PAD_SLOT_ID=-1,
                CP_SIZE=1,
                CP_INTERLEAVE=1,
                BLOCK_SIZE=8,
            ),
        )


def drafting_cases() -> list[Case]:
    """Every case for drafters and for the verification of their drafts."""
    rng = np.random.default_rng(2)
    builders = [
        draft_statistics_cases,
        residual_mass_cases,
        rejection_cases,
        resample_cases,
        insert_resampled_cases,
        draft_token_cases,
        dflash_cases,
    ]
    return [case for build in builders for case in build(rng)]
