"""A damaged file in the compile cache is no reason to stop: it is compiled again.

``tests/engine/test_warm_up.py`` starts an engine whose cache has a truncated library.
"""

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from vllm.compilation import decorators
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

from dllm.patches import compile_cache
from dllm.patches.compile_cache import (
    CHECKSUMS,
    delete_damaged_files,
    reload_compiled_backbone,
    write_checksums,
)
from tests.support.process import run_python

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("damage", [b"", b"\x80\x05", b"not a pickle at all" * 999], ids=repr)
def test_a_damaged_file_counts_as_none(
    checkpoint: Callable[..., Path], tmp_path, monkeypatch, damage
):
    load_general_plugins()
    reload_compiled_backbone()
    config = EngineArgs(str(checkpoint()), max_model_len=512).create_engine_config()
    model = SimpleNamespace(
        vllm_config=config,
        compilation_config=config.compilation_config,
        forward=test_a_damaged_file_counts_as_none,
        _is_encoder=False,
    )
    file = tmp_path / "model"
    file.write_bytes(damage)
    warning = Mock()
    monkeypatch.setattr(decorators.logger, "warning", warning)
    assert decorators._try_load_aot_compiled_fn(model, str(file)) is None
    (said, *_, reason), _ = warning.call_args
    assert "Compiling model again" in said
    assert re.search("corrupted|truncated|invalid load key", reason), reason


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache as a start leaves it, with checksums."""
    for name in ("rank_0_0/model", "inductor_cache/ab/kernel.so", "inductor_cache/ab/kernel.cpp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() * 99)
    write_checksums(config(tmp_path))
    return tmp_path


def config(cache: Path | None) -> SimpleNamespace:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(local_cache_dir=cache and str(cache)),
        parallel_config=SimpleNamespace(rank=0, data_parallel_index=0),
    )


def files(cache: Path) -> set[str]:
    return {str(file.relative_to(cache)) for file in cache.rglob("*") if file.is_file()}


def test_the_list_is_one_that_sha256sum_checks(cache):
    run = ["sha256sum", "--check", "--strict", f"rank_0_0/{CHECKSUMS}"]
    said = subprocess.run(run, cwd=cache, capture_output=True, text=True, check=True).stdout
    assert said.count(": OK") == 3


@pytest.mark.parametrize("damage", ["truncated", "emptied", "zeros", "one bit"])
@pytest.mark.parametrize("name", ["rank_0_0/model", "inductor_cache/ab/kernel.so"])
def test_a_damaged_file_is_deleted_and_no_other(cache, name, damage):
    before = files(cache)
    whole = (cache / name).read_bytes()
    changed = {
        "truncated": whole[:-1],
        "emptied": b"",
        "zeros": bytes(len(whole)),
        "one bit": whole[:7] + bytes([whole[7] ^ 1]) + whole[8:],
    }
    (cache / name).write_bytes(changed[damage])
    delete_damaged_files(cache / "rank_0_0")
    assert files(cache) == before - {name}
    delete_damaged_files(cache / "rank_0_0")  # a missing file is no damage
    assert files(cache) == before - {name}


def test_files_of_which_nothing_is_noted_stay(cache):
    (cache / "inductor_cache" / "later.so").write_bytes(b"compiled by another server")
    before = files(cache)
    delete_damaged_files(cache / "rank_0_0")
    delete_damaged_files(cache / "rank_1_0")  # this rank has no list
    assert files(cache) == before


@pytest.mark.parametrize("damage", [b"", b"\xff\x00", b"no list\n\n", b"0  rank_0_0/other\n"])
def test_a_damaged_list_accuses_nobody(cache, damage):
    (cache / "rank_0_0" / CHECKSUMS).write_bytes(damage)
    before = files(cache)
    delete_damaged_files(cache / "rank_0_0")
    assert files(cache) == before


def test_checksums_that_cannot_be_written_stop_nothing(tmp_path, monkeypatch):
    warning = Mock()
    monkeypatch.setattr(compile_cache.logger, "warning", warning)
    write_checksums(config(None))  # nothing is compiled
    warning.assert_not_called()
    write_checksums(config(tmp_path))  # the rank's folder is missing
    (said, reason), _ = warning.call_args
    assert "cannot be written" in said and isinstance(reason, FileNotFoundError)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for 64 kB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_is_named(checkpoint: Callable[..., Path], full_disk):
    ended = run_python(
        "-m",
        "tests.support.compiled_start_worker",
        str(checkpoint(layer_types=["full_attention"])),
        environment={"VLLM_CACHE_ROOT": str(full_disk), "TORCHDYNAMO_DISABLE": "0"},
        status=1,
    )
    assert "InductorError: OSError: [Errno 28] No space left on device" in ended.stderr
