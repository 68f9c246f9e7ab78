"""Starts ``dllm draft-worker`` processes for tests, as a user does."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.patience import HANG_S
from tests.support.process import ROOT, python_path
from tests.support.server_harness import ENVIRONMENT

FLAGS = (
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=512",
    "--max-num-seqs=16",
    "--kv-cache-memory-bytes=64M",
)


class WorkerProcess:
    """A process ``dllm draft-worker``; leaving a ``with`` block ends it.

    Args:
        listen: its address; by default a socket beside the log.

    Attributes:
        address: where it listens, once it is ready.
    """

    def __init__(self, model: Path, log: Path, *flags: str, listen: str | None = None) -> None:
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": python_path(ROOT)}
        del environment["VLLM_CPU_KVCACHE_SPACE"]  # it would overrule FLAGS
        command = [sys.executable, "-m", "dllm.cli", "draft-worker", "--model", str(model)]
        self.address = ""
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--listen", listen or f"unix://{log}.sock", *FLAGS, *flags],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_until_ready(self) -> "WorkerProcess":
        end = time.monotonic() + HANG_S
        while True:
            said = self.log.read_text(errors="replace")
            found = re.search(r"^dllm draft-worker: .* at (\S+)$", said, re.MULTILINE)
            if found:
                self.address = found[1]
                return self
            is_running = self.process.poll() is None and time.monotonic() < end
            assert is_running, f"no draft worker: {said[-4000:]}"
            time.sleep(0.1)

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
