"""What serves in place of a kernel that is wrong on this GPU."""

from types import SimpleNamespace

import pytest
import torch
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from dllm.attention.inputs import Layer
from dllm.attention.masks import Mask
from dllm.drafter import pair
from dllm.drafter.checkpoint import LayerAttention
from dllm.engine import attention_layers, grammars, kernel_checks
from dllm.ops import dispatch
from dllm.ops.dispatch import CONTEXT_KV, GRAMMAR_PATHS, ROW_STATISTICS
from dllm.patches import configure, self_test

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FULL = Layer()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    """Runs the test on a server whose checks find one kernel wrong; the backend that serves."""

    def replace(wrong: str, layer: Layer = FULL, ranks=bool, **options: object):
        monkeypatch.setattr(self_test, "all_ranks_say_yes", ranks)
        monkeypatch.setattr(configure, "settings_of", lambda config: None)
        monkeypatch.setattr(
            self_test, "layers_to_check", lambda config: ({"full layers": layer}, {})
        )
        monkeypatch.setattr(
            attention_layers, "layers_of", lambda config, settings: {"full layers": layer}
        )
        monkeypatch.setattr(
            type(current_platform),
            "get_device_capability",
            classmethod(lambda cls, device_id=0: DeviceCapability(9, 0)),
        )
        found = {"attention, full layers": "", ROW_STATISTICS: "", GRAMMAR_PATHS: ""}
        found |= {wrong: "off by up to 0.3"}
        monkeypatch.setattr(kernel_checks, "checks", lambda trials: found.items())
        config = SimpleNamespace(
            additional_config={"dllm": options},
            attention_config=SimpleNamespace(
                backend=AttentionBackendEnum.CUSTOM, flash_attn_version=4
            ),
            cache_config=SimpleNamespace(cache_dtype="auto"),
        )
        self_test.replace_wrong_kernels(config, CPU)
        return config.attention_config

    wrong_kernels: set[str] = set()
    for module in (dispatch, grammars, self_test):
        monkeypatch.setattr(module, "WRONG_KERNELS", wrong_kernels)
    return replace


def test_vllms_kernel_takes_the_place_of_wrong_attention(run):
    assert run("attention, full layers").backend == AttentionBackendEnum.TRITON_ATTN
    assert not dispatch.WRONG_KERNELS


def test_a_kernel_that_is_wrong_on_another_rank_serves_on_none(run):
    answers: list[bool] = []

    def ranks(answer: bool) -> bool:
        answers.append(answer)
        return len(answers) != 1  # another rank says no to the first kernel, attention

    assert run(ROW_STATISTICS, ranks=ranks).backend == AttentionBackendEnum.TRITON_ATTN
    assert answers == [True, False, True], "each rank is asked about each kernel"


@pytest.mark.parametrize("mask", [Mask(block_length=4), Mask(64, is_anchored=True)], ids=str)
def test_where_it_cannot_nothing_wrong_is_served(run, mask):
    with pytest.raises(RuntimeError, match="self_test"):
        run("attention, full layers", Layer(mask=mask))


def test_our_kernel_takes_the_place_of_wrong_flash_attention(run):
    attention = run("FlashAttention 4, full layers")
    assert (attention.backend, attention.flash_attn_version) == (AttentionBackendEnum.CUSTOM, None)
    assert run(ROW_STATISTICS).flash_attn_version == 4


def test_the_definition_takes_the_place_of_wrong_statistics(run):
    assert not dispatch._runs_definition(CUDA, 262_144)
    assert run(ROW_STATISTICS).backend == AttentionBackendEnum.CUSTOM
    assert dispatch._runs_definition(CUDA, 262_144)


def test_the_host_takes_the_place_of_wrong_paths(run, monkeypatch):
    monkeypatch.setattr(grammars, "DeviceGrammars", lambda *given: "device")
    monkeypatch.setattr(grammars, "HostGrammars", lambda *given: "host")
    assert grammars.grammars_for(None, 4, CUDA) == "device"
    run(GRAMMAR_PATHS)
    assert grammars.grammars_for(None, 4, CUDA) == "host"


def test_it_can_be_turned_off(run):
    attention = run("attention, full layers", self_test=False)
    assert attention.backend == AttentionBackendEnum.CUSTOM


@pytest.fixture
def run_drafter(monkeypatch: pytest.MonkeyPatch):
    """Runs the test on a server with a drafter whose checks find one kernel wrong."""

    def replace(
        wrong: str, is_anchored: bool = False, **options: object
    ) -> AttentionBackendEnum | None:
        """The backend that serves, or None: vLLM chooses one."""
        drafter = SimpleNamespace(
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            hidden_size=128,
            is_neox_style=None,
            layers=(LayerAttention(), LayerAttention(Mask(64, is_anchored))),
        )
        monkeypatch.setattr(pair, "drafter_config", lambda config: drafter)
        asked: list[str] = []

        def checks(trials):
            asked.extend(trials)
            return [(name, "off by 1" if name == wrong else "") for name in trials]

        monkeypatch.setattr(kernel_checks, "checks", checks)
        speculative = SimpleNamespace(
            attention_backend=AttentionBackendEnum.CUSTOM,
            draft_model_config=SimpleNamespace(dtype=torch.bfloat16),
            kv_cache_dtype=None,
        )
        config = SimpleNamespace(
            additional_config={"dllm": {"drafter": options}},
            speculative_config=speculative,
            cache_config=SimpleNamespace(cache_dtype="fp8", block_size=16),
            parallel_config=SimpleNamespace(tensor_parallel_size=2),
        )
        monkeypatch.setattr(self_test, "all_ranks_say_yes", bool)
        self_test.replace_wrong_drafter_kernels(config, CPU)
        expected = ["attention, draft layers 0", "attention, draft layers 1"]
        assert asked == expected + [CONTEXT_KV] * bool(options)
        return speculative.attention_backend

    return replace


def test_vllm_takes_the_place_of_a_drafters_wrong_attention(run_drafter):
    assert run_drafter("nothing") == AttentionBackendEnum.CUSTOM
    assert run_drafter("attention, draft layers 0") is None
    with pytest.raises(RuntimeError, match="self_test"):
        run_drafter("attention, draft layers 1", is_anchored=True)


def test_vllms_operations_take_the_place_of_a_wrong_context(run_drafter, monkeypatch):
    wrong: set[str] = set()
    monkeypatch.setattr(self_test, "WRONG_KERNELS", wrong)
    assert run_drafter("nothing", fused_context=True) == AttentionBackendEnum.CUSTOM
    assert not wrong
    assert run_drafter(CONTEXT_KV, fused_context=True) == AttentionBackendEnum.CUSTOM
    assert wrong == {CONTEXT_KV}


def test_a_layer_is_checked_as_a_gpu_of_the_server_has_it():
    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="fp8", block_size=16),
        parallel_config=SimpleNamespace(tensor_parallel_size=4),
    )
    layer = attention_layers.on_one_gpu(Layer(num_heads=8, num_kv_heads=2), config)
    assert (layer.num_heads, layer.num_kv_heads, layer.page_size) == (2, 1, 16)
    assert (layer.cache_dtype, layer.dtype) == (torch.float8_e4m3fn, torch.float32)
    config.cache_config.cache_dtype, config.cache_config.block_size = "auto", None
    layer = attention_layers.on_one_gpu(Layer(), config)
    assert (layer.cache_dtype, layer.page_size) == (None, Layer.page_size)
