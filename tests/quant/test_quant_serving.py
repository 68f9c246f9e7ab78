"""Quantized checkpoints: what a server refuses while it loads one, and who is not touched."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.kernels.linear.scaled_mm import cpu as int8_kernels
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.utils.torch_utils import set_default_torch_dtype

from dllm.models.gemma.weights import refuse_missing
from dllm.models.quantized import copy_k_proj_entries_to_v_proj
from dllm.patches.install import install
from dllm.quant import cpu_config
from dllm.quant.checks import checked
from dllm.quant.cpu_config import EmulatingConfig, Int8Linear
from dllm.quant.formats import round_trip
from dllm.quant.schemes import parse_plan
from tests.support.engine_harness import Engine
from tests.support.quant_checkpoints import OURS, quantization_config, write_quantized

install()

Q_PROJ = "model.decoder.layers.0.self_attn.q_proj"
EXPERT = "model.decoder.layers.3.experts.1.up_proj"
TOKENIZER = Path(__file__).parents[2] / "checkpoints/tiny-random"


# --- refusals while loading ----------------------------------------------------------------------


def stream(scheme: str, **changes: torch.Tensor | None) -> list[str]:
    """Pass one layer's tensors through ``checked``; ``None`` leaves one out."""
    parts: dict[str, torch.Tensor | None] = {
        "weight_packed": torch.zeros(64, 16, dtype=torch.uint8),
        "weight_scale": torch.ones(64, 2).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([100.0]),
        "input_global_scale": torch.tensor([336.0]),
    }
    if not scheme.startswith("nvfp4"):
        weight = torch.ones(64, 32).to(torch.float8_e4m3fn)
        parts = {"weight": weight, "weight_scale": torch.ones(64, 1)}
    parts |= changes
    tensors = [("lm_head.weight", torch.ones(2, 2)), ("model.decoder.norm.weight", torch.ones(2))]
    tensors += [(f"{Q_PROJ}.{part}", t) for part, t in parts.items() if t is not None]
    plan = parse_plan(quantization_config(scheme, OURS, {}))
    return [name for name, _ in checked(tensors, plan)]


@pytest.mark.parametrize(
    ("scheme", "changes", "message"),
    [
        ("fp8-dynamic", {"weight_scale": torch.tensor([[1.0]] * 63 + [[float("nan")]])}, "1 of 64"),
        ("nvfp4", {"input_global_scale": None}, "misses input_global_scale"),
        # One scale to 32 neighbours: vLLM's expert loader would spread it without a word.
        (
            "nvfp4",
            {"weight_scale": torch.ones(64, 1).half()},
            r"expected \[64, 2\]",
        ),
    ],
)
def test_a_layer_that_would_compute_nan_is_refused_by_name(scheme, changes, message):
    """A problem of each kind; ``test_check_quant.py`` has all of them."""
    with pytest.raises(ValueError, match=message) as refusal:
        stream(scheme, **changes)
    assert Q_PROJ in str(refusal.value) and "dllm check-quant" in str(refusal.value)


@pytest.mark.parametrize("suffix", ["weight_scale", "input_scale", "k_scale", "v_scale"])
def test_scales_are_checked_where_the_scheme_is_unknown(suffix):
    """On CUDA vLLM serves more schemes than we know."""
    with pytest.raises(ValueError, match=rf"x\.{suffix}: 2 of 2 scales are NaN"):
        list(checked([(f"x.{suffix}", torch.full((2,), float("nan")))], None))


@pytest.mark.parametrize("part", ["gate_proj.weight_scale", "down_proj.weight"])
def test_each_expert_is_missed(part):
    """vLLM takes the parameter of all experts for loaded when one of them was."""
    names = {
        f"model.layers.0.experts.{expert}.{projection}_proj.{suffix}"
        for expert in range(4)
        for projection in ("gate", "up", "down")
        for suffix in ("weight", "weight_scale")
    }
    parameters = [
        f"model.layers.0.experts.routed_experts.{stack}_{suffix}"
        for stack in ("w13", "w2")
        for suffix in ("weight", "weight_scale")
    ]
    refuse_missing(parameters, names, {}, num_experts=4)
    with pytest.raises(ValueError, match=rf"model\.decoder\.layers\.0\.experts\.2\.{part}\."):
        refuse_missing(parameters, names - {f"model.layers.0.experts.2.{part}"}, {}, num_experts=4)


def copy_to_encoder(tensors: dict[str, torch.Tensor]) -> None:
    """What a naive ``oneshot`` writes: a second copy, calibrated otherwise."""
    for name in [name for name in tensors if name.startswith(f"{Q_PROJ}.")]:
        twin = name.replace("model.decoder.", "model.encoder.language_model.")
        tensors[twin] = tensors[name].clone()
        if name.endswith("input_global_scale"):
            tensors[twin] *= 2


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda tensors: tensors[f"{EXPERT}.input_global_scale"].fill_(math.nan),
            r"NaN or infinite, in .*experts\.1\.up_proj\.input_global_scale\.",
        ),
        (
            lambda tensors: tensors.pop(f"{EXPERT}.weight_scale"),
            r"1\.up_proj is nvfp4 and misses",
        ),
        (copy_to_encoder, r"they differ: layers\.0\.self_attn\.q_proj\.input_global_scale\."),
    ],
    ids=["nan", "missing", "copies"],
)
def test_the_server_does_not_start(checkpoint: Callable[..., Path], tmp_path, edit, message):
    path = write_quantized(checkpoint(), tmp_path / "model", "nvfp4", edit=edit)
    with pytest.raises(ValueError, match=message):
        Engine(path, max_num_batched_tokens=256)


def test_an_unsupported_scheme_is_refused_before_anything_is_loaded(checkpoint, tmp_path):
    def to_int4(config: dict) -> None:
        config["config_groups"]["group_0"]["weights"] |= {"num_bits": 4, "type": "int"}

    path = write_quantized(checkpoint(), tmp_path / "model", "fp8-dynamic", edit_config=to_int4)
    with pytest.raises(ValueError, match=r"weights int4.*supported: fp8-dynamic"):
        EngineArgs(str(path)).create_engine_config()


# --- what computes -------------------------------------------------------------------------------


@pytest.mark.parametrize("has_vnni", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_int8_layers_take_activations_of_every_dtype(dtype, tolerance, has_vnni, monkeypatch):
    """With fp32, every CPU claims AMX, which vLLM then chooses and which does not take fp32."""
    if not has_vnni:
        monkeypatch.setattr(cpu_config, "adds_in_32_bits", lambda capabilities: False)
    elif not cpu_config.adds_in_32_bits(torch.cpu.get_capabilities()):
        pytest.skip("this CPU has no VNNI: what vLLM's kernel computes is wrong, and is not used")
    if dtype == torch.float32:
        monkeypatch.setattr(int8_kernels, "check_cpu_sgl_kernel", lambda *shape: True)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (32, 64), generator=generator, dtype=torch.int8)
    scale = torch.rand(32, 1, generator=generator) / 127
    inputs = torch.randn(5, 64, generator=generator).to(dtype)

    scheme = Int8Linear("channel", is_static_input_scheme=False, input_symmetric=True)
    scheme.kernel = init_int8_linear_kernel(True, False, True, "Int8Linear")
    layer = torch.nn.Module()
    layer.params_dtype, layer.logical_widths = dtype, [32]
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    layer.bias = layer.input_scale = layer.input_zero_point = layer.azp_adj = None
    with set_default_torch_dtype(dtype):
        scheme.process_weights_after_loading(layer)
        output = scheme.apply_weights(layer, inputs, None)
    expected = round_trip(inputs.float(), "int8") @ (weight * scale).T
    assert output.dtype == dtype
    assert (output - expected).norm() / expected.norm() < tolerance


# --- whom it concerns ----------------------------------------------------------------------------


def test_only_our_architecture_is_emulated(checkpoint, tmp_path):
    """A compressed-tensors Qwen3 in this process keeps vLLM's own configuration."""
    ours = write_quantized(checkpoint(), tmp_path / "ours", "fp8-dynamic")
    assert type(EngineArgs(str(ours)).create_engine_config().quant_config) is EmulatingConfig
    other = tmp_path / "qwen3"
    config = Qwen3Config(num_hidden_layers=1, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(other)
    written = json.loads((other / "config.json").read_text())
    written["quantization_config"] = quantization_config("fp8-dynamic", OURS, {})
    (other / "config.json").write_text(json.dumps(written))
    arguments = EngineArgs(str(other), tokenizer=str(TOKENIZER))
    assert type(arguments.create_engine_config().quant_config) is CompressedTensorsConfig


def test_full_layers_name_no_values_and_vllm_asks_for_them():
    """A checkpoint that spells out its layers cannot name the v_proj that full layers lack."""
    keys = "model.layers.1.self_attn.k_proj"
    config = SimpleNamespace(
        get_name=lambda: "compressed-tensors",
        ignore=["lm_head", "model.layers.0.self_attn.k_proj", keys],
        target_scheme_map={"Linear": 1, "model.layers.3.self_attn.k_proj": 2},
    )
    copy_k_proj_entries_to_v_proj(config, ["sliding_attention", "full_attention"] * 2)
    assert config.ignore[3:] == ["model.layers.1.self_attn.v_proj"]
    assert config.target_scheme_map["model.layers.3.self_attn.v_proj"] == 2
    assert len(config.target_scheme_map) == 3
