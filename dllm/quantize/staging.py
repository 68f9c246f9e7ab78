"""Writes the files of an output directory so that the directory appears complete or not at all.

Files are written to ``NAME.partial`` beside the output, which is renamed to its final name at the
end. Each file gets its own name only when it is complete, so a run that is started again with the
same inputs keeps the files of an interrupted one. config.json comes last: without it nothing loads
the weights.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dllm.settings.command import CommandError

# Records what the files were made from; stays in the finished directory.
RUN = "quantize_run.json"


class Staging:
    """The directory ``NAME.partial`` that becomes the output directory.

    Args:
        out: the directory to make; must not exist.
        run: everything that the files depend on, as JSON. Files of a run with another one are not
            used.

    Raises:
        CommandError: ``out`` exists, or ``NAME.partial`` belongs to a run with other inputs or is
            being written by another process.
    """

    def __init__(self, out: Path, run: Mapping[str, object]) -> None:
        self.out = out
        self.path = out.with_name(out.name + ".partial")
        refuse_existing(out)
        if self.path.exists() and not self.path.is_dir():
            raise CommandError(f"{self.path} is no directory. Delete it, or name another --out.")
        text = json.dumps(run, indent=2) + "\n"
        with self._writing(RUN):
            self.path.mkdir(exist_ok=True)
            # Stays open, because closing it gives up the lock. Both end with the process.
            self._run = (self.path / RUN).open("a+")
            try:
                fcntl.flock(self._run, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CommandError(
                    f"{self.path} is being written by another process; wait for it."
                ) from None
            self._run.seek(0)
            found = self._run.read()
            if found and found != text:
                raise CommandError(
                    f"{self.path} holds an unfinished run with other inputs or options. Delete it, "
                    "or name another --out."
                )
            if not found:
                self._run.write(text)
                self._run.flush()

    def has(self, name: str) -> bool:
        """Whether a file is there. If it is, it is complete."""
        return (self.path / name).is_file()

    def load(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of a file that is there."""
        return load_file(self.path / name)

    def save(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write tensors to a file, completely or not at all.

        Raises:
            CommandError: it cannot be written; says so if the disk is full.
        """
        with self._writing(name) as unfinished:
            contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
            save_file(contiguous, unfinished, metadata={"format": "pt"})
            unfinished.chmod(0o644)  # safetensors writes it readable by its owner only

    def write_json(self, name: str, value: Mapping[str, object]) -> None:
        """Write JSON to a file, completely or not at all; raises as ``save``."""
        with self._writing(name) as unfinished:
            unfinished.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def copy(self, file: Path) -> None:
        """Copy a file, completely or not at all; raises as ``save``."""
        with self._writing(file.name) as unfinished:
            shutil.copyfile(file, unfinished)

    @contextmanager
    def _writing(self, name: str) -> Iterator[Path]:
        """Give a temporary path to write a file to.

        Afterwards the file gets its name, or is removed if writing failed.
        """
        unfinished = self.path / f"{name}.unfinished"
        try:
            yield unfinished
            if unfinished.exists():
                _flush_to_disk(unfinished)
                unfinished.replace(self.path / name)
        except (OSError, SafetensorError) as error:
            unfinished.unlink(missing_ok=True)
            raise CommandError(self._why(name, error)) from error
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    def _why(self, name: str, error: Exception) -> str:
        number = getattr(error, "errno", None)
        full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or any(
            word in str(error) for word in ("No space left", "File too large", "quota")
        )
        reason = "there is no room for it" if full else str(error)
        return (
            f"{self.path / name} could not be written: {reason}. {self.out} was not made; what is "
            f"finished stays in {self.path}, and the same command goes on from there."
        )

    def finish(self) -> None:
        """Give the directory its name.

        Raises:
            CommandError: something with that name has appeared.
        """
        refuse_existing(self.out)
        _flush_to_disk(self.path)
        self.path.rename(self.out)
        self._run.close()

    def discard(self, name: str) -> None:
        """Remove a file that the finished directory does not need."""
        (self.path / name).unlink(missing_ok=True)


def refuse_existing(out: Path) -> None:
    """Refuse an output path at which something exists.

    Raises:
        CommandError: it exists.
    """
    if out.exists() or out.is_symlink():
        raise CommandError(f"--out {out} exists, and nothing is overwritten; name another one.")


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
