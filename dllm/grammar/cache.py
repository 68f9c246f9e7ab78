"""Tables that were built before: in memory, and in files that other processes share."""

import contextlib
import os
import tempfile
import threading
from collections import OrderedDict
from pathlib import Path

from dllm.grammar.table import Table

MOST_FILE_BYTES = 256 << 20  # of all files together


class Recent:
    """The tables that were used last, up to so many bytes; for any number of threads."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.num_bytes = 0
        self._tables: OrderedDict[str, Table] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> Table | None:
        """The table of a key, if it is there."""
        with self._lock:
            if key in self._tables:
                self._tables.move_to_end(key)
            return self._tables.get(key)

    def put(self, key: str, table: Table) -> None:
        """Keep a table; one that is larger than all that may be kept is not."""
        with self._lock:
            if key in self._tables or table.num_bytes > self.most_bytes:
                return
            self._tables[key] = table
            self.num_bytes += table.num_bytes
            while self.num_bytes > self.most_bytes:
                _, oldest = self._tables.popitem(last=False)
                self.num_bytes -= oldest.num_bytes


class Files:
    """A file for each table. Where files cannot be read or written there is no cache.

    Args:
        folder: made when it is needed.
        most_bytes: files that were used longest ago are deleted when there are more.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_FILE_BYTES) -> None:
        self.folder = folder
        self.most_bytes = most_bytes

    def get(self, key: str, vocab_size: int) -> Table | None:
        """The table of a key; None if there is no file, or one that is damaged."""
        path = self._path(key)
        try:
            table = Table.from_bytes(path.read_bytes())
        except Exception:  # whatever is wrong with the file, it is built again
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used last
        return table if len(table.class_of) == vocab_size else None

    def put(self, key: str, table: Table) -> None:
        """Write a file, whole or not at all."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
                try:
                    file.write(table.to_bytes())
                    file.flush()  # or a full disk is noticed behind os.replace
                    os.replace(file.name, self._path(key))
                except OSError:
                    os.unlink(file.name)
                    raise
            self._delete_oldest()

    def _delete_oldest(self) -> None:
        files = [(path.stat(), path) for path in self.folder.glob("*.table")]
        files.sort(key=lambda file: file[0].st_mtime)
        num_bytes = sum(about.st_size for about, _ in files)
        for about, path in files:
            if num_bytes <= self.most_bytes:
                break
            path.unlink(missing_ok=True)
            num_bytes -= about.st_size

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.table"
