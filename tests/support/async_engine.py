"""Starts engines with asynchronous scheduling on a CPU (``tests.support.forced_async``)."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dllm.engine import pending
from tests.support.engine_harness import Engine, get_engine
from tests.support.forced_async import asynchronous_platform


def get_async_engine(model: str | Path, **options: Any) -> Engine:
    """As ``get_engine``, with asynchronous scheduling."""
    with asynchronous_platform():
        engine = get_engine(model, async_scheduling=True, **options)
    assert engine.core.batch_queue_size == 2
    return engine


@contextmanager
def rows_taken(block_size: int = 1) -> Iterator[Counter[str]]:
    """How the rows of all engine steps were run, of a model with blocks of this size."""
    taken: Counter[str] = Counter()
    find = pending.find_commits

    def spy(state: Any, batch: Any, num_tokens: torch.Tensor) -> torch.Tensor:
        commits = find(state, batch, num_tokens)
        widths, seq_lens = batch.cu_num_logits.diff(), batch.seq_lens[: batch.num_reqs]
        heads = batch.query_start_loc[: batch.num_reqs + 1].diff() - widths
        is_prompt = seq_lens - widths <= torch.from_numpy(batch.prefill_len_np)
        is_late = (heads >= block_size) & ~is_prompt
        taken["deferred commit"] += int(commits.sum())
        taken["commit with its tail"] += int((commits & (heads > 0)).sum())
        taken["trimmed commit"] += int((commits & (num_tokens[batch.idx_mapping] < seq_lens)).sum())
        taken["block before a canvas"] += int((is_late & (widths > 0)).sum())
        taken["block alone"] += int((is_late & (widths == 0)).sum())
        taken["canvas"] += int((~commits & (widths > 0)).sum())
        taken["mixed batch"] += bool(commits.any() and not commits.all())
        return commits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pending, "find_commits", spy)
        yield taken
