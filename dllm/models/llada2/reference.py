"""LLaDA2 in Hugging Face's Glm4Moe, which computes the same under other names.

Both have RMS norms of queries and keys, rotary embedding of the first part of each head, a sigmoid
router with a bias for the choice of experts, groups of experts, a shared expert, and dense first
layers. transformers has no class of LLaDA2's own.

Source of the released names: ``modeling_llada2_moe.py`` of inclusionAI/LLaDA2.0-mini, and
``bailing_moe.py`` of vLLM 0.32.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from dllm.models.llada2.shapes import DEFAULTS

Config = Mapping[str, object]

# Released names as patterns, and Glm4Moe's; the order does not matter.
RENAMES = (
    (r"model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.attention\.dense\.", ".self_attn.o_proj."),
    (r"\.attention\.query_layernorm\.", ".self_attn.q_norm."),
    (r"\.attention\.key_layernorm\.", ".self_attn.k_norm."),
    (r"\.mlp\.gate\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
)
FUSED = ".attention.query_key_value."
SEPARATE = (".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj.")
EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
# Fields of config.json that have another name in Glm4MoeConfig, and those it shares.
FIELDS = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "use_qk_norm",
    "first_k_dense_replace",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
    "tie_word_embeddings",
)


def glm4_config(config: Config) -> Glm4MoeConfig:
    """``config`` may leave fields out."""
    config = {**DEFAULTS, **config}
    fields = {name: config[name] for name in SHARED_FIELDS}
    fields |= {name: config[released] for released, name in FIELDS.items()}
    rope = {name: config[name] for name in ("rope_theta", "partial_rotary_factor")}
    return Glm4MoeConfig(
        **fields,
        rope_parameters={"rope_type": "default", **rope},
        attention_bias=config["use_qkv_bias"],
    )


def load_reference(path: Path) -> Glm4MoeForCausalLM:
    """In fp32, eager. Raises RuntimeError if a weight is missing, unknown or misshapen."""
    config = json.loads((path / "config.json").read_text())
    model = Glm4MoeForCausalLM(glm4_config(config))
    model.set_attn_implementation("eager")
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    model.load_state_dict(from_released(tensors, config))
    return model.eval()


def from_released(tensors: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Queries, keys and values are one matrix of ``(heads + 2 * key heads) * head_dim`` rows, in
    this order; experts are stacked, ``gate_up_proj`` ``[E, 2 * I, H]`` and ``down_proj`` ``[E, H,
    I]``.
    """
    renamed: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in tensors.items():
        if FUSED in name:
            parts = tensor.split(_qkv_rows(config))
            for part, separate in zip(parts, SEPARATE, strict=True):
                renamed[name.replace(FUSED, separate)] = part
        elif match := EXPERT.fullmatch(name):
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
        else:
            renamed[glm4_name(name)] = tensor
    for prefix, parts in experts.items():
        indices = sorted({index for index, _ in parts})
        pairs = [torch.cat((parts[i, "gate"], parts[i, "up"])) for i in indices]
        renamed[f"{prefix}gate_up_proj"] = torch.stack(pairs)
        renamed[f"{prefix}down_proj"] = torch.stack([parts[i, "down"] for i in indices])
    if config.get("tie_word_embeddings"):
        renamed["lm_head.weight"] = renamed["model.embed_tokens.weight"]
    return renamed


def _qkv_rows(config: Config) -> list[int]:
    heads, key_heads, size = (
        int(config[name])  # type: ignore[call-overload]
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    return [heads * size, key_heads * size, key_heads * size]


def glm4_name(name: str) -> str:
    """That of the queries for the fused matrix."""
    for pattern, theirs in ((re.escape(FUSED), SEPARATE[0]), *RENAMES):
        name = re.sub(pattern, theirs, name)
    return name
