"""Replaces the drafter of a running server by a newer one, and takes it back if it is worse.

A trainer beside the server (``dllm recalibrate``) publishes checkpoints in a folder:

    FOLDER/000001, FOLDER/000002, ...   drafters of the shape that the server was started with
    FOLDER/rejected                     those that the server took back, one a line

The server takes the last one that is not rejected. A thread reads it into host memory; then its
weights are copied over those in use, between two steps. Nothing else changes: the text does not
depend on drafts, so it does not depend on when this happens either. The drafter's KV pages of
running requests are still those of the weights before. Their next drafts may be worse.

A renewed drafter is on probation. If the target keeps fewer of its drafts than of those before it,
the weights before come back, and its number is written to ``rejected``.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from vllm.logger import init_logger

from dllm import LOGGER
from dllm.engine.ranks import answer_of_first_rank

logger = init_logger(LOGGER)

REJECTED, DIGITS, WEIGHTS = "rejected", 6, "*.safetensors"
STEPS_BETWEEN_LOOKS = 64
PROBATION = 1024  # drafted rows whose acceptance is compared with that of as many before
STALE = 256  # drafted rows after a change that do not count: their context is of older weights
MOST_LOSS = 0.05  # share of the accepted drafts that a renewed drafter may lose

Weights = dict[str, Tensor]


def published(folder: Path) -> list[int]:
    """Numbers of a folder's complete checkpoints that are not rejected, ascending."""
    path = folder / REJECTED
    rejected = set(path.read_text().split()) if path.exists() else set()
    names = {path.parent.name for path in folder.glob(f"{'[0-9]' * DIGITS}/config.json")}
    return sorted(int(name) for name in names - rejected)


def checkpoint(folder: Path, number: int) -> Path:
    """The folder of a published checkpoint."""
    return folder / f"{number:0{DIGITS}}"


def read_weights(path: Path) -> Weights:
    """All tensors of a checkpoint, in host memory."""
    found: Weights = {}
    for part in sorted(path.glob(WEIGHTS)):
        found |= load_file(part)
    return found


@dataclass
class Tally:
    """Accepted drafts of the rows that were drafted for."""

    accepted: int = 0
    rows: int = 0

    def add(self, accepted: int, rows: int) -> None:
        """Add a step; the older half is forgotten when it would count twice the probation."""
        self.accepted += accepted
        self.rows += rows
        if self.rows >= 2 * PROBATION:
            self.accepted, self.rows = self.accepted // 2, self.rows // 2

    @property
    def rate(self) -> float:
        """Accepted drafts of a row."""
        return self.accepted / max(self.rows, 1)


class Renewal:
    """One worker's watch over the folder.

    Args:
        folder: what the trainer publishes to; it may not exist yet.
        initial: the checkpoint that the server was started with.
        load: copies weights over those in use.

    Attributes:
        current: number of the checkpoint in use; 0: the one that the server was started with.
    """

    def __init__(self, folder: Path, initial: Path, load: Callable[[Weights], None]) -> None:
        self.folder, self.initial, self.load = folder, initial, load
        self.current = self._before = 0
        self._refused: set[int] = set()  # also where the folder cannot be written to
        self._tally, self._tally_before = Tally(), Tally()
        self._num_stale = self._num_steps = 0
        self._is_on_probation = False
        self._reading: _Reading | None = None

    def after_step(self, accepted: int, rows: int) -> None:
        """Count a step of the target; now and then look for a newer drafter, or take one back.

        All ranks call this after every step, and change weights after the same one: drafts that
        differ between ranks would give them different inputs.

        Args:
            accepted: drafts that the target kept.
            rows: requests whose drafts it verified.
        """
        self._num_steps += 1
        if self._num_stale > 0:
            self._num_stale -= rows
        else:
            self._tally.add(accepted, rows)
        if self._is_on_probation and self._tally.rows >= PROBATION:
            self._is_on_probation = False
            self._judge()
        if self._num_steps % STEPS_BETWEEN_LOOKS == 0 and not self._is_on_probation:
            self._look()

    def _look(self) -> None:
        """Begin to read a newer checkpoint; use one whose reading is over."""
        if self._reading is None:
            newest = answer_of_first_rank(self._newest())
            if newest > self.current:
                self._reading = _Reading(checkpoint(self.folder, newest), newest)
        elif answer_of_first_rank(not self._reading.thread.is_alive()):
            reading, self._reading = self._reading, None
            before, tally = self.current, self._tally
            if self._use(reading.number, reading.result()):
                self._before, self._tally_before = before, tally
                self._is_on_probation = True

    def _newest(self) -> int:
        """Number of the newest checkpoint that may be used; 0 if there is none."""
        try:
            numbers = set(published(self.folder))
        except OSError as error:  # serving must go on
            logger.warning_once("The folder %s cannot be read: %s", str(self.folder), str(error))
            return 0
        return max(numbers - self._refused, default=0)

    def _use(self, number: int, weights: Weights | None) -> bool:
        """Copy weights over those in use; a checkpoint that does not fit is rejected instead.

        Args:
            weights: None if they cannot be read.
        """
        try:
            if weights is None:
                raise ValueError("it cannot be read")
            self.load(weights)
        except Exception as error:  # a checkpoint of another shape; serving must go on
            logger.warning("The drafter %s is not used: %s", self._path(number), error)
            self._reject(number)
            return False
        logger.info("The drafter is that of %s", self._path(number))
        self.current, self._tally, self._num_stale = number, Tally(), STALE
        return True

    def _judge(self) -> None:
        """The end of a probation: keep the renewed drafter, or take the one before."""
        before = self._tally_before
        if before.rows < PROBATION or self._tally.rate >= (1 - MOST_LOSS) * before.rate:
            return  # too little is known of the one before, or it was not better
        worse, rate = self.current, self._tally.rate
        logger.warning(
            "The drafter %s is taken back: %.2f drafts accepted a step, %.2f before",
            self._path(worse),
            rate,
            before.rate,
        )
        self._reject(worse)
        if self._use(self._before, read_weights(self._path(self._before))):
            self._tally = before

    def _path(self, number: int) -> Path:
        return checkpoint(self.folder, number) if number else self.initial

    def _reject(self, number: int) -> None:
        """Never use this checkpoint again, and tell the trainer."""
        self._refused.add(number)
        try:
            if number in published(self.folder):
                with (self.folder / REJECTED).open("a") as file:
                    file.write(f"{number:0{DIGITS}}\n")
        except OSError as error:
            logger.warning("The trainer is not told of it: %s", error)


class _Reading:
    """A checkpoint that a thread reads into host memory."""

    def __init__(self, path: Path, number: int) -> None:
        self.number = number
        self._path = path
        self._weights: Weights | None = None
        self.thread = threading.Thread(target=self._read, name="dllm-renewal", daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            self._weights = read_weights(self._path)
        except Exception as error:  # cut short, or deleted meanwhile
            logger.warning("The drafter %s cannot be read: %s", self._path, error)

    def result(self) -> Weights | None:
        """The weights, when the thread is over; None if they cannot be read."""
        self.thread.join()
        return self._weights
