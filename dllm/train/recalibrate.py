"""The rounds of ``dllm recalibrate`` (``commands``).

A server finds what is published by ``dllm.drafter.weight_reload``.
"""

import argparse
import fcntl
import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from dllm.drafter.samples import SUFFIX
from dllm.drafter.weight_reload import DIGITS, checkpoint, published
from dllm.settings.command import OK, CommandError
from dllm.settings.files import whole
from dllm.train.export import Drafter, write_checkpoint
from dllm.train.responses import TooFewSamples, split_buffer
from dllm.train.run import DraftLearner, Run
from dllm.train.settings import CONTINUED
from dllm.train.target import TargetEmbeddingsAndHead, read_config, target_facts

MIN_GAIN = 0.01  # share by which a published drafter's tokens a step exceed those of its base
# How many published drafters stay on disk, so that one which a server has found is still there when
# it reads it. (The server keeps the files of the drafter in use open: ``WeightReload``.)
KEPT = 3
LOWEST_PRIORITY = 19
SECONDS_BETWEEN_LOOKS = 5.0
SNAPSHOT = "round-"  # folders of links to the shards, inside the recording's


def recalibrate(given: argparse.Namespace) -> int:
    """Raises CommandError: no recording, a pair that does not fit, or a recording of others."""
    if not given.buffer.is_dir():
        raise CommandError(
            f"--buffer {given.buffer}: no such folder; a server with `record` makes it."
        )
    os.nice(LOWEST_PRIORITY)
    torch.set_num_threads(1)
    ends = TargetEmbeddingsAndHead.read(given.target, given.device)
    given.out.mkdir(parents=True, exist_ok=True)
    # Recordings are private: none may be left behind when the command is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    seen: set[str] = set()
    with snapshots(given.buffer):
        for number in itertools.count(1) if given.rounds is None else range(1, given.rounds + 1):
            seen = wait_for_news(given.buffer, seen)
            with tempfile.TemporaryDirectory(dir=given.buffer, prefix=SNAPSHOT) as snapshot:
                link_shards(given.buffer, Path(snapshot))
                try:
                    happened = one_round(given, ends, Path(snapshot))
                except TooFewSamples as error:
                    happened = str(error)
            print(f"round {number}: {happened}", flush=True)
    return OK


@contextmanager
def snapshots(buffer: Path) -> Iterator[None]:
    """Lets this process take snapshots; if it is alone, deletes those that others have left."""
    folder = os.open(buffer, os.O_RDONLY)
    try:
        with suppress(BlockingIOError):  # others are at work
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for leftover in buffer.glob(f"{SNAPSHOT}*"):
                shutil.rmtree(leftover, ignore_errors=True)
        fcntl.flock(folder, fcntl.LOCK_SH)
        yield
    finally:
        os.close(folder)


def one_round(given: argparse.Namespace, ends: TargetEmbeddingsAndHead, buffer: Path) -> str:
    """What happened, in a sentence. Raises TooFewSamples if the recording is too short."""
    done = published(given.out)
    base = checkpoint(given.out, done[-1]) if done else given.drafter
    drafter = Drafter.load(base, target_facts(read_config(given.target)))
    samples, heldout = split_buffer(buffer, drafter.read)
    settings = replace(CONTINUED, steps=given.steps, evaluate_every=given.steps, threads=1)
    run = Run(DraftLearner(settings, drafter, ends, samples, heldout), None)
    list(run.run())
    before, after = run.rows[0]["length"], run.rows[-1]["length"]
    result = f"held-out tokens a step {before:.2f} -> {after:.2f}, {len(samples)} samples"
    if after < before * (1 + MIN_GAIN):
        return f"{result}; not published"
    return f"{result}; published as {publish(given.out, drafter.config, run.average.state_dict())}"


def publish(out: Path, config: dict[str, object], weights: dict[str, torch.Tensor]) -> Path:
    """Write the next checkpoint of a folder, whole or not at all; delete what is too old."""
    numbers = [int(path.name) for path in out.glob("[0-9]" * DIGITS)]
    path = checkpoint(out, max(numbers, default=0) + 1)
    with whole(path) as part:
        write_checkpoint(part, config, weights)
    kept = published(out)[-KEPT:]
    for number in numbers:
        if number not in kept:
            shutil.rmtree(checkpoint(out, number), ignore_errors=True)
    return path


def wait_for_news(buffer: Path, seen: set[str]) -> set[str]:
    while True:
        names = {path.name for path in buffer.glob(f"*{SUFFIX}")}
        if names - seen:
            return names
        time.sleep(SECONDS_BETWEEN_LOOKS)


def link_shards(buffer: Path, folder: Path) -> None:
    """Hard links to all shards: the server may delete old ones while they are read."""
    for path in buffer.glob(f"*{SUFFIX}"):
        try:
            (folder / path.name).hardlink_to(path)
        except FileNotFoundError:  # deleted just now
            continue
        except OSError:  # another file system
            shutil.copyfile(path, folder / path.name)
