"""The kernels of canvases under grammars; tests/test_kernel_suites.py runs this.

Everything is compared bit for bit with the search on a CPU, `dllm/grammar/viterbi`.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dllm.grammar import kernels
from dllm.grammar.class_maxima import Maxima, class_maxima, label_maxima
from dllm.grammar.device import NO_TABLE, Searches, pack
from dllm.grammar.table import Table
from dllm.grammar.viterbi import OTHER_THAN_FIXED, STOPPED, Canvas
from tests.support.grammar_path_cases import UNLIMITED, VOCAB, Batch, batch
from tests.support.grammar_paths import unpacked, write_paths
from tests.support.grammars import GRAMMARS, PADDING, STOP, WORDS, table
from tests.support.interpreter import DEVICE, speed_up

speed_up()
CUTS = [kernels.PathTiles(32, 64, 4), kernels.PathTiles(256, 512, 4)]


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


def maxima_of(made: Batch, members: int = 512) -> Maxima:
    tables = on_device(made.tables)
    found = class_maxima(made.logits.to(DEVICE), tables, made.table_of.to(DEVICE), members)
    return Maxima(*(part.cpu() for part in found))


def assert_maxima(found: Maxima, made: Batch) -> None:
    """By hand: NaN is -inf, the lowest of equal tokens wins."""
    logits = made.logits.float().nan_to_num(nan=-math.inf, neginf=-math.inf)
    for row, which in enumerate(made.table_of.tolist()):
        for kind in range(made.tables.most_classes):
            members = torch.nonzero(made.tables.class_of[which] == kind)[:, 0]
            if which == NO_TABLE or not len(members):
                assert found.member[row, kind] == -1 and found.best[row, kind] == -math.inf
            else:
                x = logits[row, members]
                assert found.member[row, kind] == members[x == x.max()][0]
                assert found.best[row, kind] == x.max()


@pytest.mark.parametrize("members", [512, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_class_maxima(dtype, members):
    made = batch(1, dtype=dtype)
    made.logits[3, 50:120] = math.nan
    made.logits[5] = math.nan
    made.logits[6] = -math.inf
    assert_maxima(maxima_of(made, members), made)


@pytest.mark.parametrize("members", [32, 4096])
def test_label_maxima(members):
    """By hand: the lowest of equal classes wins."""
    made = batch(1)
    made.logits[:] = made.logits.round()
    made.logits[5] = -math.inf
    maxima, table_of = maxima_of(made), made.table_of.to(DEVICE)
    found = label_maxima(on_device(maxima), on_device(made.tables), table_of, members)
    num_ties = 0
    for row, which in enumerate(made.table_of.tolist()):
        labels = [] if which == NO_TABLE else labels_of(unpacked(made.tables, which))
        for label in range(made.tables.most_labels):
            best, kind = float(found.best[row, label]), int(found.member[row, label])
            if label >= len(labels):
                assert (best, kind) == (-math.inf, -1)
                continue
            x = maxima.best[row].numpy()[labels[label]]
            tied = labels[label][x == x.max()]
            num_ties += len(tied) > 1
            assert (best, kind) == (float(x.max()), tied[0])
    assert num_ties > 10


def labels_of(table: Table) -> list[np.ndarray]:
    """The classes of each label."""
    edges = table.edges
    return [edges.classes(label) for label in range(len(edges.bounds) - 1)]


def test_class_maxima_of_strided_rows():
    made = batch(2)
    wide = torch.full((len(made.logits), 2 * made.logits.shape[1]), math.nan)
    wide[:, : made.logits.shape[1]] = made.logits
    strided = made._replace(logits=wide[:, : made.logits.shape[1]])
    assert_maxima(maxima_of(strided), made)


@pytest.mark.parametrize("empty", [0, 1, 3])
def test_a_class_without_tokens(empty):
    class_of = np.where(np.arange(VOCAB) % 4 == empty, -1, np.arange(VOCAB) % 4).astype(np.int32)
    following = np.zeros((1, 4), dtype=np.int32)
    following[0, empty] = -1
    made = Table(class_of, following, np.ones(1, dtype=bool), np.zeros(1, dtype=np.int32))
    tables = pack([made])
    assert empty not in tables.chunk_class
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    table_of = torch.zeros(3, dtype=torch.int32)
    given = batch(0)._replace(logits=logits, tables=tables, table_of=table_of)
    assert_maxima(maxima_of(given), given)


def paths_of(made: Batch, cut: kernels.PathTiles, scores: torch.Tensor | None = None):
    """The paths and the masked logits of (the kernels, the search).

    Args:
        scores: None: the logits.
    """
    parts = made.canvases, made.stops, made.fillers
    masked, expected = made.logits.clone().to(DEVICE), made.logits.clone()
    moved = [on_device(part) if isinstance(part, tuple) else part.to(DEVICE) for part in parts]
    theirs = masked if scores is None else scores.to(DEVICE)
    ours = kernels.write_paths(masked, theirs, on_device(made.tables), *moved, cut)
    scores = expected if scores is None else scores
    return (ours, masked), (write_paths(expected, scores, made.tables, *parts), expected)


def assert_equal(ours, expected):
    for name, a, b in zip(ours[0]._fields, ours[0], expected[0], strict=True):
        assert a.dtype == b.dtype and torch.equal(a.cpu(), b), name
    bits = torch.int32 if ours[1].dtype == torch.float32 else torch.int16
    assert torch.equal(ours[1].cpu().view(bits), expected[1].view(bits))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("seed", range(4))
def test_paths_and_masks(seed, cut):
    made = batch(seed)
    ours, expected = paths_of(made, cut)
    assert_equal(ours, expected)
    if seed == 0:  # something was searched, stopped, left alone
        paths = expected[0]
        assert (paths.score < 0).any() and (paths.score == 0).any()
        assert (paths.end == STOPPED).any() and (paths.end >= 0).any()
    is_free = made.table_of == NO_TABLE
    same = ours[1].cpu().view(torch.int32) == made.logits.view(torch.int32)
    assert is_free.any() and same[is_free].all() and not same.all()
    assert torch.equal(ours[0].tokens.cpu()[is_free], made.logits.argmax(dim=1)[is_free])


@pytest.mark.parametrize("seed", range(4))
def test_paths_through_fixed_tokens(seed):
    """Half of the tokens of a path are fixed, and others are the likeliest there."""
    made = batch(seed)
    wanted = write_paths(made.logits.clone(), made.logits, made.tables, *made[2:3], *made[5:])
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(made.logits.shape, generator=generator)
    fixed = torch.nonzero(torch.rand(len(scores), generator=generator) < 0.5)[:, 0]
    scores[fixed] = OTHER_THAN_FIXED
    scores[fixed, wanted.tokens[fixed]] = 0.0
    ours, expected = paths_of(made, CUTS[1], scores)
    assert_equal(ours, expected)
    in_text = fixed[(expected[0].states[fixed] != STOPPED) & (wanted.states[fixed] != STOPPED)]
    is_free = made.table_of[in_text] == NO_TABLE
    kept = expected[0].tokens[in_text] == wanted.tokens[in_text]
    assert kept[~is_free].all() and len(in_text)


@pytest.mark.parametrize("seed", range(4))
def test_paths_of_real_grammars(seed):
    """Several in one batch, ties, rows of -inf, stops and paddings."""
    rng = np.random.default_rng(seed)
    found = [table(*GRAMMARS[name], most_states=60)[0] for name in ("words", "date", "choice")]
    which, lengths = rng.integers(0, len(found), 4), rng.integers(1, 8, 4)
    states = [int(rng.integers(0, len(found[each].accepts))) for each in which]
    states[0] = STOPPED
    budgets = [
        99 if rng.random() < 0.3 else int(found[each].left[state]) + int(rng.integers(0, 5))
        for each, state in zip(which, states, strict=True)
    ]
    scores = rng.normal(0, 3, (int(lengths.sum()), len(WORDS))).astype(np.float32)
    scores[::3] = scores[::3].round()
    scores[1::7, rng.integers(0, len(WORDS), 150)] = -np.inf
    scores[rng.random(len(scores)) < 0.2, STOP] = 20.0
    first = np.cumsum(lengths) - lengths
    canvas_of = torch.from_numpy(np.repeat(np.arange(4), lengths))
    parts = (first, lengths, which, states, budgets, [UNLIMITED] * 4)
    ints = [torch.tensor(x, dtype=torch.int32) for x in parts]
    made = Batch(
        torch.from_numpy(scores),
        pack(found),
        Searches(*ints, canvas_of, most_rows=int(lengths.max()), num_states=4 * 60),
        canvas_of,
        ints[2][canvas_of],
        torch.full((4, 1), STOP),
        torch.tensor([[STOP, PADDING]]).repeat(4, 1),
    )
    assert_equal(*paths_of(made, CUTS[1]))


def test_a_canvas_does_not_depend_on_the_others():
    made = batch(5)
    (together, _), _ = paths_of(made, CUTS[0])
    for canvas in (1, 4):
        rows = made.canvas_of == canvas
        one = slice(canvas, canvas + 1)
        parts = [part[one] for part in made.canvases[:6]]
        parts[0] = torch.zeros_like(parts[0])
        request_of = torch.zeros_like(made.canvas_of[rows])
        alone = Batch(
            made.logits[rows], made.tables,
            Searches(*parts, request_of, int(parts[1]), num_states=200),
            request_of, made.table_of[rows], made.stops[one], made.fillers[one],
        )  # fmt: skip
        (ours, _), _ = paths_of(alone, CUTS[0])
        assert torch.equal(ours.tokens, together.tokens[rows.to(DEVICE)])
        assert torch.equal(ours.score, together.score[one])


def test_scores_of_impossible_rows():
    made = batch(6)
    made.logits[:] = -math.inf
    made.logits[:, 250] = 0.0
    ours, expected = paths_of(made, CUTS[0])
    assert_equal(ours, expected)
    assert torch.isfinite(ours[0].score).all()


def test_a_row_of_nan_is_a_row_of_impossible_tokens():
    made = batch(6)
    made.logits[4] = math.nan
    (ours, _), _ = paths_of(made, CUTS[0])
    assert torch.isfinite(ours.score).all()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_of_any_states(dtype, cut):
    made = batch(8, dtype=dtype)
    made.logits[0, :5] = torch.tensor([math.nan, -0.0, 0.0, math.inf, 1e-40]).to(dtype)
    places = torch.arange(len(made.logits)) - made.canvases.first_row[made.canvas_of]
    budgets = (made.canvases.budget[made.canvas_of] - places).int()
    states = made.canvases.state[made.canvas_of]
    stops = made.stops[made.canvas_of]
    goes_on, rest = torch.ones_like(states, dtype=torch.bool), (made.table_of, states, budgets)
    given = [part.to(DEVICE) for part in (*rest, goes_on, stops)]
    ours, expected = made.logits.clone().to(DEVICE), made.logits.clone()
    kernels.mask_rows_kernel(ours, on_device(made.tables), *given, cut)
    for row, (which, state, budget, its_stops) in enumerate(
        zip(*(x.tolist() for x in (*rest, stops)), strict=True)
    ):
        if which != NO_TABLE:
            search = Canvas(unpacked(made.tables, which), [*{*its_stops}])
            expected[row, torch.from_numpy(search._forbidden(state, budget))] = -math.inf
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
    assert class_maxima(*none).best.shape[0] == 0
