"""A server's options for drafting: ``--additional-config '{"dllm": {"drafter": {...}}}'``.

They are checked once, when the server starts. The number of tokens in a draft block (N) is vLLM's
own option ``num_speculative_tokens``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from dllm.settings.checks import Flag, FloatRange, IntRange, Text, Values, check_fields, is_list_of

# "architectures" in a drafter's config.json. vLLM uses this name for both checkpoint formats.
DRAFTER_ARCHITECTURE = "DFlashDraftModel"
# The same checkpoint where our classes serve it. vLLM's keep its own name.
OUR_DRAFTER = "DllmDFlashDraftModel"
WHERE = '--additional-config: "dllm": "drafter"'
Policy = Literal["fixed", "adaptive", "pilot"]
Verification = Literal["drafter_invariant", "rejection"]
# Options that only one policy has; any other policy refuses them.
POLICY_OPTIONS = {
    "width": "fixed",
    "hysteresis": "adaptive",
    "pilot": "pilot",
    "prompt_lookup": "adaptive",
}
Hysteresis = Annotated[float, FloatRange(0.0, 1.0)]


def _are_layers(given: Any) -> bool:
    in_order = is_list_of(int, given) and sorted({one for one in given if one >= 0})
    return bool(in_order) and in_order == [*given]


LAYERS = Values(_are_layers, "a list of layers of the target, 0-based and ascending")
MASK_TOKEN = Values(
    lambda given: isinstance(given, str) or given in IntRange(0),
    "an id of at least 0, or a token of the target's tokenizer",
)


@dataclass(frozen=True)
class DrafterOptions:
    """The ``drafter`` object of the options.

    Attributes:
        policy: decides how many drafts of a request the target verifies (its width); one of
            ``Policy`` (``dllm.drafter.widths``).
        width: of the policy ``fixed``: drafts verified in each step, 0 to num_speculative_tokens
            (the default). At 0 nothing is drafted.
        hysteresis: of the policy ``adaptive``: drafting starts again when it is faster than plain
            decoding by this share, and stops when it is slower by this share.
        pilot: of the policy ``pilot``: the file that ``dllm train pilot`` wrote.
        prompt_lookup: of the policy ``adaptive``: draft what stood behind the same tokens before,
            where that promises more than the drafter does (``dllm.drafter.prompt_lookup``).
        verification: which drafts are kept (``dllm.drafter.verification``). ``drafter_invariant``:
            those that are the target's own tokens. ``rejection``: x with probability
            min(1, p(x) / q(x)); then a seed does not decide the text alone.
        fused_context: compute the drafter's keys and values of context tokens, of all its layers,
            and write them by one kernel instead of vLLM's operations (``attention.context_kv``).
            Refused on a CPU.
        window: number of context tokens before the draft block that the drafter attends to; earlier
            ones leave its KV cache. None keeps what the checkpoint says.
        denoise_steps: passes over a draft block; in each the positions are decided of which the
            drafter is surest, and the next one sees them.
        noise_schedule: how many each pass decides (``dllm.ops.schedule``).
        mask_token_id: the token at undecided positions, if the checkpoint does not name one: its
            id, or as the target's tokenizer writes it.
        record: folder in which tokens and hidden states of live traffic are recorded, for
            ``dllm train drafter --from-buffer``; None records nothing. They reveal what users
            wrote.
        record_layers: for a server without a drafter: layers of the target (0-based) whose outputs
            are recorded; a drafter says itself which ones it reads.
        record_mb: limit of that folder, MB (10^6 bytes); the oldest recordings are deleted first.
        renew: folder in which ``dllm recalibrate`` publishes newer drafters; the server takes them
            while it runs (``dllm.drafter.weight_reload``). None keeps the drafter that it started
            with.
    """

    policy: Policy = "fixed"
    width: Annotated[int | None, IntRange(0)] = None
    hysteresis: Hysteresis = 0.03
    pilot: Text = None
    prompt_lookup: Flag = False
    verification: Verification = "drafter_invariant"
    fused_context: Flag = False
    window: Annotated[int | None, IntRange(1)] = None
    denoise_steps: Annotated[int, IntRange(1)] = 1
    noise_schedule: Literal["linear", "cosine", "sqrt"] = "cosine"
    mask_token_id: Annotated[int | str | None, MASK_TOKEN] = None
    record: Text = None
    record_layers: Annotated[Sequence[int] | None, LAYERS] = None
    record_mb: Annotated[int, IntRange(1)] = 1000
    renew: Text = None

    def __post_init__(self) -> None:
        check_fields(self, WHERE)
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
        """Refuse options that do not fit the server's speculative config.

        Args:
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
    """Whether all drafts of every row are verified in each step.

    Then a step's size is known in advance, which asynchronous schedulers other than ours need.
    """
    return options.policy == "fixed" and options.width in (None, num_drafts)
