"""Records live traffic for calibration: tokens, hidden states, and how many drafts were accepted.

Off by default (``record`` of ``dllm.settings.drafting``). The files reveal what users wrote: tokens
are their text, and hidden states can be turned back into it. See docs/calibration.md.

    target step -> open samples, one for each request -> closed samples -> shards in a folder
                              (host memory)               (a thread)       (oldest deleted first)

Serving waits only for the copy of a step's hidden states to the host. A thread writes the shards;
if it falls behind, or the disk fails, samples are dropped. Shards have the format of
``dllm.drafter.samples`` and two more tensors, ``verified`` and ``accepted`` (``[N]`` int16): how
many drafts were verified, and accepted, directly after a token; -1 where none were.
"""

import fcntl
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dllm import LOGGER
from dllm.drafter.samples import SUFFIX, Sample, write_shard
from dllm.drafter.step import TargetStep

logger = logging.getLogger(LOGGER)

GROUP = "traffic"
# Tokens of a sample at most, and of a prompt in it. Where the next step of a prompt has no room, a
# new sample begins with the last tokens of that step: so there is always room for the answer.
MAX_SAMPLE_TOKENS, BEGIN_TOKENS = 2048, 1024
# Steps that a prompt may wait for its next chunk before its request counts as finished.
MAX_GAP = 64
# The bytes allowed on disk are divided into so many shards: deleting the oldest one to make room
# loses a small part of the samples.
SHARDS = 16
MAX_SHARD_BYTES = 64 << 20
# A shard is written when it is full, or when its first sample has waited for this time.
MAX_WAIT_S = 60.0
# Bytes on disk besides the hidden states: for each sample (header), and for each token (its id, and
# the two int16 counts).
SAMPLE_OVERHEAD, TOKEN_OVERHEAD = 64, 8
LOCK = ".lock"  # file in the folder that a process holds while it changes the folder
DIGITS = 12  # of a shard's number, with which its name begins


@dataclass
class RecordedSample:
    """A request's tokens from position ``start`` on, as far as the target computed them."""

    start: int
    prompt: int  # tokens of the request's prompt
    tokens: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)  # parts of [tokens, features], in order
    num_bytes: int = 0  # of ``hidden``, in host memory
    last_sampled: int = -1  # the token behind the last one; -1 in the middle of a prompt
    seen: int = 0  # number of the recorder's step that last added to it

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk, an upper bound."""
        return self.num_bytes + SAMPLE_OVERHEAD + TOKEN_OVERHEAD * len(self.tokens)

    def extend(
        self, tokens: list[int], hidden: Tensor, verified: int = -1, accepted: int = -1
    ) -> None:
        """Add the tokens of a step; the counts belong to the first of them."""
        unmarked = [-1] * (len(tokens) - 1)
        self.tokens += tokens
        self.verified += [verified, *unmarked]
        self.accepted += [accepted, *unmarked]
        self.hidden.append(hidden)
        self.num_bytes += hidden.nbytes

    def close(self) -> None:
        """Add the last sampled token, with a hidden state of zeros, which no draft block reads."""
        if self.last_sampled >= 0:
            self.extend([self.last_sampled], torch.zeros_like(self.hidden[-1][:1]))

    def sample(self) -> Sample:
        """Without the hidden states."""
        # At least 1: a draft block needs at least one token of context before it.
        return Sample(tuple(self.tokens), max(1, self.prompt - self.start), GROUP)


class Recorder:
    """Records one worker's traffic; the folder's shards never take more than ``max_bytes``.

    Several processes may share a folder. Open samples hold at most a quarter of ``max_bytes`` in
    host memory: a row that would exceed this closes its sample, or does not begin one. Closed
    samples that are not written yet are those of three shards at most. ``layers`` (0-based) are
    noted in them.
    """

    def __init__(self, folder: Path, max_bytes: int, layers: Sequence[int] = ()) -> None:
        self.max_bytes = max_bytes
        self.ring = ShardRing(folder, max_bytes, layers)
        self.shard_bytes = min(MAX_SHARD_BYTES, max_bytes // SHARDS)
        self.num_dropped = 0  # samples
        self._num_steps = 0
        self._open: dict[str, RecordedSample] = {}
        self._open_bytes = 0  # of the hidden states of all open samples
        self._closed: list[RecordedSample] = []
        self._closed_bytes = 0
        self._waiting_since = 0.0
        # One shard is being written and one may wait. A longer queue would only take more memory.
        self._queue: queue.Queue[list[RecordedSample] | None] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._write, name="dllm-recorder", daemon=True)
        self._thread.start()
        # Not atexit, whose functions a forked process (vLLM's engine core may be one) does not run.
        self._at_exit = Finalize(None, self.close, exitpriority=0)

    def observe(self, step: TargetStep) -> None:
        self._num_steps += 1
        self._close_finished(set(step.batch.req_ids))
        skipped = self._rows(step)
        if skipped:
            firsts, kept = step.batch.query_start_loc_np, step.kept
            places = [
                np.arange(firsts[row] + skip, firsts[row] + kept[row])
                for row, skip in skipped.items()
            ]
            chosen = torch.from_numpy(np.concatenate(places))
            hidden = step.features(chosen).cpu()  # one copy for all rows: it waits for the device
            parts = hidden.split([len(tokens) for tokens in places])
            for row, tokens, part in zip(skipped, places, parts, strict=True):
                start = int(step.starts[row]) + skipped[row]
                # Each sample has memory of its own, or one would keep that of the others.
                self._extend(step, row, start, step.tokens[tokens], part.clone())
        if self._closed and time.monotonic() - self._waiting_since > MAX_WAIT_S:
            self._hand_over()

    def close(self) -> None:
        """Write all samples, open ones included, and end the thread."""
        self._at_exit.cancel()
        if not self._thread.is_alive():
            return
        for name in list(self._open):
            self._end(name)
        self._queue.put(self._closed)
        self._queue.put(None)
        self._thread.join()

    def _close_finished(self, now: set[str]) -> None:
        for name, sample in list(self._open.items()):
            waits = sample.last_sampled < 0 and self._num_steps - sample.seen <= MAX_GAP
            if name not in now and not waits:
                self._end(name)

    def _rows(self, step: TargetStep) -> dict[int, int]:
        """Row -> first tokens left out. Ends samples without room, or that a row does not go on."""
        rows = {}
        room = self.max_bytes // 4 - self._open_bytes
        starts, kept = step.starts, step.kept.tolist()
        for row, name in enumerate(step.batch.req_ids):
            sample = self._open.get(name)
            is_prompt = starts[row] < step.batch.prefill_len_np[row]
            most = BEGIN_TOKENS if is_prompt else MAX_SAMPLE_TOKENS
            if sample is not None and (
                sample.end != starts[row]
                or len(sample.tokens) + kept[row] > most
                or kept[row] * step.token_bytes > room
            ):
                room += sample.num_bytes
                self._end(name)
                sample = None
            skip = max(0, kept[row] - BEGIN_TOKENS) if sample is None else 0
            num_bytes = (kept[row] - skip) * step.token_bytes
            # A sample must begin in the prompt: a response alone is not enough context.
            if (sample is not None or is_prompt) and num_bytes <= room:
                rows[row] = skip
                room -= num_bytes
        return rows

    def _extend(
        self, step: TargetStep, row: int, start: int, tokens: np.ndarray, hidden: Tensor
    ) -> None:
        begun = RecordedSample(start, int(step.batch.prefill_len_np[row]))
        sample = self._open.setdefault(step.batch.req_ids[row], begun)
        verified, rejected = int(step.verified[row]), int(step.rejected[row])
        counts = (verified, verified - rejected) if verified else (-1, -1)
        sample.extend(tokens.tolist(), hidden, *counts)
        self._open_bytes += hidden.nbytes
        sample.last_sampled = int(step.followers[row])
        sample.seen = self._num_steps

    def _end(self, name: str) -> None:
        sample = self._open.pop(name)
        self._open_bytes -= sample.num_bytes
        sample.close()
        if sample.sample().num_anchors == 0:
            return  # no draft block can be trained on it
        if not self._closed:
            self._waiting_since = time.monotonic()
        self._closed.append(sample)
        self._closed_bytes += sample.disk_bytes
        if self._closed_bytes >= self.shard_bytes:
            self._hand_over()

    def _hand_over(self) -> None:
        """Give the closed samples to the thread as one shard; drop them if it is behind."""
        try:
            self._queue.put_nowait(self._closed)
        except queue.Full:
            self._drop(self._closed, "the disk is slower than traffic")
        self._closed, self._closed_bytes = [], 0

    def _drop(self, samples: Sequence[RecordedSample], why: str) -> None:
        if samples and self.num_dropped == 0:
            logger.warning("Recording: dropped %d samples, %s.", len(samples), why)
        self.num_dropped += len(samples)

    def _write(self) -> None:
        """Body of the thread: write shards until None arrives. An error drops that shard only."""
        while (samples := self._queue.get()) is not None:
            try:
                self.ring.write(samples)
            except Exception as error:  # for example a full disk; serving must go on
                self._drop(samples, str(error))


class ShardRing:
    """The shards of a folder; a new one replaces the oldest ones where room is short.

    The limit holds for all processes together that write to the folder. A shard's name begins with
    a number, which is the order of writing, and goes on with the host and the process. Raises
    OSError if the folder cannot be made or written to, or its file system has no locks.
    """

    def __init__(self, folder: Path, max_bytes: int, layers: Sequence[int] = ()) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # private: it holds what users wrote
        self.folder, self.max_bytes, self.layers = folder, max_bytes, layers
        with self._alone():  # nobody is writing
            for leftover in folder.glob(f"{'[0-9]' * DIGITS}-*.part"):
                leftover.unlink()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with (self.folder / LOCK).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def shards(self) -> list[Path]:
        return sorted(self.folder.glob(f"{'[0-9]' * DIGITS}-*{SUFFIX}"))

    def write(self, samples: Sequence[RecordedSample]) -> None:
        """Write one shard whole. Old shards are deleted before it, so the limit always holds.

        Raises OSError or SafetensorError if the disk is full or gone; no part of the shard remains.
        """
        if not samples:
            return
        needed = 4096 + sum(sample.disk_bytes for sample in samples)  # the header is smaller
        if needed > self.max_bytes:
            raise OSError(f"a shard of {needed} bytes exceeds the {self.max_bytes} allowed")
        with self._alone():
            sizes = [(path, path.stat().st_size) for path in self.shards()]
            number = 1 + (int(sizes[-1][0].name[:DIGITS]) if sizes else -1)
            total = sum(size for _, size in sizes)
            for path, size in sizes:
                if total + needed <= self.max_bytes:
                    break
                path.unlink()
                total -= size
            name = f"{number:0{DIGITS}}-{socket.gethostname()}-{os.getpid()}{SUFFIX}"
            _write(self.folder / name, samples, self.layers)


def _write(path: Path, samples: Sequence[RecordedSample], layers: Sequence[int]) -> None:
    verified = [count for each in samples for count in each.verified]
    accepted = [count for each in samples for count in each.accepted]
    write_shard(
        path,
        [each.sample() for each in samples],
        [part for each in samples for part in each.hidden],
        {
            "verified": torch.tensor(verified, dtype=torch.int16),
            "accepted": torch.tensor(accepted, dtype=torch.int16),
        },
        layers,
    )
