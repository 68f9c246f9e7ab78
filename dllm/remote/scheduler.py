"""vLLM's scheduler, which asks draft workers for the drafts that it schedules.

It asks, and not the worker of the target, so that every rank gets the same drafts with the schedule
and nothing is read back from a device. One engine core has one set of connections.
"""

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from dllm.drafter.metrics import CountedDrafts, DraftingCounts
from dllm.drafter.scheduler import DraftingScheduler
from dllm.drafter.widths.adaptive import AdaptiveWidth
from dllm.drafter.widths.policy import FixedWidth, WidthPolicy
from dllm.remote.address import Address, parse
from dllm.remote.client import Client, Link
from dllm.remote.discovery import Child, Following
from dllm.remote.drafter import RemoteDrafter, StepRow
from dllm.remote.keys import Keys
from dllm.remote.metrics import Changes, counts_of, send_remote
from dllm.remote.ngram import Ngrams
from dllm.remote.stream import dialer
from dllm.remote.wire import reply_bytes
from dllm.settings.remote import WHERE
from dllm.settings.server import PluginOptions


class RemoteScheduler(DraftingScheduler):
    """Schedules as vLLM's; drafts come from ``remote``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.remote, self.following = make_drafter(self.vllm_config)
        self._changes = Changes()

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """vLLM's schedule; prompts that begin are sent to the workers."""
        if self.following is not None:
            self.following.update(self.remote.client)
        output = super().schedule(throttle_prefills)
        begun = (self.requests[new.req_id] for new in output.scheduled_new_reqs)
        self.remote.admit((each.request_id, each.all_token_ids) for each in begun if _is_text(each))
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """vLLM's; then drafts behind the new tokens are asked for."""
        in_prompt = self._in_prompt(scheduler_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.remote.end(self.remote.client.names - self.requests.keys())
        sampled = model_runner_output.sampled_token_ids
        rows = []
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(name)
            rows.append(
                StepRow(
                    name,
                    request.all_token_ids if request is not None else [],
                    in_prompt.get(name, True),
                    len(sampled[model_runner_output.req_id_to_index[name]]) if sampled else 0,
                    len(scheduler_output.scheduled_spec_decode_tokens.get(name, ())),
                    self._limit(request),
                )
            )
        self.remote.follow(rows)
        return outputs

    def _in_prompt(self, scheduled: SchedulerOutput) -> dict[str, bool]:
        """Which requests of a step read more than their last token and drafts."""
        found = {}
        for name, count in scheduled.num_scheduled_tokens.items():
            request = self.requests.get(name)
            num_drafts = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
            found[name] = request is None or not request.num_output_tokens or count > 1 + num_drafts
        return found

    def _limit(self, request: Request | None) -> int:
        """Drafts that a request's next step may verify and gain from."""
        if request is None or request.status != RequestStatus.RUNNING or request.is_prefill_chunk:
            return 0
        if not _is_text(request):
            return 0
        left = min(
            request.max_tokens - request.num_output_tokens, self.max_model_len - request.num_tokens
        )
        return max(0, min(self.num_spec_tokens, left - 1))

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Takes the place of the worker's drafts, which are nothing: those of the draft workers."""
        names, drafts = self.remote.take()
        counts, self.remote.counts = self.remote.counts, DraftingCounts.none(self.num_spec_tokens)
        super().update_draft_token_ids(CountedDrafts(names, drafts, counts))

    def _send_counts(self, stats: SchedulerStats) -> None:
        """The counts of every drafter, and those of the draft workers."""
        super()._send_counts(stats)
        send_remote(stats, self._changes.of(counts_of(self.remote)))


def _is_text(request: Request) -> bool:
    """Whether a request's token ids are all that its model reads of its prompt."""
    return request.prompt_embeds is None and not request.pooling_params


def make_drafter(vllm_config: VllmConfig) -> tuple[RemoteDrafter, Following | None]:
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
        return Link(str(address), dialer(address, keys, reply_bytes(num_slots)), deadline_s)

    links = [link(parse(each, options.keys, f"{WHERE}: workers")) for each in options.workers]
    client = Client(links, vllm_config.model_config.get_vocab_size())
    ngrams = Ngrams(options.ngram_min, options.ngram_max) if options.fallback == "ngram" else None
    policy: WidthPolicy = FixedWidth(num_drafts, options.width)
    if options.policy == "adaptive":
        policy = AdaptiveWidth(num_drafts, num_slots, hysteresis=options.hysteresis)
    following = None
    if options.discovery == "dynamo":
        following = Following(Child.of_dynamo("watch"), link, options.keys)
    return RemoteDrafter(client, ngrams, policy, num_drafts, num_slots, deadline_s), following
