"""A damaged file in the compile cache is no reason to stop: vLLM compiles again."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from vllm.compilation import decorators
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

from dllm.patches.cpu import reload_compiled_backbone


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
