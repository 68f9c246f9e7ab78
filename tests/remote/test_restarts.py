"""Draft workers in processes of their own that are killed, started again, and paused.

The workers' model is a function, so that a process starts in a fraction of a second. The target is
the engine core's part of it (``RemoteDrafter``), with real connections and real time.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator

from dllm.drafter.widths.policy import FixedWidth
from dllm.remote.address import parse
from dllm.remote.client import Client, Link
from dllm.remote.drafter import RemoteDrafter, StepRow
from dllm.remote.stream import dialer
from dllm.remote.wire import reply_bytes
from tests.support.oracle import VOCAB, truth
from tests.support.process import start_python

NUM_DRAFTS, STEP_S, DEADLINE_S = 4, 0.01, 0.05
MAX_TOKENS = 300  # of a request; the next one begins in the same step
GONE_STEPS = 100  # a second
BACK_S = 1.0
LONG_S = 60.0  # a test that waits so long has failed


class LiveTarget:
    """A target that is ``truth``, one request after the other; each step takes STEP_S."""

    def __init__(self, address: str) -> None:
        dial = dialer(parse(address, None, "address"), None, reply_bytes(1))
        self.link = Link(address, dial, DEADLINE_S)
        client = Client([self.link], VOCAB)
        policy = FixedWidth(NUM_DRAFTS)
        self.drafter = RemoteDrafter(client, None, policy, NUM_DRAFTS, 1, DEADLINE_S)
        self._number = 0
        self._begin()

    def _begin(self) -> None:
        self._number += 1
        self._text, self._drafts = [self._number % VOCAB, 3, 7], []
        self.drafter.admit([(str(self._number), self._text)])

    def step(self) -> bool:
        """One step; returns whether drafts are there for the next one."""
        time.sleep(STEP_S)  # the target computes
        for draft in [*self._drafts, None]:
            own = truth(self._text)
            self._text.append(own)
            if own != draft:
                break
        num_verified = len(self._drafts)
        name = str(self._number)
        row = StepRow(name, self._text, False, num_verified + 1, num_verified, NUM_DRAFTS)
        self.drafter.follow([row])
        _, (self._drafts,) = self.drafter.take()
        has_drafts = bool(self._drafts)
        if len(self._text) > MAX_TOKENS:
            self.drafter.end([name])
            self._begin()
        return has_drafts

    def step_until_drafts(self) -> float:
        """The time at which drafts were there."""
        end = time.monotonic() + LONG_S
        while not self.step():
            assert time.monotonic() < end, "no drafts"
        return time.monotonic()

    def step_until_none(self) -> None:
        """Until the worker is out."""
        end = time.monotonic() + LONG_S
        while not self.link.is_out:
            self.step()
            assert time.monotonic() < end, "the worker is still waited for"


@contextlib.contextmanager
def worker(address: str) -> Iterator[tuple[subprocess.Popen, str, float]]:
    """A process, where it listens, and when it was ready (``time.monotonic``)."""
    with start_python("-m", "tests.support.oracle", address) as process:
        try:
            assert process.stdout is not None
            address, ready = process.stdout.readline().split()
            yield process, address, float(ready)
        finally:
            process.kill()


@contextlib.contextmanager
def target_of(address: str) -> Iterator[LiveTarget]:
    """A target that has drafts."""
    target = LiveTarget(address)
    try:
        target.step_until_drafts()
        yield target
    finally:
        target.link.close()


def test_a_worker_that_is_started_again_is_used_within_a_second(tmp_path):
    with (
        worker(f"unix://{tmp_path}/worker.sock") as (first, address, _),
        target_of(address) as target,
    ):
        first.kill()
        target.step_until_none()
        for _ in range(3):
            for _ in range(GONE_STEPS):
                assert not target.step()
            with worker(address) as (process, _, ready):
                assert target.step_until_drafts() - ready < BACK_S
                process.kill()
                target.step_until_none()
        assert target.link.num_ups == 4


def test_a_worker_that_goes_on_is_used_within_a_second(tmp_path):
    with (
        worker(f"unix://{tmp_path}/worker.sock") as (process, address, _),
        target_of(address) as target,
    ):
        os.kill(process.pid, signal.SIGSTOP)
        target.step_until_none()
        for _ in range(GONE_STEPS):
            assert not target.step()
        assert target.link.is_up and target.link.num_misses == 1
        going_on = time.monotonic()
        os.kill(process.pid, signal.SIGCONT)
        assert target.step_until_drafts() - going_on < BACK_S
        assert target.link.num_ups == 1
