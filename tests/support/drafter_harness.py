"""Engines with a drafter, and a record of what they draft in each step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from dllm.drafter.pair import drafter_config
from dllm.drafter.steering import Steering
from dllm.drafter.widths.adaptive import AdaptiveWidth
from dllm.drafter.widths.costs import StepCosts
from dllm.drafter.widths.pilot import Pilot, PilotConfig, PilotLengths
from dllm.drafter.widths.policy import FixedWidth, VerifiedStep, WidthPolicy
from dllm.engine.metrics import Counts
from dllm.patches.contract import CPU_WORKER
from dllm.settings import vllm_names
from tests.support.drafter_pairs import random_drafter
from tests.support.drafter_reference import ReferenceDrafter
from tests.support.engine_harness import Engine, get_engine
from tests.support.recorded_calls import record_calls

LIMITS = dict(max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64, block_size=32)


def prompt(length: int, salt: int = 0, vocab: int = 450) -> list[int]:
    """Token ids in which nothing repeats soon."""
    return [(20 + 7 * index + salt) % vocab for index in range(length)]


def plain_engine(target: Path, **options: Any) -> Engine:
    return get_engine(target, worker_cls=CPU_WORKER, **(LIMITS | options))


def drafting_engine(
    target: Path, drafter: Path, num_drafts: int, options: dict[str, Any] | None = None, **more: Any
) -> Engine:
    """``options`` are the plugin's; ``speculative`` in ``more`` adds to ``speculative_config``."""
    speculative = {
        "method": "dflash",
        "model": str(drafter),
        "num_speculative_tokens": num_drafts,
    } | more.pop("speculative", {})
    return get_engine(
        target,
        speculative_config=speculative,
        additional_config={"dllm": {"drafter": options or {}}},
        **(LIMITS | more),
    )


class FixedCosts(StepCosts):
    """Costs that are given and not learned, the same for every number of requests.

    Args:
        plain: milliseconds of a step without drafts.
        drafting: of a step that verifies nothing and drafts.
        per_block: what verifying N drafts adds, of each request.
    """

    def __init__(self, num_drafts: int, plain: float, drafting: float, per_block: float) -> None:
        super().__init__(num_drafts)
        self.given = plain, drafting, per_block

    def observe(self, num_rows: int, num_verified: int, drafts: bool, ms: float) -> None:
        pass

    def plain(self, num_rows: int) -> float:
        return self.given[0]

    def drafting(self, num_rows: int, passes: bool = True) -> np.ndarray:
        plain, drafting, per_block = self.given
        num_verified = np.arange(num_rows * self.num_drafts + 1)
        return (drafting if passes else plain) + per_block * num_verified / (
            num_rows * self.num_drafts
        )


class Noting(WidthPolicy):
    """Notes what it is told."""

    reads_outcomes = True

    def __init__(self, num_drafts: int) -> None:
        super().__init__(num_drafts)
        self.steps: list[VerifiedStep] = []

    def observe(self, step: VerifiedStep) -> None:
        self.steps.append(step)

    def num(self, count: str) -> int:
        """Drafts that were "verified", or "accepted"."""
        return sum(int(getattr(step, count).sum()) for step in self.steps)


class AllDrafts(Noting, FixedWidth):
    """The full width, always."""


class Bursts(FixedWidth):
    """Drafts in the first steps of every so many; notes how sure the drafter is."""

    reads_confidence = True

    def __init__(self, num_drafts: int, width: int, first: int, every: int) -> None:
        super().__init__(num_drafts, width)
        self.first, self.every, self.num_steps = first, every, 0
        self.confidence: list[np.ndarray] = []

    def wants_drafts(self, slots: np.ndarray) -> bool:
        self.num_steps += 1
        return self.num_steps % self.every < self.first

    def widths(self, slots: np.ndarray, confidence: np.ndarray | None) -> np.ndarray:
        assert confidence is not None
        self.confidence.append(confidence.copy())
        return super().widths(slots, confidence)


class RandomWidth(Noting):
    """Any width, 0 and N included, and no drafting in one step of ten."""

    def __init__(self, num_drafts: int, seed: int = 3, reads_confidence: bool = True) -> None:
        super().__init__(num_drafts)
        self.reads_confidence = reads_confidence
        self.rng = np.random.default_rng(seed)
        self.confidence: list[np.ndarray] = []

    def wants_drafts(self, slots: np.ndarray) -> bool:
        return bool(self.rng.random() < 0.9)

    def widths(self, slots: np.ndarray, confidence: np.ndarray | None) -> np.ndarray:
        assert (confidence is not None) is self.reads_confidence
        if confidence is not None:
            assert confidence.shape == (len(slots), self.num_drafts)
            self.confidence.append(confidence.copy())
        return self.rng.integers(0, self.num_drafts + 1, len(slots))


def make_policy(kind: str, engine: Engine) -> Any:
    """A policy for an engine: "adaptive", "random", or a fixed width; or the lengths of "pilot"."""
    slots, num_drafts = engine.runner.max_num_reqs, engine.runner.speculator.num_speculative_steps
    if kind == "adaptive":
        policy = AdaptiveWidth(num_drafts, slots, clock=lambda: 0.0)
        # Drafts dear enough that how likely each is kept decides.
        policy.costs = FixedCosts(num_drafts, plain=1.0, drafting=1.1, per_block=2.4)
        return policy
    if kind == "pilot":  # its choice is random, and differs between prompts
        torch.manual_seed(0)
        vocab_size = engine.runner.vllm_config.model_config.get_vocab_size()
        chooser = PilotLengths(slots, "unread")
        config = PilotConfig(tuple(range(num_drafts + 1)), vocab_size, hidden_size=64)
        chooser.pilot = Pilot(config).bfloat16()
        return chooser
    return RandomWidth(num_drafts) if kind == "random" else FixedWidth(num_drafts, int(kind))


@contextmanager
def policy_of(engine: Engine, policy: Any) -> Iterator[Any]:
    """Let another policy choose the widths of an engine, or a pilot the lengths of its blocks.

    Enter and leave between requests.
    """
    steering = getattr(engine.runner.speculator, "steering", None)
    with ExitStack() as stack:
        if not isinstance(policy, WidthPolicy):
            stack.enter_context(mock.patch.object(steering, "lengths", policy))
        else:
            stack.enter_context(mock.patch.object(engine.scheduler.driver, "policy", policy))
            if steering is not None:
                reads = policy.reads_confidence
                stack.enter_context(mock.patch.object(steering, "reads_confidence", reads))
        yield policy


def take_counts(engine: Engine) -> Counts:
    """What was counted since they were taken; without statistics nobody else takes them."""
    counts = engine.scheduler._counts.take()
    counts.merge(engine.runner.speculator.steering.counts.take())  # of the last step, no report
    return counts


def unused_drafts(engine: Engine, given: list[int]) -> Counts:
    """Serve one token behind a prompt in chunks; what was counted, times aside.

    No step of it has drafts that anybody can use. Behind the last one vLLM knows it from 0.33 on.
    """
    speculator = engine.runner.speculator
    take_counts(engine)
    with mock.patch.object(speculator, "propose", wraps=speculator.propose) as propose:
        engine.generate([given], greedy(1))
    asked = [call.kwargs["num_speculative_tokens"] for call in propose.call_args_list]
    num_chunks = -(-len(given) // engine.scheduler.max_num_scheduled_tokens)
    last = speculator.num_speculative_steps if vllm_names.is_0_32() else 0
    assert asked == [0] * (num_chunks - 1) + [last] and num_chunks > 1
    counts = take_counts(engine)
    counts.pop(("drafting_seconds", ""), None)
    return counts


@dataclass
class Draft:
    tokens: list[int]  # of the request so far; the target has not read the last one yet
    drafts: list[int]
    logits: torch.Tensor  # [N, vocab], of the last pass over the block


@contextmanager
def watch_passes(
    engine: Engine, see: Callable[[int, list[int], list[int]], None]
) -> Iterator[None]:
    """Give ``see`` what is drafted for requests behind their prompt: row, tokens so far, drafts."""
    states, follow = engine.runner.req_states, Steering._follow

    def spy(self: Any, step: Any, draft: Any, is_wanted: bool) -> torch.Tensor:
        drafts = follow(self, step, draft, is_wanted)
        for row, slot in enumerate(step.batch.idx_mapping_np.tolist()):
            if self._drafted and int(step.num_sampled[row]) > 0:
                length = int(states.total_len.gpu[slot])
                tokens = states.all_token_ids.gpu[slot, :length].tolist()
                see(row, tokens, drafts[row].tolist())
        return drafts

    with mock.patch.object(Steering, "_follow", spy):
        yield


@contextmanager
def watch_drafts(engine: Engine) -> Iterator[list[Draft]]:
    """Record every draft of requests that are behind their prompt."""
    seen: list[Draft] = []

    def see(row: int, tokens: list[int], drafts: list[int]) -> None:
        logits = calls[-1][1].unflatten(0, (-1, len(drafts)))
        seen.append(Draft(tokens, drafts, logits[row].clone()))

    with pytest.MonkeyPatch.context() as patch, watch_passes(engine, see):
        calls = record_calls(patch, engine.runner.speculator.model, "compute_logits")
        yield seen


@contextmanager
def watch_context(engine: Engine) -> Iterator[dict[int, torch.Tensor]]:
    """Record what fc gave for each token of one request that is stored, by position."""
    model = engine.runner.speculator.model
    store = model.precompute_and_store_context_kv
    states: dict[int, torch.Tensor] = {}

    def spy(hidden: torch.Tensor, positions: torch.Tensor, slots: Any = None) -> None:
        if slots is not None:
            for row in (slots[0] >= 0).nonzero().flatten().tolist():
                states[int(positions[row])] = hidden[row].clone()
        store(hidden, positions, slots)

    with mock.patch.object(model, "precompute_and_store_context_kv", spy):
        yield states


def reference(
    target: Path, engine: Engine, weights: dict[str, torch.Tensor] | None = None
) -> ReferenceDrafter:
    """The definition of an engine's drafter; without weights, of the random one."""
    model = Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32)
    config = drafter_config(engine.runner.vllm_config)
    return ReferenceDrafter(model, config, weights or random_drafter())


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """In fp32, but for sums in another order; 2e-6 was measured."""
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)


def assert_drafts(expected: ReferenceDrafter, drafts: Sequence[Draft]) -> None:
    """The drafts, and their logits, are those of the definition."""
    with torch.inference_mode():
        for draft in drafts:
            block = [draft.tokens[-1]] + [expected.config.mask_token_id] * len(draft.drafts)
            logits = expected.logits(draft.tokens[:-1], block)[1:]
            assert_close(draft.logits, logits)
            assert draft.drafts == logits.argmax(-1).tolist()


def assert_greedy(target: Path, prompt: list[int], output: list[int]) -> None:
    """Every token of ``output`` is the target's argmax behind those before it."""
    model = Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == output


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(**(dict(temperature=0, max_tokens=max_tokens, ignore_eos=True) | more))


SAMPLED = {"temperature": 1.0, "seed": 5}
SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 4}
# Sampling parameters that drafts must not change.
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "presence and frequency": {"presence_penalty": 1.5, "frequency_penalty": 1.0},
    "repetition": {"repetition_penalty": 1.8},
    "logit bias": {"logit_bias": {100: 100.0}},
    "allowed ids": {"allowed_token_ids": [30, 40, 50]},
    "bad words": {"bad_words": ["rin", "ver", "ru"]},
    "min tokens": {"ignore_eos": False, "min_tokens": 20, "stop_token_ids": list(range(300, 420))},
    "stop": {"stop_token_ids": list(range(2, 512, 7))},
    "one candidate": SAMPLED | {"top_k": 1},
    "tiny nucleus": SAMPLED | {"top_p": 1e-6},
    "certain": SAMPLED | {"min_p": 1.0},
    "sampled": SAMPLED,
    "min p": SAMPLED | {"min_p": 0.05},
    "top k and top p": SAMPLED | {"top_k": 20, "top_p": 0.8},
    "sampled repetition": {"temperature": 0.5, "seed": 7, "repetition_penalty": 1.8},
    "regex": {"structured_outputs": StructuredOutputsParams(regex="[a-c]{12}")},
    "choice": {"structured_outputs": StructuredOutputsParams(choice=["ab", "abcabc", "cab"])},
    "schema": {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
    "sampled schema": SAMPLED | {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
}
