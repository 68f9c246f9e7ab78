"""The plain loops of LLaDA-8B and Dream (``bench.loops``), with all that a request may choose.

Weights are loaded by names that are written here, not by those of the code under test.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from bench.loops import WholeSequences, share_of
from dllm.models.unmasking.reference import additive, shifted
from dllm.ops import noise

GEN_LENGTH = 64


class Setting(NamedTuple):
    steps: int  # of the whole answer, as in the references
    block_length: int
    alg: str = "maskgit_plus"
    alg_temp: float = 0.0

    def of_request(self) -> dict[str, Any]:
        num_blocks = GEN_LENGTH // self.block_length
        return {
            "diffusion_max_steps": self.steps // num_blocks,
            "diffusion_block_length": self.block_length,
            "diffusion_strategy": OURS.get(self.alg, self.alg),
            "diffusion_alg_temp": self.alg_temp,
        }


SEED = 7
OURS = {"maskgit_plus": "low_confidence_static", "entropy": "least_entropy"}
# The first one is what a request gets that says nothing.
SETTINGS = {
    "llada": {
        "default": Setting(64, 32),
        "fast": Setting(16, 16),
        "whole": Setting(24, 64),
        "random": Setting(16, 16, "random"),
        "margin": Setting(32, 32, "topk_margin"),
        "drawn": Setting(32, 32, "maskgit_plus", 0.2),
    },
    "dream": {
        "default": Setting(64, 64, "entropy"),
        "fast": Setting(24, 64, "entropy"),
        "maskgit_plus": Setting(32, 64),
        "margin": Setting(32, 64, "topk_margin"),
        "origin": Setting(32, 64, "origin"),
        "drawn": Setting(32, 64, "entropy", 0.3),
    },
}
# Released names of LLaDA -> Llama's.
OF_BLOCK = {
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
OF_MODEL = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}


def llama_name(name: str) -> str:
    parts = name.removeprefix("model.transformer.").removesuffix(".weight").split(".")
    if parts[0] == "blocks":
        return f"model.layers.{parts[1]}.{OF_BLOCK[parts[2]]}.weight"
    return f"{OF_MODEL[parts[0]]}.weight"


def llama(path: Path) -> PreTrainedModel:
    given = json.loads((path / "config.json").read_text())
    config = LlamaConfig(
        vocab_size=given["vocab_size"],
        hidden_size=given["d_model"],
        intermediate_size=given["mlp_hidden_size"],
        num_hidden_layers=given["n_layers"],
        num_attention_heads=given["n_heads"],
        num_key_value_heads=given["n_kv_heads"],
        rms_norm_eps=given["rms_norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": given["rope_theta"]},
        tie_word_embeddings=given["weight_tying"],
        attn_implementation="eager",
    )
    weights = load_file(path / "model.safetensors")
    named = {llama_name(name): each for name, each in weights.items()}
    return loaded(LlamaForCausalLM(config), named)


def qwen2(path: Path) -> PreTrainedModel:
    fields = json.loads((path / "config.json").read_text())
    fields |= {"model_type": "qwen2", "architectures": None, "attn_implementation": "eager"}
    return loaded(Qwen2ForCausalLM(Qwen2Config(**fields)), load_file(path / "model.safetensors"))


def loaded(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    """In fp32; a head that is not there is the matrix of embeddings."""
    missing, unknown = model.float().eval().load_state_dict(weights, strict=False)
    assert not unknown and missing == ["lm_head.weight"] * model.config.tie_word_embeddings
    return model


class Loop(WholeSequences):
    """One prompt, by any setting."""

    def __init__(self, name: str, path: Path, length: int = GEN_LENGTH) -> None:
        is_dream = name == "dream"
        model = qwen2(path) if is_dream else llama(path)
        mask = json.loads((path / "config.json").read_text())["mask_token_id"]
        super().__init__(model, mask, length, is_dream)
        self.settings = SETTINGS[name]

    def answer(
        self, prompt: list[int], setting: Setting, is_cached: bool = False
    ) -> tuple[list[int], int]:
        """The tokens of the answer, and the number of passes.

        ``is_cached``: in front of a block keys, values and logits are those of its first pass.
        """
        self.setting, self.is_cached = setting, is_cached
        steps = setting.steps * setting.block_length // self.length
        found = self.generate([prompt], setting.block_length, steps)
        return found.answers[0], found.num_steps

    @torch.no_grad()
    def rows(self, ids: list[int]) -> torch.Tensor:
        """``[L, V]``, each row for its own token; every token sees all of them."""
        seen = torch.ones(1, len(ids), len(ids), dtype=torch.bool)
        return super().logits(torch.tensor([ids]), seen, 0, 0)[0]

    def logits(
        self, canvas: torch.Tensor, seen: torch.Tensor, start: int, step: int
    ) -> torch.Tensor:
        if not self.is_cached:
            return super().logits(canvas, seen, start, step)
        first = start if step else 0
        if step == 0:
            self.cache = DynamicCache(config=self.model.config)
        self.cache.crop(first)
        found = self.model(
            canvas[:, first:], attention_mask=additive(seen[:, first:]), past_key_values=self.cache
        ).logits
        found[..., self.mask] = -torch.inf
        if step == 0:
            self.first_pass = found
        whole = torch.cat([self.first_pass[:, :first], found], 1)
        return shifted(whole) if self.is_dream else whole

    def surest(
        self, p: torch.Tensor, is_mask: torch.Tensor, start: int, step: int, steps: int
    ) -> tuple[torch.Tensor, int]:
        alg, alg_temp = self.setting[2:]
        sure, count = super().surest(p, is_mask, start, step, steps)
        bits, top = bits_of(start, step, p.shape[1]), p.topk(2).values
        if alg != "entropy":
            sure = top[..., 0] - (top[..., 1] if alg == "topk_margin" else 0)
        if alg_temp:
            sure = sure / alg_temp + noise.gumbel_from_bits(bits)
        if alg == "random":
            sure = -bits[None].double()
        if alg == "origin":
            chosen = is_mask & (bits < share_of(step, steps) * 2**32)
            sure, count = chosen.float(), int(chosen.sum())
        return sure, count


def bits_of(start: int, step: int, size: int) -> torch.Tensor:
    """Random words of a step, for each token of a block that begins at ``start``."""
    seed, at, done = (torch.tensor([one]) for one in (SEED, start, step))
    return noise.row_keys(seed, at, done, GEN_LENGTH, noise.STREAM_ORDER)[0, :size, 0]
