"""``dllm recalibrate``: goes on training a server's drafter on its traffic, beside the server.

Each round trains for a few hundred steps on what the server has recorded (``record``). If more
drafts of the held-out part of the recording are then accepted, the drafter is published in a
folder, which the server watches (``renew``, ``dllm.drafter.renewal``). It runs at the lowest
priority and stops with Ctrl-C.
"""

import argparse
import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from dllm.drafter.renewal import DIGITS, checkpoint, published
from dllm.drafter.samples import SUFFIX, Sample
from dllm.settings.command import OK, CommandError
from dllm.train.drafter import export
from dllm.train.drafter.acceptance import total
from dllm.train.drafter.command import HELDOUT_EVERY, TooFewSamples, split_buffer
from dllm.train.drafter.ends import TargetEnds
from dllm.train.drafter.learner import DraftLearner
from dllm.train.drafter.presets import CONTINUED
from dllm.train.drafter.settings import block_of
from dllm.train.drafter.target import read_config, read_drafter, target_facts
from dllm.train.run import Run

MIN_GAIN = 0.01  # share by which a published drafter's tokens a step exceed those of its base
KEPT = 3  # published drafters that stay on disk: the one in use, the one before, a newer one
LOWEST_PRIORITY = 19
SECONDS_BETWEEN_LOOKS = 5.0
SNAPSHOT = "round-"  # folders of links to the shards, inside the recording's


def main(argv: Sequence[str]) -> int:
    """Train and publish until stopped, or for ``--rounds`` rounds.

    Raises:
        CommandError: there is no recording, drafter and target do not fit each other, or the
            recording is of others.
    """
    given = parse(argv)
    if not given.buffer.is_dir():
        raise CommandError(
            f"--buffer {given.buffer}: no such folder; a server with `record` makes it."
        )
    os.nice(LOWEST_PRIORITY)
    torch.set_num_threads(1)
    ends = TargetEnds.read(given.target, given.device)
    given.out.mkdir(parents=True, exist_ok=True)
    # Recordings are private: none may be left behind when the command is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for leftover in given.buffer.glob(f"{SNAPSHOT}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    seen: set[str] = set()
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


def one_round(given: argparse.Namespace, ends: TargetEnds, buffer: Path) -> str:
    """Train on a recording; publish what is better. Returns what happened, in a sentence.

    Raises:
        TooFewSamples: the recording is too short.
    """
    done = published(given.out)
    base = checkpoint(given.out, done[-1]) if done else given.drafter
    config, weights = export.read_checkpoint(base)
    read = read_drafter(config, target_facts(read_config(given.target)))
    samples, heldout = split(*split_buffer(buffer, read))
    settings = replace(CONTINUED, steps=given.steps, evaluate_every=given.steps, threads=1)
    learner = DraftLearner(settings, read, block_of(config), ends, samples, heldout, weights)
    run = Run(learner, None)
    learner.evaluate(run.average)
    before = total(learner.acceptance).length
    for _ in run.run():
        pass
    after = total(learner.acceptance).length
    result = f"held-out tokens a step {before:.2f} -> {after:.2f}, {len(samples)} samples"
    if not is_better(before, after):
        return f"{result}; not published"
    return f"{result}; published as {publish(given.out, config, run.average.state_dict())}"


def is_better(before: float, after: float) -> bool:
    """Whether a drafter is published, by held-out tokens a step of its base and of itself."""
    return after >= before * (1 + MIN_GAIN)


def split(*parts: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """(samples to train on, held-out ones): the same in every round, whatever was deleted.

    Raises:
        TooFewSamples: none is held out.
    """
    train: list[Sample] = []
    heldout: list[Sample] = []
    for sample in itertools.chain(*parts):
        digest = zlib.crc32(repr(sample.tokens).encode())
        (train if digest % HELDOUT_EVERY else heldout).append(sample)
    if not heldout or not train:
        raise TooFewSamples(f"{len(train)} samples, of which none is held out. Record for longer.")
    return train, heldout


def publish(out: Path, config: dict[str, object], weights: dict[str, torch.Tensor]) -> Path:
    """Write the next checkpoint of a folder, whole or not at all; delete what is too old."""
    numbers = [int(path.name) for path in out.glob("[0-9]" * DIGITS)]
    path = checkpoint(out, max(numbers, default=0) + 1)
    with tempfile.TemporaryDirectory(dir=out, prefix="new-") as folder:
        export.write_checkpoint(Path(folder) / "model", config, weights)
        (Path(folder) / "model").rename(path)
    kept = published(out)[-KEPT:]
    for number in numbers:
        if number not in kept:
            shutil.rmtree(checkpoint(out, number), ignore_errors=True)
    return path


def wait_for_news(buffer: Path, seen: set[str]) -> set[str]:
    """Return the names of the recorded shards when there is one that was not seen before."""
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


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; exits with status 2 when it is wrong."""
    parser = argparse.ArgumentParser(prog="dllm recalibrate", description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--drafter", type=Path, required=True, help="that the server started with")
    parser.add_argument("--buffer", type=Path, required=True, help="the server's `record` folder")
    parser.add_argument("--out", type=Path, required=True, help="the server's `renew` folder")
    parser.add_argument("--steps", type=int, default=200, help="training steps of a round")
    parser.add_argument("--rounds", type=int, help="stop after so many; default: go on")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args(argv)
    if given.steps < 1 or (given.rounds is not None and given.rounds < 1):
        parser.error("--steps and --rounds are at least 1.")
    return given
