"""Replaces the drafter of a running server by a newer one, and takes it back if it is worse.

A trainer beside the server (``dllm recalibrate``) publishes checkpoints in a folder:

    FOLDER/000001, FOLDER/000002, ...   drafters of the shape that the server was started with
    FOLDER/rejected                     those that the server took back, one a line

The server takes the last one that is not rejected. A thread reads it into host memory; then its
weights are copied over those in use, between two steps. Nothing else changes: the text does not
depend on drafts, so it does not depend on when this happens either. The drafter's KV pages of
running requests are still those of the weights before. Their next drafts may be worse.

A renewed drafter is on probation. If the target keeps fewer of its drafts than of those before it,
the weights before come back, and its number is written to ``rejected``. One that is published
meanwhile takes its place, and is compared with the same weights before.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from safetensors.torch import load_file
from torch import Tensor
from vllm.logger import init_logger

from dllm import LOGGER
from dllm.engine.ranks import all_ranks_say_yes, answer_of_first_rank

logger = init_logger(LOGGER)

REJECTED, DIGITS, WEIGHTS = "rejected", 6, "*.safetensors"
STEPS_BETWEEN_LOOKS = 64
PROBATION = 1024  # drafted rows whose acceptance is compared with that of as many before
STALE = 256  # drafted rows after a change that do not count: their context is of older weights
LONGEST_PROBATION = 8192  # steps, where few rows are drafted for
FEWEST_ROWS = 64  # of a probation that ends so; fewer say nothing about a drafter
MOST_LOSS = 0.05  # share of the accepted drafts that a renewed drafter may lose
CERTAINTY = 3.0  # standard errors of the difference that count as chance

Weights = dict[str, Tensor]


def published(folder: Path) -> list[int]:
    """Numbers of a folder's complete checkpoints that are not rejected, ascending."""
    path = folder / REJECTED
    rejected = set(path.read_text(errors="replace").split()) if path.is_file() else set()
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


def is_worse(new: Sequence[int], old: Sequence[int]) -> bool:
    """Whether MOST_LOSS of the accepted drafts was lost, and more than chance explains.

    Args:
        new, old: drafts that the target kept of each row that was drafted for.
    """
    chance = CERTAINTY * (np.var(new) / len(new) + np.var(old) / len(old)) ** 0.5
    return bool(np.mean(new) < (1 - MOST_LOSS) * np.mean(old) - chance)


class Renewal:
    """One worker's watch over the folder.

    Args:
        folder: what the trainer publishes to; it may not exist yet.
        initial: the checkpoint that the server was started with.
        load: copies weights over those in use.
        refuse: raises ValueError for weights that ``load`` cannot take. A thread calls it.

    Attributes:
        current: number of the checkpoint in use; 0: the one that the server was started with.
    """

    def __init__(
        self,
        folder: Path,
        initial: Path,
        load: Callable[[Weights], None],
        refuse: Callable[[Weights], None],
    ) -> None:
        self.folder, self.initial, self.load, self.refuse = folder, initial, load, refuse
        self.current = self._before = 0
        self._refused: set[int] = set()  # also where the folder cannot be written to
        # Accepted drafts of each of the last rows, of the drafter in use and of the one before.
        self._accepted: deque[int] = deque(maxlen=2 * PROBATION)
        self._accepted_before = self._accepted
        self._num_stale = self._num_steps = 0
        self._probation_left = 0  # steps
        self._reader = ThreadPoolExecutor(1, "dllm-renewal")
        self._reading: Future[Weights | None] | None = None  # of the checkpoint ``_next``
        self._next = 0

    def after_step(self, accepted: np.ndarray) -> None:
        """Count a step of the target; now and then look for a newer drafter, or take one back.

        All ranks call this after every step, and change weights after the same one: drafts that
        differ between ranks would give them different inputs.

        Args:
            accepted: ``[rows]``, drafts that the target kept of each request that had some.
        """
        self._num_steps += 1
        if self._num_stale > 0:
            self._num_stale -= len(accepted)
        else:
            self._accepted.extend(accepted.tolist())
        if self._probation_left:
            self._probation_left -= 1
            if len(self._accepted) >= PROBATION or not self._probation_left:
                self._probation_left = 0
                self._judge()
        if self._num_steps % STEPS_BETWEEN_LOOKS == 0:
            self._look()

    def _look(self) -> None:
        """Begin to read a newer checkpoint; use one whose reading is over."""
        if self._reading is None:
            newest = answer_of_first_rank(self._newest())
            if newest > self.current:
                self._next, self._reading = newest, self._reader.submit(self._read, newest)
        elif answer_of_first_rank(self._reading.done()):
            reading, self._reading = self._reading, None
            before, accepted = self.current, self._accepted
            if self._use(self._next, reading.result()):
                if not self._probation_left:
                    self._before, self._accepted_before = before, accepted
                self._probation_left = LONGEST_PROBATION

    def _newest(self) -> int:
        """Number of the newest checkpoint that may be used; 0 if there is none."""
        try:
            return max(set(published(self.folder)) - self._refused, default=0)
        except OSError as error:  # serving must go on
            logger.warning_once("The folder %s cannot be read: %s", str(self.folder), str(error))
            return 0

    def _use(self, number: int, weights: Weights | None) -> bool:
        """Copy weights over those in use, on all ranks or on none. Returns whether it was done.

        Args:
            weights: None if they cannot be read, or do not fit; the checkpoint is rejected then.
        """
        if not all_ranks_say_yes(weights is not None and self._loads(number, weights)):
            self._reject(number)
            if weights is not None:  # loaded by this rank, in part at least
                in_use = self._read(self.current)
                if in_use is None or not self._loads(self.current, in_use):
                    logger.error("The drafter is damaged, and drafts are bad: restart the server.")
            return False
        logger.info("The drafter is that of %s", self._path(number))
        self.current, self._num_stale = number, STALE
        self._accepted = deque(maxlen=2 * PROBATION)
        return True

    def _loads(self, number: int, weights: Weights) -> bool:
        """Copy weights over those in use; False if that failed halfway."""
        try:
            self.load(weights)
        except Exception as error:  # serving must go on
            logger.warning("The drafter %s cannot be used: %s", self._path(number), error)
            return False
        return True

    def _judge(self) -> None:
        """The end of a probation: keep the renewed drafter, or take the one before."""
        before, worse = self._accepted_before, self.current
        if len(before) < PROBATION or len(self._accepted) < FEWEST_ROWS:
            return  # too little is known of one of them
        if not is_worse(self._accepted, before):
            return
        logger.warning(
            "The drafter %s is taken back: %.2f drafts accepted a step, %.2f before",
            self._path(worse),
            np.mean(self._accepted),
            np.mean(before),
        )
        self._reject(worse)
        for number in dict.fromkeys((self._before, 0)):  # the one before may be deleted by now
            if self._use(number, self._read(number)):
                self._accepted = before
                return

    def _path(self, number: int) -> Path:
        return checkpoint(self.folder, number) if number else self.initial

    def _read(self, number: int) -> Weights | None:
        """A checkpoint's weights; None and a warning if they cannot be read, or do not fit."""
        try:
            weights = read_weights(self._path(number))
            self.refuse(weights)
        except Exception as error:  # cut short, deleted meanwhile, or of another shape
            logger.warning("The drafter %s cannot be used: %s", self._path(number), error)
            return None
        return weights

    def _reject(self, number: int) -> None:
        """Never use this checkpoint again, and tell the trainer."""
        self._refused.add(number)
        try:
            if number in published(self.folder):
                with (self.folder / REJECTED).open("a") as file:
                    file.write(f"{number:0{DIGITS}}\n")
        except OSError as error:
            logger.warning("The trainer is not told of it: %s", error)
