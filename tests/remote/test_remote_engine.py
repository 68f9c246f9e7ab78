"""Drafts of a worker's engine in a target's engine, on a CPU, in this process: the same text.

The link calls the worker where a socket would wait, because two engines of one process cannot run
at once.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from bench.toys.suite import questions
from dllm.drafter.widths.adaptive import AdaptiveWidth
from dllm.drafter.widths.policy import WidthPolicy
from dllm.engine.metrics import Counts
from dllm.patches.drafts import REMOTE_DRAFTS
from dllm.remote.engine import EngineDrafts
from dllm.remote.link import Link
from dllm.remote.scheduler import RemoteDrafter
from dllm.remote.wire import GREETING, Delta, Draft, DraftBatch, Reply, frame, read_batch
from dllm.remote.worker import DraftWorker
from tests.support.drafter_harness import CASES, LIMITS, FixedCosts, greedy, plain_engine, prompt
from tests.support.drafter_pairs import write_target
from tests.support.engine_harness import Engine, get_engine
from tests.support.recorded_calls import record_calls
from tests.support.toy_prompts import encode_prompt

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
TARGET = CHECKPOINTS / "tiny-ar"
NUM_DRAFTS = 5
LONG_S = 60.0  # a deadline that is not missed


class Inline:
    """A connection to a worker of this process, which works while somebody waits."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.is_open = self.is_near = True
        self.greeting = [frame(GREETING)[4:]]

    def send(self, data: bytes) -> bool:
        self.worker.hear(1, read_batch(data[4:]))
        return True

    def read(self) -> list[bytes]:
        if self.worker.is_busy:
            self.worker.draft()
        if self.greeting:
            return [self.greeting.pop()]
        return [frame(reply)[4:] for _, reply in self.worker.replies()]

    def close(self) -> None:
        self.is_open = False


class Liar:
    """Replies at once, anything: right drafts, wrong ones, token ids that do not exist."""

    def __init__(self, draft=None) -> None:
        self.draft, self.random = draft, random.Random(0)
        self.pending: list[DraftBatch] = []
        self.texts: dict[int, list[int]] = {}
        self.is_busy = False

    def hear(self, peer: int, batch: DraftBatch) -> None:
        self.pending.append(batch)

    def replies(self) -> Iterator[tuple[int, Reply]]:
        pending, self.pending = self.pending, []
        for batch in pending:
            for row in batch.rows:
                known = self.texts.setdefault(row.session, [])
                known[row.start :] = row.tokens
            yield 1, Reply(batch.step, [self.row(row) for row in batch.rows if row.want])

    def row(self, row: Delta) -> Draft:
        text = self.texts[row.session]
        if self.draft is not None:
            return Draft(row.session, len(text), self.draft(text, row.want))
        tokens = [self.random.randrange(512) for _ in range(self.random.randint(0, 40))]
        if self.random.random() < 0.05:
            tokens.append(2**31 - 1)
        start = len(text) + self.random.choice((0, 0, 0, -1, 5))
        return Draft(row.session, max(0, start), tokens, self.random.random() < 0.05)


def remote_engine(target: Path = TARGET, **options: Any) -> Engine:
    """A target with remote drafts, and nobody at the worker's address."""
    given = {"workers": ["/nowhere/worker.sock"], "policy": "fixed"}
    remote = {**given, **options.pop("remote", {})}
    speculative = {"method": "custom_class", "model": REMOTE_DRAFTS}
    speculative["num_speculative_tokens"] = options.pop("num_drafts", NUM_DRAFTS)
    return get_engine(
        target,
        speculative_config=speculative,
        additional_config={"dllm": {"remote": remote}},
        **(LIMITS | options),
    )


@dataclass
class Drafting:
    """An engine's ``RemoteDrafter``, its link to the one worker, and what both counted."""

    drafter: RemoteDrafter
    link: Link
    counts: Counts = field(default_factory=Counts)
    widths: list[int] = field(default_factory=list)  # of each request and step

    def num(self, what: str) -> float:
        """``remote_WHAT``."""
        return self.counts.get((f"remote_{what}", self.link.address), 0)


@contextmanager
def drafted_by(
    engine: Engine, worker: Any, policy: WidthPolicy | None = None
) -> Iterator[Drafting]:
    """Let a worker of this process draft for the engine."""
    drafter = engine.scheduler.remote
    (link,) = drafter.client.links
    seen = Drafting(drafter, link)
    take = drafter.take

    def spy() -> Any:
        names, drafts = take()
        seen.widths.extend(map(len, drafts))
        return names, drafts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "_dial", lambda: Inline(worker))
        patch.setattr(link, "_dialed_at", float("-inf"))
        patch.setattr(link, "_deadline_s", LONG_S)
        patch.setattr(link, "_counts", seen.counts)
        patch.setattr(drafter.client, "_wait", lambda links, seconds: None)
        patch.setattr(drafter, "_deadline_s", LONG_S)
        patch.setattr(drafter, "take", spy)
        patch.setattr(drafter.driver, "policy", policy or drafter.driver.policy)
        patch.setattr(drafter, "_wants_drafts", drafter.driver.policy.most > 0)
        for _ in range(2):
            link.receive()
        yield seen
        link.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Held-out questions, as token ids."""
    asked = questions(("schema", "extract", "report"), "heldout", 4)
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    return [encode_prompt(tokenizer, each.prompt) for each in asked]


@pytest.fixture(scope="module")
def plain() -> Engine:
    return plain_engine(TARGET)


@pytest.fixture(scope="module")
def remote() -> Engine:
    return remote_engine()


def draft_engine(model: str, ahead: int) -> DraftWorker:
    """A worker with an engine of a checkpoint."""
    options: dict[str, Any] = dict(max_model_len=512, max_num_seqs=8, skip_tokenizer_init=True)
    options["additional_config"] = {"dllm": {"draft_worker": True}}
    engine = get_engine(CHECKPOINTS / model, **options)
    return DraftWorker(EngineDrafts(engine.llm.llm_engine), ahead)


# --- the same text --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "ahead"),
    [("tiny-ar", 0), ("tiny-ar", NUM_DRAFTS + 1), ("tiny-dllm", 0)],
    ids=["autoregressive", "running ahead", "diffusion"],
)
def test_greedy_output_is_that_of_plain_decoding(plain, remote, prompts, model, ahead):
    remote.reset_prefix_cache()
    worker = draft_engine(model, ahead)
    steps = count_steps(remote)
    expected = plain.generate(prompts, greedy(40))
    with drafted_by(remote, worker) as seen:
        assert remote.generate(prompts, greedy(40)) == expected
        # Not before the next batch does the worker hear that they are over.
        remote.generate([[1, 2, 3]], greedy(2))
    kept = seen.num("drafts")
    assert kept > (60 if model == "tiny-dllm" else 200)
    # 4 at once, 12 requests, 40 tokens: 120 steps without drafts.
    assert count_steps(remote) - steps < (90 if model == "tiny-dllm" else 45)


def count_steps(engine: Engine) -> int:
    return engine.scheduler.current_step


# --- whatever is drafted, and whatever happens ----------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """Random weights: small, and any token may follow."""
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def alone(target) -> Engine:
    """The random target without drafts."""
    return plain_engine(target)


@pytest.fixture(scope="module")
def small(target) -> Engine:
    """The random target with remote drafts, and a cache too small for four long requests."""
    return remote_engine(target, num_gpu_blocks_override=24)


def oracle(alone: Engine, prompts: Sequence[list[int]], num_tokens: int):
    """A draft that is right for these prompts, with every fifth draft wrong."""
    answers = alone.generate(prompts, greedy(num_tokens))
    texts = [given + answer for given, answer in zip(prompts, answers, strict=True)]

    def draft(text: list[int], count: int) -> list[int]:
        found = next((each for each in texts if each[: len(text)] == text), [])
        places = range(len(text), min(len(text) + count, len(found)))
        return [(found[place] + (place % 5 == 0)) % 512 for place in places]

    return draft, answers


def half_right(texts: Sequence[list[int]]):
    """A draft: none to three right drafts for these texts, and two that are wrong."""

    def draft(text: list[int], count: int) -> list[int]:
        found = next((each for each in texts if each[: len(text)] == text), text)
        right = found[len(text) : len(text) + count]
        return [*right[: len(text) % 4], *([17] * 2)]

    return draft


def test_hostile_replies_change_no_token(alone, small):
    small.reset_prefix_cache()
    prompts = [prompt(length, length) for length in (3, 40, 90, 11)]
    with drafted_by(small, Liar()) as seen:
        assert small.generate(prompts, greedy(60)) == alone.generate(prompts, greedy(60))
    assert seen.num("drafts") > 100 and seen.num("refused") > 0


def test_nobody_is_asked_behind_steps_whose_drafts_nobody_uses(alone, small):
    """A prompt in chunks, and the last token. vLLM leaves out no drafts without KV of their own."""
    assert not getattr(small.scheduler, "can_skip_drafts", False)  # from 0.33 on
    small.reset_prefix_cache()
    counts = small.scheduler.remote.counts
    counts.take()
    given = prompt(150, 8)
    with drafted_by(small, Liar()):
        assert small.generate([given], greedy(2)) == alone.generate([given], greedy(2))
        assert not {"draft_passes", "draft_widths"} & {name for name, _ in counts}
        assert small.generate([given], greedy(9)) == alone.generate([given], greedy(9))
    assert counts["draft_passes", ""] > 0


def test_preempted_requests_lose_nothing(alone, small, monkeypatch):
    """Nor their seeds and grammars: a request reads its own answer again, and goes on."""
    small.reset_prefix_cache()
    prompts = [prompt(150, 10 + index) for index in range(4)]
    names = ("greedy", "sampled", "sampled schema", "regex")
    params = [greedy(60, **CASES[name]) for name in names]
    expected = alone.generate(prompts, params)
    texts = [given + answer for given, answer in zip(prompts, expected, strict=True)]
    preempted = record_calls(monkeypatch, small.scheduler, "_preempt_request")
    with drafted_by(small, Liar(half_right(texts))) as seen:
        assert small.generate(prompts, params) == expected
    assert preempted and seen.num("drafts") > 100


def test_sampling_parameters_do_the_same_with_drafts(alone, small):
    """Half of the drafts are right. So are those that a grammar, or a stop token, cuts."""
    small.reset_prefix_cache()
    prompts = [prompt(3, salt) for salt, _ in enumerate(CASES)]
    params = [greedy(24, **case) for case in CASES.values()]
    expected = alone.generate(prompts, params)
    texts = [given + answer for given, answer in zip(prompts, expected, strict=True)]

    with drafted_by(small, Liar(half_right(texts))) as seen:
        found = small.generate(prompts, params)
    assert dict(zip(CASES, found, strict=True)) == dict(zip(CASES, expected, strict=True))
    assert seen.num("drafts") > 60


# --- widths ---------------------------------------------------------------------------------------


def test_adaptive_widths_change_no_token(small, alone):
    """Costs that make wide drafts pay where they were right, and none where they were wrong."""
    small.reset_prefix_cache()
    prompts = [prompt(30, salt) for salt in range(4)]
    draft, answers = oracle(alone, prompts[:2], 60)
    answers += alone.generate(prompts[2:], greedy(60))
    policy = AdaptiveWidth(NUM_DRAFTS, 4, reads_confidence=False)
    policy.costs = FixedCosts(NUM_DRAFTS, plain=3.0, drafting=3.1, per_block=2.0)
    liar = Liar(lambda text, count: draft(text, count) or [17] * count)
    with drafted_by(small, liar, policy) as seen:
        assert small.generate(prompts, greedy(60)) == answers
    assert len({*seen.widths}) > 2, seen.widths
