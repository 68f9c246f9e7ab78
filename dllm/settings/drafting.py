"""A server's options for drafting: ``--additional-config '{"dllm": {"drafter": {...}}}'``.

They are checked once, when the server starts. The number of tokens in a draft block (N) is vLLM's
own option ``num_speculative_tokens``.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from dllm.settings.checks import refuse_wide
from dllm.settings.options import CHECKED, Count, Natural

# "architectures" in a drafter's config.json. vLLM uses this name for both checkpoint formats.
DRAFTER_ARCHITECTURE = "DFlashDraftModel"
# The same checkpoint where our classes serve it. vLLM's keep its own name.
OUR_DRAFTER = "DllmDFlashDraftModel"
WHERE = '--additional-config: "dllm": "drafter"'
# Options that only one policy has; any other policy refuses them.
POLICY_OPTIONS = {
    "width": "fixed",
    "pilot": "pilot",
    "prompt_lookup": "adaptive",
}


def ascending(given: Sequence[int]) -> Sequence[int]:
    """Raises ValueError for numbers that do not rise, or for none."""
    if not given or [*given] != sorted({*given}):
        raise ValueError(f"{[*given]}; allowed: ascending numbers, at least one.")
    return given


Ascending = Annotated[Sequence[Natural], AfterValidator(ascending)]


@dataclass(frozen=True, config=CHECKED)
class DrafterOptions:
    """The ``drafter`` object of the options."""

    policy: Literal["fixed", "adaptive", "pilot"] = "fixed"
    """how many drafts are verified: the width"""

    width: Natural | None = None
    """of `fixed`: verified drafts, by default num_speculative_tokens; 0: none"""

    pilot: str | None = None
    """of `pilot`: the file of `dllm train pilot`"""

    prompt_lookup: bool = False
    """of `adaptive`: draft what stood behind the same tokens before:
    [below](#drafts-from-the-text-itself)"""

    verification: Literal["drafter_invariant", "rejection"] = "drafter_invariant"
    """which drafts are kept: [below](#what-the-output-promises)"""

    adapter: str | None = None
    """with which the target drafts for itself: [draft-adapters.md](draft-adapters.md)"""

    uno_mask_token_id: Annotated[int, Field(ge=2)] | None = None
    """its noise is ids from 1 to below this, by default all"""

    uno_noise_seed: Natural = 0
    """of the noise"""

    fused_context: bool = False
    """on CUDA: one kernel (`attention/context_kv.py`) for context tokens; no quantized projections.
    No GPU has timed it"""

    window: Count | None = None
    """context tokens that the drafter attends to and keeps; by default the
    checkpoint's"""

    denoise_steps: Count = 1
    """passes over a block: [passes.md](passes.md)"""

    noise_schedule: Literal["linear", "cosine", "sqrt"] = "cosine"
    """how many drafts each decides"""

    mask_token_id: Natural | str | None = None
    r"""where the checkpoint names none: an id, or a token,
    `"<\|MASK\|>"`"""

    record: str | None = None
    """a folder in which live traffic is recorded: what users wrote
    ([calibration.md](calibration.md))"""

    record_layers: Ascending | None = None
    """without a drafter: the target's layers (0-based) to record"""

    record_mb: Count = 1000
    """limit of that folder, MB (10^6 bytes); the oldest go"""

    renew: str | None = None
    """a folder of newer drafters to take:
    [calibration.md](calibration.md#while-the-server-runs)"""

    def __post_init__(self) -> None:
        for name in self.given().keys() & {"record_layers", "record_mb"}:
            if self.record is None:
                raise ValueError(f'{WHERE}: {name} needs "record": the folder to write to.')
        if self.noise_schedule != "cosine" and self.denoise_steps == 1:
            raise ValueError(f"{WHERE}: noise_schedule needs denoise_steps of 2 or more.")
        if self.policy == "pilot" and self.pilot is None:
            raise ValueError(
                f'{WHERE}: policy "pilot" needs "pilot": a file of `dllm train pilot`.'
            )
        for name, value in self.given().items():
            owner = POLICY_OPTIONS.get(name, self.policy)
            if owner != self.policy:
                raise ValueError(
                    f"{WHERE}: {name} = {value!r} belongs to the policy "
                    f'"{owner}", and "policy" is "{self.policy}". Leave one of them out.'
                )

    def given(self) -> dict[str, Any]:
        """The options that have another value than their default."""
        default = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in vars(self).items() if value != default[name]}

    def check_against(self, num_drafts: int, is_trimmed_by_vllm: bool) -> None:
        """Raises ValueError for options that do not fit the server's speculative config.

        ``is_trimmed_by_vllm``: vLLM chooses how many are verified (enable_adaptive_verification).
        """
        refuse_wide(WHERE, self.width, num_drafts)
        if self.denoise_steps > num_drafts:
            raise ValueError(
                f"{WHERE}: denoise_steps = {self.denoise_steps}, but num_speculative_tokens is "
                f"{num_drafts}; allowed: 1 to {num_drafts}, as each pass decides a draft."
            )
        takes_one_pass = {
            "policy = 'pilot'": self.policy == "pilot",
            # What is drawn at a place depends on what was drawn behind it: it has no distribution
            # behind the drafts in front of it alone, as rejection sampling needs.
            "verification = 'rejection'": self.verification == "rejection",
            "enable_adaptive_verification": is_trimmed_by_vllm,
        }
        for other, is_given in takes_one_pass.items():
            if is_given and self.denoise_steps > 1:
                raise ValueError(
                    f"{WHERE}: denoise_steps = {self.denoise_steps} with {other}; allowed with it: "
                    "1. Leave one of them out."
                )
        if is_trimmed_by_vllm and self.record is not None:
            raise ValueError(
                f"{WHERE}: record with enable_adaptive_verification: what is verified is then "
                "decided on the device, and nobody else knows it. Leave one of them out."
            )
        if is_trimmed_by_vllm and not always_verifies_all(self, num_drafts):
            raise ValueError(
                f"{WHERE}: policy = {self.policy!r}, width = {self.width} with "
                "enable_adaptive_verification: with it, vLLM decides how many drafts are verified. "
                "Leave one of them out."
            )


def always_verifies_all(options: DrafterOptions, num_drafts: int) -> bool:
    """Then a step's size is known in advance, which asynchronous schedulers but ours need."""
    return options.policy == "fixed" and options.width in (None, num_drafts)


def has_drafter(speculative_config: Any, architectures: list[str]) -> bool:
    if speculative_config is None or speculative_config.method != "dflash":
        return False
    found = speculative_config.draft_model_config.architectures or ()
    return not set(architectures).isdisjoint(found)
