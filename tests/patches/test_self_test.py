"""What serves in place of a kernel that is wrong on this GPU."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from dllm.engine import grammars, kernel_checks
from dllm.ops import dispatch
from dllm.ops.dispatch import GRAMMAR_PATHS, ROW_STATISTICS
from dllm.patches import self_test

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    """Runs the test on a server whose checks find one kernel wrong; the backend that serves."""

    def replace(wrong: str, block_size=1, window="symmetric", **options: object):
        settings = SimpleNamespace(block_size=block_size, canvas_window=window)
        monkeypatch.setattr(self_test, "settings_of", lambda config: settings)
        monkeypatch.setattr(kernel_checks, "layers_of", lambda config, settings: {"full layers": 0})
        found = {"attention, full layers": "", ROW_STATISTICS: "", GRAMMAR_PATHS: ""}
        found |= {wrong: "off by up to 0.3"}
        monkeypatch.setattr(kernel_checks, "checks", lambda layers, device: found.items())
        config = SimpleNamespace(
            additional_config={"dllm": options},
            attention_config=SimpleNamespace(backend=AttentionBackendEnum.CUSTOM),
        )
        self_test.replace_wrong_kernels(config, CPU)
        return config.attention_config.backend

    wrong_kernels: set[str] = set()
    for module in (dispatch, grammars, self_test):
        monkeypatch.setattr(module, "WRONG_KERNELS", wrong_kernels)
    return replace


def test_vllms_kernel_takes_the_place_of_wrong_attention(run):
    assert run("attention, full layers") == AttentionBackendEnum.TRITON_ATTN
    assert not dispatch.WRONG_KERNELS


@pytest.mark.parametrize("model", [{"block_size": 4}, {"window": "anchored"}])
def test_where_it_cannot_nothing_wrong_is_served(run, model):
    with pytest.raises(RuntimeError, match="self_test"):
        run("attention, full layers", **model)


def test_the_definition_takes_the_place_of_wrong_statistics(run):
    assert not dispatch._runs_definition(CUDA, 262_144)
    assert run(ROW_STATISTICS) == AttentionBackendEnum.CUSTOM
    assert dispatch._runs_definition(CUDA, 262_144)


def test_the_host_takes_the_place_of_wrong_paths(run, monkeypatch):
    monkeypatch.setattr(grammars, "DeviceGrammars", lambda *given: "device")
    monkeypatch.setattr(grammars, "HostGrammars", lambda *given: "host")
    assert grammars.grammars_for(None, 4, CUDA) == "device"
    run(GRAMMAR_PATHS)
    assert grammars.grammars_for(None, 4, CUDA) == "host"


def test_it_can_be_turned_off(run):
    assert run("attention, full layers", self_test=False) == AttentionBackendEnum.CUSTOM
