"""Cases for the kernels of dllm/cpu/batch.py, which must do the same as vLLM's Triton kernels.

Outputs are filled with `POISON` or NaN before a launch, so that the comparison also shows what must
not be written. Block sizes are small, so that loops over blocks run more than once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dllm.patches.cpu import parameters_of

POISON = -777
GPU = "vllm.v1.worker.gpu."


@dataclass
class Case:
    """One launch. A list of tensors among `args` stands for a tensor of their addresses."""

    kernel: str
    label: str
    grid: tuple[int, ...]
    args: dict[str, Any] = field(repr=False)
    rtol: float = 0.0

    @property
    def id(self) -> str:
        return f"{self.kernel.rsplit('.', 1)[1].strip('_')}-{self.label}"


def case(kernel: str, label: str, grid: tuple[int, ...], rtol: float = 0.0, **args: Any) -> Case:
    """A launch of one of the runner's kernels.

    What is not given: strides and the vocabulary are those of tensors, blocks are of 32 logits or
    of 4 other elements.
    """
    logits = args.get("logits_ptr")
    for name in {*parameters_of(GPU + kernel)} - args.keys():
        if name.endswith("_stride"):
            tensor = args[name.removesuffix("stride") + "ptr"]
            args[name] = 0 if tensor is None else tensor.stride(0)
        elif name == "vocab_size" and logits is not None:
            args[name] = logits.shape[-1]
        elif name == "BLOCK_SIZE":
            args[name] = 4 if logits is None else 32
    return Case(GPU + kernel, label, grid, args, rtol)


def i32(values: Any) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.int32).clone()


def i64(values: Any) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.int64).clone()


def f32(values: Any) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.float32).clone()


def poisoned(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full(shape, torch.nan if dtype.is_floating_point else POISON, dtype=dtype)


def spans(lengths: list[int], padding: int = 0) -> torch.Tensor:
    """Where adjacent spans start, and the last one's end, which is repeated `padding` times."""
    ends = [0, *np.cumsum(lengths, dtype=int).tolist()]
    return i32(ends + ends[-1:] * padding)


def random_logits(rng: np.random.Generator, rows: int, vocab: int) -> torch.Tensor:
    """fp32 logits with ties and -inf entries among them."""
    logits = rng.normal(0, 4, (rows, vocab)).round(1)
    logits[rng.random((rows, vocab)) < 0.1] = -np.inf
    return torch.from_numpy(logits).float()


# --------------------------------------------------------------------------- staged writes


def apply_write_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Tables of one and two dimensions, of ints and floats, one or several of them."""
    tokens = i32(rng.integers(0, 99, 64))
    tables = [poisoned(5, 12), poisoned(5, 20)]
    for label, output, stride, contents, groups, writes in [
        ("rows", poisoned(6, 40), 40, tokens, None, [(4, 0, 30), (0, 7, 3), (2, 39, 1)]),
        ("one-dimension", poisoned(6), 1, tokens, None, [(5, 0, 1), (0, 0, 1)]),
        ("floats", poisoned(3, 4, dtype=torch.float32), 4, torch.rand(4), None, [(1, 0, 4)]),
        ("groups", tables, i64([12, 20]), tokens, [0, 1, 1], [(3, 2, 10), (0, 0, 9), (4, 1, 19)]),
    ]:
        rows, starts, lengths = map(list, zip(*writes, strict=True))
        yield case(
            "buffer_utils._apply_write_kernel",
            label,
            (len(writes), 4),
            output_ptr=output,
            output_stride=stride,
            write_indices_ptr=i32(rows),
            write_starts_ptr=i32(starts),
            write_contents_ptr=contents,
            write_cu_lens_ptr=spans(lengths)[1:].clone(),
            write_group_ids_ptr=None if groups is None else i32(groups),
            BLOCK_SIZE=8,
            MULTI_GROUP=groups is not None,
        )


# --------------------------------------------------------------------------- block tables


def gather_block_tables_cases(rng: np.random.Generator) -> Iterator[Case]:
    """A full batch, padding rows, slots without blocks, one row, no row."""
    max_num_reqs, widths = 6, [5, 21]
    for label, slots in {
        "batch": [4, 1, 5],
        "one-row": [2],
        "full": [3, 2, 1, 0, 5, 4],
        "empty": [],
    }.items():
        num_blocks = np.stack([rng.integers(0, width + 1, max_num_reqs) for width in widths])
        num_blocks[:, 1] = 0
        yield case(
            "block_table._gather_block_tables_kernel",
            label,
            (2, max_num_reqs),
            batch_idx_to_req_idx=i64(slots),
            src_block_table_ptrs=[i32(rng.integers(0, 99, (6, width))) for width in widths],
            dst_block_table_ptrs=[poisoned(6, width) for width in widths],
            block_table_strides=i64(widths),
            num_blocks_ptr=i32(num_blocks),
            num_reqs=len(slots),
            num_computed_tokens_ptr=i32(rng.integers(0, 60, max_num_reqs)),
            sliding_window_reach_ptr=i32([0, 7]),
            block_sizes_ptr=i32([4, 2]),
            MASK_SLIDING_WINDOW=label != "one-row",
            BLOCK_SIZE=8,
        )


def compute_slot_mappings_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Page crossings, two block sizes, a group that is off, rows without a slot, no row."""
    for label, slots, lengths in [
        ("batch", [4, 1, 2], [9, 1, 20]),
        ("rows-without-slot", [-1, 3, -1], [5, 17, 2]),
        ("no-slot-at-all", [-1], [5]),
        ("zero-length-row", [0, 5, 3], [3, 0, 4]),
        ("padded-starts", [0, 5], [3, 4]),
        ("empty", [], []),
    ]:
        num_tokens = sum(lengths)
        yield case(
            "block_table._compute_slot_mappings_kernel",
            label,
            (3, len(slots) + 1),
            max_num_tokens=40,
            idx_mapping=i64(slots),
            query_start_loc=spans(lengths, padding=2 if label == "padded-starts" else 0),
            pos=i64(rng.integers(0, 80, max(num_tokens, 1))),
            block_table_ptrs=[i32(rng.integers(0, 99, (6, width))) for width in (20, 10, 20)],
            block_table_strides=i64([20, 10, 20]),
            block_sizes=i32([4, 8, 4]),
            slot_mapping_enabled=torch.tensor([True, True, False]),
            dcp_sharded=torch.tensor([True, True, True]),
            slot_mappings_ptr=poisoned(3, 48, dtype=torch.int64),
            cp_rank=0,
            CP_SIZE=1,
            CP_INTERLEAVE=1,
            PAD_ID=-1,
            TRITON_BLOCK_SIZE=8,
        )


# --------------------------------------------------------------------------- inputs of a step


def prepare_prefill_inputs_cases(rng: np.random.Generator) -> Iterator[Case]:
    """First, middle and last chunks, rows that are done, look-ahead over the prompt's end."""
    prefill_lens, slots, lengths = [30, 12, 25, 8], [2, 0, 3, 1], [10, 9, 4, 3]
    for label, num_computed, num_lookahead in [
        ("first-chunk", [0, 0, 0, 0], 1),
        ("middle-and-last-chunks", [21, 9, 15, 8], 1),
        ("look-ahead", [18, 9, 14, 4], 3),
        ("beyond-the-prompt", [25, 11, 24, 7], 2),
        ("all-done", [30, 12, 25, 9], 1),
        ("empty", [0, 0, 0, 0], 1),
    ]:
        rows = 0 if label == "empty" else 4
        yield case(
            "input_batch._prepare_prefill_inputs_kernel",
            label,
            (rows,),
            input_ids_ptr=poisoned(40),
            next_prefill_tokens_ptr=poisoned(num_lookahead, 4),
            num_lookahead=num_lookahead,
            idx_mapping_ptr=i64(slots[:rows]),
            query_start_loc_ptr=spans(lengths[:rows]),
            all_token_ids_ptr=i32(rng.integers(0, 999, (4, 50))),
            prefill_lens_ptr=i32(prefill_lens),
            num_computed_tokens_ptr=i32(num_computed),
            LOOKAHEAD_BLOCK=4,
        )


def prepare_pos_seq_lens_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Batches with and without zero-length rows, padded starts, one row, no row."""
    for label, slots, lengths in [
        ("batch", [3, 0, 5], [7, 1, 12]),
        ("zero-length-row", [3, 0, 5], [7, 0, 12]),
        ("one-row", [1], [1]),
        ("empty", [], []),
    ]:
        yield case(
            "input_batch._prepare_pos_seq_lens_kernel",
            label,
            (len(slots) + 1,),
            pos_ptr=poisoned(32, dtype=torch.int64),
            seq_lens_ptr=poisoned(6),
            idx_mapping_ptr=i64(slots),
            query_start_loc_ptr=spans(lengths, padding=3),
            num_computed_tokens_ptr=i32(rng.integers(0, 100, 6)),
            max_num_reqs=6,
        )


def combine_sampled_and_draft_tokens_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Diffusion rows (no bonus token) and autoregressive ones: prompts, no, cut and full drafts."""
    for label, new, drafts, query_lens, seq_lens, prefill_lens in [
        ("diffusion-canvases", 0, [4, 4, 4], [4, 8, 4], [24, 28, 9], [20, 20, 5]),
        ("diffusion-head-only", 0, [0, 4, 0], [5, 4, 9], [15, 24, 9], [20, 20, 9]),
        ("diffusion-cut-canvas", 0, [3, 1, 4], [3, 1, 4], [23, 24, 9], [20, 20, 5]),
        ("no-drafts", 1, [0, 0, 0], [1, 6, 1], [21, 6, 9], [20, 20, 5]),
        ("drafts", 1, [4, 2, 0], [5, 3, 1], [25, 24, 9], [20, 20, 5]),
        ("placeholders-in-the-prompt", 1, [2, 2, 2], [3, 4, 3], [20, 19, 8], [20, 20, 5]),
        ("starts-inside-the-prompt", 1, [4, 3, 2], [5, 4, 3], [22, 23, 8], [20, 20, 5]),
        ("empty", 1, [], [], [], []),
    ]:
        rows = len(drafts)
        num_logits = [count + new for count in drafts]
        yield case(
            "input_batch._combine_sampled_and_draft_tokens_kernel",
            label,
            (rows,),
            input_ids_ptr=poisoned(30),
            idx_mapping_ptr=i64([2, 0, 3][:rows]),
            last_sampled_tokens_ptr=i64(rng.integers(0, 999, (4, 1))),
            query_start_loc_ptr=spans(query_lens, padding=1),
            seq_lens_ptr=i32(seq_lens),
            prefill_len_ptr=i32(
                [*prefill_lens[1:2], POISON, *prefill_lens[0:1], *prefill_lens[2:3]]
            ),
            draft_tokens_ptr=i64(rng.integers(0, 999, (4, 4))),
            cu_num_logits_ptr=spans(num_logits),
            logits_indices_ptr=poisoned(sum(num_logits), dtype=torch.int64),
            BLOCK_SIZE=8,
            NUM_NEW_SAMPLED_TOKENS=new,
        )


def expand_idx_mapping_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Rows with many, one and no logits, and a tail of the output that no row fills."""
    for label, slots, num_logits in [
        ("batch", [5, 2, 0], [4, 1, 3]),
        ("rows-without-logits", [5, 2, 0], [0, 4, 0]),
        ("empty", [], []),
    ]:
        yield case(
            "input_batch._expand_idx_mapping_kernel",
            label,
            (len(slots),),
            idx_mapping_ptr=i64(slots),
            expanded_idx_mapping_ptr=poisoned(10, dtype=torch.int64),
            expanded_local_pos_ptr=poisoned(10),
            cu_num_logits_ptr=spans(num_logits),
        )


# --------------------------------------------------------------------------- after a step


def post_update_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Rows that emit all, some or none, masked rows, with and without token counts and spans."""
    for label, slots, num_sampled, num_rejected, has_counts, has_spans in [
        ("denoise", [3, 1, 4], [0, 0, 0], [4, 4, 4], False, True),
        ("emit", [3, 1, 4], [4, 0, 2], [4, 4, 2], False, True),
        ("counts", [3, 1, 4], [1, 4, 3], [0, 0, 1], True, True),
        ("masked-rows", [-1, 1, -1], [4, 4, 4], [0, 1, 0], True, True),
        ("no-spans", [3, 1, 4], [1, 0, 2], [0, 3, 1], True, False),
        ("empty", [], [], [], True, True),
    ]:
        rows = len(slots)
        yield case(
            "input_batch._post_update_kernel",
            label,
            (rows,),
            idx_mapping_ptr=i64(slots),
            num_computed_tokens_ptr=i32(rng.integers(0, 100, 6)),
            last_sampled_tokens_ptr=poisoned(6, 1, dtype=torch.int64),
            output_bin_counts_ptr=i32(rng.integers(0, 3, (6, 7))) if has_counts else None,
            sampled_tokens_ptr=i32(rng.integers(3, 5, (rows, 4))),
            num_sampled_ptr=i32(num_sampled),
            num_rejected_ptr=i32(num_rejected),
            query_start_loc_ptr=spans([8, 4, 5][:rows], padding=2) if has_spans else None,
            all_token_ids_ptr=poisoned(6, 40),
            total_len_ptr=i32(rng.integers(0, 36, 6)),
            draft_tokens_ptr=i64(rng.integers(0, 99, (rows, 3))) if has_counts else None,
            draft_tokens_out_ptr=poisoned(6, 3, dtype=torch.int64),
            num_draft_tokens=3 if has_counts else 0,
        )


def post_update_num_computed_tokens_cases(rng: np.random.Generator) -> Iterator[Case]:
    """A batch, one row, no row."""
    for label, slots in [("batch", [3, 1, 4]), ("one-row", [5]), ("empty", [])]:
        yield case(
            "input_batch._post_update_num_computed_tokens_kernel",
            label,
            (len(slots),),
            idx_mapping_ptr=i64(slots),
            num_computed_tokens_ptr=i32(rng.integers(0, 100, 6)),
            query_start_loc_ptr=spans([8, 4, 5][: len(slots)], padding=1),
        )


def prompt_embeds_cases(rng: np.random.Generator) -> Iterator[Case]:
    """A first chunk, a later one, tokens among the embeddings, a prompt that is over, and none."""
    lengths = [9, 0, 5, 6]
    given = [f32(rng.normal(0, 1, (length, 7))) for length in lengths]
    masks = [torch.from_numpy(rng.integers(0, 2, length, dtype=np.uint8)) for length in lengths]
    yield case(
        "model_states.prompt_embeds._apply_prompt_embeds_kernel",
        "batch",
        (4, 2),
        inputs_embeds_ptr=poisoned(20, 8, dtype=torch.float32)[:, :7],
        embeds_ptrs_ptr=given,
        mask_ptrs_ptr=[masks[slot] if slot > 1 else None for slot in range(4)],
        embeds_lens_ptr=i32(lengths),
        idx_mapping_ptr=i64([3, 0, 1, 2]),
        query_start_loc_ptr=spans([6, 4, 3, 2]),
        num_computed_tokens_ptr=i32([3, 0, 5, 2]),
        hidden_size=7,
        TOKEN_BLOCK=4,
    )


def zero_blocks_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Two segments of other widths; what lies between two pages stays."""
    pages = [i32(rng.integers(1, 99, (5, 12))), i32(rng.integers(1, 99, (5, 3)))]
    yield Case(
        "vllm.v1.worker.utils._zero_kv_blocks_kernel",
        "batch",
        (2, 2, 3),
        dict(
            seg_addrs_ptr=pages,
            seg_block_strides_ptr=i64([12, 3]),
            seg_page_sizes_ptr=i64([10, 3]),
            block_ids_ptr=i64([4, 1]),
            BLOCK_SIZE=4,
        ),
    )


def state_cases() -> list[Case]:
    """Every case for the runner's state."""
    rng = np.random.default_rng(0)
    builders = [
        apply_write_cases,
        gather_block_tables_cases,
        compute_slot_mappings_cases,
        prepare_prefill_inputs_cases,
        prepare_pos_seq_lens_cases,
        combine_sampled_and_draft_tokens_cases,
        expand_idx_mapping_cases,
        post_update_cases,
        post_update_num_computed_tokens_cases,
        prompt_embeds_cases,
        zero_blocks_cases,
    ]
    return [case for build in builders for case in build(rng)]
