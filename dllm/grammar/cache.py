"""Tables that were built before, in files that other processes share."""

import contextlib
import os
import tempfile
from pathlib import Path

from dllm.grammar.table import Table

MOST_FILE_BYTES = 256 << 20  # of all files together


class Files:
    """A file for each table. Where files cannot be read or written there is no cache.

    Args:
        folder: made when it is needed.
        most_bytes: files that were used longest ago are deleted when there are more.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_FILE_BYTES) -> None:
        self.folder = folder
        self.most_bytes = most_bytes

    def get(self, key: str, vocab_size: int) -> bytes | None:
        """The table of a key; None if there is no file, or one that is damaged."""
        path = self._path(key)
        try:
            packed = path.read_bytes()
            found = len(Table.from_bytes(packed).class_of)
        except Exception:  # whatever is wrong with the file, it is built again
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used last
        return packed if found == vocab_size else None

    def put(self, key: str, packed: bytes) -> None:
        """Write a file, whole or not at all."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
                try:
                    file.write(packed)
                    file.flush()  # or a full disk is noticed behind os.replace
                    os.replace(file.name, self._path(key))
                except OSError:
                    os.unlink(file.name)
                    raise
            self._delete_oldest()

    def _delete_oldest(self) -> None:
        # Among them unfinished files of servers that were killed.
        files = [(path.stat(), path) for path in self.folder.iterdir() if path.is_file()]
        files.sort(key=lambda file: file[0].st_mtime)
        num_bytes = sum(about.st_size for about, _ in files)
        for about, path in files:
            if num_bytes <= self.most_bytes:
                break
            path.unlink(missing_ok=True)
            num_bytes -= about.st_size

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.table"
