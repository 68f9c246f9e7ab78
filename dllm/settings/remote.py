"""A target's options for remote drafts: ``--additional-config '{"dllm": {"remote": {...}}}'``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from dllm.settings.checks import (
    FloatRange,
    IntRange,
    Text,
    Values,
    check_fields,
    is_list_of,
    refuse_value,
)
from dllm.settings.drafting import DrafterOptions, Hysteresis

WHERE = '--additional-config: "dllm": "remote"'
MAX_DRAFTS = 127  # of a request, in a step
Discovery = Literal["static", "dynamo"]
DISCOVERIES = get_args(Discovery)
ADDRESSES = Values(lambda given: is_list_of(str, given), "a list of addresses")


@dataclass(frozen=True)
class RemoteOptions:
    """The ``remote`` object of the options.

    Attributes:
        workers: addresses of draft workers, ``unix:///PATH`` or ``tcp://HOST:PORT``.
        deadline_ms: how long a step waits for drafts at most. ``adaptive`` waits no longer than the
            drafts are expected to be worth.
        policy: how many drafts of a request are verified: ``adaptive`` or ``fixed``.
        width: of ``fixed``: drafts verified in each step; num_speculative_tokens if not given.
        hysteresis: of ``adaptive``, as for a DFlash drafter.
        keys: folder of `dllm draft-keys`; needed for workers on other machines.
        discovery: ``static``: the addresses above; ``dynamo``: those that NVIDIA Dynamo lists.
    """

    workers: Annotated[Sequence[str], ADDRESSES] = ()
    deadline_ms: Annotated[float, FloatRange(0.0, 10_000.0, excludes_low=True)] = 50.0
    policy: Literal["adaptive", "fixed"] = "adaptive"
    width: Annotated[int | None, IntRange(0)] = None
    hysteresis: Hysteresis = DrafterOptions.hysteresis
    keys: Text = None
    discovery: Discovery = "static"

    def __post_init__(self) -> None:
        check_fields(self, WHERE)
        if self.width is not None and self.policy != "fixed":
            raise ValueError(f'{WHERE}: width belongs to the policy "fixed". Leave it out.')
        if self.hysteresis != RemoteOptions.hysteresis and self.policy != "adaptive":
            raise ValueError(f'{WHERE}: hysteresis belongs to the policy "adaptive". Leave it out.')
        if len(set(self.workers)) < len(self.workers):
            refuse_value(f"{WHERE}: workers", list(self.workers), "each address once")
        if (self.discovery == "dynamo") == bool(self.workers):
            raise ValueError(
                f'{WHERE}: name either "workers" or "discovery": "dynamo", which finds them; got '
                f"workers = {list(self.workers)} and discovery = {self.discovery!r}."
            )

    def check_against(self, num_drafts: int) -> None:
        """Raises ValueError for too many drafts, or for a width above num_speculative_tokens."""
        if num_drafts > MAX_DRAFTS:
            refuse_value("num_speculative_tokens", num_drafts, f"at most {MAX_DRAFTS} with {WHERE}")
        if self.width is not None and self.width > num_drafts:
            refuse_value(
                f"{WHERE}: width", self.width, f"0 to {num_drafts} (num_speculative_tokens)"
            )
