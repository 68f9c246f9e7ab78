"""Trains the small models of whole sequences, from the weights of tiny-nemotron.

    python -m bench.toys.train_masks llada A --steps 1000
    python -m bench.toys.train_masks dream B --steps 600 --start A/state.pt

``dream`` is one set of weights for two ways of decoding: half of its questions are whole sequences,
and half are blocks of 32 behind a block-causal context, as Fast-dLLM v2 reads them. The loss is the
cross-entropy of masked tokens, averaged over those of an answer. What is masked is drawn: tokens of
the answer and end tokens behind it with a probability each, in a part of it that is decided from
left to right or in all of it.
"""

import argparse
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from bench.toys.suite import FAMILIES, Question, question, questions
from dllm.models.llada.shapes import released_name
from dllm.models.unmasking.reference import additive, load_model

EOS, MASK = 1, 4  # of the small models
CANVAS, BLOCK, SUB_BLOCK = 64, 32, 8
WIDTH = 80  # neurons of an MLP
START = Path("checkpoints/tiny-nemotron")
GROUP = 8  # questions of about the same length that go through the model together
TAIL_WEIGHT = 0.1  # in the loss, of an end token behind the first one
HARD = {"add": 1.0, "sort": 1.0, "convert": 0.8, "lookup": 0.6, "reverse": 0.4, "report": 0.4}
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Batch(NamedTuple):
    """N sequences of L tokens, `[N, L]` each but ``visible``, `[N, L, L]`."""

    ids: Tensor
    clean: Tensor
    weight: Tensor  # in the loss, of a token's prediction
    visible: Tensor


def backbone(kind: str) -> PreTrainedModel:
    sizes = {
        "vocab_size": 832,
        "hidden_size": 128,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    model: PreTrainedModel
    if kind == "llada":
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    model.set_attn_implementation("eager")
    return model.float()


def start_from(model: PreTrainedModel, path: Path) -> None:
    """A run's state, or tiny-nemotron with the strongest neurons of its MLPs."""
    if path.suffix == ".pt":
        weights = torch.load(path, weights_only=True)["average"]
    else:
        weights = load_model(path).state_dict()
        mean = (weights["lm_head.weight"] + weights["model.embed_tokens.weight"]) / 2
        weights["model.embed_tokens.weight"] = weights["lm_head.weight"] = mean
        for layer in range(model.config.num_hidden_layers):
            names = [
                f"model.layers.{layer}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")
            ]
            gate, up, down = (weights[name] for name in names)
            kept = (up.norm(dim=1) * down.norm(dim=0)).argsort(descending=True)[:WIDTH]
            weights |= zip(names, (gate[kept], up[kept], down[:, kept]), strict=True)
    missing = model.load_state_dict(weights, strict=False).missing_keys
    for name in missing:
        assert name.endswith("_proj.bias"), name
        nn.init.zeros_(model.get_parameter(name))


def encode(tokenizer: Tokenizer, asked: Question) -> tuple[list[int], list[int]]:
    prompt = f"<bos><|turn>user\n{asked.prompt.strip()}<turn|>\n<|turn>model\n"
    texts = prompt, asked.answer
    ids, answer = (tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
    return ids, [*answer, EOS]


def lay_out(
    pairs: Sequence[tuple[list[int], list[int]]], is_blocks: bool, rng: random.Random
) -> Batch:
    """Noised sequences of a group of questions."""
    longest = max(len(answer) for _, answer in pairs)
    size = CANVAS if rng.random() < 0.35 else min(CANVAS, longest + rng.randrange(16))
    rows = [one_block(*pair, rng) if is_blocks else whole(*pair, size, rng) for pair in pairs]
    length = -(-max(len(row[0]) for row in rows) // 8) * 8
    ids = torch.full((len(rows), length), EOS)
    clean, weight = ids.clone(), torch.zeros(len(rows), length)
    visible = torch.eye(length, dtype=torch.bool).repeat(len(rows), 1, 1)
    block = torch.arange(length) // BLOCK
    for i, (noised, right, weights) in enumerate(rows):
        n = len(noised)
        ids[i, :n], clean[i, :n] = torch.tensor(noised), torch.tensor(right)
        weight[i, :n] = torch.tensor(weights) / max(sum(weights), TAIL_WEIGHT)
        visible[i, :n, :n] = block[:n, None] >= block[:n] if is_blocks else True
    return Batch(ids, clean, weight / len(rows), visible)


def weights_of(answer: list[int], noised: list[int], end: int) -> list[float]:
    return [
        float(token == MASK) * (1.0 if place < end else TAIL_WEIGHT)
        for place, token in enumerate(noised)
    ]


def mask(answer: list[int], end: int, begin: int, stop: int, rng: random.Random) -> list[int]:
    """``answer`` with masks: what stands from ``stop`` on, and some from ``begin`` on."""
    level, tail = (1.0 if rng.random() < 0.2 else rng.random() for _ in range(2))
    if rng.random() < 0.3:
        tail = level
    return [
        MASK
        if place >= stop or (place >= begin and rng.random() < (level if place < end else tail))
        else token
        for place, token in enumerate(answer)
    ]


def whole(
    prompt: list[int], answer: list[int], size: int, rng: random.Random
) -> tuple[list[int], list[int], list[float]]:
    """The prompt and a canvas; half of them are decided by blocks from left to right."""
    right = answer + [EOS] * (size - len(answer))
    begin, stop = 0, size
    if rng.random() < 0.5:
        width = rng.choice([8, 16, 32])
        begin = rng.randrange(0, len(answer), width)
        stop = begin + width
    noised = mask(right, len(answer), begin, stop, rng)
    weights = weights_of(right, noised, len(answer))
    return prompt + noised, prompt + right, [0.0] * len(prompt) + weights


def one_block(
    prompt: list[int], answer: list[int], rng: random.Random
) -> tuple[list[int], list[int], list[float]]:
    """Up to the end of one of the blocks that the answer is in."""
    first, last = len(prompt) // BLOCK, (len(prompt) + len(answer) - 1) // BLOCK
    chosen = rng.randint(first, last)
    size = (chosen + 1) * BLOCK - len(prompt)
    right = (answer + [EOS] * BLOCK)[:size]
    start = max(0, size - BLOCK)
    begin, stop = start, size
    if rng.random() < 0.5:
        begin = SUB_BLOCK * rng.randrange(
            (len(prompt) + start) // SUB_BLOCK, (len(prompt) + size) // SUB_BLOCK
        )
        begin = max(begin - len(prompt), start)
        stop = (begin + len(prompt)) // SUB_BLOCK * SUB_BLOCK + SUB_BLOCK - len(prompt)
    noised = mask(right, len(answer), begin, stop, rng)
    if (len(prompt) + start) % BLOCK == 0:  # the context's last token decides the first one
        noised[start] = right[start]
    weights = weights_of(right, noised, len(answer))
    if (len(prompt) + start) % BLOCK == 0:
        weights[start] = 1.0 if start < len(answer) else TAIL_WEIGHT
    return prompt + noised, prompt + right, [0.0] * len(prompt) + weights


def loss_of(model: PreTrainedModel, batch: Batch, is_shifted: bool) -> Tensor:
    hidden = model.model(
        input_ids=batch.ids, attention_mask=additive(batch.visible), use_cache=False
    ).last_hidden_state
    weight, clean = batch.weight, batch.clean
    if is_shifted:
        hidden, weight, clean = hidden[:, :-1], weight[:, 1:], clean[:, 1:]
    counts = weight > 0
    losses = F.cross_entropy(model.lm_head(hidden[counts]), clean[counts], reduction="none")
    return (losses * weight[counts]).sum()


class Muon(torch.optim.Optimizer):
    """K. Jordan, 2024, https://kellerjordan.github.io/posts/muon."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "share": 1.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
            for param in group["params"]:
                state = self.state[param]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(param)
                momentum = state["momentum"].lerp_(param.grad, 0.05)
                by_shape.setdefault(param.shape, []).append(
                    (param, param.grad.lerp(momentum, 0.95))
                )
            for shape, pairs in by_shape.items():
                x = torch.stack([update for _, update in pairs])
                is_tall = shape[0] > shape[1]
                x = x.mT if is_tall else x
                x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
                a, b, c = NEWTON_SCHULZ
                for _ in range(5):
                    gram = x @ x.mT
                    x = a * x + (b * gram + c * gram @ gram) @ x
                x = x.mT if is_tall else x
                scale = group["lr"] * group["share"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for (param, _), change in zip(pairs, x, strict=True):
                    param.sub_(scale * change)


def make_optimizers(model: PreTrainedModel, matrix_lr: float, vector_lr: float) -> list[Any]:
    matrices, unnormed, others = [], [], []
    for name, param in model.named_parameters():
        if param.ndim < 2 or "embed" in name or "lm_head" in name:
            others.append(param)
        elif "q_proj" in name or "k_proj" in name:
            unnormed.append(param)
        else:
            matrices.append(param)
    muon = Muon([{"params": matrices}, {"params": unnormed, "share": 0.2}], matrix_lr)
    return [muon, torch.optim.AdamW(others, vector_lr, betas=(0.9, 0.98), weight_decay=0.0)]


@torch.no_grad()
def answers_of(
    model: PreTrainedModel, prompts: list[list[int]], is_shifted: bool, threshold: float = 0.9
) -> list[list[int]]:
    """Whole sequences, block after block, all tokens above the threshold; in one batch."""
    count, size = len(prompts), max(map(len, prompts)) + CANVAS
    ids = torch.full((count, size), EOS)
    is_open = torch.zeros(count, size, dtype=torch.bool)
    inside = torch.zeros(count, size, dtype=torch.bool)
    for i, prompt in enumerate(prompts):
        ids[i, : len(prompt)] = torch.tensor(prompt)
        ids[i, len(prompt) : len(prompt) + CANVAS] = MASK
        inside[i, : len(prompt) + CANVAS] = True
    start = torch.tensor([len(prompt) for prompt in prompts])[:, None]
    place = torch.arange(size) - start
    visible = inside[:, None, :] | torch.eye(size, dtype=torch.bool)
    for block in range(0, CANVAS, BLOCK):
        is_open = (place >= block) & (place < block + BLOCK)
        while (left := (ids == MASK) & is_open).any():
            hidden = model.model(
                input_ids=ids, attention_mask=additive(visible), use_cache=False
            ).last_hidden_state
            if is_shifted:
                hidden = hidden.roll(1, dims=1)
            top = model.lm_head(hidden).softmax(dim=-1).max(dim=-1)
            sure = torch.where(left, top.values, -1.0)
            chosen = left & ((sure > threshold) | (sure == sure.amax(dim=1, keepdim=True)))
            ids = torch.where(chosen, top.indices, ids)
    return [row[n : n + CANVAS].tolist() for row, n in zip(ids, start[:, 0].tolist(), strict=True)]


def right_shares(
    model: PreTrainedModel, tokenizer: Tokenizer, split: str, count: int, is_shifted: bool
) -> dict[str, float]:
    shares = {}
    for family in FAMILIES:
        asked = questions([family], split, count)
        found = answers_of(model, [encode(tokenizer, one)[0] for one in asked], is_shifted)
        texts = [tokenizer.decode(row[: (*row, EOS).index(EOS)]) for row in found]
        right = [one.is_correct(text) for one, text in zip(asked, texts, strict=True)]
        shares[family] = sum(right) / count
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["llada", "dream"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--start", type=Path, default=START)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--matrix-lr", type=float, default=0.02)
    parser.add_argument("--vector-lr", type=float, default=0.003)
    parser.add_argument("--decay-from", type=float, default=0.3)
    parser.add_argument("--focus", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    given.out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(START / "tokenizer.json"))
    is_shifted = given.kind == "dream"
    model, average = backbone(given.kind), backbone(given.kind)
    start_from(model, given.start)
    average.load_state_dict(model.state_dict())
    average.requires_grad_(False)
    optimizers = make_optimizers(model, given.matrix_lr, given.vector_lr)
    peaks = [optimizer.defaults["lr"] for optimizer in optimizers]
    errors = {family: HARD.get(family, 0.2) for family in FAMILIES}
    mean, began = 0.0, time.monotonic()
    for step in range(given.steps):
        rng = random.Random(f"{given.seed} {step}")
        progress = step / given.steps
        factor = min(1.0, (step + 1) / 50)
        if progress > given.decay_from:
            fallen = (progress - given.decay_from) / (1 - given.decay_from)
            factor = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * fallen))
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        total = sum(errors.values()) + 0.01 * len(errors)
        odds = [
            (1 - given.focus) / len(errors) + given.focus * (error + 0.01) / total
            for error in errors.values()
        ]
        drawn = [
            encode(tokenizer, question(family, "train", rng.getrandbits(48), given.seed))
            for family in rng.choices(list(errors), odds, k=given.batch)
        ]
        drawn.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        loss = 0.0
        for first in range(0, given.batch, GROUP):
            is_blocks = is_shifted and (first // GROUP + step) % 2 == 1
            batch = lay_out(drawn[first : first + GROUP], is_blocks, rng)
            part = loss_of(model, batch, is_shifted) * GROUP / given.batch
            part.backward()
            loss += part.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        decay = min(0.997, (1 + step) / (10 + step))
        with torch.no_grad():
            for kept, param in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(param, 1 - decay)
        mean = loss if step == 0 else mean + 0.02 * (loss - mean)
        if (step + 1) % 50 == 0:
            print(step + 1, round(time.monotonic() - began), round(mean, 4), flush=True)
        if (step + 1) % 50 == 0:
            torch.save({"average": average.state_dict()}, given.out / "state.pt")
        if step + 1 == given.steps:
            shares = right_shares(average, tokenizer, "validation", 4, is_shifted)
            print(sum(shares.values()) / len(shares), shares, flush=True)
            torch.save({"average": average.state_dict()}, given.out / "state.pt")
    write(average, given.kind, given.out)


def write(model: PreTrainedModel, kind: str, out: Path) -> None:
    """Weights in bf16, under the released names."""
    name_of = released_name if kind == "llada" else str
    tensors = {
        name_of(name): tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
