"""Cases for our kernels of drafting and verification, which must do the same as Triton's."""

from collections.abc import Iterator

import numpy as np
import torch

from tests.support.cpu_kernel_cases import Case, case, f32, i32, i64, poisoned, spans
from tests.support.cpu_sampling_cases import SEEDS


def draft_token_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Draft tokens, which those inside a prompt are not, and the places of sampled tokens."""
    sampler = "spec_decode.rejection_sampler."
    slots, num_drafts = [2, 0, 4, 1, 3, 5], [3, 3, 2, 0, 3, 3]
    num_rows = [count + 1 for count in num_drafts]
    num_logits = sum(num_rows)
    yield case(
        sampler + "_gather_draft_sampled_kernel",
        "batch",
        (3,),
        draft_sampled_ptr=poisoned(num_logits),
        pos_ptr=poisoned(num_logits, dtype=torch.int64),
        input_ids_ptr=i32(rng.integers(0, 99, 40)),
        positions_ptr=i64(np.arange(40) + 10),
        logits_indices_ptr=i64(np.arange(num_logits) + 3),
        expanded_idx_mapping_ptr=i64(np.repeat(slots, num_rows)),
        expanded_local_pos_ptr=i32(np.concatenate([np.arange(count) for count in num_rows])),
        prefill_len_ptr=i32([5, 60, 14, 8, 21, 30]),
        num_logits=num_logits,
        BLOCK_SIZE=8,
    )
    yield case(
        sampler + "_flatten_sampled_kernel",
        "batch",
        (6,),
        flat_sampled_ptr=poisoned(num_logits, dtype=torch.int64),
        sampled_ptr=i64(rng.integers(0, 99, (6, 4))),
        num_sampled_ptr=i32([4, 1, 2, 0, 3, 4]),
        cu_num_logits_ptr=spans(num_rows),
    )


def dflash_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Rejected context, evicted blocks, positions at the model's end, rows in mid-prompt."""
    block_table = rng.integers(0, 50, (5, 6))
    block_table[:, 0] = 0
    positions = np.concatenate([np.arange(7) + 9, np.arange(4), np.arange(5) + 18])
    yield case(
        "spec_decode.dflash.speculator._prepare_dflash_inputs_kernel",
        "masks",
        (3, 2),
        out_input_ids_ptr=poisoned(30),
        out_query_positions_ptr=poisoned(30, dtype=torch.int64),
        out_is_padding_ptr=torch.zeros(30, dtype=torch.bool),
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
        parallel_drafting_token_id=777,
        block_size=4,
        num_query_per_req=4,
        num_speculative_steps=3,
        max_num_reqs=5,
        max_num_tokens=28,
        max_model_len=24,
        cp_rank=0,
        SAMPLE_FROM_ANCHOR=False,
        PAD_SLOT_ID=-1,
        CP_SIZE=1,
        CP_INTERLEAVE=1,
        BLOCK_SIZE=8,
    )


def drafting_cases() -> list[Case]:
    """Every case for drafters and for the verification of their drafts."""
    rng = np.random.default_rng(2)
    return [case for build in (draft_token_cases, dflash_cases) for case in build(rng)]
