"""NVFP4 checkpoints of NVIDIA Model Optimizer: what a CUDA server loads, and what it refuses."""

import copy
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dllm.quant.checks import checked
from dllm.quant.schemes import parse_model_optimizer as plan_of
from tests.support.cuda_start import rehearse
from tests.support.quant_checkpoints import EXPERTS_ALONE, Tensors, write_modelopt

EXPERT = "model.decoder.layers.0.experts.1.up_proj"
Q_PROJ = "model.decoder.layers.0.self_attn.q_proj"
CONDITION = "model.decoder.self_conditioning.up_proj.weight"
NAN, ZERO = torch.tensor(float("nan")), torch.tensor(0.0)
FP8_CACHE = {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}
WEIGHTS_ALONE = {
    "config_groups": {
        "group_0": {"input_activations": None, "weights": {"num_bits": 4, "type": "float"}}
    }
}


def without_input_scales(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith("input_scale")]:
        del tensors[name]


def with_cache_scales(tensors: Tensors) -> None:
    for layer in range(4):
        for letter in "kv":
            stem = f"model.decoder.layers.{layer}.self_attn.{letter}_proj.{letter}_scale"
            tensors[stem] = torch.tensor(0.5)


def exclude_by_name(layer: int) -> list[str]:
    """All of a full-attention layer, which has no v_proj: its keys are its values."""
    projections = ("q_proj", "k_proj", "o_proj")
    return [f"model.decoder.layers.{layer}.self_attn.{name}" for name in projections]


# name: arguments of write_modelopt
LOADED: dict[str, dict[str, Any]] = {
    "experts": {},
    "all layers": {"excluded": ("lm_head", "*router*", "*self_conditioning*")},
    "full attention by name": {
        "excluded": (*[e for e in EXPERTS_ALONE if e != "*self_attn*"], *exclude_by_name(1))
    },
    "weights alone": {"edit": without_input_scales} | WEIGHTS_ALONE,
    "fp8 cache": {"edit": with_cache_scales} | FP8_CACHE,
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nan": (
        {"edit": lambda t: t.update({f"{EXPERT}.weight_scale_2": NAN})},
        f"NaN or infinite, in {EXPERT}.weight_scale_2.",
    ),
    "no scale of the weight": (
        {"edit": lambda t: t.pop(f"{EXPERT}.weight_scale_2")},
        f"{EXPERT} is nvfp4 and misses weight_scale_2",
    ),
    "no scale of inputs": (
        {"edit": without_input_scales},
        "is nvfp4 and misses input_scale",
    ),
    "one scale to 32 weights": (
        {"edit": lambda t: t.update({f"{EXPERT}.weight_scale": t[f"{EXPERT}.weight_scale"][:, ::2]
                                     .contiguous()})},
        f"{EXPERT}.weight_scale has shape",
    ),
    "groups of 32": ({"group_size": 32}, "group_size = 32; NVFP4 has a scale for every 16"),
    "self-conditioning": (
        {"edit": lambda t: t.update({CONDITION: torch.zeros(128, 64, dtype=torch.uint8)})},
        f"{CONDITION} holds packed codes, and this layer is served unquantized",
    ),
    "zero in the cache": (
        {"edit": lambda t: t.update({"model.decoder.layers.0.self_attn.k_proj.k_scale": ZERO})},
        "k_proj.k_scale: 1 of 1 scales are zero",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A checkpoint for each case."""
    folder = tmp_path_factory.mktemp("modelopt")
    cases = LOADED | {name: arguments for name, (arguments, _) in REFUSED.items()}
    source = checkpoint(dtype="bfloat16")
    return {
        name: write_modelopt(source, folder / name, **copy.copy(arguments))
        for name, arguments in cases.items()
    }


@pytest.fixture(scope="module")
def starts(models: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """What each does on an H200."""
    cases = [{"model": str(model), "loads": True} for model in models.values()]
    return dict(zip(models, rehearse("h200", cases), strict=True))


@pytest.mark.parametrize("name", LOADED)
def test_a_whole_checkpoint_is_loaded(starts, models, name):
    """Every code and scale is where vLLM's experts expect it."""
    start = starts[name]
    assert start["quantization"] == "modelopt_fp4"
    tensors = load_file(models[name] / "model.safetensors")
    stem = "model.decoder.layers.0.experts"
    for part in ("weight", "weight_scale"):
        experts = [
            torch.cat([tensors[f"{stem}.{i}.{half}_proj.{part}"] for half in ("gate", "up")])
            for i in range(4)
        ]
        whole = torch.stack([expert.view(torch.uint8) for expert in experts])
        assert start["experts"][f"w13_{part}"] == zlib.crc32(whole.numpy().data)


def test_the_checkpoint_chooses_the_dtype_of_the_kv_cache(starts):
    assert starts["fp8 cache"]["cache_dtype"] == "fp8_e4m3"
    assert starts["experts"]["cache_dtype"] == "auto"


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_compute_nan_is_refused(starts, name):
    assert REFUSED[name][1] in starts[name]["refusal"]


# --- which layers are quantized -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("excluded", "quantized"),
    [
        (EXPERTS_ALONE, {EXPERT}),
        (("lm_head",), {EXPERT, Q_PROJ}),
        (("layers.0.self_attn.q_proj",), {EXPERT}),  # part of a name
        (("model.layers.0.self_attn*",), {EXPERT}),  # vLLM's name of the module
        (("model.encoder.language_model.layers.0.experts*",), {Q_PROJ}),
        (("model.layers.0*",), set()),
        (("model.layers.1.*",), {EXPERT, Q_PROJ}),
    ],
    ids=lambda names: str(sorted(names)),
)
def test_patterns_name_what_is_not_quantized(excluded, quantized):
    plan = plan_of("NVFP4", 16, excluded)
    assert {name for name in (EXPERT, Q_PROJ) if plan.scheme_of(name)} == quantized
    assert plan.scheme_of("lm_head") is None


def test_weights_alone_have_no_scale_of_inputs():
    tensors = {
        f"{EXPERT}.weight": torch.zeros(32, 64, dtype=torch.uint8),
        f"{EXPERT}.weight_scale": torch.ones(32, 8).to(torch.float8_e4m3fn),
        f"{EXPERT}.weight_scale_2": torch.tensor(0.01),
    }
    assert dict(checked(tensors.items(), plan_of("W4A16_NVFP4", 16, ()))).keys() == tensors.keys()
    with pytest.raises(ValueError, match="misses input_scale"):
        list(checked(tensors.items(), plan_of("NVFP4", 16, ())))
