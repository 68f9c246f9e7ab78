"""A batch without the pages that no row sees, for vLLM's FlashAttention 4.

Of a bidirectional sequence FlashAttention 4 reads all keys, also through a window
(``flash_fwd_sm90.py``, where ``dynamic_causal`` is 0), and masks what is in front of it: behind
8,192 keys more than six times what a canvas of 256 rows sees through a window of 1,024. A mask
depends on distances alone, so a sequence that begins some pages later gives the same rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from dllm.attention.inputs import RaggedBatch
from dllm.attention.planning import ceil_div

BLOCK = 128  # pages that a program copies


@triton.jit(do_not_specialize=["out_stride", "stride", "num_pages", "table_size"])
def visible_pages_kernel(
    out_tables, out_lens, query_start_loc, seq_lens, tables,
    out_stride, stride, num_pages, table_size,
    WINDOW: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK pages of one sequence. Grid: (sequences, blocks of pages)."""
    seq = tl.program_id(0)
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seq_len = tl.load(seq_lens + seq)
    query_len = tl.load(query_start_loc + seq + 1) - tl.load(query_start_loc + seq)
    first_page = tl.maximum(seq_len - query_len - (WINDOW - 1), 0) // PAGE_SIZE
    source = tables + seq.to(tl.int64) * stride + first_page
    found = tl.load(source + page, page < table_size - first_page, other=0)
    tl.store(out_tables + seq.to(tl.int64) * out_stride + page, found, page < num_pages)
    if tl.program_id(1) == 0:
        tl.store(out_lens + seq, seq_len - first_page * PAGE_SIZE)


class VisiblePages:
    """Leaves out the pages in front of the window of each sequence's first row.

    What it returns lies in memory that a captured CUDA graph reads again, but for a batch of more
    than ``num_seqs`` sequences, which is no full graph's.
    """

    def __init__(
        self, window: int, page_size: int, num_seqs: int, max_query_len: int, device: torch.device
    ) -> None:
        self._window, self._page_size = window, page_size
        num_pages = ceil_div(self._most_keys(max_query_len), page_size)
        self._tables = torch.zeros(num_seqs, num_pages, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(num_seqs, dtype=torch.int32, device=device)

    def _most_keys(self, query_len: int) -> int:
        """What a sequence's rows see, and the rest of a page."""
        return query_len + self._window + self._page_size - 2

    def __call__(self, batch: RaggedBatch) -> RaggedBatch:
        """The shorter batch; its max_seq_len follows from max_query_len. Does not wait."""
        num_seqs, table_size = batch.block_tables.shape
        most_keys = self._most_keys(batch.max_query_len)
        num_pages = min(table_size, ceil_div(most_keys, self._page_size))
        tables, seq_lens = self._tables[:num_seqs, :num_pages], self._seq_lens[:num_seqs]
        if num_seqs > len(self._tables):
            tables = self._tables.new_empty(num_seqs, num_pages)
            seq_lens = torch.empty_like(batch.seq_lens)
        visible_pages_kernel[(num_seqs, ceil_div(num_pages, BLOCK))](
            tables, seq_lens, batch.query_start_loc, batch.seq_lens, batch.block_tables,
            tables.stride(0), batch.block_tables.stride(0), num_pages, table_size,
            WINDOW=self._window, PAGE_SIZE=self._page_size, BLOCK=BLOCK, num_warps=1,
        )  # fmt: skip
        bound = table_size * self._page_size if batch.max_seq_len is None else batch.max_seq_len
        return replace(
            batch, block_tables=tables, seq_lens=seq_lens, max_seq_len=min(bound, most_keys)
        )
