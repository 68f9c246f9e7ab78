"""A server's options for drafting: ``--additional-config '{"dllm": {"drafter": {...}}}'``.

They are checked once, when the server starts. The number of tokens in a draft block (N) is vLLM's
own option ``num_speculative_tokens``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from dllm.settings.checks import FloatRange, check_int, known_fields, refuse_value

# "architectures" in a drafter's config.json. vLLM uses this name for both checkpoint formats.
DRAFTER_ARCHITECTURE = "DFlashDraftModel"
WHERE = '--additional-config: "dllm": "drafter"'
POLICIES = ("fixed", "adaptive", "pilot")
# Options that only one policy has; any other policy refuses them.
POLICY_OPTIONS = {
    "width": "fixed",
    "confidence": "adaptive",
    "hysteresis": "adaptive",
    "pilot": "pilot",
}
HYSTERESES = FloatRange(0.0, 1.0)  # allowed values of `hysteresis`


@dataclass(frozen=True)
class DrafterOptions:
    """The ``drafter`` object of the options.

    Attributes:
        policy: decides how many drafts of a request the target verifies (its width); one of
            ``POLICIES`` (``dllm.drafter.widths``).
        width: of the policy ``fixed``: drafts verified in each step, 0 to num_speculative_tokens
            (the default). At 0 nothing is drafted.
        confidence: of the policy ``adaptive``: use the drafter's probability of each draft in the
            decision what to verify.
        hysteresis: of the policy ``adaptive``: drafting starts again when it is faster than plain
            decoding by this share, and stops when it is slower by this share.
        pilot: of the policy ``pilot``: folder that ``dllm train pilot`` wrote.
        window: number of context tokens before the draft block that the drafter attends to; earlier
            ones leave its KV cache. None keeps what the checkpoint says.
        mask_token_id, mask_token: the token at undecided positions, if the checkpoint does not name
            one.
        record: folder in which tokens and hidden states of live traffic are recorded, for
            ``dllm calibrate --from-buffer``; None records nothing. They reveal what users wrote.
        record_layers: for a server without a drafter: layers of the target (0-based) whose outputs
            are recorded; a drafter says itself which ones it reads.
        record_mb: limit of that folder, MB (10^6 bytes); the oldest recordings are deleted first.
        renew: folder in which ``dllm recalibrate`` publishes newer drafters; the server takes them
            while it runs (``dllm.drafter.renewal``). None keeps the drafter that it started with.
    """

    policy: str = "fixed"
    width: int | None = None
    confidence: bool = True
    hysteresis: float = 0.03
    pilot: str | None = None
    window: int | None = None
    mask_token_id: int | None = None
    mask_token: str | None = None
    record: str | None = None
    record_layers: Sequence[int] | None = None
    record_mb: int = 1000
    renew: str | None = None

    def __post_init__(self) -> None:
        for key, at_least in (("width", 0), ("window", 1), ("mask_token_id", 0)):
            if getattr(self, key) is not None:
                check_int(f"{WHERE}: {key}", getattr(self, key), at_least)
        check_int(f"{WHERE}: record_mb", self.record_mb, 1)
        self._check_record_layers()
        for key in ("mask_token", "record", "renew"):
            if getattr(self, key) is not None and not isinstance(getattr(self, key), str):
                refuse_value(f"{WHERE}: {key}", getattr(self, key), "a string")
        if self.policy not in POLICIES:
            refuse_value(f"{WHERE}: policy", self.policy, ", ".join(POLICIES))
        self._check_policy()

    def _check_record_layers(self) -> None:
        """Refuse anything but ascending layers; and layers without a folder to record to."""
        layers = self.record_layers
        if layers is None:
            return
        is_list = isinstance(layers, list | tuple) and all(type(i) is int for i in layers)
        if not is_list or not layers or list(layers) != sorted({i for i in layers if i >= 0}):
            allowed = "a list of layers of the target, 0-based and ascending"
            refuse_value(f"{WHERE}: record_layers", layers, allowed)
        if self.record is None:
            raise ValueError(f'{WHERE}: record_layers needs "record": the folder to write to.')

    def _check_policy(self) -> None:
        """Refuse wrong values of the policies' options, and options of another policy."""
        if not isinstance(self.confidence, bool):
            refuse_value(f"{WHERE}: confidence", self.confidence, "true or false")
        if self.hysteresis not in HYSTERESES:
            refuse_value(f"{WHERE}: hysteresis", self.hysteresis, str(HYSTERESES))
        if self.pilot is not None and not isinstance(self.pilot, str):
            refuse_value(f"{WHERE}: pilot", self.pilot, "a folder's path")
        if self.policy == "pilot" and self.pilot is None:
            raise ValueError(
                f'{WHERE}: policy "pilot" needs "pilot": the folder that `dllm train pilot --out` '
                "wrote."
            )
        for field in fields(self):
            owner = POLICY_OPTIONS.get(field.name, self.policy)
            if owner != self.policy and getattr(self, field.name) != field.default:
                raise ValueError(
                    f"{WHERE}: {field.name} = {getattr(self, field.name)!r} belongs to the policy "
                    f'"{owner}", and "policy" is "{self.policy}". Leave one of them out.'
                )

    @classmethod
    def from_given(cls, given: object) -> "DrafterOptions":
        """The options from the parsed JSON object.

        Raises:
            ValueError: an unknown key (names the most similar known one) or a value out of range.
        """
        if isinstance(given, cls):
            return given
        return cls(**known_fields(cls, given, WHERE))

    def check_against(self, num_drafts: int, is_trimmed_by_vllm: bool) -> None:
        """Refuse options that do not fit the server's speculative config.

        Args:
            num_drafts: num_speculative_tokens.
            is_trimmed_by_vllm: vLLM chooses how many drafts are verified
                (enable_adaptive_verification).

        Raises:
            ValueError: names both values.
        """
        if self.width is not None and self.width > num_drafts:
            raise ValueError(
                f"{WHERE}: width = {self.width}, but num_speculative_tokens is {num_drafts}; "
                f"allowed: 0 to {num_drafts}."
            )
        if is_trimmed_by_vllm and (self.record is not None or self.renew is not None):
            raise ValueError(
                f"{WHERE}: record or renew with enable_adaptive_verification: what is verified is "
                "then decided on the device, and nobody else knows it. Leave one of them out."
            )
        if is_trimmed_by_vllm and not always_verifies_all(self, num_drafts):
            raise ValueError(
                f"{WHERE}: policy = {self.policy!r}, width = {self.width} with "
                "enable_adaptive_verification: with it, vLLM decides how many drafts are verified. "
                "Leave one of them out."
            )


def always_verifies_all(options: DrafterOptions, num_drafts: int) -> bool:
    """Whether all drafts of every row are verified in each step.

    Then the scheduler knows every step's size in advance, which asynchronous scheduling needs.
    """
    return options.policy == "fixed" and options.width in (None, num_drafts)
