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
    """Drafts sampled at mask tokens (DFlash), and at the token in front of them, too (DSpark)."""
    yield _dflash_case(rng, "masks", 4, False)
    yield _dflash_case(rng, "anchor", 3, True)


def _dflash_case(rng: np.random.Generator, label: str, num_queries: int, from_anchor: bool) -> Case:
    """Rejected context, evicted blocks, positions at the model's end, rows in mid-prompt."""
    block_table = rng.integers(0, 50, (5, 6))
    block_table[:, 0] = 0
    positions = np.concatenate([np.arange(7) + 9, np.arange(4), np.arange(5) + 18])
    return case(
        "spec_decode.dflash.speculator._prepare_dflash_inputs_kernel",
        label,
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
        num_query_per_req=num_queries,
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
    )


def selector_cases(rng: np.random.Generator) -> Iterator[Case]:
    """A walk through candidates; a buffer for more rows than there are."""
    rows, steps, top_k = 3, 4, 5
    yield case(
        "spec_decode.dflash2.speculator._selector_walk_kernel",
        "greedy",
        (rows,),
        scores_ptr=f32(rng.normal(0, 2, (rows, steps, top_k, top_k))),
        candidate_ptr=i64(rng.integers(0, 99, (rows, steps, top_k))),
        sample_pos_ptr=i64(np.arange(rows * steps) + 7),
        req_state_ptr=i64(np.repeat([2, 0, 4], steps)),
        temperature_ptr=f32(rng.random(5)),
        seeds_ptr=i64(SEEDS[:5]),
        tokens_ptr=poisoned(5, steps, dtype=torch.int64),
        realized_scores_ptr=poisoned(5, steps, top_k, dtype=torch.float32),
        num_steps=steps,
        top_k=top_k,
        BLOCK_K=8,
        SAMPLE_PROBABILISTIC=False,
        USE_FP64=False,
    )


# A step of the target: a row with rejected drafts, one in mid-prompt, one at the model's end.
NUM_TOKENS, MODEL_END = [7, 4, 5], 24
STARTS = [9, 0, 19]


def _step(rng: np.random.Generator) -> dict[str, torch.Tensor]:
    positions = [np.arange(count) + start for count, start in zip(NUM_TOKENS, STARTS, strict=True)]
    return dict(
        target_input_ids_ptr=i32(rng.integers(0, 99, 16)),
        target_positions_ptr=i64(np.concatenate(positions)),
        idx_mapping_ptr=i64([3, 0, 4]),
        num_rejected_ptr=i32([4, 0, 0]),
        query_start_loc_ptr=spans(NUM_TOKENS, padding=1),
        seq_lens_ptr=i32([16, 4, 24, 0, 0]),
    )


def draft_model_cases(rng: np.random.Generator) -> Iterator[Case]:
    yield case(
        "spec_decode.standalone_ar.speculator._prepare_prefill_inputs_kernel",
        "step",
        (3,),
        last_sampled_ptr=i32(rng.integers(0, 99, (5, 1))),
        out_input_ids_ptr=poisoned(22),
        out_positions_ptr=poisoned(22, dtype=torch.int64),
        last_token_indices_ptr=poisoned(5, dtype=torch.int64),
        out_query_start_loc_ptr=poisoned(6),
        out_seq_lens_ptr=poisoned(5),
        max_num_reqs=5,
        max_model_len=MODEL_END,
        **_step(rng),
    )


def eagle_cases(rng: np.random.Generator) -> Iterator[Case]:
    """The first pass; the one behind it; one in the middle, and the last, of which nothing goes on.

    Of the second, positions advance with each draft, or (Gemma 4) do not.
    """
    kernels = "spec_decode.target_dependent_ar.speculator."
    yield case(
        kernels + "_prepare_prefill_inputs_kernel",
        "step",
        (3,),
        last_token_indices_ptr=poisoned(5, dtype=torch.int64),
        draft_current_step_ptr=i64([3]),
        draft_input_ids_ptr=poisoned(22),
        draft_positions_ptr=poisoned(22, dtype=torch.int64),
        draft_query_start_loc_ptr=poisoned(6),
        draft_seq_lens_ptr=poisoned(5),
        last_sampled_ptr=i64(rng.integers(0, 99, (5, 1))),
        next_prefill_tokens_ptr=i32(rng.integers(100, 199, (1, 5))),
        num_sampled_ptr=i32([3, 0, 1]),
        max_num_reqs=5,
        **_step(rng),
    )
    for advances in (True, False):
        yield case(
            kernels + "_prepare_decode_inputs_kernel",
            f"advances {advances}",
            (4,),
            draft_tokens_ptr=i64(rng.integers(0, 99, 3)),
            target_seq_lens_ptr=i32([16, 4, 24]),
            num_rejected_ptr=i32([4, 0, 0]),
            input_ids_ptr=poisoned(8),
            positions_ptr=i64([11, 3, 23, 7, 7]),
            sample_src_positions_ptr=i64([12, 4, 24, 7, 7]),
            query_start_loc_ptr=poisoned(6),
            seq_lens_ptr=poisoned(5),
            max_model_len=MODEL_END,
            max_num_reqs=5,
            ADVANCE_DRAFT_POSITIONS=advances,
        )
        for step in (1, 3):
            yield case(
                kernels + "_update_draft_inputs_kernel",
                f"advances {advances}, step {step}",
                (3,),
                output_draft_tokens_ptr=poisoned(5, 4, dtype=torch.int64),
                next_input_hidden_states_ptr=poisoned(8, 6, dtype=torch.float32),
                input_ids_ptr=poisoned(8),
                positions_ptr=i64([11, 3, 23, 7, 7]),
                sample_src_positions_ptr=i64([12, 4, 24, 7, 7]),
                seq_lens_ptr=i32([12, 4, 24, 7, 7]),
                draft_tokens_ptr=i64(rng.integers(0, 99, 3)),
                current_draft_step_ptr=i64([step]),
                hidden_states_ptr=f32(rng.normal(0, 1, (3, 6))),
                hidden_size=6,
                max_model_len=MODEL_END,
                num_speculative_steps=4,
                ADVANCE_DRAFT_POSITIONS=advances,
            )


def drafting_cases() -> list[Case]:
    """Every case for drafters and for the verification of their drafts."""
    rng = np.random.default_rng(2)
    builders = draft_token_cases, dflash_cases, selector_cases, draft_model_cases, eagle_cases
    return [case for build in builders for case in build(rng)]
