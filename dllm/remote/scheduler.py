"""vLLM's scheduler, which asks draft workers for the drafts that it schedules.

It asks, and not the worker of the target, so that every rank gets the same drafts with the schedule
and nothing is read back from a device. One engine core has one set of connections. Step by step:

    admit    requests that begin: their prompts are sent while the target reads them itself
    follow   behind a step of the target: learn from it, and ask for what comes next
    take     before the next step is scheduled: the drafts to verify

The width policy is the DFlash drafter's (``drafter.widths``). It alone decides whether drafts are
asked for and how long a step waits for them, within the deadline of the server's options. It learns
from every wait: the time is the cost of drafting, and a draft that did not come is as useless as
one that is rejected.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

from dllm.drafter.metrics import send_drafting
from dllm.drafter.scheduler import DraftingScheduler, StepRows
from dllm.drafter.widths.driver import WidthDriver
from dllm.remote.address import Address, parse
from dllm.remote.client import Client, DraftRequest
from dllm.remote.dialing import dialer
from dllm.remote.discovery import Following, watch_dynamo
from dllm.remote.keys import Keys
from dllm.remote.link import Link
from dllm.remote.wire import reply_bytes
from dllm.settings.remote import WHERE
from dllm.settings.server import options_of


class RemoteDrafter:
    """Drafts for one engine core; a step waits ``deadline_s`` at most.

    The policy of ``driver`` does not read the drafter's confidence, because none comes with these
    drafts. What is drafted is added to its counts, as for a DFlash drafter: ``drafting_seconds`` is
    the time waited, ``draft_passes`` are steps that asked.
    """

    def __init__(self, client: Client, driver: WidthDriver, deadline_s: float) -> None:
        self.client, self.driver, self.counts = client, driver, driver.counts
        self._deadline_s = deadline_s
        self._requests: dict[str, DraftRequest] = {}  # of all requests of the last step
        self._short: set[str] = set()  # got fewer drafts than the policy would have verified
        self._wants_drafts = driver.policy.most > 0  # behind a step, what the policy says
        self._wait_s = deadline_s
        self._waited = False  # for drafts, behind the last step

    def admit(self, texts: Mapping[str, Sequence[int]]) -> None:
        """Send prompts that the target begins to read, so that the first drafts are not late.

        The target's first token is its own: one more draft is asked for.
        """
        if texts and self._wants_drafts:
            requests = {
                name: DraftRequest(tokens, self.driver.policy.most + 1)
                for name, tokens in texts.items()
            }
            self.client.ask(requests, self._deadline_s)

    def follow(
        self,
        requests: dict[str, DraftRequest],
        in_prompt: np.ndarray,
        verified: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        """Learn from a step, and ask for drafts of the next one if the policy wants any.

        ``requests`` of the step: what may be of use in the next one. The rest is as
        ``VerifiedStep``.
        """
        self._requests = requests
        self.driver.keep(requests)
        if self.driver.policy.reads_outcomes:
            # One more draft counts as rejected where fewer came in time than the policy would have
            # verified, or it would go on to expect what a slow worker cannot deliver.
            short = np.array([name in self._short for name in requests], dtype=np.int64)
            rows = list(requests), in_prompt, verified + short, accepted
            self.driver.observe(*rows, self._waited)
        self._waited = False
        useful, asking = self._useful, {}
        if useful:
            self._wants_drafts = self.driver.plan(useful)
        if useful and self._wants_drafts:
            self._wait_s = max(0.0, min(self._deadline_s, self.driver.worth_s(useful)))
            most = self.driver.policy.most
            asking = {
                name: DraftRequest(tokens, min(want, most))
                for name, (tokens, want) in useful.items()
            }
        self.client.ask(asking, self._wait_s)
        if asking:
            self.counts.add("draft_passes")

    def take(self) -> tuple[list[str], list[list[int]]]:
        """The drafts to verify of each request of the last step; waits for them if need be."""
        useful, requests, self._requests, self._short = self._useful, self._requests, {}, set()
        drafts: dict[str, list[int]] = {}
        if useful and self._wants_drafts:
            drafts = self._collect(useful)
            if not drafts:
                self.driver.policy.note_wait(None)
        self.driver.count([drafts.get(name, []) for name in useful])
        return list(requests), [drafts.get(name, []) for name in requests]

    @property
    def _useful(self) -> dict[str, DraftRequest]:
        """The requests of the last step that can use drafts."""
        return {name: request for name, request in self._requests.items() if request.want}

    def _collect(self, requests: Mapping[str, DraftRequest]) -> dict[str, list[int]]:
        """In time, cut to the widths of the policy, for all requests; none if nobody is there."""
        waited_s = self.client.collect(requests, self._wait_s)
        self.counts.add("drafting_seconds", waited_s)
        sessions = {name: self.client.sessions[name] for name in requests}
        drafts = {name: sessions[name].usable(request) for name, request in requests.items()}
        self.counts.add("drafted_tokens", sum(map(len, drafts.values())))
        is_expected = {name: drafts[name] or sessions[name].is_asked for name in requests}
        if not any(is_expected.values()):
            return {}
        self.driver.policy.note_wait(waited_s)
        self._waited = True
        widths = dict(zip(requests, self.driver.widths(requests), strict=True))
        for name, request in requests.items():
            if is_expected[name] and len(drafts[name]) < min(widths[name], request.want):
                self._short.add(name)
            drafts[name] = drafts[name][: widths[name]]
            worker = sessions[name].link
            if drafts[name] and worker is not None:
                worker.count("drafts", len(drafts[name]))
        return drafts


class RemoteScheduler(DraftingScheduler):
    """The scheduler of a target, with what it asks of draft workers before and behind each step."""

    reads_confidence = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.remote, self.following = make_drafter(self.vllm_config, self.driver)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self.following is not None:
            self.following.update(self.remote.client)
        output = super().schedule(throttle_prefills)
        begun = (self.requests[new.req_id] for new in output.scheduled_new_reqs)
        self.remote.admit({each.request_id: each.all_token_ids for each in begun if _is_text(each)})
        return output

    @property
    def _reads_steps(self) -> bool:
        return True

    def _plan(self, scheduled: SchedulerOutput) -> None:
        """Nothing yet: drafts are asked for when the step's outcome is known."""

    def _follow(self, step: StepRows, accepted: np.ndarray) -> None:
        self.remote.client.keep(self.requests)
        requests = {name: self._draft_request(name) for name in step.names}
        self.remote.follow(requests, step.in_prompt, step.verified, accepted)

    def _draft_request(self, name: str) -> DraftRequest:
        """A request's tokens, and how many drafts its next step may verify and gain from."""
        request = self.requests.get(name)
        if request is None:
            return DraftRequest([], 0)
        tokens, is_running = request.all_token_ids, request.status == RequestStatus.RUNNING
        if not is_running or request.is_prefill_chunk or not _is_text(request):
            return DraftRequest(tokens, 0)
        left = min(
            request.max_tokens - request.num_output_tokens, self.max_model_len - request.num_tokens
        )
        return DraftRequest(tokens, max(0, min(self.num_spec_tokens, left - 1)))

    def _cut(self, drafts: DraftTokenIds) -> DraftTokenIds:
        """The drafts of the draft workers. The target's own worker has none."""
        return DraftTokenIds(*self.remote.take())

    def _send_counts(self, stats: SchedulerStats) -> None:
        workers = {link.address: not link.is_out for link in self.remote.client.links}
        send_drafting(stats, self._counts.take(), workers)


def _is_text(request: Request) -> bool:
    """Whether a request's token ids are all that its model reads of its prompt."""
    return request.prompt_embeds is None and not request.pooling_params


def make_drafter(
    vllm_config: VllmConfig, driver: WidthDriver
) -> tuple[RemoteDrafter, Following | None]:
    """The drafter of a server's options, connected to its workers; and what follows Dynamo's list.

    Raises ValueError: the folder of keys is not as it should be, a worker's host is not known, or
    Dynamo's runtime is not there.
    """
    options = options_of(vllm_config).remote
    assert options is not None, "checked at start"
    num_slots = vllm_config.scheduler_config.max_num_seqs
    deadline_s = 1e-3 * options.deadline_ms
    keys = None if options.keys is None else Keys(options.keys)

    def link(address: Address) -> Link:
        dial = dialer(address, keys, reply_bytes(num_slots))
        return Link(str(address), dial, deadline_s, driver.counts)

    links = [link(parse(each, options.keys, f"{WHERE}: workers")) for each in options.workers]
    client = Client(links, vllm_config.model_config.get_vocab_size(), driver.counts)
    following = None
    if options.discovery == "dynamo":
        following = Following(watch_dynamo(), link, options.keys)
    return RemoteDrafter(client, driver, deadline_s), following
