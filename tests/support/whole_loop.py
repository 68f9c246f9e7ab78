"""The plain loops of LLaDA-8B and Dream, on transformers' models, in fp32.

After the papers and ``generate`` of ML-GSAI/LLaDA, ``diffusion_generate`` of Dream: the answer's
masks all stand behind the prompt from the start, and every token sees every other one. LLaDA fills
in one block after the other. Dream's row i is for token i + 1, and how many tokens a step decides
depends on how many masks are left.
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

from dllm.models.unmasking.reference import additive
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


def bits_of(start: int, step: int, length: int) -> torch.Tensor:
    """Random words of a step, for each token of a sequence whose block begins at ``start``."""
    seed, at, done = (torch.tensor([one]) for one in (SEED, start, step))
    words = noise.row_keys(seed, at, done, GEN_LENGTH, noise.STREAM_ORDER)[0, :, 0]
    return torch.cat([torch.zeros(start, dtype=words.dtype), words])[:length]


class Loop:
    def __init__(self, name: str, path: Path) -> None:
        self.is_dream = name == "dream"
        self.model = qwen2(path) if self.is_dream else llama(path)
        self.mask = json.loads((path / "config.json").read_text())["mask_token_id"]
        self.settings = SETTINGS[name]

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """``[L, V]``, each row for its own token; every token sees all of them."""
        return self._own(self._logits(ids))

    def _logits(self, ids: list[int], cache: DynamicCache | None = None) -> torch.Tensor:
        num_keys = len(ids) + (cache.get_seq_length() if cache is not None else 0)
        all_of_them = additive(torch.ones(1, len(ids), num_keys, dtype=torch.bool))
        logits: torch.Tensor = self.model(
            torch.tensor([ids]), attention_mask=all_of_them, past_key_values=cache
        ).logits
        logits[..., self.mask] = -torch.inf
        return logits[0]

    def _own(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.cat([logits[:1], logits[:-1]]) if self.is_dream else logits

    @torch.no_grad()
    def cached_logits(self, ids: list[int], start: int, is_first: bool) -> torch.Tensor:
        """``[L, V]``. In front of ``start`` keys, values and logits are those of the first pass."""
        if is_first:
            self.cache = DynamicCache(config=self.model.config)
            self.first = self._logits(ids, self.cache)
            return self._own(self.first)
        self.cache.crop(start)
        return self._own(torch.cat([self.first[:start], self._logits(ids[start:], self.cache)]))

    def answer(
        self, prompt: list[int], setting: Setting, is_cached: bool = False
    ) -> tuple[list[int], int]:
        """The tokens of the answer, and the number of passes."""
        ids, passes = prompt + [self.mask] * GEN_LENGTH, 0
        steps = setting.steps // (GEN_LENGTH // setting.block_length)
        for start in range(len(prompt), len(ids), setting.block_length):
            block = range(start, start + setting.block_length)
            for step in range(steps):
                masks = [at for at in block if ids[at] == self.mask]
                count = len(block) // steps + (step < len(block) % steps)
                bits = bits_of(start, step, len(ids))
                if self.is_dream:
                    part = self.part_transferred(step, steps)
                    count = int(len(masks) * part)
                if setting.alg == "origin":
                    masks = [at for at in masks if bits[at] < part * 2**32]
                    count = len(masks)
                logits = self.cached_logits(ids, start, step == 0) if is_cached else None
                self.reveal(ids, masks, count, setting, logits, bits)
                passes += 1
        return ids[len(prompt) :], passes

    @staticmethod
    def part_transferred(step: int, steps: int) -> torch.Tensor:
        times = torch.linspace(1, 1e-3, steps + 1)
        return torch.ones(()) if step == steps - 1 else 1 - times[step + 1] / times[step]

    def reveal(
        self,
        ids: list[int],
        masks: list[int],
        count: int,
        setting: Setting,
        logits: torch.Tensor | None = None,
        bits: torch.Tensor | None = None,
    ) -> None:
        p = (self.logits(ids) if logits is None else logits).softmax(-1)
        top = p.topk(2).values
        score = top[:, 0]
        if setting.alg == "entropy":
            score = (p * p.clamp(min=1e-30).log()).sum(-1)
        if setting.alg == "topk_margin":
            score = top[:, 0] - top[:, 1]
        if setting.alg_temp:
            score = score / setting.alg_temp + noise.gumbel_from_bits(bits)
        if setting.alg == "random":
            score = -bits.double()
        for at in sorted(masks, key=lambda at: -float(score[at]))[:count]:
            ids[at] = int(p[at].argmax())
