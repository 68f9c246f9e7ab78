"""Plugin of pytest: vLLM's tests share the servers that they start, if the options agree."""

import os
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest


class SharedServers:
    """Replaces the start and the end of vLLM's ``RemoteVLLMServer``.

    Args:
        names: of the model, by which each server can be asked.
        flags: of every server.
        dropped: options of the tests that are left out, with the number of their values.
        log: what servers print.
    """

    def __init__(
        self, names: list[str], flags: list[str], dropped: dict[str, int], log: Path
    ) -> None:
        self.names = names
        self.flags = flags
        self.dropped = dropped
        self.log = log
        self.running: dict[str, Any] = {}

    def pytest_collection(self) -> None:
        from tests.utils import RemoteVLLMServer

        self.start = RemoteVLLMServer.__init__
        self.stop = RemoteVLLMServer.__exit__
        shared = self

        def started(server: Any, model: str, args: list[str], **options: Any) -> None:
            server.__dict__ = shared.get(server, model, args, **options).__dict__

        RemoteVLLMServer.__init__ = started
        RemoteVLLMServer.__exit__ = lambda *exception: None

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Models run in other processes: nothing has to be freed in this one."""
        item.add_marker("skip_global_cleanup")

    def get(self, new: Any, model: str, args: list[str], **options: Any) -> Any:
        """The server that has these options; if there is none, ``new`` is started with them."""
        args = [*without(args, self.dropped), *self.flags]
        given = options.pop("env_dict", None) or {}
        environment = {key: value for key, value in given.items() if os.environ.get(key) != value}
        key = repr((type(new), args, environment, options))
        if key not in self.running:
            # The tests ask for processes that import everything again, because of CUDA.
            environment.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
            names = [model, *(name for name in self.names if name != model)]
            args = [*args, "--served-model-name", *names]
            options.setdefault("max_wait_seconds", 1500)  # a busy machine takes long
            with self.log.open("a") as log, redirect_stdout(log), redirect_stderr(log):
                self.start(new, model, args, env_dict=environment, **options)
            self.running[key] = new
        server = self.running[key]
        assert server._poll() is None, f"an earlier test ended the server of {self.log}"
        return server

    def pytest_sessionfinish(self) -> None:
        for server in self.running.values():
            self.stop(server, None, None, None)


def without(args: list[str], dropped: dict[str, int]) -> list[str]:
    """A command line without some options."""
    kept = []
    rest = iter(args)
    for arg in rest:
        name, equals, _ = arg.partition("=")
        if name not in dropped:
            kept.append(arg)
        elif not equals:
            for _ in range(dropped[name]):
                next(rest)
    return kept
