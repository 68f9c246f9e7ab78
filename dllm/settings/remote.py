"""A target's options for remote drafts: ``--additional-config '{"dllm": {"remote": {...}}}'``."""

from collections.abc import Sequence
from dataclasses import dataclass

from dllm.settings.checks import FloatRange, check_int, known_fields, refuse_value
from dllm.settings.drafting import HYSTERESES, DrafterOptions

WHERE = '--additional-config: "dllm": "remote"'
POLICIES = ("adaptive", "fixed")
MAX_DRAFTS = 127  # of a request, in a step
DISCOVERIES = ("static", "dynamo")
DEADLINES_MS = FloatRange(0.0, 10_000.0, excludes_low=True)


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

    workers: Sequence[str] = ()
    deadline_ms: float = 50.0
    policy: str = "adaptive"
    width: int | None = None
    hysteresis: float = DrafterOptions.hysteresis
    keys: str | None = None
    discovery: str = "static"

    def __post_init__(self) -> None:
        for key, allowed in (("policy", POLICIES), ("discovery", DISCOVERIES)):
            if getattr(self, key) not in allowed:
                refuse_value(f"{WHERE}: {key}", getattr(self, key), ", ".join(allowed))
        if self.deadline_ms not in DEADLINES_MS:
            refuse_value(f"{WHERE}: deadline_ms", self.deadline_ms, str(DEADLINES_MS))
        if self.hysteresis not in HYSTERESES:
            refuse_value(f"{WHERE}: hysteresis", self.hysteresis, str(HYSTERESES))
        if self.width is not None:
            check_int(f"{WHERE}: width", self.width, 0)
            if self.policy != "fixed":
                raise ValueError(f'{WHERE}: width belongs to the policy "fixed". Leave it out.')
        if self.keys is not None and not isinstance(self.keys, str):
            refuse_value(f"{WHERE}: keys", self.keys, "a folder's path")
        self._check_workers()

    def _check_workers(self) -> None:
        is_list = isinstance(self.workers, list | tuple)
        if not is_list or not all(isinstance(each, str) for each in self.workers):
            refuse_value(f"{WHERE}: workers", self.workers, "a list of addresses")
        if len(set(self.workers)) < len(self.workers):
            refuse_value(f"{WHERE}: workers", list(self.workers), "each address once")
        if (self.discovery == "dynamo") == bool(self.workers):
            raise ValueError(
                f'{WHERE}: name either "workers" or "discovery": "dynamo", which finds them; got '
                f"workers = {list(self.workers)} and discovery = {self.discovery!r}."
            )

    def check_against(self, num_drafts: int) -> None:
        """Refuse more drafts than can be asked for, and a width above num_speculative_tokens.

        Raises:
            ValueError: names the value and what is allowed.
        """
        if num_drafts > MAX_DRAFTS:
            refuse_value("num_speculative_tokens", num_drafts, f"at most {MAX_DRAFTS} with {WHERE}")
        if self.width is not None and self.width > num_drafts:
            refuse_value(
                f"{WHERE}: width",
                self.width,
                f"0 to {num_drafts} (num_speculative_tokens)",
            )

    @classmethod
    def from_given(cls, given: object) -> "RemoteOptions":
        """The options from the parsed JSON object.

        Raises:
            ValueError: an unknown key (names the most similar known one) or a value out of range.
        """
        if isinstance(given, cls):
            return given
        return cls(**known_fields(cls, given, WHERE))
