"""Which states of an automaton are equal."""

import numpy as np

MIXING, SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint8(32)


def coarsest(
    own: np.ndarray, source: np.ndarray, target: np.ndarray, weight: np.ndarray
) -> np.ndarray:
    """``[S]``: the class of each state; no steps tell those of one class apart (Hopcroft 1971).

    Args:
        own: ``[S]``, what tells states apart before any step.
        source: ``[E]``, ascending, where a step begins, and ``target`` where it leads.
        weight: ``[E]`` uint64, a drawn number for each kind of step.
    """
    each = np.arange(len(own) + 1)
    order = np.argsort(target, kind="stable")
    before, bounds_before = source[order], np.searchsorted(target[order], each)
    bounds = np.searchsorted(source, each)
    class_of = np.unique(own, return_inverse=True)[1]
    size = np.bincount(class_of, minlength=len(own))
    todo = each[:-1]
    while len(todo):
        steps, which = side_by_side(bounds[todo], bounds[todo + 1])
        total = _mixed(class_of[todo])
        np.add.at(total, which, weight[steps] * _mixed(class_of[target[steps]]))
        _, first, group = np.unique(total, return_index=True, return_inverse=True)
        old, count = class_of[todo[first]], np.bincount(group)
        # The largest group keeps the number of its class, unless the others there lead to no
        # state of a new number, so that nobody looked at them.
        is_all = np.bincount(old, count, minlength=len(own)) == size
        largest = np.lexsort((-count, old))
        largest = largest[np.diff(old[largest], prepend=-1) > 0]
        is_new = np.ones(len(old), dtype=bool)
        is_new[largest] = ~is_all[old[largest]]
        num_classes = np.count_nonzero(size)
        number = np.where(is_new, num_classes + np.cumsum(is_new) - 1, old)
        np.subtract.at(size, old[is_new], count[is_new])
        size[number[is_new]] = count[is_new]
        class_of[todo] = number[group]
        moved = todo[is_new[group]]
        steps, _ = side_by_side(bounds_before[moved], bounds_before[moved + 1])
        todo = np.unique(before[steps])
    return class_of


def _mixed(number: np.ndarray) -> np.ndarray:
    found = (number.astype(np.uint64) + np.uint64(1)) * MIXING
    return found ^ (found >> SHIFT)


def side_by_side(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the numbers from each of ``low`` up to ``high``; which of them each belongs to)."""
    which = np.repeat(np.arange(len(low)), high - low)
    return np.arange(len(which)) + (high - np.cumsum(high - low))[which], which
