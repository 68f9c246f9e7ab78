"""Makes the width policy that a server's options name."""

from dllm.drafter.widths.adaptive import AdaptiveWidth
from dllm.drafter.widths.pilot import Pilot, PilotWidth
from dllm.drafter.widths.policy import FixedWidth, WidthPolicy
from dllm.settings.drafting import DrafterOptions


def make_policy(options: DrafterOptions, num_drafts: int, num_slots: int) -> WidthPolicy:
    """The policy that the options name.

    Args:
        num_drafts: N, the tokens of a draft block.
        num_slots: requests that the server runs at once.
    """
    if options.policy == "adaptive":
        return AdaptiveWidth(num_drafts, num_slots, options.confidence, options.hysteresis)
    if options.policy == "pilot":
        assert options.pilot is not None, "checked by DrafterOptions"
        return PilotWidth(num_drafts, num_slots, Pilot.load(options.pilot))
    assert options.policy == "fixed", options.policy
    return FixedWidth(num_drafts, options.width)
