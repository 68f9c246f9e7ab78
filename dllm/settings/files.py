"""Files that are there whole or not at all, and the environments beside ours."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A name beside ``path``, for a file or a folder that takes its place in the end.

    If the block raises, nothing of it is left, and what was at ``path`` stays.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    finally:
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink(missing_ok=True)


def beside(name: str) -> Path | None:
    """Python of ``.venv-NAME``, which `make setup-NAME` makes in a checkout; None: not whole."""
    folder = ROOT / f".venv-{name}"
    return folder / "bin/python" if (folder / ".locked").is_file() else None
