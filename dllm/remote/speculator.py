"""The speculator of a target with remote drafts, which are the scheduler's."""

from dllm.drafter.scheduled import ScheduledDrafts


class RemoteDrafts(ScheduledDrafts):
    """The speculator that ``--speculative-config`` names: method "custom_class", this as model."""
