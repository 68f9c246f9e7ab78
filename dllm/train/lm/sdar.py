"""SDAR: masked blocks on Qwen3, in Hugging Face's own class.

SDAR is an autoregressive Qwen3 that was trained further (S. Cheng et al., 2025,
https://arxiv.org/abs/2510.06303). Its layers and weight names are Qwen3's, and a token is predicted
at its own position.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from dllm.tasks.tokenizer import TOKEN_ID, VOCAB_SIZE
from dllm.train.lm.block_decoding import DecodingRule
from dllm.train.lm.mask_diffusion import MASK, MaskDiffusion
from dllm.train.lm.objective import (
    EOS,
    checkpoint_config,
    save_transformers,
    transformers_weights,
)
from dllm.train.lm.settings import TrainSettings

THRESHOLD = 0.85  # of the dynamic rule in the released generate.py


class SDAR(MaskDiffusion):
    """The objective of masked blocks, on Qwen3."""

    def __init__(self, settings: TrainSettings, tokenizer: Tokenizer) -> None:
        super().__init__(settings, tokenizer)
        self.rule = DecodingRule(settings.model.canvas_length, THRESHOLD)

    def config(self) -> dict[str, object]:
        """config.json: Qwen3's, with the block length and MASK."""
        shape = self.settings.model
        return {
            "architectures": ["SDARForCausalLM"],
            "model_type": "sdar",
            "dtype": "bfloat16",
            "block_size": shape.canvas_length,
            "mask_token_id": MASK,
            "vocab_size": VOCAB_SIZE,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.hidden_size // 32,
            "num_key_value_heads": max(1, shape.hidden_size // 64),
            "head_dim": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": TOKEN_ID["<bos>"],
            "eos_token_id": EOS,
            "pad_token_id": TOKEN_ID["<pad>"],
        }

    def generation_config(self) -> dict[str, object]:
        """generation_config.json: the most probable tokens unless a request says otherwise."""
        return {
            "bos_token_id": TOKEN_ID["<bos>"],
            "pad_token_id": TOKEN_ID["<pad>"],
            "eos_token_id": [EOS, TOKEN_ID["<turn|>"]],
            "do_sample": False,
            "temperature": 0.0,
        }

    def build_model(self) -> Qwen3ForCausalLM:
        """A new model in fp32; all of it is trained."""
        torch.manual_seed(self.settings.seed)
        model = Qwen3ForCausalLM(Qwen3Config(**qwen3_config(self.config())))
        model.set_attn_implementation("eager")  # the fused kernel's bf16 backward is slower
        return model

    def load_start(self, path: Path) -> Mapping[str, Tensor]:
        """Weights of an SDAR, or of the autoregressive Qwen3 that it begins as."""
        config = checkpoint_config(path, "SDARForCausalLM", "Qwen3ForCausalLM")
        return transformers_weights(Qwen3ForCausalLM, qwen3_config(config), path)

    def save_weights(self, model: PreTrainedModel, path: Path) -> None:
        """Write them as Hugging Face does."""
        save_transformers(model, path)


def qwen3_config(config: Mapping[str, object]) -> dict[str, object]:
    """The fields of ``Qwen3Config`` for a config.json of SDAR."""
    return {**config, "model_type": "qwen3", "dtype": "float32"}
