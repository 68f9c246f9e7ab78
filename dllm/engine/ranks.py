"""Decisions that all tensor-parallel ranks have to make alike.

Ranks that decide differently would run different collective operations, and wait for each other for
ever. They do not read the same time on their clocks.
"""

import torch
from vllm.distributed import get_tp_group


def all_ranks_say_yes(answer: bool) -> bool:
    """Whether every rank says yes; each of them has to be asked. Does not use the device."""
    group = get_tp_group()
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
