"""Writes small random checkpoints of drafters that vLLM has a speculator for, and their targets."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file
from transformers import Qwen2ForCausalLM

from tests.support.drafter_pairs import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    MASK,
    Draw,
    drafter_config,
    layer_weights,
    random_drafter,
    write_drafter,
    write_target,
)

VOCAB = 512


def write_dflash_2(path: Path) -> Path:
    """DFlash with convolutions in front of its layers and a selector of candidates."""
    draw, weights = Draw(), random_drafter()
    taps, group_size, rank, top_k = 3, 16, 8, 4
    for layer in range(2):
        for part in ("attention_conv", "mlp_conv"):
            name, rows = f"layers.{layer}.{part}.", 2 * taps * HIDDEN // group_size
            weights[name + "base_kernel"] = draw(2, taps, HIDDEN)
            weights[name + "kernel_projection.weight"] = draw(rows, HIDDEN)
    for side in ("predecessor", "successor"):
        weights[f"candidate_selector.{side}_codebook"] = draw(VOCAB, rank)
    weights["candidate_selector.hidden_projection.weight"] = draw(rank, HIDDEN)
    config = drafter_config(architectures=["DFlash2DraftModel"])
    config["dflash_config"] |= {
        "conv_kernel_size": taps,
        "conv_group_size": group_size,
        "selector_rank": rank,
        "selector_top_k": top_k,
    }
    return write_drafter(path, config, weights)


def write_lilicorr(path: Path) -> Path:
    """DFlash with a small network that says which candidates follow which."""
    draw, weights = Draw(), random_drafter()
    size, heads, top_k, factor, block = 32, 2, 4, 8, 8
    layers = {
        "token_proj": (size, HIDDEN),
        "pass_hidden_proj": (size, HIDDEN),
        "context_proj": (size, HIDDEN),
        "feature_mlp.up_proj": (size, 5),
        "feature_mlp.down_proj": (size, size),
        "layers.0.attn.out_proj": (size, size),
        "layers.0.mlp.up_proj": (2 * size, size),
        "layers.0.mlp.down_proj": (size, 2 * size),
        "factor_input_proj": (size, 3 * size),
        "out_head": (factor, size),
        "in_head": (factor, size),
        "anchor_out_head": (factor, size),
    }
    head = {
        "feature_norm.weight": 1 + draw(5),
        "feature_norm.bias": draw(5),
        "slot_embedding": draw(1, 1, block - 1, 1, size),
        "rank_embedding": draw(1, 1, 1, top_k, size),
        "relative_slot_bias": draw(heads, 2 * block - 1),
        "same_slot_bias": draw(heads),
        "layers.0.attn.in_proj_weight": draw(3 * size, size),
        "layers.0.attn.in_proj_bias": draw(3 * size),
    }
    for norm in ("layers.0.attn_norm", "layers.0.mlp_norm", "output_norm", "anchor_norm"):
        head[f"{norm}.weight"] = 1 + draw(size)
    for name, shape in layers.items():
        head[f"{name}.weight"], head[f"{name}.bias"] = draw(*shape), draw(shape[0])
    weights |= {f"lilicorr.{name}": tensor for name, tensor in head.items()}
    config = drafter_config(architectures=["LiLiCorrDraftModel"])
    config["dflash_config"] |= {
        "lilicorr_hidden_size": size,
        "lilicorr_num_layers": 1,
        "lilicorr_num_heads": heads,
        "lilicorr_mlp_ratio": 2.0,
        "lilicorr_candidate_topk": top_k,
        "lilicorr_factor_dim": factor,
        "lilicorr_vector_eps": 1e-6,
        "lilicorr_logit_scale": 4.0,
    }
    return write_drafter(path, config, weights)


def write_dspark(path: Path) -> Path:
    """DFlash's layers with a head that reads the draft in front."""
    draw, weights, rank = Draw(), random_drafter(), 8
    for name in ("markov_w1", "markov_w2"):
        weights[f"markov_head.{name}.weight"] = draw(VOCAB, rank)
    config = drafter_config(
        architectures=["Qwen3DSparkModel"],
        markov_rank=rank,
        enable_confidence_head=False,
        mask_token_id=MASK,
        target_layer_ids=[1, 3],
    )
    return write_drafter(path, config, weights)


def write_eagle_3(path: Path) -> Path:
    """A layer that reads three of the target's layers and its own output."""
    draw = Draw()
    weights = {
        "fc.weight": draw(HIDDEN, 3 * HIDDEN),
        "norm.weight": 1 + draw(HIDDEN),
        "lm_head.weight": draw(VOCAB, HIDDEN),
        "embed_tokens.weight": draw(VOCAB, HIDDEN),
        "midlayer.hidden_norm.weight": 1 + draw(HIDDEN),
    }
    layer = layer_weights(draw, "midlayer.", 2 * HIDDEN)
    weights |= {name: tensor for name, tensor in layer.items() if "_norm" not in name}
    config = drafter_config(
        architectures=["LlamaForCausalLMEagle3"],
        model_type="llama",
        draft_vocab_size=VOCAB,
        num_hidden_layers=1,
        target_hidden_size=HIDDEN,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
    )
    for key in ("dflash_config", "block_size", "num_target_layers"):
        del config[key]
    return write_drafter(path, config, weights)


def write_mimo(path: Path) -> Path:
    """A target with an MTP module: a Qwen2 whose config.json names MiMo's class."""
    draw, name, size = Draw(), "model.mtp_layers.0.", HEADS * HEAD_DIM
    write_target(path, layers=2, kind=Qwen2ForCausalLM, hidden_size=size)
    module = {name + "input_proj.weight": draw(size, 2 * size)}
    for norm in ("token", "hidden", "final", "input", "post_attention"):
        module[f"{name}{norm}_layernorm.weight"] = 1 + draw(size)
    file, settings = path / "model.safetensors", path / "config.json"
    weights = load_file(file)
    for key, tensor in weights.items():
        if ".layers.1." in key and "layernorm" not in key:
            module[key.replace("model.layers.1.", name)] = tensor.clone()
    save_file(weights | module, file, metadata={"format": "pt"})
    given = json.loads(settings.read_text())
    given |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    settings.write_text(json.dumps(given))
    return path


class Source(NamedTuple):
    """A draft source: vLLM's name of it, and what writes target and drafter.

    Attributes:
        write_drafter: None if the target drafts.
    """

    method: str
    write_drafter: Callable[[Path], Path] | None
    write_target: Callable[[Path], Path] = write_target
    more: dict[str, Any] = {}


PROBABILISTIC = {"draft_sample_method": "probabilistic"}
SOURCES = {
    "draft_model": Source("draft_model", None),
    "draft_model, sampled": Source("draft_model", None, more=PROBABILISTIC),
    "eagle3": Source("eagle3", write_eagle_3),
    "eagle3, sampled": Source("eagle3", write_eagle_3, more=PROBABILISTIC),
    "mtp": Source("mtp", None, write_mimo),
    "dflash 2": Source("dflash", write_dflash_2),
    "lilicorr": Source("dflash", write_lilicorr),
    "dspark": Source("dspark", write_dspark),
    "dspark, sampled": Source("dspark", write_dspark, more=PROBABILISTIC),
}
