"""What a server may say about drafting: ``--additional-config '{"dllm": {"drafter": {...}}}'``.

Checked once, when the server starts. How many tokens are drafted at all is vLLM's own
``num_speculative_tokens``.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields

DRAFTER_ARCHITECTURE = "DFlashDraftModel"  # of config.json; both formats arrive under this name
WHERE = '--additional-config: "dllm": "drafter"'
POLICIES = ("fixed",)
NOISE_SCHEDULES = ("cosine", "linear", "sqrt")


@dataclass(frozen=True)
class DrafterOptions:
    """The ``drafter`` object of our options.

    Attributes:
        policy: who decides how many drafts of a request the target verifies (``policy``).
        width: of the policy ``fixed``: drafts verified per step, 0 to num_speculative_tokens (the
            default). At 0 nothing is drafted.
        window: tokens of context before the draft block that the drafter attends to; those before
            them leave its KV cache. None keeps what the checkpoint says.
        denoise_steps: passes over the draft block; more than one reveals the surest tokens first.
        noise_schedule: how many tokens each of these passes reveals (``schedule``).
        mask_token_id, mask_token: the token that stands at undecided positions, where the
            checkpoint does not say.
    """

    policy: str = "fixed"
    width: int | None = None
    window: int | None = None
    denoise_steps: int = 1
    noise_schedule: str = "cosine"
    mask_token_id: int | None = None
    mask_token: str | None = None

    def __post_init__(self) -> None:
        for key, at_least in (("width", 0), ("window", 1), ("mask_token_id", 0)):
            if getattr(self, key) is not None:
                _check_int(key, getattr(self, key), at_least)
        _check_int("denoise_steps", self.denoise_steps, 1)
        if self.mask_token is not None and not isinstance(self.mask_token, str):
            raise ValueError(f"{WHERE}: mask_token = {self.mask_token!r}; allowed: a string.")
        for key, allowed in (("policy", POLICIES), ("noise_schedule", NOISE_SCHEDULES)):
            if getattr(self, key) not in allowed:
                raise ValueError(
                    f"{WHERE}: {key} = {getattr(self, key)!r}; allowed: {', '.join(allowed)}."
                )

    @classmethod
    def from_given(cls, given: object) -> "DrafterOptions":
        """Parse the object.

        Raises:
            ValueError: an unknown key (with the nearest known one) or a value out of range.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ValueError(f"{WHERE} must be an object, got {given!r}.")
        known = [field.name for field in fields(cls)]
        for key in given:
            if key not in known:
                nearest = difflib.get_close_matches(str(key), known, n=1)
                hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
                raise ValueError(f"{WHERE} has no option {key!r}{hint}; known: {', '.join(known)}.")
        return cls(**given)

    def check_against(self, num_drafts: int, samples_drafts: bool) -> None:
        """Refuse what does not fit ``num_speculative_tokens`` or vLLM's way to draw drafts.

        Raises:
            ValueError: with both values.
        """
        if self.width is not None and self.width > num_drafts:
            raise ValueError(
                f"{WHERE}: width = {self.width}, but num_speculative_tokens is {num_drafts}; "
                f"allowed: 0 to {num_drafts}."
            )
        if self.denoise_steps > num_drafts:
            raise ValueError(
                f"{WHERE}: denoise_steps = {self.denoise_steps}, but num_speculative_tokens is "
                f"{num_drafts}; each step reveals at least one token."
            )
        if self.denoise_steps > 1 and samples_drafts:
            raise ValueError(
                f"{WHERE}: denoise_steps = {self.denoise_steps} with draft_sample_method "
                "'probabilistic': tokens revealed in order of confidence are not drawn from their "
                "own probabilities, and verifying them as if they were is not exact. Leave "
                "draft_sample_method out."
            )


def _check_int(key: str, value: object, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{WHERE}: {key} = {value!r}; allowed: an integer of at least {at_least}.")
