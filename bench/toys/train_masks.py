"""Trains a small model of Dream's format, from the weights of tiny-fast-dllm.

    python -m bench.toys.train_masks A --steps 300 --decay-from 0.25 --seed 5
    python -m bench.toys.train_masks B --start A/state.pt --own 0.7 ...

The loss is the cross-entropy of masked tokens, averaged over those of an answer. What is masked is
drawn, or, in a share ``--own`` of the groups, what a model in training would decide last: Dream
decides the tokens of which it is the surest, wherever they are, and has to go on from there.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from bench.toys.suite import FAMILIES, Question, question, questions
from dllm.models.unmasking.reference import additive

EOS, MASK = 1, 4  # of the small models
CANVAS, BLOCK = 64, 32
START = Path("checkpoints/tiny-fast-dllm")
GROUP = 8  # questions of about the same length that go through the model together
TAIL_WEIGHT = 0.1  # in the loss, of an end token behind the first one
HARD = {"add": 1.0, "sort": 1.0, "convert": 0.8, "lookup": 0.6, "reverse": 0.4, "report": 0.4}
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


Pair = tuple[list[int], list[int]]  # a prompt and its answer, with the end token
Row = tuple[list[int], list[int], list[float]]  # noised, clean, and weights in the loss


class Batch(NamedTuple):
    """N sequences of L tokens, `[N, L]` each but ``visible``, `[N, L, L]`."""

    ids: Tensor
    clean: Tensor
    weight: Tensor  # in the loss, of a token's prediction
    visible: Tensor


def backbone() -> PreTrainedModel:
    fields = json.loads((START / "config.json").read_text()) | {"model_type": "qwen2"}
    model: PreTrainedModel = Qwen2ForCausalLM(Qwen2Config(**fields))
    model.set_attn_implementation("eager")
    return model.float()


def start_from(model: PreTrainedModel, path: Path) -> None:
    """A run's state, or a checkpoint."""
    if path.suffix == ".pt":
        model.load_state_dict(torch.load(path, weights_only=True)["average"])
        return
    weights = {name: one.float() for name, one in load_file(path / "model.safetensors").items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)


def encode(tokenizer: Tokenizer, asked: Question) -> tuple[list[int], list[int]]:
    prompt = f"<bos><|turn>user\n{asked.prompt.strip()}<turn|>\n<|turn>model\n"
    texts = prompt, asked.answer
    ids, answer = (tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
    return ids, [*answer, EOS]


def lay_out(pairs: Sequence[Pair], rng: random.Random, own: PreTrainedModel | None) -> Batch:
    """Noised sequences of a group of questions; ``own``: in the order of this model."""
    longest = max(len(answer) for _, answer in pairs)
    size = CANVAS if rng.random() < 0.35 else min(CANVAS, longest + rng.randrange(16))
    rows = own_order(own, pairs, rng) if own else [whole(*pair, size, rng) for pair in pairs]
    length = -(-max(len(row[0]) for row in rows) // 8) * 8
    ids = torch.full((len(rows), length), EOS)
    clean, weight = ids.clone(), torch.zeros(len(rows), length)
    visible = torch.eye(length, dtype=torch.bool).repeat(len(rows), 1, 1)
    for i, (noised, right, weights) in enumerate(rows):
        n = len(noised)
        ids[i, :n], clean[i, :n] = torch.tensor(noised), torch.tensor(right)
        weight[i, :n] = torch.tensor(weights) / max(sum(weights), TAIL_WEIGHT)
        visible[i, :n, :n] = True
    return Batch(ids, clean, weight / len(rows), visible)


@torch.no_grad()
def own_order(model: PreTrainedModel, pairs: Sequence[Pair], rng: random.Random) -> list[Row]:
    """As ``whole``; known are the tokens of which the model is the surest, in two steps."""
    longest = max(len(answer) for _, answer in pairs)
    size = CANVAS if rng.random() < 0.5 else min(CANVAS, longest + rng.randrange(16))
    length = max(len(p) for p, _ in pairs) + size
    ids = torch.full((len(pairs), length), EOS)
    inside = torch.zeros(len(pairs), length, dtype=torch.bool)
    for i, (prompt, _) in enumerate(pairs):
        ids[i, : len(prompt)] = torch.tensor(prompt)
        ids[i, len(prompt) : len(prompt) + size] = MASK
        inside[i, : len(prompt) + size] = True
    visible = inside[:, None, :] | torch.eye(length, dtype=torch.bool)
    rights = [answer + [EOS] * (size - len(answer)) for _, answer in pairs]
    left = [min(size, rng.randint(1, len(answer) + 5)) for _, answer in pairs]
    for part in (0.5, 1.0):
        hidden = hidden_states(model, ids, visible)
        p = model.lm_head(hidden.roll(1, dims=1)).softmax(dim=-1)
        entropy = torch.special.entr(p).sum(-1)
        for i, (prompt, answer) in enumerate(pairs):
            begin = len(prompt)
            masks = [at for at in range(size) if ids[i, begin + at] == MASK]
            # Behind the answer all first, and half of what is known of it; then the rest.
            goal = left[i] if part == 1.0 else max(left[i], (left[i] + len(answer)) // 2)
            masks.sort(key=entropy[i, begin:].tolist().__getitem__)
            for at in masks[: max(0, len(masks) - goal)]:
                ids[i, begin + at] = rights[i][at]
    rows = []
    for i, (prompt, answer) in enumerate(pairs):
        noised = ids[i, len(prompt) : len(prompt) + size].tolist()
        weights = weights_of(rights[i], noised, len(answer))
        rows.append((prompt + noised, prompt + rights[i], [0.0] * len(prompt) + weights))
    return rows


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


def whole(prompt: list[int], answer: list[int], size: int, rng: random.Random) -> Row:
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


def hidden_states(model: PreTrainedModel, ids: Tensor, visible: Tensor) -> Tensor:
    mask = additive(visible)
    found: Tensor = model.model(
        input_ids=ids, attention_mask=mask, use_cache=False
    ).last_hidden_state
    return found


def loss_of(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Row i is for token i + 1."""
    hidden = hidden_states(model, batch.ids, batch.visible)[:, :-1]
    weight, clean = batch.weight[:, 1:], batch.clean[:, 1:]
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
    model: PreTrainedModel, prompts: list[list[int]], threshold: float = 0.9
) -> list[list[int]]:
    """Whole sequences, block after block, all tokens above the threshold; in one batch."""
    count, size = len(prompts), max(map(len, prompts)) + CANVAS
    ids = torch.full((count, size), EOS)
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
            hidden = hidden_states(model, ids, visible).roll(1, dims=1)
            top = model.lm_head(hidden).softmax(dim=-1).max(dim=-1)
            sure = torch.where(left, top.values, -1.0)
            chosen = left & ((sure > threshold) | (sure == sure.amax(dim=1, keepdim=True)))
            ids = torch.where(chosen, top.indices, ids)
    return [row[n : n + CANVAS].tolist() for row, n in zip(ids, start[:, 0].tolist(), strict=True)]


def right_shares(
    model: PreTrainedModel, tokenizer: Tokenizer, split: str, count: int
) -> dict[str, float]:
    shares = {}
    for family in FAMILIES:
        asked = questions([family], split, count)
        found = answers_of(model, [encode(tokenizer, one)[0] for one in asked])
        texts = [tokenizer.decode(row[: (*row, EOS).index(EOS)]) for row in found]
        right = [one.is_correct(text) for one, text in zip(asked, texts, strict=True)]
        shares[family] = sum(right) / count
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--start", type=Path, default=START)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--matrix-lr", type=float, default=0.02)
    parser.add_argument("--vector-lr", type=float, default=0.003)
    parser.add_argument("--decay-from", type=float, default=0.3)
    parser.add_argument("--focus", type=float, default=0.6)
    parser.add_argument("--own", type=float, default=0.0)
    parser.add_argument("--hard", type=json.loads, default=HARD)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    given.out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(START / "tokenizer.json"))
    model, average = backbone(), backbone()
    start_from(model, given.start)
    average.load_state_dict(model.state_dict())
    average.requires_grad_(False)
    optimizers = make_optimizers(model, given.matrix_lr, given.vector_lr)
    peaks = [optimizer.defaults["lr"] for optimizer in optimizers]
    errors = {family: given.hard.get(family, 0.2) for family in FAMILIES}
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
            is_own = given.own > 0 and rng.random() < given.own
            batch = lay_out(drawn[first : first + GROUP], rng, average if is_own else None)
            part = loss_of(model, batch) * GROUP / given.batch
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
        if (step + 1) % 25 == 0:
            torch.save({"average": average.state_dict()}, given.out / "state.pt")
        if step + 1 == given.steps:
            shares = right_shares(average, tokenizer, "validation", 4)
            print(sum(shares.values()) / len(shares), shares, flush=True)
            torch.save({"average": average.state_dict()}, given.out / "state.pt")
    write(average, given.out)


def write(model: PreTrainedModel, out: Path) -> None:
    """Weights in bf16."""
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
