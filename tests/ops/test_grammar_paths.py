"""The definition, which a CPU runs, finds the paths that the search of `dllm/grammar` finds."""

import math

import numpy as np
import pytest
import torch

from dllm.grammar.viterbi import Canvas
from dllm.ops.dispatch import best_paths, class_maxima, mask_rows
from dllm.ops.grammar_paths import (
    NO_TABLE,
    STOPPED,
    Canvases,
    NoRoom,
    PackedTables,
    Sizes,
    TablePool,
    ends,
    pack,
)
from tests.support.grammar_path_cases import VOCAB, MadeTable, batch
from tests.support.grammars import GRAMMARS, PADDING, STOP, WORDS, table

UNLIMITED = (1 << 30) - 1


@pytest.mark.parametrize("empty", [0, 1, 3])
def test_a_class_without_tokens(empty):
    class_of = np.where(np.arange(VOCAB) % 4 == empty, -1, np.arange(VOCAB) % 4).astype(np.int32)
    following = np.zeros((1, 4), dtype=np.int32)
    following[0, empty] = -1
    made = MadeTable(class_of, following, np.ones(1, dtype=bool), np.zeros(1, dtype=np.int32))
    tables, table_of = pack([made]), torch.zeros(3, dtype=torch.int32)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    ours = class_maxima(logits, tables, table_of)
    assert (ours.token[:, empty] == -1).all() and (ours.best[:, empty] == -math.inf).all()
    assert ours.token[0].tolist() == [
        -1 if kind == empty else 4 * int(logits[0, kind::4].argmax()) + kind for kind in range(4)
    ]
    assert empty not in tables.chunk_class


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_class_maxima_by_hand(dtype):
    made = batch(3, dtype=dtype)
    made.logits[3, 50:120] = math.nan
    made.logits[5] = math.nan
    made.logits[6] = -math.inf
    maxima = class_maxima(made.logits, made.tables, made.table_of)
    logits = made.logits.float().nan_to_num(nan=-math.inf, neginf=-math.inf)
    for row, which in enumerate(made.table_of.tolist()):
        for kind in range(made.tables.most_classes):
            members = torch.nonzero(made.tables.class_of[which] == kind)[:, 0]
            if which == NO_TABLE or not len(members):
                assert maxima.token[row, kind] == -1
            else:
                x = logits[row, members]
                assert maxima.token[row, kind] == members[x == x.max()][0]
                assert maxima.best[row, kind] == x.max()


@pytest.mark.parametrize("seed", range(12))
def test_paths_and_masks_are_those_of_the_search(seed):
    """Several grammars in one batch, ties, rows of -inf, stops and paddings."""
    rng = np.random.default_rng(seed)
    names = list(GRAMMARS)
    found = [table(*GRAMMARS[name], most_states=300)[0] for name in names]
    which = rng.integers(0, len(found), 6)
    lengths = rng.integers(1, 12, 6)
    states = [int(rng.integers(0, len(found[each].accepts))) for each in which]
    states[0] = STOPPED
    budgets = [
        UNLIMITED if rng.random() < 0.3 else int(found[each].left[state]) + int(rng.integers(0, 5))
        for each, state in zip(which, states, strict=True)
    ]
    scores = rng.normal(0, 3, (int(lengths.sum()), len(WORDS))).astype(np.float32)
    scores[::3] = scores[::3].round()
    scores[1::7, rng.integers(0, len(WORDS), 150)] = -np.inf
    scores[rng.random(len(scores)) < 0.2, STOP] = 20.0
    first = np.cumsum(lengths) - lengths
    canvas_of = torch.from_numpy(np.repeat(np.arange(6), lengths))
    ints = [torch.tensor(x, dtype=torch.int32) for x in (first, lengths, which, states, budgets)]
    tables, logits = pack(found), torch.from_numpy(scores)
    stops = torch.full((6, 1), STOP)
    fillers = torch.tensor([[STOP, PADDING]]).repeat(6, 1)
    table_of = ints[2][canvas_of]
    paths = best_paths(
        class_maxima(logits, tables, table_of),
        ends(logits, logits.argmax(dim=1), canvas_of, stops, fillers),
        tables,
        Canvases(*ints, most_rows=int(lengths.max())),
    )
    places = torch.arange(len(scores)) - ints[0][canvas_of]
    masked = logits.clone()
    row_budgets = (ints[4][canvas_of] - places).int()
    mask_rows(masked, tables, table_of, paths.states, row_budgets, stops[canvas_of])
    for canvas in range(6):
        rows = slice(int(first[canvas]), int(first[canvas] + lengths[canvas]))
        search = Canvas(found[which[canvas]], [STOP], [PADDING])
        expected = search.best_path(scores[rows], states[canvas], budgets[canvas])
        np.testing.assert_array_equal(paths.tokens[rows], expected.tokens)
        np.testing.assert_array_equal(paths.states[rows], expected.states[:-1])
        assert paths.end[canvas] == expected.states[-1]
        assert paths.score[canvas] == expected.score
        forbidden = search.forbidden(expected, budgets[canvas])
        np.testing.assert_array_equal(masked[rows], np.where(forbidden, -np.inf, scores[rows]))


def test_a_pool_holds_what_fits_and_makes_room():
    """Tables that nobody asks for stay until their room is needed; the answers stay the same."""
    one, two, three = (table(*GRAMMARS[name])[0] for name in ("words", "date", "choice"))
    sizes = [Sizes.of(each) for each in (one, two, three)]
    room = Sizes(2, *(max(column) * 2 for column in list(zip(*sizes, strict=True))[1:]))
    pool = TablePool(room, len(WORDS))
    memory = {name: part.data_ptr() for name, part in parts(pool.place([one])[0])}
    assert pool.place([two, one])[1] == [1, 0] and pool.place([two])[1] == [1]
    packed, numbers = pool.place([three, two])  # the first one is gone
    assert numbers == [0, 1]
    assert memory == {name: part.data_ptr() for name, part in parts(packed)}
    for name, expected in parts(pack([three, two])):
        found = getattr(packed, name)[: len(expected)]
        assert torch.equal(found[: len(expected)], expected), name
    assert [packed.most_classes, packed.most_states, packed.most_chunks] == [
        max(two.num_classes, three.num_classes),
        max(len(two.accepts), len(three.accepts)),
        max(sizes[1].chunks, sizes[2].chunks),
    ]
    with pytest.raises(NoRoom):
        pool.place([one, two, three])
    assert pool.place([one])[1]  # it goes on


def parts(packed: PackedTables) -> list[tuple[str, torch.Tensor]]:
    """The arrays of tables."""
    fields = zip(packed._fields, packed, strict=True)
    return [(name, part) for name, part in fields if isinstance(part, torch.Tensor)]


@pytest.mark.parametrize("part", ["cells", "edges", "chunks"])
def test_a_pool_beyond_what_kernels_count_is_refused(part):
    with pytest.raises(NoRoom, match="32 bits"):
        TablePool(Sizes(1, 1, 1, 1, 1)._replace(**{part: 1 << 31}), 1, "meta")


def test_rows_without_a_table_stay():
    made = batch(4)
    maxima = class_maxima(made.logits, made.tables, made.table_of)
    likeliest = made.logits.argmax(dim=1)
    found = ends(made.logits, likeliest, made.canvas_of, made.stops, made.fillers)
    paths = best_paths(maxima, found, made.tables, made.canvases)
    is_free = made.table_of == NO_TABLE
    assert torch.equal(paths.tokens[is_free], likeliest[is_free])
    masked = made.logits.clone()
    budgets = torch.full_like(paths.states, UNLIMITED)
    stops = made.stops[made.canvas_of]
    mask_rows(masked, made.tables, made.table_of, paths.states, budgets, stops)
    same = masked.view(torch.int32) == made.logits.view(torch.int32)
    assert same[is_free].all() and same[paths.states == STOPPED].all() and not same.all()
