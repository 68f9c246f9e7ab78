"""The committed tiles are those that bench/results/tiles.csv, by its own rule, says are best."""

from __future__ import annotations

from itertools import groupby

import pytest

from bench.context import RESULTS, read_csv
from bench.multiprocessor import GPUS, programs_of_sm
from bench.tiles import LAYERS, Result, committed, preference, tiles

TEXTS = ("layer", "matrix")


def rows() -> list[Result]:
    """The lines of the CSV with 64-token pages, between which the rule chooses."""
    found = []
    for row in read_csv(RESULTS / "tiles.csv"):
        numbers = {
            name: row[name] if name in TEXTS else row[name] == "True" if name[:3] == "is_" else
            int(row[name]) for name in Result.__dataclass_fields__
        }  # fmt: skip
        found.append(Result(**numbers))
    return [row for row in found if row.page_size == 64]


def test_the_committed_tiles_are_the_best_of_the_table() -> None:
    groups = {key: list(group) for key, group in groupby(rows(), lambda row: (row.gpu, row.layer))}
    assert set(groups) == {(gpu, layer) for gpu in GPUS for layer in LAYERS}
    for (gpu, layer), group in groups.items():
        ours = committed(gpu, LAYERS[layer])
        best = max(group, key=preference)
        assert best.is_committed, (best, ours)
        taken = best.block_m, best.block_n, best.num_warps, best.num_stages, best.block_v
        columns = ours.columns(LAYERS[layer].head_size)
        assert taken == (ours.block_m, ours.block_n, ours.num_warps, ours.num_stages, columns)


def test_the_section_shows_the_committed_tiles() -> None:
    lines = [line for line in tiles(RESULTS).splitlines() if line.startswith("| ")][1:]
    taken = [row for row in read_csv(RESULTS / "tiles.csv") if row["is_committed"] == "True"]
    assert len(lines) == len(taken) == len(GPUS) * len(LAYERS) * 2  # two sizes of a page
    for line, row in zip(lines, taken, strict=True):
        assert f"| {row['block_m']} x {row['block_n']} (" in line


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "num_warps", "expected"),
    [
        (90, 254, 192 << 10, 8, 1),  # registers and shared memory for one
        (90, 255, 96 << 10, 4, 2),
        (90, 32, 0, 4, 16),  # 2,048 threads
        (120, 100, 66 << 10, 4, 1),
        (120, 100, 100 << 10, 4, 0),  # more than a program may have
        (80, 206, 100 << 10, 8, 1),
    ],
)
def test_programs_of_a_multiprocessor(
    arch: int, registers: int, shared: int, num_warps: int, expected: int
) -> None:
    assert programs_of_sm(arch, registers, shared, num_warps) == expected
