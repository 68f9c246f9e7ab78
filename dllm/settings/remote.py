"""A target's options for remote drafts: ``--additional-config '{"dllm": {"remote": {...}}}'``."""

from collections.abc import Sequence
from typing import Annotated, Literal, get_args

from pydantic import Field
from pydantic.dataclasses import dataclass

from dllm.settings.checks import refuse_value, refuse_wide
from dllm.settings.options import CHECKED, Natural

WHERE = '--additional-config: "dllm": "remote"'
MAX_DRAFTS = 127  # of a request, in a step
Discovery = Literal["static", "dynamo"]
DISCOVERIES = get_args(Discovery)


@dataclass(frozen=True, config=CHECKED)
class RemoteOptions:
    """The ``remote`` object of the options."""

    workers: Sequence[str] = ()
    """`unix:///PATH`, `/PATH`, `~/PATH` or `tcp://HOST:PORT`; with several, each request belongs to
    one, on [this machine](#what-it-promises) if it can (rendezvous hashing)"""

    deadline_ms: Annotated[float, Field(gt=0, le=10_000)] = 50.0
    """how long a step waits at most; `adaptive` waits no longer than drafts are worth"""

    policy: Literal["adaptive", "fixed"] = "adaptive"
    """widths, 0 included, as for a [DFlash drafter](drafter.md#which-policy); or `fixed` with
    `width`"""

    width: Natural | None = None
    """of `fixed`: drafts verified in each step, by default num_speculative_tokens"""

    keys: str | None = None
    """folder of `dllm draft-keys`; needed for workers on other machines"""

    discovery: Discovery = "static"
    """`static`: the addresses above; `dynamo`: [finds the workers](#workers-that-come-and-go)"""

    def __post_init__(self) -> None:
        if self.width is not None and self.policy != "fixed":
            raise ValueError(f'{WHERE}: width belongs to the policy "fixed". Leave it out.')
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
        refuse_wide(WHERE, self.width, num_drafts)
