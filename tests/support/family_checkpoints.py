"""Small random checkpoints of the families with masks, with the released names and fields."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dllm.models import FAMILIES as SERVED

TOKENIZER = Path(__file__).parents[2] / "checkpoints" / "tiny-ar"
VOCAB, MASK, EOS = 832, 831, 1
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

COMMON = {
    "mask_token_id": MASK,
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}
SDAR = COMMON | {
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
    "block_size": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "attention_bias": False,
    "use_sliding_window": False,
}
SDAR_MOE = SDAR | {
    "architectures": ["SDARMoeForCausalLM"],
    "model_type": "sdar_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# Three that say nothing of blocks. Tiny-A2D names a mask here because the vocabulary is small.
A2D_QWEN3 = {name: value for name, value in SDAR.items() if name != "block_size"} | {
    "architectures": ["A2DQwen3LMHeadModel"],
    "model_type": "a2d-qwen3",
    "tie_word_embeddings": True,
}
A2D_QWEN2 = {name: value for name, value in A2D_QWEN3.items() if name != "head_dim"} | {
    "architectures": ["A2DQwen2LMHeadModel"],
    "model_type": "a2d-qwen2",
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
STABLE_DIFFCODER = {name: value for name, value in A2D_QWEN2.items() if name != "mask_token_id"} | {
    "architectures": ["StableDiffcoderForCausalLM"],
    "model_type": "llama",
    "rope_theta": 500000.0,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
FAST_DLLM = A2D_QWEN2 | {
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "model_type": "Fast_dLLM_Qwen",
    "bd_size": 32,
    "layer_types": ["full_attention"] * 3,
}
NEMOTRON = COMMON | {
    "architectures": ["NemotronLabsDiffusionModel"],
    "model_type": "nemotron_labs_diffusion",
    "attention_bias": False,
    "block_size": 32,
    "dlm_paradigm": "bidirectional",
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 16.0,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32,  # 16384 in the released ones
        "rope_theta": 1000000.0,
        "rope_type": "yarn",
    },
    "sliding_window": None,
}
LLADA2 = COMMON | {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "block_size": 32,
    "moe_intermediate_size": 32,
    "rms_norm_eps": 1e-6,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5,
    "rope_theta": 600000,
    "rope_scaling": None,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "score_function": "sigmoid",
    "pad_token_id": EOS,
}
# Every token sees all others. The names are OLMo's.
LLADA = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "activation_type": "silu",
    "alibi": False,
    "block_type": "llama",
    "d_model": 64,
    "embedding_size": VOCAB,
    "eos_token_id": EOS,
    "gen_length": 64,
    "include_bias": False,
    "layer_norm_type": "rms",
    "mask_token_id": MASK,
    "max_sequence_length": 512,
    "mlp_hidden_size": 96,
    "n_heads": 2,
    "n_kv_heads": 2,
    "n_layers": 3,
    "rms_norm_eps": 1e-5,
    "rope": True,
    "rope_theta": 500000.0,
    "torch_dtype": "float32",
    "vocab_size": VOCAB,
    "weight_tying": False,
}
DREAM = {name: value for name, value in A2D_QWEN2.items() if name != "block_size"} | {
    "architectures": ["DreamModel"],
    "model_type": "Dream",
    "gen_length": 64,
    "tie_word_embeddings": False,
}
WHOLE_SEQUENCES = {"llada": LLADA, "dream": DREAM}
# Every architecture with masks and blocks.
FAMILIES = {
    "sdar": SDAR,
    "sdar-moe": SDAR_MOE,
    "a2d-qwen3": A2D_QWEN3,
    "a2d-qwen2": A2D_QWEN2,
    "stable-diffcoder": STABLE_DIFFCODER,
    "fast-dllm": FAST_DLLM,
    "llada2": LLADA2,
    "nemotron": NEMOTRON,
}


def write(path: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """Write a checkpoint with these fields of config.json and random weights."""
    path.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copy(TOKENIZER / name, path / name)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    generator = torch.Generator().manual_seed(seed)
    shapes = SERVED[config["architectures"][0]].tensor_shapes(config)
    tensors = {name: _tensor(name, shape, generator) for name, shape in shapes.items()}
    if config["model_type"].startswith("a2d"):  # the released ones hold the tied head twice
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors")
    return path


def _tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.1 * noise
    if name.endswith("expert_bias"):
        return 0.1 * noise
    # Sharp enough that the most likely token depends on the context.
    return noise * (1.0 if "embed" in name else 3.0 * shape[-1] ** -0.5)
