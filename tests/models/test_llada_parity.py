"""LLaDA-8B, token for token, against a plain loop on transformers' Llama, in fp32.

The loop is written after arXiv 2502.09992 and ``generate`` of ML-GSAI/LLaDA: the answer's masks all
stand behind the prompt from the start; one block of them after the other is filled in, the surest
tokens first; every token sees every other one.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import SamplingParams

from dllm.models.unmasking.reference import additive
from tests.support.engine_harness import Engine, get_engine
from tests.support.family_checkpoints import EOS, LLADA, MASK, write

GEN_LENGTH = 64
LENGTHS = [1, 8, 31, 33, 75]


class Setting(NamedTuple):
    steps: int  # of the whole answer, as in the reference
    block_length: int
    strategy: str = "low_confidence_static"

    def of_request(self) -> dict[str, Any]:
        num_blocks = GEN_LENGTH // self.block_length
        return {
            "diffusion_max_steps": self.steps // num_blocks,
            "diffusion_block_length": self.block_length,
        }


SETTINGS = {"default": Setting(64, 32), "fast": Setting(16, 16), "whole": Setting(24, 64)}
# Released names -> Llama's.
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


class Loop:
    def __init__(self, path: Path) -> None:
        config = LlamaConfig(
            vocab_size=LLADA["vocab_size"],
            hidden_size=LLADA["d_model"],
            intermediate_size=LLADA["mlp_hidden_size"],
            num_hidden_layers=LLADA["n_layers"],
            num_attention_heads=LLADA["n_heads"],
            num_key_value_heads=LLADA["n_kv_heads"],
            rms_norm_eps=LLADA["rms_norm_eps"],
            rope_parameters={"rope_type": "default", "rope_theta": LLADA["rope_theta"]},
            attn_implementation="eager",
        )
        self.model = LlamaForCausalLM(config).eval()
        weights = load_file(path / "model.safetensors")
        self.model.load_state_dict({llama_name(name): each for name, each in weights.items()})

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """``[L, V]``; every token sees all of them."""
        all_of_them = additive(torch.ones(1, len(ids), len(ids), dtype=torch.bool))
        logits: torch.Tensor = self.model(torch.tensor([ids]), attention_mask=all_of_them).logits
        logits[..., MASK] = -torch.inf
        return logits[0]

    def answer(self, prompt: list[int], setting: Setting) -> tuple[list[int], int]:
        """The tokens of the answer, and the number of passes."""
        ids, passes = prompt + [MASK] * GEN_LENGTH, 0
        steps = setting.steps // (GEN_LENGTH // setting.block_length)
        for start in range(len(prompt), len(ids), setting.block_length):
            block = range(start, start + setting.block_length)
            for step in range(steps):
                p, tokens = self.logits(ids).softmax(-1).max(-1)
                count = len(block) // steps + (step < len(block) % steps)
                masks = [at for at in block if ids[at] == MASK]
                for at in sorted(masks, key=lambda at: -float(p[at]))[:count]:
                    ids[at] = int(tokens[at])
                passes += 1
        return ids[len(prompt) :], passes


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("llada") / "model", LLADA)


@pytest.fixture(scope="module")
def loop(path: Path) -> Loop:
    return Loop(path)


@pytest.fixture(scope="module")
def engine(path: Path) -> Engine:
    return get_engine(path)


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(4)
    return [torch.randint(20, 800, (n,), generator=draw).tolist() for n in LENGTHS]


def params(max_tokens: int = GEN_LENGTH, **extra: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, extra_args=extra)


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_the_loop(engine: Engine, loop: Loop, name: str) -> None:
    """More prompts than run at a time."""
    setting = SETTINGS[name]
    found = engine.generate(prompts(), params(**setting.of_request()))
    assert found == [loop.answer(prompt, setting)[0] for prompt in prompts()]
    assert name != "default" or found == engine.generate(prompts(), params())


def test_a_block_takes_the_passes_of_the_loop(engine: Engine, loop: Loop) -> None:
    prompt, setting = prompts()[-1], SETTINGS["fast"]
    tokens, passes = loop.answer(prompt, setting)
    with engine.watch() as watched:
        assert engine.generate([prompt], params(**setting.of_request())) == [tokens]
    (steps,) = watched.values()
    assert len(steps) == passes == setting.steps
