"""A server of tiny-sdar; files with ``pytest_plugins = ["tests.support.sdar_server"]`` share it."""

from collections.abc import Iterator

import pytest

from tests.support.server_harness import CHECKPOINTS, COMMON_FLAGS, Server, serving

FLAGS = (
    *COMMON_FLAGS,
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    "--enable-lora",
    f"--lora-modules=signed={CHECKPOINTS / 'tiny-sdar-signed'}",
)


@pytest.fixture(scope="session")
def sdar_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It serves tool calls and the adapter "signed", and takes others at run time."""
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    yield from serving(CHECKPOINTS / "tiny-sdar", tmp_path_factory, FLAGS, environment)
