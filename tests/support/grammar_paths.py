"""What the kernels of canvases under grammars do, by the search on a CPU that defines it."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dllm.engine import grammars
from dllm.engine.grammars import DeviceGrammars
from dllm.grammar.device import NO_TABLE, PackedTables, Paths, Searches
from dllm.grammar.table import Table
from dllm.grammar.viterbi import STOPPED, Canvas


def write_paths(
    logits: Tensor,
    scores: Tensor,
    tables: PackedTables,
    canvases: Searches,
    stops: Tensor,
    fillers: Tensor,
) -> Paths:
    paths = Paths(
        tokens=scores.argmax(dim=1),
        states=torch.full((len(logits),), STOPPED, dtype=torch.int32),
        end=canvases.state.clone(),
        score=torch.zeros(len(canvases.table), dtype=torch.float64),
    )
    for canvas, table in enumerate(canvases.table.tolist()):
        first, length = int(canvases.first_row[canvas]), int(canvases.length[canvas])
        if table == NO_TABLE:
            continue
        rows = slice(first, first + length)
        ends = set(stops[canvas].tolist())
        search = Canvas(unpacked(tables, table), [*ends], [*{*fillers[canvas].tolist()} - ends])
        state, budget = int(canvases.state[canvas]), int(canvases.budget[canvas])
        given = budget, int(canvases.thoughts_end[canvas])
        path = search.best_path(scores[rows].float().numpy(), state, *given)
        paths.tokens[rows] = torch.from_numpy(path.tokens)
        paths.states[rows] = torch.from_numpy(path.states[:-1]).int()
        paths.end[canvas], paths.score[canvas] = int(path.states[-1]), path.score
        is_forbidden = np.stack(search.forbidden(path, *given))
        logits[rows] = logits[rows].masked_fill(torch.from_numpy(is_forbidden), -torch.inf)
    return paths


def unpacked(tables: PackedTables, number: int) -> Table:
    states = slice(int(tables.first_state[number]), int(tables.first_state[number + 1]))
    cells = slice(int(tables.first_next[number]), int(tables.first_next[number + 1]))
    return Table(
        class_of=tables.class_of[number].numpy(),
        next=tables.next[cells].view(-1, int(tables.num_classes[number])).numpy(),
        accepts=tables.accepts[states].bool().numpy(),
        left=tables.left[states].numpy(),
    )


def as_on_a_gpu(engine: Any, monkeypatch: pytest.MonkeyPatch) -> DeviceGrammars:
    """Let an engine on a CPU keep its grammars as on a GPU, with this search for the kernels."""
    monkeypatch.setattr(grammars, "write_paths", write_paths)
    state = engine.runner.model_state
    on_device = DeviceGrammars(state.vllm_config, state.max_num_reqs, torch.device("cpu"))
    for owner in (state, engine.runner.sampler):
        monkeypatch.setattr(owner, "grammars", on_device)
    return on_device
