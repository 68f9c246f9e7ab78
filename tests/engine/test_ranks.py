"""Decisions of several ranks: two data-parallel engines of two tensor-parallel ranks each."""

import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from dllm.engine import ranks

ENGINES = [[0, 1], [2, 3]]
PEERS = [[0, 2], [1, 3]]  # the same rank of each engine


def decide(rank: int, answer: bool, store: Path, found: Any) -> None:
    """What a rank says, and what it then hears."""
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=4)

    def group_of(groups: list[list[int]]) -> SimpleNamespace:
        made = [(members, dist.new_group(members)) for members in groups]  # by every rank
        ((members, group),) = ((one, group) for one, group in made if rank in one)
        return SimpleNamespace(world_size=len(members), ranks=members, cpu_group=group)

    tensor_parallel, data_parallel = group_of(ENGINES), group_of(PEERS)
    ranks.get_tp_group, ranks.get_dp_group = lambda: tensor_parallel, lambda: data_parallel
    of_engine = ranks.all_ranks_say_yes(answer), ranks.answer_of_first_rank(rank)
    found.put((rank, (*of_engine, ranks.all_engines_say_yes(answer))))
    dist.barrier()  # nobody leaves while another one is asked


@pytest.mark.parametrize("no", [None, 0, 3], ids=str)
def test_one_no_is_heard_by_the_ranks_of_its_engine_or_of_all(no: int | None, tmp_path: Path):
    fork = multiprocessing.get_context("fork")
    found = fork.Queue()
    processes = [
        fork.Process(target=decide, args=(rank, rank != no, tmp_path / "store", found))
        for rank in range(4)
    ]
    for one in processes:
        one.start()
    heard = dict(found.get() for _ in processes)
    for one in processes:
        one.join()
    assert heard == {
        rank: (no not in engine, engine[0], no is None) for engine in ENGINES for rank in engine
    }
