"""Asynchronous scheduling against its synchronous twin, on a worker that models KV pages.

Both schedulers get the same requests, and the same worker state decides what a canvas turns into.
Tokens have to be equal. The worker checks every key that it reads, and after every engine step and
every answer each page of the prefix cache has to hold the causal KV of the tokens that it is known
by.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_block_hash, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from dllm.engine.async_scheduler import CanvasAsyncScheduler
from dllm.engine.scheduler import CanvasScheduler
from tests.patches.test_startup import engine_config
from tests.support.page_worker import CAUSAL, VOCABULARY, PageWorker, Text

CANVAS, PAGE = 4, 4


@dataclass(frozen=True)
class Ask:
    """A request of the simulation.

    Attributes:
        shared, own: tokens of its prompt; many requests start with the same ``shared`` ones.
        arrives: the engine step before which it arrives.
        aborted: how many engine steps later it is aborted, before the answer of that engine step is
            counted.
    """

    shared: int
    own: int
    max_tokens: int
    width: int
    stops: bool
    text: Text
    arrives: int
    aborted: int | None

    def request(self, name: str, hasher: Any) -> Request:
        prompt = [token % VOCABULARY for token in range(self.shared)]
        prompt += [(self.text.seed * 7 + token) % VOCABULARY for token in range(self.own)]
        params = SamplingParams(
            max_tokens=self.max_tokens,
            ignore_eos=True,
            stop_token_ids=[3] if self.stops else None,
            extra_args={"diffusion_canvas_length": self.width},
        )
        return Request(name, prompt, params, None, block_hasher=hasher)


@dataclass(frozen=True)
class Server:
    """The limits of a simulated server."""

    budget: int
    slots: int
    pages: int
    longest: int
    window: int
    longest_chunk: int
    separates: bool
    reset: int | None  # the engine step before which the pages of all requests are dropped
    block_size: int = 1


def scheduler_of(config: Any, server: Server, kind: type[CanvasScheduler]) -> CanvasScheduler:
    """A scheduler with two KV cache groups: full attention, and a sliding window."""
    limits = config.scheduler_config
    limits.max_num_batched_tokens = server.budget
    limits.max_num_scheduled_tokens = None
    limits.max_num_seqs = server.slots
    limits.long_prefill_token_threshold = server.longest_chunk
    limits.async_scheduling = kind is CanvasAsyncScheduler
    config.model_config.max_model_len = limits.max_model_len = server.longest
    config.diffusion_config.canvas_length = canvas_length(server)
    config.model_config.hf_config.block_size = server.block_size
    config.cache_config.block_size = PAGE
    config.cache_config.num_gpu_blocks = server.pages
    config.additional_config = {"dllm": {"separate_passes": server.separates}}
    heads: dict[str, Any] = dict(num_kv_heads=1, head_size=1, dtype=torch.float32)
    full = FullAttentionSpec(block_size=PAGE, **heads)
    sliding = SlidingWindowSpec(block_size=PAGE, sliding_window=server.window, **heads)
    cache = KVCacheConfig(
        num_blocks=server.pages,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["a"], full), KVCacheGroupSpec(["b"], sliding)],
    )
    manager = StructuredOutputManager(config)
    return kind(config, cache, manager, block_size=PAGE, hash_block_size=PAGE)


def canvas_length(server: Server) -> int:
    return server.block_size if server.block_size > 1 else CANVAS


class Simulation:
    """An engine core with a page worker; asynchronous if its scheduler is.

    Attributes:
        tokens: what each request has emitted.
        taken: how often each kind of row and each special case was seen.
    """

    def __init__(self, scheduler: CanvasScheduler, server: Server, asks: Sequence[Ask]) -> None:
        init_none_hash(sha256)
        self.reset, self.canvas_length = server.reset, canvas_length(server)
        self.longest_chunk = max(server.longest_chunk or server.budget, self.canvas_length)
        self.scheduler, self.asks = scheduler, dict(enumerate(asks))
        self.depth = 2 if isinstance(scheduler, CanvasAsyncScheduler) else 1
        texts = {str(number): ask.text for number, ask in self.asks.items()}
        self.worker = PageWorker([None, server.window], PAGE, server.block_size, texts)
        self.taken = self.worker.taken
        self.tokens: dict[str, list[int]] = {name: [] for name in texts}
        self.finished: set[str] = set()
        self._hasher = get_request_block_hasher(PAGE, sha256)
        self._requests: list[Request] = []
        self._hashed: dict[bytes, tuple[int, ...]] = {}  # what pages of the cache are known by
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput, frozenset[str]]] = deque()
        scheduler.log_stats = True
        scheduler.make_stats = self._keep_steps  # type: ignore[method-assign]
        self._steps_counted = 0

    def run(self, most_steps: int = 2000) -> None:
        """Serve every request that is not aborted."""
        aborts: dict[int, list[str]] = {}
        for step in range(most_steps):
            for number, ask in self.asks.items():
                if ask.arrives == step:
                    request = ask.request(str(number), self._hasher)
                    self._requests.append(request)
                    self.scheduler.add_request(request)
                    if ask.aborted is not None:
                        aborts.setdefault(step + ask.aborted, []).append(str(number))
            if step == self.reset:
                dropped = any(slot.pending for slot in self.worker.slots.values())
                self.taken["pages dropped between emission and commit"] += dropped
                assert self.scheduler.reset_prefix_cache(reset_running_requests=True)
            if self.scheduler.has_requests():
                is_alone = sum(self.scheduler.get_request_counts()) == 1
                message = self.scheduler.schedule()
                # vLLM lets a request that is alone take all of the budget.
                longest = max(message.num_scheduled_tokens.values(), default=0)
                assert is_alone or longest <= self.longest_chunk, "long_prefill_token_threshold"
                answer = self.worker.run(message)
                self._in_flight.append((message, answer, self.worker.denoised))
                self._check_pages()
                if len(self._in_flight) < self.depth:
                    continue
            for name in aborts.pop(step, []):
                self._abort(name)
            if self._in_flight:
                self._count(*self._in_flight.popleft())
                self._check_pages()
            elif all(ask.arrives <= step for ask in self.asks.values()):
                break
        else:
            raise AssertionError(f"requests unfinished after {most_steps} engine steps")
        assert not self.scheduler.requests
        used = self.scheduler.kv_cache_manager.block_pool
        assert used.get_num_free_blocks() == used.num_gpu_blocks - 1, "a page leaked"

    def _abort(self, name: str) -> None:
        request = self.scheduler.requests.get(name)
        if request is not None:
            slot = self.worker.slots.get(name)
            self.taken["aborted between emission and commit"] += bool(slot and slot.pending)
            self.taken["aborted in flight"] += request.num_in_flight_tokens > 0
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def _keep_steps(self, steps: Any, *_: Any, **__: Any) -> None:
        """In the place of the scheduler's statistics of an engine step."""
        self._steps_counted = steps.num_drafts if steps is not None else 0

    def _count(
        self, message: SchedulerOutput, answer: ModelRunnerOutput, denoised: frozenset[str]
    ) -> None:
        alive = [self.scheduler.requests.get(name) for name in denoised]
        num_steps = sum(
            not (request.num_stale_output_tokens and request.drop_stale_output)
            for request in alive
            if request is not None
        )
        for name, tokens in zip(answer.req_ids, answer.sampled_token_ids, strict=True):
            request = self.scheduler.requests.get(name)
            if request is not None and tokens and request.num_stale_output_tokens:
                self.taken["block of a preempted request"] += 1
        emitted = {r: len(t) for r, t in zip(answer.req_ids, answer.sampled_token_ids, strict=True)}
        outputs = self.scheduler.update_from_output(message, answer)
        assert self._steps_counted == num_steps, "passes that write KV are no denoise steps"
        for output in outputs[0].outputs if 0 in outputs else ():
            self.tokens[output.request_id] += output.new_token_ids
            is_cut = len(output.new_token_ids) < emitted[output.request_id]
            self.taken["stopped within a block"] += is_cut
            if output.finish_reason is not None:
                self.finished.add(output.request_id)
        if self.depth == 1:
            self.scheduler.update_draft_token_ids(self.worker.drafts(message, self.canvas_length))
        for request in self.scheduler.requests.values():
            self._check_counters(request)

    def _check_counters(self, request: Request) -> None:
        """The canvases in flight are its placeholders; the device agrees when none is."""
        if request.status == RequestStatus.RUNNING and not request.num_stale_output_tokens:
            canvases = [m.scheduled_spec_decode_tokens for m, *_ in self._in_flight]
            in_flight = sum(len(widths.get(request.request_id, ())) for widths in canvases)
            assert request.num_output_placeholders == in_flight
        slot = self.worker.slots.get(request.request_id)
        if slot and request.status == RequestStatus.RUNNING and not request.num_in_flight_tokens:
            assert request.num_computed_tokens == slot.computed
            assert list(request.all_token_ids) == slot.tokens

    def _check_pages(self) -> None:
        for request in self._requests:
            for number, known in enumerate(request.block_hashes):
                end = (number + 1) * PAGE
                self._hashed.setdefault(bytes(known), tuple(request.all_token_ids[:end]))
        for block in self.scheduler.kv_cache_manager.block_pool.blocks:
            if block.block_hash is None:
                continue
            tokens = self._hashed[bytes(get_block_hash(block.block_hash))]
            for place in range(PAGE):
                end = self.worker.end_of_block(len(tokens) - PAGE + place)
                expected = (CAUSAL, tokens[:end])
                assert self.worker.pages[block.block_id, place] == expected, "not causal KV"


@pytest.fixture(scope="module")
def base(checkpoint: Any) -> Any:
    """A configuration; each simulation sets its limits."""
    return engine_config(checkpoint())


texts = st.builds(
    Text, seed=st.integers(0, 10**6), most_steps=st.integers(1, 5), trims=st.booleans()
)
asks = st.builds(
    Ask,
    shared=st.integers(1, 14),
    own=st.integers(0, 6),
    max_tokens=st.integers(1, 24),
    width=st.sampled_from([2, 3, CANVAS, CANVAS]),
    stops=st.booleans(),
    text=texts,
    arrives=st.integers(0, 12),
    aborted=st.none() | st.integers(0, 15),
)


def servers(block_sizes: Sequence[int]) -> Any:
    """Servers of models with blocks of one of these sizes."""
    return st.builds(
        Server,
        budget=st.integers(CANVAS, 24),
        slots=st.integers(1, 6),
        pages=st.integers(26, 48),
        longest=st.integers(24, 40),
        window=st.sampled_from([2, 5, 9]),
        longest_chunk=st.sampled_from([0, 0, CANVAS, 7]),
        separates=st.sampled_from([False, False, True]),
        reset=st.none() | st.integers(2, 20),
        block_size=st.sampled_from(block_sizes),
    )


CASES = {
    "deferred commit",
    "trimmed commit",
    "block before a canvas",
    "block alone",
    "emitted block found in the cache",
    "preempted between emission and commit",
    "block of a preempted request",
    "aborted in flight",
    "aborted between emission and commit",
    "stopped within a block",
    "pages dropped between emission and commit",
}
MET = 2


def simulate(base: Any, server: Server, asks: Sequence[Ask], kind: Any) -> Simulation:
    """Run the requests to their end."""
    run = Simulation(scheduler_of(base, server, kind), server, asks)
    run.run()
    return run


def assert_same_tokens(ours: Simulation, twin: Simulation) -> None:
    for number, ask in ours.asks.items():
        mine, theirs = ours.tokens[str(number)], twin.tokens[str(number)]
        if ask.aborted is None:
            assert mine == theirs
            assert str(number) in ours.finished & twin.finished
        else:  # aborted sooner or later
            length = min(len(mine), len(theirs))
            assert mine[:length] == theirs[:length]


generated = settings(max_examples=600, derandomize=True, database=None, phases=[Phase.generate])


@pytest.mark.parametrize("block_sizes", [(1,), (2, 4)])
def test_tokens_and_pages_equal_those_of_the_synchronous_twin(base, block_sizes):
    taken: Counter[str] = Counter()

    @given(server=servers(block_sizes), asks=st.lists(asks, min_size=1, max_size=8))
    @generated
    def check(server: Server, asks: list[Ask]) -> None:
        twin = simulate(base, server, asks, CanvasScheduler)
        ours = simulate(base, server, asks, CanvasAsyncScheduler)
        assert_same_tokens(ours, twin)
        assert twin.taken["deferred commit"] == 0
        taken.update(ours.taken)

    check()
    expected = CASES | ({"block with its tail"} if block_sizes != (1,) else set())
    assert {case for case, times in taken.items() if times >= MET} == expected
