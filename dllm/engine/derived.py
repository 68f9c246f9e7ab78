"""Objects of ours in the place of vLLM's: of a class derived from its, with all that its have."""

from functools import cache
from typing import Any


def as_one_of(ours: type, theirs: Any, **own: Any) -> Any:
    """``own``: attributes that vLLM's object has not."""
    one: Any = object.__new__(ours)
    vars(one).update(vars(theirs), **own)
    return one


@cache
def of_both(ours: type, theirs: type) -> type:
    """A class of ours in front of one of vLLM's, under the name of that."""
    return type(theirs.__name__, (ours, theirs), {"__module__": ours.__module__})
