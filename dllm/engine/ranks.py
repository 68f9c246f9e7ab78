"""Decisions that all tensor-parallel ranks have to make alike, or all engines, too.

Ranks that decide differently would run different collective operations, and wait for each other for
ever. They do not read the same time on their clocks.
"""

import torch
from vllm.distributed import get_dp_group, get_tp_group
from vllm.distributed.parallel_state import GroupCoordinator


def all_ranks_say_yes(answer: bool) -> bool:
    """Whether every rank says yes; each of them has to be asked. Does not use the device."""
    return _all_say_yes(answer, get_tp_group())


def all_engines_say_yes(answer: bool) -> bool:
    """As ``all_ranks_say_yes``, of all data-parallel engines; each rank of each has to be asked."""
    return _all_say_yes(all_ranks_say_yes(answer), get_dp_group())


def _all_say_yes(answer: bool, group: GroupCoordinator) -> bool:
    if group.world_size == 1:
        return answer
    shared = torch.tensor([answer], dtype=torch.int64)
    minimum = torch.distributed.ReduceOp.MIN
    torch.distributed.all_reduce(shared, op=minimum, group=group.cpu_group)
    return bool(shared)


def answer_of_first_rank(answer: int) -> int:
    """The first rank's answer, on every rank; each of them has to ask. Does not use the device."""
    group = get_tp_group()
    if group.world_size == 1:
        return answer
    shared = torch.tensor([answer], dtype=torch.int64)
    torch.distributed.broadcast(shared, group.ranks[0], group=group.cpu_group)
    return int(shared)
