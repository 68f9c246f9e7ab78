"""What drafts on a server. ``kinds`` decides it once, and it is read here."""

from enum import Enum
from typing import Any

from dllm.patches.contract import CPU_WORKER, GPU_WORKER
from dllm.patches.neighbours import is_disabled
from dllm.settings.drafting import OUR_DRAFTER, has_drafter

SELF_DRAFTER = "dllm.drafter.self_drafter.SelfDrafter"
NOISE_DRAFTER = "dllm.drafter.self_drafter.NoiseDrafter"
REMOTE_DRAFTS = "dllm.remote.speculator.RemoteDrafts"
LOOKUP = "ngram"  # with the option ``prompt_lookup``: ours in place of vLLM's


class Draft(Enum):
    """Who makes the drafts that ours verify."""

    ITSELF = "the target, for itself"
    NETWORK = "our DFlash drafter"
    SOURCE = "a speculator of vLLM, which ours steers"
    TEXTS = "the requests' own texts"
    REMOTE = "draft workers"


# Of the method "custom_class", by the class.
CLASSES = {SELF_DRAFTER: Draft.ITSELF, NOISE_DRAFTER: Draft.ITSELF, REMOTE_DRAFTS: Draft.REMOTE}


def draft_of(speculative_config: Any) -> Draft | None:
    """What drafts on a server of this configuration; None: nobody, or vLLM without us.

    A class of ours is there from the beginning. The rest is what ``kinds`` has written: the
    architecture of our drafter, and that a worker of ours serves.
    """
    if speculative_config is None:
        return None
    if speculative_config.method == "custom_class":
        return CLASSES.get(speculative_config.model)
    if has_drafter(speculative_config, [OUR_DRAFTER]):
        return Draft.NETWORK
    worker = speculative_config.target_parallel_config.worker_cls
    if worker not in (CPU_WORKER, GPU_WORKER) or is_disabled():
        return None
    return Draft.TEXTS if speculative_config.method == LOOKUP else Draft.SOURCE
