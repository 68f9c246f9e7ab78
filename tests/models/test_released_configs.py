"""Fields of released config.json files: vLLM reads them, and the references have the known sizes.

The files are in ``released/``, each with its source. No weights are at hand.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import Glm4MoeForCausalLM
from vllm.transformers_utils.config import get_config

from dllm import register
from dllm.models import FAMILIES, Served
from dllm.models.llada2.reference import glm4_config
from dllm.models.unmasking.reference import backbone_of
from tests.support.llada2_names import to_released
from tests.support.released import released

LLADA2_MINI, LLADA2_FLASH, SDAR_1_7B = (
    released(name)["config"] for name in ("llada2.0-mini", "llada2.0-flash", "sdar-1.7b-chat")
)


@pytest.mark.parametrize(
    ("fields", "block_size", "mask_token_id"),
    [(LLADA2_MINI, 32, 156895), (LLADA2_FLASH, 32, 156895), (SDAR_1_7B, 4, 151669)],
    ids=["llada2-mini", "llada2-flash", "sdar-1.7b"],
)
def test_vllm_reads_it_without_remote_code(
    fields: dict, block_size: int, mask_token_id: int, tmp_path: Path
) -> None:
    register()
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = get_config(tmp_path, trust_remote_code=False)
    assert config.canvas_length == config.block_size == block_size
    assert config.mask_token_id == mask_token_id and config.architectures[0] in FAMILIES
    assert config.rope_parameters["rope_theta"] == fields["rope_theta"]
    # transformers keeps the first under another name, and drops the last.
    elsewhere = ("rope_theta", "rope_scaling", "torch_dtype", "auto_map", "use_cache")
    for name, value in fields.items():
        if name not in elsewhere:
            assert getattr(config, name) == value, name


def test_longer_contexts_are_read(tmp_path: Path) -> None:
    """By rotary scaling, as model cards of LLaDA2 advise."""
    register()
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(LLADA2_MINI | {"rope_scaling": scaling}))
    rope = get_config(tmp_path, trust_remote_code=False).rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("yarn", 4.0, 600000)


@pytest.mark.parametrize(
    ("fields", "billions"), [(LLADA2_MINI, 16.3), (LLADA2_FLASH, 102.9)], ids=["mini", "flash"]
)
def test_llada2_has_the_published_size(fields: dict, billions: float) -> None:
    """16B and 100B, the model cards say; every expert has weights of its own."""
    with torch.device("meta"):
        model = Glm4MoeForCausalLM(glm4_config(fields))
    released = to_released(model.state_dict(), fields)
    assert sum(t.numel() for t in released.values()) / 1e9 == pytest.approx(billions, abs=0.05)
    layer = "model.layers.1."
    heads = fields["num_attention_heads"] + 2 * fields["num_key_value_heads"]
    fused = released[f"{layer}attention.query_key_value.weight"]
    assert fused.shape == (heads * 128, fields["hidden_size"])
    assert released[f"{layer}mlp.experts.255.gate_proj.weight"].shape == (
        fields["moe_intermediate_size"],
        fields["hidden_size"],
    )
    assert released[f"{layer}mlp.gate.expert_bias"].shape == (256,)
    assert "model.layers.0.mlp.gate_proj.weight" in released


def test_sdar_has_the_published_size() -> None:
    """A Qwen3 of 1.7B, with a head of its own."""
    with torch.device("meta"):
        kind, config = backbone_of(SDAR_1_7B)
        model = kind(config)
    assert sum(t.numel() for t in model.state_dict().values()) / 1e9 == pytest.approx(
        2.03, abs=0.01
    )


@pytest.mark.parametrize(
    "served", [one for one in FAMILIES.values() if one.config], ids=lambda one: one.config
)
def test_a_config_of_another_architecture_is_of_no_diffusion_model(served: Served) -> None:
    """Its ``model_type`` may be one of ours; vLLM asks for ``canvas_length``."""
    made, lengths = served.config_class(), {"block_size": 4, "gen_length": 4}
    assert made(architectures=["Qwen3ForCausalLM"], **lengths).canvas_length is None
    assert made(architectures=[served.architecture], **lengths).canvas_length == 4
