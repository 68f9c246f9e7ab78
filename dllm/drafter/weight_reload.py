"""Replaces the drafter of a running server by a newer one.

A trainer beside the server (``dllm recalibrate``) publishes checkpoints in a folder:

    FOLDER/000001, FOLDER/000002, ...   drafters with the config.json that the server started with
    FOLDER/rejected                     those that the server cannot use, one a line

The server takes the last one that is not rejected. A thread reads it into host memory; then its
weights are copied over those in use, between two steps. No text depends on it. The drafter's KV
pages of running requests are still those of the weights before: their next drafts may be worse.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

from safetensors.torch import load_file
from torch import Tensor
from vllm.logger import init_logger

from dllm import LOGGER
from dllm.engine.ranks import all_ranks_say_yes, answer_of_first_rank

logger = init_logger(LOGGER)

REJECTED, DIGITS, WEIGHTS = "rejected", 6, "*.safetensors"
STEPS_BETWEEN_LOOKS = 64

Weights = dict[str, Tensor]


def published(folder: Path) -> list[int]:
    """Numbers of a folder's complete checkpoints that are not rejected, ascending."""
    path = folder / REJECTED
    rejected = set(path.read_text(errors="replace").split()) if path.is_file() else set()
    names = {path.parent.name for path in folder.glob(f"{'[0-9]' * DIGITS}/config.json")}
    return sorted(int(name) for name in names - rejected)


def checkpoint(folder: Path, number: int) -> Path:
    """The folder of a published drafter; numbers begin with 1."""
    return folder / f"{number:0{DIGITS}}"


def open_weights(path: Path) -> list[BinaryIO]:
    """A checkpoint's files of weights, open: who deletes them takes nothing from their readers."""
    return [part.open("rb") for part in sorted(path.glob(WEIGHTS))]


def read_weights(files: Iterable[BinaryIO]) -> Weights:
    """All tensors of these files, in host memory; also of files that were deleted meanwhile."""
    found: Weights = {}
    for file in files:
        found |= load_file(f"/proc/self/fd/{file.fileno()}")
    return found


class Version(NamedTuple):
    """A checkpoint that was read; its files stay open."""

    files: list[BinaryIO]
    weights: Weights


class WeightReload:
    """One worker's watch over the folder, which may not exist yet.

    Args:
        refuse: raises ValueError for weights that ``load`` cannot take. A thread calls it.
        refuse_config: the same for a folder whose config.json says something else than the one in
            use; weights would be of the same shape, and draft badly.
    """

    def __init__(
        self,
        folder: Path,
        initial: Path,
        load: Callable[[Weights], None],
        refuse: Callable[[Weights], None],
        refuse_config: Callable[[Path], None],
    ) -> None:
        self.folder, self.initial, self.load, self.refuse = folder, initial, load, refuse
        self.refuse_config = refuse_config
        self.current = self._num_steps = 0  # checkpoint 0 is the one that the server started with
        # The files of the checkpoint in use. They stay open, because the trainer deletes old
        # checkpoints, and the server has to go back to this one if a newer one fails halfway.
        self._files = open_weights(initial)
        self._refused: set[int] = set()  # also where the folder cannot be written to
        self._reader = ThreadPoolExecutor(1, "dllm-weight-reload")
        self._reading: Future[Version | None] | None = None  # of the checkpoint ``_next``
        self._next = 0

    def after_step(self) -> None:
        """All ranks call this after every step, and change weights after the same one.

        Drafts that differ between ranks would give them different inputs.
        """
        self._num_steps += 1
        if self._num_steps % STEPS_BETWEEN_LOOKS == 0:
            self._look()

    def _look(self) -> None:
        if self._reading is None:
            newest = answer_of_first_rank(self._newest())
            if newest > self.current:
                self._next, self._reading = newest, self._reader.submit(self._read, newest)
        elif answer_of_first_rank(self._reading.done()):
            reading, self._reading = self._reading, None
            self._use(self._next, reading.result())

    def _newest(self) -> int:
        """Number of the newest checkpoint that may be used; 0 if there is none."""
        try:
            return max(set(published(self.folder)) - self._refused, default=0)
        except OSError as error:  # serving must go on
            logger.warning_once("The folder %s cannot be read: %s", str(self.folder), str(error))
            return 0

    def _use(self, number: int, version: Version | None) -> None:
        """On all ranks or on none. ``version`` is None if it cannot be read, or does not fit."""
        is_loaded = version is not None and self._loads(number, version.weights)
        if not all_ranks_say_yes(is_loaded):
            self._reject(number)
            if version is not None:  # loaded by this rank, in part at least
                in_use = self._read(self.current, self._files)
                if in_use is None or not self._loads(self.current, in_use.weights):
                    logger.error("The drafter is damaged, and drafts are bad: restart the server.")
            return
        assert version is not None
        logger.info("The drafter is that of %s", self._path(number))
        for file in self._files:
            file.close()
        self.current, self._files = number, version.files

    def _loads(self, number: int, weights: Weights) -> bool:
        """Copy weights over those in use; False if that failed halfway."""
        try:
            self.load(weights)
        except Exception as error:  # serving must go on
            logger.warning("The drafter %s cannot be used: %s", self._path(number), error)
            return False
        return True

    def _path(self, number: int) -> Path:
        return checkpoint(self.folder, number) if number else self.initial

    def _read(self, number: int, files: list[BinaryIO] | None = None) -> Version | None:
        """A checkpoint; None and a warning if it cannot be read, or does not fit."""
        try:
            if files is None:
                self.refuse_config(self._path(number))
                files = open_weights(self._path(number))
            weights = read_weights(files)
            self.refuse(weights)
        except Exception as error:  # cut short, deleted meanwhile, or of another shape
            logger.warning("The drafter %s cannot be used: %s", self._path(number), error)
            return None
        return Version(files, weights)

    def _reject(self, number: int) -> None:
        self._refused.add(number)
        try:
            if number in published(self.folder):
                with (self.folder / REJECTED).open("a") as file:
                    file.write(f"{number:0{DIGITS}}\n")
        except OSError as error:
            logger.warning("The trainer is not told of it: %s", error)
