"""Fields of released config.json files: vLLM reads them, and the references have the known sizes.

The values are those of https://huggingface.co/inclusionAI/LLaDA2.0-mini and LLaDA2.0-flash (as in
configs/model_configs of github.com/inclusionAI/dFactory) and of
https://huggingface.co/JetLM/SDAR-1.7B-Chat (as in models/ of github.com/hxhcreate/DARE). No weights
are at hand.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Glm4MoeForCausalLM, Qwen3ForCausalLM
from vllm.transformers_utils.config import get_config

from dllm import register
from dllm.models.llada2.reference import glm4_config, to_released
from dllm.models.sdar.reference import qwen3_config

LLADA2_MINI: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "auto_map": {"AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig"},
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "max_position_embeddings": 16384,
    "max_window_layers": 28,
    "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True,
    "n_group": 8,
    "norm_head": False,
    "norm_softmax": False,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 20,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "output_dropout": 0.0,
    "output_router_logits": False,
    "pad_token_id": 156892,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 600000,
    "rotary_dim": 64,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_cache": False,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "use_sliding_window": False,
    "using_split_qkv_in_self_attention": False,
    "vocab_size": 157184,
}
LLADA2_FLASH = LLADA2_MINI | {
    "hidden_size": 4096,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
}
SDAR_1_7B: dict[str, Any] = {
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
    "auto_map": {"AutoConfig": "configuration_sdar.SDARConfig"},
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 4,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "fuse_cross_entropy": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "mask_token_id": 151669,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


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
    assert (config.canvas_length, config.mask_token_id) == (block_size, mask_token_id)
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
        model = Qwen3ForCausalLM(qwen3_config(SDAR_1_7B))
    assert sum(t.numel() for t in model.state_dict().values()) / 1e9 == pytest.approx(
        2.03, abs=0.01
    )
