"""Recording live traffic for calibration: hidden states, tokens, and what was accepted of drafts.

Off unless a server is told to (``record`` of ``dllm.settings.drafting``). What is written reveals
what users wrote: tokens are their text, and hidden states can be turned back into it. See
docs/calibration.md.

    step of the target -> samples that grow, one for each request -> closed samples -> shard
                                              (host memory)          (a thread)       (ring on disk)

Serving waits for one copy of a step's hidden states to the host and for nothing else: shards are
written by a thread, and a sample is dropped when the thread falls behind or the disk fails. Shards
are those of ``dllm.drafter.samples``, with two more tensors, ``[N]`` int16: at a token behind
which drafts were verified, ``verified`` and ``accepted`` say how many; -1 at all others.
"""

import atexit
import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dllm import LOGGER
from dllm.drafter.samples import SUFFIX, Sample, write_shard

logger = logging.getLogger(LOGGER)

GROUP = "traffic"
# Of a request, the first so many tokens behind what was cached; of a longer prompt, its end.
MAX_SAMPLE_TOKENS = 2048
# Steps that a prompt may wait for its next chunk before its request is taken to be over.
MAX_GAP = 64
# The ring is a number of shards, so that dropping the oldest drops a small part of what is known.
SHARDS = 16
MAX_SHARD_BYTES = 64 << 20
# A shard is written when it is full, or when its first sample has waited for so long.
MAX_WAIT_S = 60.0
# Of the file's header and of numbers beside the hidden states, per sample and per token.
SAMPLE_OVERHEAD, TOKEN_OVERHEAD = 64, 8


@dataclass(frozen=True)
class RecordedStep:
    """One step of the target, row by row, on the host but for ``features``.

    Attributes:
        requests: a name for each row; a row of another request under the same slot is another one.
        starts: ``[rows]`` position of each row's first token.
        lengths: ``[rows]`` tokens of each row, rejected drafts included.
        kept: ``[rows]`` those that remain: all but rejected drafts.
        prompts: ``[rows]`` length of each request's prompt.
        verified: ``[rows]`` drafts among the tokens; all but the first token of a decoding row.
        last_sampled: ``[rows]`` the token behind the kept ones; -1 in the middle of a prompt.
        tokens: ``[tokens]``; features: ``[tokens, features]``, where the target computed them.
    """

    requests: Sequence[str]
    starts: np.ndarray
    lengths: np.ndarray
    kept: np.ndarray
    prompts: np.ndarray
    verified: np.ndarray
    last_sampled: np.ndarray
    tokens: np.ndarray
    features: Tensor


@dataclass
class OpenSample:
    """A request's tokens from position ``start`` on, as far as the target has computed them."""

    start: int
    prompt: int  # length of the request's prompt
    seen: int = 0  # step of the recorder that added to it last
    tokens: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    last_sampled: int = -1

    @property
    def end(self) -> int:
        """Position behind its tokens."""
        return self.start + len(self.tokens)

    @property
    def num_bytes(self) -> int:
        """In host memory."""
        return sum(part.nbytes for part in self.hidden)

    def close(self) -> "ClosedSample | None":
        """With the last sampled token, which nothing has been computed for; None: nothing to learn.

        Its hidden state is left at zero: no draft block sees what stands at its end.
        """
        tokens = [*self.tokens, *([self.last_sampled] if self.last_sampled >= 0 else [])]
        # A draft block needs context before it.
        response_start = max(1, self.prompt - self.start)
        sample = Sample(tuple(tokens), response_start, GROUP)
        if sample.num_anchors == 0:
            return None
        hidden = torch.cat(self.hidden)
        missing = len(tokens) - len(hidden)
        hidden = torch.cat([hidden, hidden.new_zeros(missing, hidden.shape[1])])
        padding = [-1] * missing
        return ClosedSample(sample, hidden, self.verified + padding, self.accepted + padding)


@dataclass(frozen=True)
class ClosedSample:
    """A sample as it is written."""

    sample: Sample
    hidden: Tensor
    verified: list[int]
    accepted: list[int]

    @property
    def num_bytes(self) -> int:
        """At most, on disk."""
        return self.hidden.nbytes + SAMPLE_OVERHEAD + TOKEN_OVERHEAD * len(self.verified)


class Recorder:
    """Samples of one worker's traffic, at most ``max_bytes`` of them on disk.

    Args:
        folder: of the ring; made if it is not there.
        max_bytes: of this worker's shards; requests that are not over yet hold no more host memory
            than a quarter of it: what would hold more ends the sample, or does not begin one.
        worker: begins the names of its shards; no two workers may share it.
    """

    def __init__(self, folder: Path, max_bytes: int, worker: str) -> None:
        self.max_bytes = max_bytes
        self.ring = ShardRing(folder, max_bytes, worker)
        self.shard_bytes = min(MAX_SHARD_BYTES, max_bytes // SHARDS)
        self.num_dropped = 0  # samples
        self._num_steps = 0
        self._open: dict[str, OpenSample] = {}
        self._closed: list[ClosedSample] = []
        self._closed_bytes = 0
        self._waiting_since = 0.0
        # One shard being written and one waiting: more would only be more memory.
        self._queue: queue.Queue[list[ClosedSample] | None] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._write, name="dllm-recorder", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def observe(self, step: RecordedStep) -> None:
        """Take in one step; closes the samples of requests that are over."""
        self._num_steps += 1
        self._close_finished(set(step.requests))
        firsts = np.cumsum(step.lengths) - step.lengths
        for row in self._rows(step):
            tokens = slice(int(firsts[row]), int(firsts[row] + step.kept[row]))
            self._extend(step, row, step.tokens[tokens], step.features[tokens].cpu())
        if self._closed and time.monotonic() - self._waiting_since > MAX_WAIT_S:
            self._hand_over()

    def close(self) -> None:
        """Write what is there, and stop."""
        atexit.unregister(self.close)
        if not self._thread.is_alive():
            return
        for sample in self._open.values():
            self._close(sample)
        self._open.clear()
        self._queue.put(self._closed)
        self._queue.put(None)
        self._thread.join()

    def _close_finished(self, now: set[str]) -> None:
        """Requests that are in a step no more; prompts may wait for their next chunk."""
        for name, sample in list(self._open.items()):
            waits = sample.last_sampled < 0 and self._num_steps - sample.seen <= MAX_GAP
            if name not in now and not waits:
                self._close(self._open.pop(name))

    def _rows(self, step: RecordedStep) -> list[int]:
        """The rows that are recorded; what does not follow its sample closes it."""
        rows = []
        room = self.max_bytes // 4 - sum(sample.num_bytes for sample in self._open.values())
        for row, name in enumerate(step.requests):
            sample = self._open.get(name)
            num_bytes = int(step.kept[row]) * step.features[:1].nbytes
            if sample is not None and (
                sample.end != step.starts[row]
                or len(sample.tokens) + step.kept[row] > MAX_SAMPLE_TOKENS
                or num_bytes > room
            ):
                self._close(self._open.pop(name))
                room += sample.num_bytes
                sample = None
            # A sample begins in the prompt: without it a response says little.
            begins = sample is None and step.starts[row] < step.prompts[row]
            if (sample is not None or begins) and num_bytes <= room:
                rows.append(row)
                room -= num_bytes
        return rows

    def _extend(self, step: RecordedStep, row: int, tokens: np.ndarray, hidden: Tensor) -> None:
        """Add a row to its request's sample."""
        begun = OpenSample(int(step.starts[row]), int(step.prompts[row]))
        sample = self._open.setdefault(step.requests[row], begun)
        verified = int(step.verified[row])
        rejected = int(step.lengths[row]) - len(tokens)
        unmarked = [-1] * (len(tokens) - 1)
        sample.tokens += tokens.tolist()
        sample.verified += [verified or -1, *unmarked]
        sample.accepted += [verified - rejected if verified else -1, *unmarked]
        sample.hidden.append(hidden)
        sample.last_sampled = int(step.last_sampled[row])
        sample.seen = self._num_steps

    def _close(self, sample: OpenSample) -> None:
        closed = sample.close()
        if closed is None:
            return
        if not self._closed:
            self._waiting_since = time.monotonic()
        self._closed.append(closed)
        self._closed_bytes += closed.num_bytes
        if self._closed_bytes >= self.shard_bytes:
            self._hand_over()

    def _hand_over(self) -> None:
        """Give a shard to the thread; drop it if the thread is behind."""
        try:
            self._queue.put_nowait(self._closed)
        except queue.Full:
            self._drop(self._closed, "the disk is slower than traffic")
        self._closed, self._closed_bytes = [], 0

    def _drop(self, samples: Sequence[ClosedSample], why: str) -> None:
        if samples and self.num_dropped == 0:
            logger.warning("Recording: dropped %d samples, %s.", len(samples), why)
        self.num_dropped += len(samples)

    def _write(self) -> None:
        """The thread: shard after shard, whatever becomes of each."""
        while (samples := self._queue.get()) is not None:
            try:
                self.ring.write(samples)
            except Exception as error:  # a full disk, say; serving goes on
                self._drop(samples, str(error))


class ShardRing:
    """One worker's shards in a folder, the oldest replaced by the newest."""

    def __init__(self, folder: Path, max_bytes: int, worker: str) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # what users wrote is nobody else's
        self.folder, self.max_bytes, self.worker = folder, max_bytes, worker
        for leftover in folder.glob(f"{worker}-*.part"):
            leftover.unlink()
        names = [path.stem for path in self.shards()]
        self.next = int(names[-1].rsplit("-", 1)[1]) + 1 if names else 0

    def shards(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.folder.glob(f"{self.worker}-*{SUFFIX}"))

    def write(self, samples: Sequence[ClosedSample]) -> None:
        """Write one shard whole; what it replaces goes first, so that the bound always holds.

        Raises:
            OSError: the disk is full or gone; nothing is left of the shard.
        """
        if not samples:
            return
        needed = 4096 + sum(sample.num_bytes for sample in samples)  # the header is smaller
        if needed > self.max_bytes:
            raise OSError(f"a shard of {needed} bytes exceeds the {self.max_bytes} allowed")
        sizes = [(path, path.stat().st_size) for path in self.shards()]
        total = sum(size for _, size in sizes)
        for path, size in sizes:
            if total + needed <= self.max_bytes:
                break
            path.unlink()
            total -= size
        marks = {
            "verified": [mark for sample in samples for mark in sample.verified],
            "accepted": [mark for sample in samples for mark in sample.accepted],
        }
        write_shard(
            self.folder / f"{self.worker}-{self.next:012}{SUFFIX}",
            [sample.sample for sample in samples],
            [sample.hidden for sample in samples],
            {name: torch.tensor(values, dtype=torch.int16) for name, values in marks.items()},
        )
        self.next += 1
