"""Writes checkpoints of small targets (Qwen3) and drafters (DFlash, in both formats).

There are random ones, whose drafts are nearly all wrong. And there is a pair with chosen weights,
whose drafts are mostly right: the target often repeats its last token, and the drafter drafts that
token.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3ForCausalLM

TOKENIZER = Path(__file__).parents[2] / "checkpoints/tiny-random"
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 64, 4, 2, 32, 128
MASK = 500  # of the plain vocabulary of 512


def write_target(
    path: Path,
    vocab_size: int = 512,
    layers: int = 4,
    kind: type[PreTrainedModel] = Qwen3ForCausalLM,
    **changes: Any,
) -> Path:
    """Write a random model in fp32 whose best two next tokens never differ by rounding only."""
    sizes = dict(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=2,
        eos_token_id=1,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    kind(kind.config_class(**sizes | changes)).to(torch.float32).save_pretrained(path)
    if vocab_size == 512:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(TOKENIZER / name, path)
    return path


def give_byte_tokenizer(target: Path) -> Path:
    """Replace a target's tokenizer by one of bytes, as a model has that is none of ours."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: index for index, token in enumerate(["<end>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (target / name).unlink()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(target)
    return target


def drafter_config(**overrides: Any) -> dict[str, Any]:
    """config.json of a drafter of two layers in z-lab's format."""
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": 512,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "max_position_embeddings": 2048,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "block_size": 8,
        "num_target_layers": 4,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3]},
    }
    return config | overrides


def speculators_config(**overrides: Any) -> dict[str, Any]:
    """config.json of the same drafter in the speculators format."""
    layer = drafter_config()
    for key in ("architectures", "dflash_config", "block_size", "num_target_layers", "dtype"):
        del layer[key]
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
            "verifier": {"name_or_path": "target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": 512,
        "block_size": 8,
        "aux_hidden_state_layer_ids": [2, 4],
        "mask_token_id": MASK,
        "sliding_window_non_causal": False,
        "dtype": "float32",
    } | overrides


class Draw:
    """Random weights, the same in every run."""

    def __init__(self, seed: int = 5, scale: float = 0.2) -> None:
        self._generator, self._scale = torch.Generator().manual_seed(seed), scale

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator) * self._scale


def layer_weights(draw: Draw, prefix: str, inputs: int = HIDDEN) -> dict[str, torch.Tensor]:
    """Attention, whose input has ``inputs`` numbers a token, feed-forward and norms."""
    heads, kv_heads = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "self_attn.q_proj": (heads, inputs),
        "self_attn.k_proj": (kv_heads, inputs),
        "self_attn.v_proj": (kv_heads, inputs),
        "self_attn.o_proj": (HIDDEN, heads),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    norms = {
        "self_attn.q_norm": HEAD_DIM,
        "self_attn.k_norm": HEAD_DIM,
        "input_layernorm": HIDDEN,
        "post_attention_layernorm": HIDDEN,
    }
    weights = {f"{prefix}{name}.weight": draw(*shape) for name, shape in shapes.items()}
    return weights | {f"{prefix}{name}.weight": 1 + draw(size) for name, size in norms.items()}


def random_drafter(seed: int = 1, layers: int = 2, features: int = 2) -> dict[str, torch.Tensor]:
    """Random weights of a drafter, under the names of z-lab's format."""
    draw = Draw(seed, 0.3)
    weights = {"fc.weight": draw(HIDDEN, features * HIDDEN)}
    for name in ("hidden_norm", "norm"):
        weights[f"{name}.weight"] = 1 + draw(HIDDEN)
    for index in range(layers):
        weights |= layer_weights(draw, f"layers.{index}.")
    return weights


def write_drafter(
    path: Path, config: dict[str, Any] | None = None, weights: dict[str, torch.Tensor] | None = None
) -> Path:
    """Write a DFlash checkpoint; by default the random one in z-lab's format."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or drafter_config(), indent=1))
    save_file(weights or random_drafter(), path / "model.safetensors", metadata={"format": "pt"})
    return path


# --- a pair made by hand -------------------------------------------------------------------------

SMALL_VOCAB, SMALL_MASK = 16, 15
IS_TOKEN, IS_MASK = 62, 63  # dimensions of the embedding that mark a real token, and a mask


def write_repeating_target(path: Path, noise: float = 0.008) -> Path:
    """Write a target with a vocabulary of 16 tokens that mostly repeats its last token.

    noise: the weight of its layers, which let the other choices depend on the whole context.
    """
    write_target(path, vocab_size=SMALL_VOCAB)
    model = Qwen3ForCausalLM.from_pretrained(path)
    embedding = torch.zeros(SMALL_VOCAB, HIDDEN)
    embedding[:, :SMALL_VOCAB] = torch.eye(SMALL_VOCAB)
    embedding[:, IS_TOKEN] = 1.0
    embedding[SMALL_MASK] = 0.0
    embedding[SMALL_MASK, IS_MASK] = 1.0
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= noise
            layer.mlp.down_proj.weight *= noise
        model.model.embed_tokens.weight.copy_(10 * embedding)
        model.lm_head.weight.mul_(0.2)
        model.lm_head.weight[:, :SMALL_VOCAB] += 0.6 * torch.eye(SMALL_VOCAB)
        model.lm_head.weight[SMALL_MASK] = 0.0
    model.save_pretrained(path)
    return path


def repeating_config() -> dict[str, Any]:
    dflash = {"mask_token_id": SMALL_MASK, "target_layer_ids": [1, 3]}
    return drafter_config(vocab_size=SMALL_VOCAB, num_hidden_layers=1, dflash_config=dflash)


def repeating_drafter() -> dict[str, torch.Tensor]:
    """Weights of a drafter whose mask tokens attend to the last token alone, and copy it."""
    weights = random_drafter(layers=1)
    for name, tensor in weights.items():
        tensor.fill_(1.0 if "norm" in name else 0.0)
    attention = "layers.0.self_attn."
    weights[f"{attention}q_norm.weight"].fill_(4.0)
    slow = HEAD_DIM // 2 - 1  # the dimension that RoPE rotates least
    for head in range(HEADS):
        weights[f"{attention}q_proj.weight"][head * HEAD_DIM + slow, IS_MASK] = 1.0
    for head in range(KV_HEADS):
        row = weights[f"{attention}k_proj.weight"][head * HEAD_DIM + slow]
        row[IS_TOKEN], row[IS_MASK] = 1.0, -1.0
    weights[f"{attention}v_proj.weight"] += torch.eye(HIDDEN)
    # Of each pair of query heads that share keys and values, the first one.
    for half, head in enumerate((0, HEADS // 2)):
        rows = slice(half * HEAD_DIM, (half + 1) * HEAD_DIM)
        columns = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        weights[f"{attention}o_proj.weight"][rows, columns] = 10 * torch.eye(HEAD_DIM)
    return weights


def write_repeating_drafter(path: Path) -> Path:
    return write_drafter(path, repeating_config(), repeating_drafter())
