"""What messages to users share: guesses at typos, folders that are missing, refused values."""

import difflib
from pathlib import Path
from typing import NoReturn

MOST_NAMES = 12  # that a message lists


def did_you_mean(given: str, known: list[str]) -> str:
    """`` (did you mean 'x'?)`` for the most similar known word; empty if none is similar."""
    nearest = difflib.get_close_matches(given, known, n=1)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""


def missing_folder(given: str, may_be_of_hub: bool = False) -> str | None:
    """What is wrong with a model's name that is plainly a path, and leads nowhere; else None.

    A name is a path if it begins with ``.``, ``/`` or ``~``, or if the folder in front of its last
    slash exists. ``may_be_of_hub``: names with one slash are no paths: vLLM looks for ``google/x``
    on the model hub, also where there is a folder ``google``.
    """
    try:
        path = Path(given).expanduser()
        is_below = given.count("/") > int(may_be_of_hub) and path.parent.is_dir()
        is_path = is_below or given.startswith((".", "/", "~"))
        if path.exists() or not is_path:
            return None
        missing = next(each for each in (path, *path.parents) if each.parent.is_dir())
        there = sorted(each.name for each in missing.parent.iterdir() if each.is_dir())
    except (OSError, RuntimeError):  # not ours to read, too long, or of an unknown user
        return None
    shown = ", ".join(there[:MOST_NAMES]) + (", ..." if there[MOST_NAMES:] else "")
    hint = did_you_mean(missing.name, there)
    return f"there is no folder {missing}{hint}; in {missing.parent}: {shown or 'no folders'}."


def refuse_value(name: str, value: object, allowed: str) -> NoReturn:
    """Raises ValueError for an option of a server. ``allowed`` completes "allowed: ..."."""
    raise ValueError(f"{name} = {value!r}; allowed: {allowed}.")


def refuse_wide(where: str, width: int | None, num_drafts: int) -> None:
    """Raises ValueError if more drafts are to be verified than are made."""
    if width is not None and width > num_drafts:
        refuse_value(f"{where}: width", width, f"0 to {num_drafts} (num_speculative_tokens)")
