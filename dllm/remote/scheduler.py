"""vLLM's scheduler, which asks draft workers for the drafts that it schedules.

It asks, and not the worker of the target, so that every rank gets the same drafts with the schedule
and nothing is read back from a device. One engine core has one set of connections.
"""

from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from dllm.drafter.metrics import Counts, send_drafting
from dllm.drafter.scheduler import DraftingScheduler
from dllm.drafter.widths.adaptive import AdaptiveWidth
from dllm.drafter.widths.policy import FixedWidth, VerifiedStep, WidthPolicy
from dllm.remote.address import Address, parse
from dllm.remote.client import Client, Link, Wish
from dllm.remote.discovery import Following, watch_dynamo
from dllm.remote.drafter import RemoteDrafter
from dllm.remote.keys import Keys
from dllm.remote.stream import dialer
from dllm.remote.wire import reply_bytes
from dllm.settings.remote import WHERE
from dllm.settings.server import PluginOptions


class RemoteScheduler(DraftingScheduler):
    """Schedules as vLLM's; drafts come from ``remote``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.remote, self.following = make_drafter(self.vllm_config, self._counts)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """vLLM's schedule; prompts that begin are sent to the workers."""
        if self.following is not None:
            self.following.update(self.remote.client)
        output = super().schedule(throttle_prefills)
        begun = (self.requests[new.req_id] for new in output.scheduled_new_reqs)
        self.remote.admit({each.request_id: each.all_token_ids for each in begun if _is_text(each)})
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """vLLM's; then drafts behind the new tokens are asked for."""
        in_prompt = self._in_prompt(scheduler_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.remote.client.keep(self.requests)
        names = list(scheduler_output.num_scheduled_tokens)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        verified = np.array([len(drafts.get(name, ())) for name in names], dtype=np.int64)
        # vLLM has cut tokens behind the end of an answer: a draft that ends it counts as rejected.
        sampled, row_of = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        num_sampled = np.array([len(sampled[row_of[name]]) if sampled else 0 for name in names])
        accepted = np.where(verified > 0, np.clip(num_sampled - 1, 0, verified), 0)
        slots = self.remote.slots(names)
        step = VerifiedStep(slots, in_prompt, num_sampled > 0, verified, accepted)
        self.remote.follow(step, {name: self._wish(name) for name in names})
        return outputs

    def _in_prompt(self, scheduled: SchedulerOutput) -> np.ndarray:
        """``[rows]`` bool: the request reads more than its last token and drafts in a step."""
        found = []
        for name, count in scheduled.num_scheduled_tokens.items():
            request = self.requests.get(name)
            num_drafts = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
            found.append(request is None or not request.num_output_tokens or count > 1 + num_drafts)
        return np.array(found, dtype=bool)

    def _wish(self, name: str) -> Wish:
        """A request's tokens, and how many drafts its next step may verify and gain from."""
        request = self.requests.get(name)
        if request is None:
            return Wish([], 0)
        tokens, is_running = request.all_token_ids, request.status == RequestStatus.RUNNING
        if not is_running or request.is_prefill_chunk or not _is_text(request):
            return Wish(tokens, 0)
        left = min(
            request.max_tokens - request.num_output_tokens, self.max_model_len - request.num_tokens
        )
        return Wish(tokens, max(0, min(self.num_spec_tokens, left - 1)))

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Takes the place of the worker's drafts, which are nothing: those of the draft workers."""
        super().update_draft_token_ids(DraftTokenIds(*self.remote.take()))

    def _send_counts(self, stats: SchedulerStats) -> None:
        """The counts of every drafter, and which draft workers are asked."""
        workers = {link.address: not link.is_out for link in self.remote.client.links}
        send_drafting(stats, self._counts.take(), workers)


def _is_text(request: Request) -> bool:
    """Whether a request's token ids are all that its model reads of its prompt."""
    return request.prompt_embeds is None and not request.pooling_params


def make_drafter(vllm_config: VllmConfig, counts: Counts) -> tuple[RemoteDrafter, Following | None]:
    """What a server's options ask for, connected to its workers; and what follows Dynamo's list.

    Raises:
        ValueError: the folder of keys is not as it should be, a worker's host is not known, or
            Dynamo's runtime is not there.
    """
    options = PluginOptions.from_vllm(vllm_config).remote
    assert options is not None, "checked at start"
    num_drafts = vllm_config.num_speculative_tokens
    num_slots = vllm_config.scheduler_config.max_num_seqs
    deadline_s = 1e-3 * options.deadline_ms
    keys = None if options.keys is None else Keys(options.keys)

    def link(address: Address) -> Link:
        dial = dialer(address, keys, reply_bytes(num_slots))
        return Link(str(address), dial, deadline_s, counts)

    links = [link(parse(each, options.keys, f"{WHERE}: workers")) for each in options.workers]
    client = Client(links, vllm_config.model_config.get_vocab_size(), counts)
    policy: WidthPolicy = FixedWidth(num_drafts, options.width)
    if options.policy == "adaptive":
        policy = AdaptiveWidth(num_drafts, num_slots, False, options.hysteresis)
    following = None
    if options.discovery == "dynamo":
        following = Following(watch_dynamo(), link, options.keys)
    return RemoteDrafter(client, policy, num_slots, deadline_s, counts), following
