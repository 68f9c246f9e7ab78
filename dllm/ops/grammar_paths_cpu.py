"""Class maxima on a CPU (defined in `grammar_paths`).

Mostly one class holds nearly all tokens, those that may stand in a free text. Its best one is the
row's best, if that is of the class. The others' tokens are put side by side, class by class, for
numpy's `maximum.reduceat`; tokens that are in no text are never looked at.
"""

import numpy as np
import torch
from torch import Tensor

from dllm.ops.grammar_paths import NO_TABLE, ClassMaxima, PackedTables

LARGE = 0.25  # of the vocabulary: a class that is not put in order


def class_maxima_cpu(logits: Tensor, tables: PackedTables, table_of: Tensor) -> ClassMaxima:
    """`dispatch.class_maxima` on a CPU."""
    shape = len(logits), tables.most_classes
    best = torch.full(shape, -torch.inf)
    token = torch.full(shape, -1, dtype=torch.int32)
    for table in table_of.unique().tolist():
        if table == NO_TABLE or not tables.num_classes[table]:
            continue
        classes = _Classes(tables.class_of[table].numpy())
        for row in torch.nonzero(table_of == table)[:, 0].tolist():
            classes.reduce(logits[row].float().numpy(), best[row].numpy(), token[row].numpy())
    return ClassMaxima(best, token)


class _Classes:
    """One table's."""

    def __init__(self, class_of: np.ndarray) -> None:
        self._class_of = class_of
        members = np.flatnonzero(class_of >= 0)
        sizes = np.bincount(class_of[members])
        self._large = int(sizes.argmax()) if sizes.max() > LARGE * len(class_of) else -1
        if self._large >= 0:
            self._is_large = class_of == self._large
            self._not_large = np.flatnonzero(~self._is_large)
            members = members[class_of[members] != self._large]
        self._order = members[np.argsort(class_of[members], kind="stable")]
        kinds = class_of[self._order]
        self._starts = np.flatnonzero(np.diff(kinds, prepend=-1))
        self._kinds = kinds[self._starts]
        self._sizes = np.diff(self._starts, append=len(kinds))

    def reduce(self, x: np.ndarray, best: np.ndarray, token: np.ndarray) -> None:
        """Write the maxima of one row."""
        if self._large >= 0:
            top = int(x.argmax())
            if np.isnan(x[top]):  # the first one, if there are any
                x = np.where(np.isnan(x), -np.inf, x)
                top = int(x.argmax())
            if not self._is_large[top]:
                among = x.copy()
                among[self._not_large] = -np.inf
                top = int(among.argmax())
                if among[top] == -np.inf:
                    top = int(self._is_large.argmax())
            best[self._large], token[self._large] = x[top], top
        if len(self._order):
            ordered = np.take(x, self._order, mode="clip")
            ordered[np.isnan(ordered)] = -np.inf
            highest = np.maximum.reduceat(ordered, self._starts)
            best[self._kinds] = highest
            # Of equal ones the first: it is written last.
            is_best = np.flatnonzero(ordered == np.repeat(highest, self._sizes))[::-1]
            tokens = self._order[is_best]
            token[self._class_of[tokens]] = tokens
