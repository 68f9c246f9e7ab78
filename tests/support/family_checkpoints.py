"""Small random checkpoints of SDAR and LLaDA2, with the names and fields of the released ones."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TOKENIZER = Path(__file__).parents[2] / "checkpoints" / "tiny-ar"
VOCAB, MASK, EOS = 832, 831, 1
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

SDAR = {
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
    "block_size": 4,
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
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
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
LLADA2 = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "block_size": 32,
    "mask_token_id": MASK,
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
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
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "torch_dtype": "float32",
}


def write(path: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """Write a checkpoint with these fields of config.json and random weights."""
    path.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copy(TOKENIZER / name, path / name)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    shapes = llada2_shapes(config) if config["model_type"] == "llada2_moe" else sdar_shapes(config)
    generator = torch.Generator().manual_seed(seed)
    save_file(
        {name: _tensor(name, shape, generator) for name, shape in shapes.items()},
        path / "model.safetensors",
    )
    return path


def _tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.1 * noise
    if name.endswith("expert_bias"):
        return 0.1 * noise
    # Sharp enough that the most likely token depends on the context.
    return noise * (1.0 if "embed" in name else 3.0 * shape[-1] ** -0.5)


def sdar_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of an SDAR: those of Qwen3 or Qwen3-MoE."""
    hidden, vocab, head = config["hidden_size"], config["vocab_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{norm}.weight"] = (hidden,)
        shapes |= {
            f"{layer}self_attn.q_proj.weight": (heads * head, hidden),
            f"{layer}self_attn.k_proj.weight": (kv_heads * head, hidden),
            f"{layer}self_attn.v_proj.weight": (kv_heads * head, hidden),
            f"{layer}self_attn.o_proj.weight": (hidden, heads * head),
            f"{layer}self_attn.q_norm.weight": (head,),
            f"{layer}self_attn.k_norm.weight": (head,),
        }
        if "num_experts" in config:
            shapes[f"{layer}mlp.gate.weight"] = (config["num_experts"], hidden)
            for expert in range(config["num_experts"]):
                inner = config["moe_intermediate_size"]
                shapes |= _mlp(f"{layer}mlp.experts.{expert}.", hidden, inner)
        else:
            shapes |= _mlp(f"{layer}mlp.", hidden, config["intermediate_size"])
    return shapes


def llada2_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a LLaDA2."""
    hidden, vocab, head = config["hidden_size"], config["vocab_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    inner = config["moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.word_embeddings.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{norm}.weight"] = (hidden,)
        shapes |= {
            f"{layer}attention.query_key_value.weight": ((heads + 2 * kv_heads) * head, hidden),
            f"{layer}attention.dense.weight": (hidden, heads * head),
            f"{layer}attention.query_layernorm.weight": (head,),
            f"{layer}attention.key_layernorm.weight": (head,),
        }
        if index < config["first_k_dense_replace"]:
            shapes |= _mlp(f"{layer}mlp.", hidden, config["intermediate_size"])
            continue
        shapes[f"{layer}mlp.gate.weight"] = (config["num_experts"], hidden)
        shapes[f"{layer}mlp.gate.expert_bias"] = (config["num_experts"],)
        shapes |= _mlp(f"{layer}mlp.shared_experts.", hidden, inner * config["num_shared_experts"])
        for expert in range(config["num_experts"]):
            shapes |= _mlp(f"{layer}mlp.experts.{expert}.", hidden, inner)
    return shapes


def _mlp(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }
