"""The kernels of canvases under grammars; test_grammar_paths_kernel.py runs this in a process.

By hand: `TRITON_INTERPRET=1 pytest --noconftest tests/ops/grammar_paths_kernel_suite.py` without a
GPU, the same without the variable on one.

Everything is compared bit for bit with the definition, which test_grammar_paths.py holds to the
search of `dllm/grammar`.
"""

from __future__ import annotations

import math

import pytest
import torch

from dllm.ops import grammar_paths_gpu as gpu
from dllm.ops.grammar_paths import (
    NO_TABLE,
    STOPPED,
    Canvases,
    ClassMaxima,
    Ends,
    PackedTables,
    ends,
    reference_best_paths,
    reference_class_maxima,
    reference_mask_rows,
)
from tests.support.grammar_path_cases import Batch, batch
from tests.support.interpreter import DEVICE, speed_up

speed_up()
CUTS = [gpu.PathTiles(2, 32, 64, 4), gpu.PathTiles(8, 256, 512, 4)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What a kernel does not write is NaN, or a number that is nobody's."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor):
        return tensor.fill_(math.nan if tensor.is_floating_point() else 99)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))


def on_device(parts):
    moved = (part.to(DEVICE) if isinstance(part, torch.Tensor) else part for part in parts)
    return type(parts)._make(moved)


def assert_equal(ours, expected):
    for name, a, b in zip(ours._fields, ours, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a.cpu(), b), name


def maxima_of(made: Batch, cut: gpu.PathTiles) -> ClassMaxima:
    tables = on_device(made.tables)
    return gpu.class_maxima_kernels(made.logits.to(DEVICE), tables, made.table_of.to(DEVICE), cut)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_class_maxima(dtype, cut):
    made = batch(1, dtype=dtype)
    made.logits[3, 50:120] = math.nan
    made.logits[5] = math.nan
    made.logits[6] = -math.inf
    ours = maxima_of(made, cut)
    assert_equal(ours, reference_class_maxima(made.logits, made.tables, made.table_of))
    assert (ours.token[made.table_of.to(DEVICE) == NO_TABLE] == -1).all()


def test_class_maxima_of_strided_rows():
    made = batch(2)
    wide = torch.full((len(made.logits), 2 * made.logits.shape[1]), math.nan)
    wide[:, : made.logits.shape[1]] = made.logits
    ours = gpu.class_maxima_kernels(
        wide[:, : made.logits.shape[1]].to(DEVICE), on_device(made.tables),
        made.table_of.to(DEVICE), CUTS[0],
    )  # fmt: skip
    assert_equal(ours, reference_class_maxima(made.logits, made.tables, made.table_of))


def paths_of(made: Batch, cut: gpu.PathTiles):
    """(the kernel's, the definition's)."""
    maxima = reference_class_maxima(made.logits, made.tables, made.table_of)
    found = ends(made.logits, made.logits.argmax(dim=1), made.canvas_of, made.stops, made.fillers)
    parts: tuple[ClassMaxima, Ends, PackedTables, Canvases]
    parts = maxima, found, made.tables, made.canvases
    ours = gpu.best_paths_kernels(*(on_device(part) for part in parts), cut)
    return ours, reference_best_paths(*parts)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("seed", range(4))
def test_best_paths(seed, cut):
    made = batch(seed)
    ours, expected = paths_of(made, cut)
    assert_equal(ours, expected)
    if seed == 0:  # something was searched, stopped, left alone
        assert (expected.score < 0).any() and (expected.score == 0).any()
        assert (expected.end == STOPPED).any() and (expected.end >= 0).any()


def test_a_canvas_does_not_depend_on_the_others():
    made = batch(5)
    together, _ = paths_of(made, CUTS[0])
    for canvas in (1, 4):
        rows = made.canvas_of == canvas
        one = slice(canvas, canvas + 1)
        parts = [part[one] for part in made.canvases[:5]]
        parts[0] = torch.zeros_like(parts[0])
        alone = Batch(
            made.logits[rows], made.tables, Canvases(*parts, most_rows=int(parts[1])),
            torch.zeros_like(made.canvas_of[rows]), made.table_of[rows],
            made.stops[one], made.fillers[one],
        )  # fmt: skip
        ours, _ = paths_of(alone, CUTS[0])
        assert torch.equal(ours.tokens, together.tokens[rows.to(DEVICE)])
        assert torch.equal(ours.score, together.score[one])


def test_scores_of_impossible_rows():
    made = batch(6)
    made.logits[:] = -math.inf
    made.logits[:, 250] = 0.0
    made.logits[4] = math.nan
    ours, expected = paths_of(made, CUTS[0])
    assert_equal(ours, expected)
    assert torch.isfinite(ours.score).all()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks(dtype, cut):
    made = batch(8, dtype=dtype)
    made.logits[0, :5] = torch.tensor([math.nan, -0.0, 0.0, math.inf, 1e-40]).to(dtype)
    places = torch.arange(len(made.logits)) - made.canvases.first_row[made.canvas_of]
    budgets = (made.canvases.budget[made.canvas_of] - places).int()
    states = made.canvases.state[made.canvas_of]
    stops = made.stops[made.canvas_of]
    rest = (made.table_of, states, budgets, stops)
    ours, expected = made.logits.clone().to(DEVICE), made.logits.clone()
    gpu.mask_rows_kernel(ours, on_device(made.tables), *(x.to(DEVICE) for x in rest), cut)
    reference_mask_rows(expected, made.tables, *rest)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(ours.cpu().view(bits), expected.view(bits))
    is_free = (made.table_of == NO_TABLE) | (states == STOPPED)
    assert is_free.any() and not is_free.all()
    kept = ours.cpu().view(bits)[is_free]
    assert torch.equal(kept, made.logits.view(bits)[is_free])
    assert (ours.cpu()[~is_free] == -math.inf).any()


def test_no_rows():
    made = batch(9)
    none = made.logits[:0].to(DEVICE), on_device(made.tables), made.table_of[:0].to(DEVICE)
    assert gpu.class_maxima_kernels(*none, CUTS[0]).best.shape[0] == 0
