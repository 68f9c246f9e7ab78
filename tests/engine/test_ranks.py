"""Decisions of several ranks: two data-parallel engines of two tensor-parallel ranks each."""

from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from dllm.engine import ranks

ENGINES = [[0, 1], [2, 3]]
PEERS = [[0, 2], [1, 3]]  # the same rank of each engine


NOES = (None, 0, 3)  # the rank that says no


def decide(rank: int, store: Path) -> None:
    """What a rank says, and what it then hears, is in a file."""
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=4)

    def group_of(groups: list[list[int]]) -> SimpleNamespace:
        made = [(members, dist.new_group(members)) for members in groups]  # by every rank
        ((members, group),) = ((one, group) for one, group in made if rank in one)
        return SimpleNamespace(world_size=len(members), ranks=members, cpu_group=group)

    tensor_parallel, data_parallel = group_of(ENGINES), group_of(PEERS)
    ranks.get_tp_group, ranks.get_dp_group = lambda: tensor_parallel, lambda: data_parallel
    heard = [
        (
            ranks.all_ranks_say_yes(rank != no),
            ranks.answer_of_first_rank(rank),
            ranks.all_engines_say_yes(rank != no),
        )
        for no in NOES
    ]
    torch.save(heard, f"{store}-{rank}")
    dist.barrier()  # nobody leaves while another one is asked


def test_one_no_is_heard_by_the_ranks_of_its_engine_or_of_all(tmp_path: Path):
    store = tmp_path / "store"
    torch.multiprocessing.spawn(decide, (store,), nprocs=4)
    for engine in ENGINES:
        for rank in engine:
            heard = [(no not in engine, engine[0], no is None) for no in NOES]
            assert torch.load(f"{store}-{rank}") == heard
