"""What a pilot learns from: what every width keeps of drafts, and what steps cost.

The text of an answer does not depend on what is drafted (``dllm.drafter.verification``). So each
prompt is answered once. Then, for each width, a block of that many masks is drafted behind every
token of the answer, and the steps of a server are replayed: each step begins where the one before
ended. Costs are measured with vLLM, in this process: one request runs at a time, widths change from
step to step, some steps draft nothing, and ``StepCosts`` smooths the times, as in ``adaptive``.
"""

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dllm.drafter.samples import SUFFIX, Sample
from dllm.drafter.widths.costs import StepCosts
from dllm.drafter.widths.policy import VerifiedStep, WidthPolicy
from dllm.settings.command import CommandError
from dllm.settings.files import whole
from dllm.train.acceptance import Acceptance, agreeing_drafts
from dllm.train.export import Drafter
from dllm.train.network import DraftNetwork
from dllm.train.responses import Prompt
from dllm.train.settings import CHECKED_ONE_IN, PilotTraining
from dllm.train.target import Target, load_batch

PLAIN_ONE_IN = 5  # steps that draft nothing
ROOM = 64  # tokens of a context beyond the longest prompt and its answer
KV_CACHE_BYTES = 1 << 30
TENSORS = ("logits", "starts", "kept", "is_heldout")  # of a file of trials


class TimedWidths(WidthPolicy):
    """Every width in turn for one request, whatever it is worth."""

    reads_outcomes = True

    def __init__(self, num_drafts: int, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(num_drafts)
        self.costs, self.clock = StepCosts(num_drafts), clock
        self._turn = 0
        self._observed_at: float | None = None

    def observe(self, step: VerifiedStep) -> None:
        now, before = self.clock(), self._observed_at
        self._observed_at = now
        if before is not None and not step.in_prompt.any():
            num_verified = int(step.verified.sum())
            self.costs.observe(1, num_verified, step.drafted, 1e3 * (now - before))

    def wants_drafts(self, slots: np.ndarray) -> bool:
        self._turn += 1
        return self._turn % PLAIN_ONE_IN != 0

    def widths(self, slots: np.ndarray, confidence: np.ndarray | None) -> np.ndarray:
        return np.full(len(slots), 1 + self._turn % self.num_drafts)


def measured_costs(
    target: Path, drafter: Path, num_drafts: int, prompts: Sequence[Sequence[int]], max_tokens: int
) -> tuple[float, float, float]:
    """Milliseconds as in ``PilotTraining.costs``; ``prompts`` are answered for it, greedily."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(target),
        max_model_len=max(map(len, prompts)) + max_tokens + ROOM,
        max_num_seqs=1,
        enable_prefix_caching=False,
        async_scheduling=False,  # so that a step is over before the next one is scheduled
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        speculative_config={
            "method": "dflash",
            "model": str(drafter),
            "num_speculative_tokens": num_drafts,
        },
        additional_config={"dllm": {"drafter": {"policy": "adaptive"}}},
    )
    policy = TimedWidths(num_drafts)
    llm.llm_engine.engine_core.engine_core.scheduler.driver.policy = policy
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for prompt in prompts:
        llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    return in_milliseconds(policy.costs)


def in_milliseconds(costs: StepCosts) -> tuple[float, float, float]:
    """Costs of one request: a step without drafts, a draft pass, each verified draft."""
    plain, (drafting, with_one, *_) = costs.plain(1), costs.drafting(1)
    return plain, float(drafting) - plain, float(with_one - drafting)


@dataclass(frozen=True)
class Trials:
    """P prompts, A tokens of their answers that drafts may follow, W widths."""

    widths: tuple[int, ...]  # drafts of a block, ascending
    logits: Tensor  # [P, vocab] bf16, of the target behind each prompt
    starts: Tensor  # [P + 1] int64, where the tokens of each answer begin in ``kept``
    kept: Tensor  # [A, W] int16, drafts of a block behind each token that agree with the answer
    is_heldout: Tensor  # [P] bool

    @property
    def tokens(self) -> Tensor:
        """``[P]``: tokens of each answer behind its first, which comes from the prompt."""
        return self.starts.diff()

    @cached_property
    def steps(self) -> Tensor:
        """``[P, W]``: steps of the target for these tokens."""
        found = torch.zeros(len(self.tokens), len(self.widths), dtype=torch.int64)
        for prompt, (start, stop) in enumerate(itertools.pairwise(self.starts.tolist())):
            for place, width in enumerate(self.widths):
                replayed = Acceptance()
                replayed.add(self.kept[start:stop, place].tolist(), width)
                found[prompt, place] = replayed.steps
        return found

    def of(self, chosen: Tensor) -> "Trials":
        """Some of the prompts: ``chosen`` ``[P]`` bool."""
        of_tokens = chosen.repeat_interleave(self.tokens)
        return replace(
            self,
            logits=self.logits[chosen],
            starts=_starts(self.tokens[chosen]),
            kept=self.kept[of_tokens],
            is_heldout=self.is_heldout[chosen],
        )

    def save(self, path: Path) -> None:
        tensors = {name: getattr(self, name).contiguous() for name in TENSORS}
        with whole(path) as part:
            save_file(tensors, part, metadata={"widths": json.dumps(self.widths)})

    @classmethod
    def load(cls, path: Path) -> "Trials":
        with safe_open(path, "pt") as file:
            widths = json.loads(file.metadata()["widths"])
            return cls(tuple(widths), **{name: file.get_tensor(name) for name in TENSORS})

    @classmethod
    def joined(cls, parts: Sequence["Trials"]) -> "Trials":
        tensors = {
            name: torch.cat([getattr(part, name) for part in parts])
            for name in ("logits", "kept", "is_heldout")
        }
        starts = _starts(torch.cat([part.tokens for part in parts]))
        return cls(parts[0].widths, starts=starts, **tensors)


def _starts(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def candidates(trained: int, radius: int) -> tuple[int, ...]:
    return tuple(range(max(1, trained - radius), trained + radius + 1))


def record(
    folder: Path,
    prompts: Sequence[Prompt],
    target: Target,
    drafter: Drafter,
    settings: PilotTraining,
) -> Iterator[int]:
    """Files that are there stay as they are. Yields the number of prompts of each."""
    folder.mkdir(parents=True, exist_ok=True)
    widths = candidates(drafter.block - 1, settings.radius)
    # In the target's precision, as on a server.
    network = drafter.network().to(target.device, target.embedding.dtype).requires_grad_(False)
    head = network.head_of(target.head).to(network.fc.weight.dtype)
    for turn, temperature in enumerate(settings.temperatures):
        asked = prompts[turn :: len(settings.temperatures)]
        for start in range(0, len(asked), settings.generate_batch):
            path = folder / f"{turn:02}-{start:08}{SUFFIX}"
            batch = asked[start : start + settings.generate_batch]
            if not path.exists():
                said = target.respond(
                    [prompt.tokens for prompt in batch],
                    settings.max_tokens,
                    temperature,
                    settings.seed + start,
                )
                pairs = zip(batch, said, strict=True)
                samples = [Sample((*p.tokens, *s), len(p.tokens), p.group) for p, s in pairs]
                parts = [
                    _try_widths(target, drafter, network, head, sample, widths)
                    for sample in samples
                ]
                is_heldout = torch.tensor([prompt.is_heldout for prompt in batch])
                replace(Trials.joined(parts), is_heldout=is_heldout).save(path)
            yield len(batch)


@torch.no_grad()
def _try_widths(
    target: Target,
    drafter: Drafter,
    network: DraftNetwork,
    head: Tensor,
    sample: Sample,
    widths: tuple[int, ...],
) -> Trials:
    kept = torch.zeros(sample.num_anchors, len(widths), dtype=torch.int16)
    if sample.num_anchors:
        batch = load_batch([sample], target, drafter.read.target_layer_ids)
        for place, width in enumerate(widths):
            agreeing = agreeing_drafts(network, target.embedding, head, batch, width + 1)
            kept[:, place] = torch.tensor(agreeing)
    return Trials(
        widths,
        target.logits_behind(sample.tokens[: sample.response_start])[None],
        torch.tensor([0, sample.num_anchors]),
        kept,
        torch.zeros(1, dtype=torch.bool),
    )


def recorded(folder: Path) -> Trials:
    """All with anything to draft. Raises CommandError if there are none, or too few."""
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        raise CommandError(f"{folder}: no trials; `dllm train pilot` records them.")
    found = Trials.joined([Trials.load(path) for path in files])
    found = found.of(found.tokens > 0)
    refuse_too_few(f"{folder}, answers of two tokens and more", found.is_heldout.tolist())
    return found


def refuse_too_few(what: str, is_heldout: Sequence[bool]) -> None:
    """Raises CommandError: too few prompts to train a pilot on, or none to measure it on."""
    num_heldout = sum(is_heldout)
    num_learned = len(is_heldout) - num_heldout
    if num_learned < CHECKED_ONE_IN or not num_heldout:
        raise CommandError(
            f"{what}: {num_learned} prompts to train on, and {num_heldout} held out; needed: "
            f"{CHECKED_ONE_IN} and 1. Give more prompts, or another --heldout."
        )
