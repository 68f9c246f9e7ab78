"""Cases for our kernels that read and edit logits, which must do the same as Triton's."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tests.support.cpu_kernel_cases import Case, case, f32, i32, i64, poisoned, random_logits, spans

SEEDS = [7, -1, 2**62 + 12345, 0, 2**31, -(2**63)]
VOCAB = 70


# --------------------------------------------------------------------------- logprobs, grammars


def logprob_cases(rng: np.random.Generator) -> Iterator[Case]:
    """fp32 and half-precision logits, rows of -inf, ties, no row."""
    for label, dtype in [
        ("fp32", torch.float32),
        ("fp16", torch.float16),
        ("empty", torch.float32),
    ]:
        rows = 0 if label == "empty" else 5
        logits = random_logits(rng, rows, 70).to(dtype)
        ids = rng.integers(0, 70, (rows, 9))
        likely = logits.argsort(1)[:, 40]
        logits_with_empty_row = logits.clone()
        logits_with_empty_row[1:2] = -torch.inf
        yield case(
            "sample.logprob._topk_log_softmax_kernel",
            label,
            (rows,),
            output_ptr=poisoned(rows, 9, dtype=torch.float32),
            logits_ptr=logits_with_empty_row,
            topk_ids_ptr=i64(ids),
            topk=9,
            TOPK_BLOCK_SIZE=4,
            # Exponentials are added in another order.
            rtol=2e-6,
        )
        yield case(
            "sample.logprob._ranks_kernel",
            label,
            (rows,),
            output_ptr=poisoned(rows, dtype=torch.int64),
            logits_ptr=logits,
            token_ids_ptr=likely.contiguous(),
        )


def logprob_token_ids_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Requests with token ids of their own and without, with a top and with no such tensor."""
    for num_topk in (0, 3):
        yield case(
            "sample.logprob._fill_logprob_token_ids_kernel",
            f"top-{num_topk}",
            (5,),
            out_token_ids_ptr=poisoned(5, 6, dtype=torch.int64),
            out_valid_mask_ptr=torch.zeros(5, 6, dtype=torch.bool),
            sampled_token_ids_ptr=i64(rng.integers(0, 99, 5)),
            topk_indices_ptr=i32(rng.integers(0, 99, (5 if num_topk else 1, 3))),
            expanded_idx_mapping_ptr=i64([2, 2, 0, 1, 3]),
            num_per_req_token_ids_ptr=i32([0, 5, 2, 1]),
            per_req_token_ids_ptr=i32(rng.integers(0, 99, (4, 8))),
            NUM_TOPK=num_topk,
            PADDED_COLS=8,
        )


def apply_grammar_bitmask_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Random masks, all and nothing allowed, positions beyond a row's logits, no mask."""
    for label, targets in [
        ("masks", [0, 1, 7, 8, 9]),
        ("positions-beyond-the-row", [2, 3, 5, 6]),
        ("empty", []),
    ]:
        bitmask = i32(rng.integers(-(2**31), 2**31, (len(targets), 3)))
        bitmask[1:2], bitmask[2:3] = -1, 0
        yield case(
            "structured_outputs._apply_grammar_bitmask_kernel",
            label,
            (len(targets), 2),
            logits_ptr=random_logits(rng, 6, 70),
            logits_indices_ptr=i32(targets),
            cu_num_logits_ptr=spans([2, 1, 3]),
            bitmask_ptr=bitmask,
            MASK_STRIDE=4,
            BLOCK_SIZE=64,
        )


# --------------------------------------------------------------------------- sampling


def gumbel_cases(rng: np.random.Generator) -> Iterator[Case]:
    """fp32 and fp64 noise, greedy rows, drafting, padding rows, and the cache of draft logits."""
    for label, fp64, drafting, scale, cache in [
        ("target", False, False, True, None),
        ("temperature-applied-before", False, False, False, None),
        ("fp64", True, False, False, None),
        ("draft-cache", False, True, True, "scalar"),
        ("draft-cache-per-row", False, True, True, "rows"),
    ]:
        logits = random_logits(rng, 5, VOCAB)
        column = i64(1) if cache == "scalar" else i64([0, 2, 1, 0, 1])
        max_dtype = torch.float64 if fp64 else torch.float32
        yield case(
            "sample.gumbel._gumbel_sample_kernel",
            label,
            (5, 3),
            local_argmax_ptr=poisoned(5, 3, dtype=torch.int64),
            local_max_ptr=poisoned(5, 3, dtype=max_dtype),
            logits_cache_ptr=poisoned(6, 3, VOCAB, dtype=torch.float32) if cache else None,
            logits_cache_stride_0=3 * VOCAB,
            logits_cache_stride_1=VOCAB,
            logits_cache_col_ptr=column if cache else None,
            logits_cache_source_ptr=logits.clone() if cache else None,
            logits_ptr=logits,
            expanded_idx_mapping_ptr=i64([2, -1 if cache else 5, 0, 1, 4]),
            seeds_ptr=i64(SEEDS),
            pos_ptr=i64([0, 5, 123, 99999, 7]),
            temp_ptr=f32([0.7, 0.0, 1.0, 1.0, 2.5, 0.01]),
            IS_DRAFTING=drafting,
            APPLY_TEMPERATURE=scale,
            USE_FP64=fp64,
            PER_TOKEN_COL=cache == "rows",
            # The logarithm is numpy's on both sides; sums are not reordered.
            rtol=1e-6,
        )


def temperature_and_min_p_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Values without an effect (0, 1) among others, and a batch of no row."""
    for label, slots in [("batch", [3, 0, 1, 2, 2]), ("empty", [])]:
        shared: dict[str, Any] = dict(expanded_idx_mapping_ptr=i64(slots))
        for dtype in (torch.float32, torch.float16):
            yield case(
                "sample.gumbel._temperature_kernel",
                f"{label}-{dtype}",
                (len(slots), 3),
                logits_ptr=random_logits(rng, len(slots), VOCAB).to(dtype),
                temperature_ptr=f32([0.0, 1.0, 0.3, 1.7]),
                **shared,
            )
        logits = random_logits(rng, len(slots), VOCAB)
        logits[1:2] = -torch.inf
        yield case(
            "sample.min_p._min_p_kernel",
            label,
            (len(slots),),
            logits_ptr=logits,
            min_p_ptr=f32([0.2, 0.0, 1.0, 0.01]),
            **shared,
        )


def penalties_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Each penalty alone, all, none; drafts that repeat, drafts that are not there."""
    input_ids = rng.integers(0, 96, 7)
    input_ids[[2, 3]], input_ids[5] = 11, -1
    yield case(
        "sample.penalties._penalties_kernel",
        "batch",
        (7, 3),
        logits_ptr=random_logits(rng, 7, 96),
        expanded_idx_mapping_ptr=i64([3, 3, 3, 3, 0, 0, 1]),
        token_ids_ptr=i32(input_ids),
        expanded_local_pos_ptr=i32([0, 1, 2, 3, 0, 1, 0]),
        repetition_penalty_ptr=f32([1.3, 1.0, 1.0, 0.8]),
        frequency_penalty_ptr=f32([0.0, 0.0, 0.5, 0.7]),
        presence_penalty_ptr=f32([0.0, 0.0, 0.0, -0.4]),
        prompt_bin_mask_ptr=i32(rng.integers(-(2**31), 2**31, (4, 3))),
        output_bin_counts_ptr=i32(rng.integers(0, 3, (4, 96))),
        rtol=1e-6,
    )
    yield case(
        "sample.penalties._bincount_kernel",
        "batch",
        (3, 3),
        expanded_idx_mapping_ptr=i64([2, 0, 3]),
        all_token_ids_ptr=i32(rng.integers(0, VOCAB, (4, 24))),
        prompt_len_ptr=i32([20, 9, 3, 8]),
        prefill_len_ptr=i32([20, 9, 21, 16]),
        prompt_bin_mask_ptr=i32(np.zeros((4, 3))),
        output_bin_counts_ptr=i32(np.zeros((4, VOCAB))),
        BLOCK_SIZE=8,
    )


def bias_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Allowed tokens, biases and stop tokens, alone and together, and rows that they empty."""
    for check_rows in (False, True):
        logits = random_logits(rng, 6, VOCAB)
        logits[4:, 3:] = -torch.inf
        logits[5, :2] = torch.tensor([torch.inf, -torch.inf])
        yield case(
            "sample.logit_bias._bias_kernel",
            "restore" if check_rows else "plain",
            (6,),
            logits_ptr=logits,
            expanded_idx_mapping_ptr=i64([0, 1, 2, 2, 3, 4]),
            num_allowed_token_ids_ptr=i32([3, 0, 5, 0, 0]),
            allowed_token_ids_ptr=i32([rng.permutation(VOCAB)[:8] for _ in range(5)]),
            num_logit_bias_ptr=i32([0, 4, 8, 0, 0]),
            bias_token_ids_ptr=i32([rng.permutation(VOCAB)[:8] for _ in range(5)]),
            bias_ptr=f32(rng.normal(0, 5, (5, 8))),
            pos_ptr=i64([4, 9, 8, 50, 4, 4]),
            min_lens_ptr=i32([0, 10, 10, 10, 10]),
            num_stop_token_ids_ptr=i32([0, 2, 1, 3, 3]),
            restore_when_all_masked_ptr=torch.tensor([True, True, False, False, True]),
            stop_token_ids_ptr=i32([[0, 1, 2, 5, 6, 7, 8, 9]] * 5),
            BLOCK_SIZE=8,
            LOGITS_BLOCK_SIZE=32,
            CHECK_ALL_MASKED_ROWS=check_rows,
        )


def bad_words_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Words of one to three tokens whose prefix is output, draft, both, prompt, or too long."""
    all_token_ids = rng.integers(20, 40, (3, 12))
    all_token_ids[1, 3:7] = [8, 9, 1, 2]
    words = [[5], [2, 6], [1, 2, 7], [9, 1, 2, 3, 4], [3, 8], [2, 3, 9], [8, 8, 8, 8, 8, 8, 8, 8]]
    prompt_word = [int(all_token_ids[0, 2]), 6]
    offsets = [0, *np.cumsum([len(word) for word in words])]
    yield case(
        "sample.bad_words._bad_words_kernel",
        "nothing-in-front",
        (1, 2),
        logits_ptr=random_logits(rng, 1, VOCAB).nan_to_num(neginf=-50),
        expanded_idx_mapping_ptr=i64([0]),
        bad_word_token_ids_ptr=i32([[7, 4, 5]]),
        bad_word_offsets_ptr=i32([[0, 1, 3]]),
        num_bad_words_ptr=i32([2]),
        all_token_ids_ptr=i32([[4, 4, 4]]),
        prompt_len_ptr=i32([3]),
        total_len_ptr=i32([3]),
        input_ids_ptr=i32([4]),
        expanded_local_pos_ptr=i32([0]),
    )
    yield case(
        "sample.bad_words._bad_words_kernel",
        "batch",
        (5, 7),
        logits_ptr=random_logits(rng, 5, VOCAB).nan_to_num(neginf=-50),
        expanded_idx_mapping_ptr=i64([1, 1, 1, 0, 2]),
        bad_word_token_ids_ptr=i32([prompt_word + [0] * 22, np.concatenate(words), [0] * 24]),
        bad_word_offsets_ptr=i32([[0, 2] + [0] * 6, offsets, [0] * 8]),
        num_bad_words_ptr=i32([1, 7, 0]),
        all_token_ids_ptr=i32(all_token_ids),
        prompt_len_ptr=i32([3, 3, 3]),
        total_len_ptr=i32([3, 7, 9]),
        input_ids_ptr=i32([2, 3, 4, 30, 30]),
        expanded_local_pos_ptr=i32([0, 1, 2, 0, 0]),
    )


def counting_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Rows in mid-prompt and not, NaNs, and a prompt that fills its row of tokens."""
    for rows in (4, 0):
        yield case(
            "input_batch._get_num_sampled_and_rejected_kernel",
            f"rows-{rows}",
            (rows,),
            num_sampled_ptr=i32([1, 3, 1, 2][:rows]),
            num_rejected_ptr=poisoned(rows),
            seq_lens_ptr=i32([20, 9, 11, 30]),
            cu_num_logits_ptr=spans([1, 5, 1, 3][:rows]),
            idx_mapping_ptr=i64([2, 0, 3, 1][:rows]),
            prefill_len_ptr=i32([9, 5, 21, 10]),
        )
    logits = random_logits(rng, 3, VOCAB)
    logits[0, [0, 40, 69]], logits[2] = torch.nan, torch.nan
    yield case(
        "metrics.logits._num_nans_kernel",
        "batch",
        (3,),
        logits_ptr=logits,
        num_nans_ptr=poisoned(3),
    )
    for label, num_computed in [("chunks", [3, 0, 11]), ("prompt-start", [0, 0, 0])]:
        yield case(
            "sample.prompt_logprob._prompt_logprobs_token_ids_kernel",
            label,
            (3,),
            prompt_logprobs_token_ids_ptr=poisoned(20, dtype=torch.int64),
            query_start_loc_ptr=spans([7, 1, 5]),
            idx_mapping_ptr=i64([2, 0, 1]),
            num_computed_tokens_ptr=i32(num_computed),
            all_token_ids_ptr=i32(rng.integers(0, 99, (3, 24))),
        )


def thinking_budget_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Thoughts that began, ended, began again; a budget that is left, used up, or not asked for.

    Markers of 2, 1 and 3 tokens, some of them among drafts, and an end that is half written.
    """
    begin, end, forced = [1, 2], [3], [8, 9, 3]
    texts = [
        [5, 1, 2, 6, 7],  # begun, one draft may stand before the end
        [1, 2, 6, 3, 7],  # ended
        [1, 2, 6, 3, 1, 2, 6, 8],  # begun again, the end half written
        [5, 5, 1],  # drafts complete the beginning
        [1, 2, 6, 6, 6, 6, 6, 6, 6],  # without a budget
        [4],
    ]
    table = np.full((6, 12), 5)
    for row, text in zip(table, texts, strict=True):
        row[: len(text)] = text
    lengths = i32([len(text) for text in texts])
    shared: dict[str, Any] = dict(
        thinking_token_budget_ptr=i32([3, 2, 1, 0, -1, 2]),
        all_token_ids_ptr=i32(table),
        total_len_ptr=lengths,
        reasoning_start_token_ids_ptr=i32(begin),
        natural_reasoning_end_token_ids_ptr=i32(end),
        START_LEN=2,
        NATURAL_END_LEN=1,
    )
    yield case(  # without budgets: with one it writes what our other kernel finds by itself
        "sample.thinking_budget._update_committed_marker_cache_kernel",
        "nothing",
        (6,),
        req_ids_ptr=i64([5, 0, 2, 1, 3, 4]),
        cached_last_start_ptr=poisoned(6),
        cached_last_end_ptr=poisoned(6),
        cached_scan_pos_ptr=poisoned(6),
        MAX_LEN=2,
        BLOCK=16,
        **shared | {"thinking_token_budget_ptr": i32([-1] * 6)},
    )
    yield case(
        "sample.thinking_budget._thinking_budget_kernel",
        "batch",
        (14,),
        logits_ptr=random_logits(rng, 14, VOCAB),
        expanded_idx_mapping_ptr=i64([0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 4, 5]),
        expanded_local_pos_ptr=i32([0, 1, 2, 3, 0, 1, 0, 1, 0, 1, 2, 3, 0, 0]),
        input_ids_ptr=i32([7, 6, 8, 3, 7, 6, 8, 9, 1, 2, 8, 9, 6, 4]),
        cached_last_start_ptr=i32([1, 0, 4, -1, 0, -1]),
        cached_last_end_ptr=i32([-1, 3, 3, -1, -1, -1]),
        reasoning_end_token_ids_ptr=i32(forced),
        END_LEN=3,
        **shared,
    )


def sampling_cases() -> list[Case]:
    """Every case for logprobs, grammars and the sampler of autoregressive models."""
    rng = np.random.default_rng(1)
    builders = [
        logprob_cases,
        logprob_token_ids_cases,
        apply_grammar_bitmask_cases,
        gumbel_cases,
        temperature_and_min_p_cases,
        penalties_cases,
        bias_cases,
        bad_words_cases,
        counting_cases,
        thinking_budget_cases,
    ]
    return [case for build in builders for case in build(rng)]
