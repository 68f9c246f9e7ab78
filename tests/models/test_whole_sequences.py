"""LLaDA-8B and Dream, token for token, against a plain loop on transformers' models, in fp32.

The loops are written after the papers and ``generate`` of ML-GSAI/LLaDA, ``diffusion_generate`` of
Dream: the answer's masks all stand behind the prompt from the start, and every token sees every
other one. LLaDA fills in one block after the other. Dream's row i is for token i + 1, and how many
tokens a step decides depends on how many masks are left.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jsonschema
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.sampling_params import StructuredOutputsParams

from dllm.models.unmasking.reference import additive
from dllm.ops import noise
from dllm.patches import routes
from tests.support.engine_harness import Engine, get_engine
from tests.support.family_checkpoints import DREAM, LLADA, MASK, WHOLE_SEQUENCES

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
GEN_LENGTH = 64
LENGTHS = [1, 8, 31, 33, 75]


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


def llama(path: Path) -> LlamaForCausalLM:
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
    model = LlamaForCausalLM(config).eval()
    weights = load_file(path / "model.safetensors")
    model.load_state_dict({llama_name(name): each for name, each in weights.items()})
    return model


def qwen2(path: Path) -> Qwen2ForCausalLM:
    fields = DREAM | {"model_type": "qwen2", "architectures": None}
    model = Qwen2ForCausalLM(Qwen2Config(**fields, attn_implementation="eager")).float().eval()
    model.load_state_dict(load_file(path / "model.safetensors"))
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
        logits[..., MASK] = -torch.inf
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
        ids, passes = prompt + [MASK] * GEN_LENGTH, 0
        steps = setting.steps // (GEN_LENGTH // setting.block_length)
        for start in range(len(prompt), len(ids), setting.block_length):
            block = range(start, start + setting.block_length)
            for step in range(steps):
                masks = [at for at in block if ids[at] == MASK]
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


@pytest.fixture(scope="module", params=WHOLE_SEQUENCES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(name: str, family: Callable[[str], Path]) -> Path:
    return family(name)


@pytest.fixture(scope="module")
def loop(name: str, path: Path) -> Loop:
    return Loop(name, path)


@pytest.fixture(scope="module")
def engine(path: Path) -> Engine:
    return get_engine(path)


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(4)
    return [torch.randint(20, 800, (n,), generator=draw).tolist() for n in LENGTHS]


def params(max_tokens: int = GEN_LENGTH, **extra: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, temperature=0, seed=SEED, ignore_eos=True, extra_args=extra
    )


@pytest.mark.parametrize("number", range(6))
def test_tokens_are_those_of_the_loop(engine: Engine, loop: Loop, number: int) -> None:
    """More prompts than run at a time."""
    setting = [*loop.settings.values()][number]
    found = engine.generate(prompts(), params(**setting.of_request()))
    assert found == [loop.answer(prompt, setting)[0] for prompt in prompts()]
    assert number > 0 or found == engine.generate(prompts(), params())


def several_blocks(
    loop: Loop, prompt: list[int], size: int, bound: float, add_threshold: float
) -> list[int]:
    """After ``generate_multi_block`` of hao-ai-lab/d3LLM, without an early stop."""
    ids, num_open = prompt + [MASK] * GEN_LENGTH, 1
    starts = range(len(prompt), len(ids), size)
    blocks = [range(start, min(start + size, len(ids))) for start in starts]
    while MASK in ids:
        left = [[at for at in block if ids[at] == MASK] for block in blocks]
        progress = 1 - len(left[num_open - 1]) / len(blocks[num_open - 1])
        num_open += num_open < len(blocks) and progress >= add_threshold
        p = loop.logits(ids).softmax(-1)
        nats = entropies(p)
        masks = [at for block in left[:num_open] for at in block]
        taken = {at for at in masks if nats[at] < bound}
        if not loop.is_dream:
            taken.add(min(masks, key=lambda at: nats[at]))
        first = next(block for block in left if block)
        if not taken & set(first):
            taken.add(min(first, key=lambda at: nats[at]))
        for at in taken:
            ids[at] = int(p[at].argmax())
    return ids[len(prompt) :]


def entropies(p: torch.Tensor) -> list[float]:
    nats: list[float] = torch.special.entr(p).sum(-1).tolist()
    return nats


@pytest.mark.parametrize(
    ("size", "part", "add_threshold"), [(16, 0.5, 0.1), (24, 0.3, 0.5), (8, 0.7, 0.05)]
)
def test_several_blocks_are_decided_at_once(
    engine: Engine, loop: Loop, size: int, part: float, add_threshold: float
) -> None:
    """``part``: of the first prompt's masks, those whose entropies are below the bound."""
    first = prompts()[0]
    nats = entropies(loop.logits(first + [MASK] * GEN_LENGTH)[len(first) :].softmax(-1))
    bound = sum(sorted(nats)[int(part * GEN_LENGTH) :][:2]) / 2
    asked = {
        "diffusion_strategy": "entropy_threshold",
        "diffusion_block_length": GEN_LENGTH,
        "diffusion_sub_block": size,
        "diffusion_entropy_bound": bound,
        "diffusion_block_add_threshold": add_threshold,
    }
    with engine.watch() as watched:
        found = engine.generate(prompts(), params(**asked))
    assert found == [several_blocks(loop, each, size, bound, add_threshold) for each in prompts()]
    assert all(len(steps) < GEN_LENGTH for steps in watched.values())


@pytest.mark.parametrize("passes", ["one a step", "many a step"])
def test_context_of_a_block_may_be_cached(path: Path, loop: Loop, passes: str) -> None:
    """More prompts than run at a time, and more than the cache holds."""
    setting = loop.settings["fast"]._replace(steps=32, block_length=16)
    option = {"context_cache": "block", "denoise_loop_ms": 0 if passes == "one a step" else 60_000}
    cached = get_engine(
        path,
        additional_config={"dllm": option},
        max_model_len=160,
        max_num_batched_tokens=300,
        block_size=32,
        num_gpu_blocks_override=14,
    )
    found = cached.generate(prompts(), params(**setting.of_request()))
    assert found == [loop.answer(prompt, setting, is_cached=True)[0] for prompt in prompts()]
    assert found != [loop.answer(prompt, setting)[0] for prompt in prompts()]


def test_an_answer_takes_the_passes_of_the_loop(engine: Engine, loop: Loop) -> None:
    prompt, setting = prompts()[-1], loop.settings["fast"]
    tokens, passes = loop.answer(prompt, setting)
    with engine.watch() as watched:
        assert engine.generate([prompt], params(**setting.of_request())) == [tokens]
    (steps,) = watched.values()
    assert len(steps) == passes == setting.steps


# --- what the reference has no words for ---------------------------------------------------------


def test_an_answer_may_be_shorter_or_longer_than_the_masks(engine: Engine, loop: Loop) -> None:
    """Shorter than a block: only its tokens are masks. Longer: ``gen_length`` masks at a time."""
    prompt = prompts()[2]
    (short,) = engine.generate([prompt], params(10, diffusion_strategy="low_confidence_static"))
    ids, masks = prompt + [MASK] * 10, list(range(len(prompt), len(prompt) + 10))
    for step in range(10):
        left = [at for at in masks if ids[at] == MASK]
        count = int(len(left) * loop.part_transferred(step, 10)) if loop.is_dream else 1
        loop.reveal(ids, left, count, Setting(10, 10))
    assert short == ids[len(prompt) :]
    setting = loop.settings["default"]
    (long,) = engine.generate([prompt], params(GEN_LENGTH + 32))
    first, _ = loop.answer(prompt, setting)
    assert long[: setting.block_length] == first[: setting.block_length]
    assert len(long) == GEN_LENGTH + 32


def test_an_end_token_ends_the_answer(engine: Engine, loop: Loop) -> None:
    """Also one in the first block: nothing behind it is computed."""
    prompt = prompts()[1]
    setting = loop.settings["default"]
    expected, _ = loop.answer(prompt, setting)
    stop = expected[20]
    with engine.watch() as watched:
        (found,) = engine.generate(
            [prompt], SamplingParams(max_tokens=GEN_LENGTH, temperature=0, stop_token_ids=[stop])
        )
    assert found == expected[: expected.index(stop) + 1]
    (steps,) = watched.values()
    assert len(steps) <= setting.block_length


def test_requests_that_preempt_each_other_have_the_same_answers(path: Path, engine: Engine) -> None:
    """A step has room for two of the sequences, the cache for three; greedy and sampled."""
    tight = get_engine(
        path,
        max_model_len=160,
        max_num_batched_tokens=300,
        block_size=32,
        num_gpu_blocks_override=14,
    )
    asked = [
        SamplingParams(max_tokens=GEN_LENGTH, temperature=t, seed=7, ignore_eos=True)
        for t in (0, 0.8, 1.2, 0, 1)
    ]
    alone = [
        engine.generate([prompt], one)[0] for prompt, one in zip(prompts(), asked, strict=True)
    ]
    assert tight.generate(prompts(), asked) == alone
    assert alone[1] != engine.generate([prompts()[1]], params())[0]


def test_pins_are_seen_and_emitted_wherever_they_are(engine: Engine, loop: Loop) -> None:
    """The masks of the first block see a pin in the second one."""
    prompt, at = prompts()[0], [3, 40, 63]
    pinned = params(diffusion_pin_at=at, diffusion_pin_ids=[100, 200, 300])
    with engine.watch(keep_logits=True) as watched:
        (found,) = engine.generate([prompt], pinned)
    assert [found[place] for place in at] == [100, 200, 300]
    (steps,) = watched.values()
    ids = prompt + [MASK] * GEN_LENGTH
    for place, token in zip(at, (100, 200, 300), strict=True):
        ids[len(prompt) + place] = token
    logits = steps[0].logits
    assert logits is not None
    expected = loop.logits(ids)[len(prompt) : len(prompt) + len(logits)]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_grammar_is_held(engine: Engine) -> None:
    """An answer of three blocks that is complete within ``max_tokens``."""
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 9, "maxItems": 12}
    asked = SamplingParams(
        max_tokens=60,
        temperature=0,
        structured_outputs=StructuredOutputsParams(json=schema),
        extra_args={"diffusion_block_length": 16},
    )
    (output,) = engine.outputs([prompts()[1]], asked)
    jsonschema.validate(json.loads(output.outputs[0].text), schema)


# --- what is chosen or refused at start ----------------------------------------------------------


def test_nothing_is_cached(engine: Engine) -> None:
    assert not engine.core.vllm_config.cache_config.enable_prefix_caching


@pytest.mark.parametrize(
    ("request_of", "field"),
    [
        (lambda **more: ChatCompletionRequest(messages=[], **more), "max_completion_tokens"),
        (lambda **more: ResponsesRequest(input="a", **more), "max_output_tokens"),
    ],
    ids=["chat", "responses"],
)
def test_an_answer_without_a_number_of_tokens_has_gen_length(
    engine: Engine, request_of: Any, field: str
) -> None:
    serving = SimpleNamespace(engine_client=SimpleNamespace(vllm_config=engine.core.vllm_config))
    for given in ({}, {field: 7}):
        request = request_of(**given)
        routes._choose_length(serving, request)
        assert getattr(request, field) == given.get(field, GEN_LENGTH)
