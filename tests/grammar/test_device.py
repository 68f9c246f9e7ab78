"""Tables in the memory of a device: what fits, and what stays."""

import pytest
import torch

from dllm.grammar.device import MOST, OverCapacity, PackedTables, Sizes, TablePool, pack
from tests.support.grammars import GRAMMARS, WORDS, table


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
    assert [getattr(packed, name) for name in MOST] == [
        max(two.num_classes, three.num_classes),
        max(sizes[1].chunks, sizes[2].chunks),
        max(len(two.edges.bounds), len(three.edges.bounds)) - 1,
        max(sizes[1].label_chunks, sizes[2].label_chunks),
    ]
    with pytest.raises(OverCapacity):
        pool.place([one, two, three])
    assert pool.place([one])[1]  # it goes on


def parts(packed: PackedTables) -> list[tuple[str, torch.Tensor]]:
    """The arrays of tables."""
    fields = zip(packed._fields, packed, strict=True)
    return [(name, part) for name, part in fields if isinstance(part, torch.Tensor)]


@pytest.mark.parametrize("part", ["cells", "edges", "chunks", "label_chunks"])
def test_a_pool_beyond_what_kernels_count_is_refused(part):
    with pytest.raises(OverCapacity, match="32 bits"):
        TablePool(Sizes(1, 1, 1, 1, 1, 1)._replace(**{part: 1 << 31}), 1, "meta")
