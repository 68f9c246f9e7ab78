"""The plugin's own server options: the ``dllm`` object of ``--additional-config``.

Wrong values are refused when the server starts, with the key, the value and what is allowed. How a
canvas is denoised is said by the checkpoint and by vLLM's flags: see the settings of each family.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dllm.settings.checks import check_int, known_fields
from dllm.settings.drafting import DrafterOptions

WHERE = '--additional-config: "dllm"'  # of PluginOptions, in messages

CommitMode = Literal["overlapped", "separate"]
SoftEmbedding = Literal["auto", "sparse", "exact"]

COMMIT_MODES: tuple[CommitMode, ...] = ("overlapped", "separate")
SOFT_EMBEDDINGS: tuple[SoftEmbedding, ...] = ("auto", "sparse", "exact")


@dataclass(frozen=True)
class PluginOptions:
    """The ``dllm`` object of ``--additional-config``.

    Attributes:
        commit: ``overlapped`` fixes the KV of an emitted block at the head of the next forward
            pass; ``separate`` gives it a pass of its own (the plain twin, for comparison).
        soft_embedding: ``sparse`` leaves out tokens that move a soft embedding by no more than
            rounding its probabilities does, if the vocabulary is large (``soft_embedding``);
            ``exact`` multiplies by all of it; ``auto`` is sparse on a CPU and exact on a GPU, where
            the sparse kernel has not been measured yet.
        logits_workspace_mib: MiB of fp32 logits that exist at once; more rows than fit are taken
            in tiles of whole canvases (``logit_rows``). Bounds the memory of a step.
        drafter: of a server with a DFlash drafter; it reads nothing else here.
    """

    commit: CommitMode = "overlapped"
    soft_embedding: SoftEmbedding = "auto"
    logits_workspace_mib: int = 1024
    drafter: DrafterOptions = field(default_factory=DrafterOptions)

    def __post_init__(self) -> None:
        check_int(f"{WHERE}: logits_workspace_mib", self.logits_workspace_mib, 1)
        for key, value, allowed in (
            ("commit", self.commit, COMMIT_MODES),
            ("soft_embedding", self.soft_embedding, SOFT_EMBEDDINGS),
        ):
            if value not in allowed:
                raise ValueError(f"{WHERE}: {key} = {value!r}; allowed: {', '.join(allowed)}.")

    @classmethod
    def from_vllm(cls, vllm_config: Any) -> "PluginOptions":
        """The options of a server; raises ValueError as ``from_additional_config``."""
        return cls.from_additional_config(vllm_config.additional_config)

    @classmethod
    def from_additional_config(cls, additional_config: object) -> "PluginOptions":
        """Parse ``vllm_config.additional_config``.

        Raises:
            ValueError: an unknown key (with the nearest known one) or a value out of range.
        """
        if not isinstance(additional_config, Mapping):
            return cls()
        given = additional_config.get("dllm")
        if given is None:
            return cls()
        values = known_fields(cls, given, WHERE)
        drafter = DrafterOptions.from_given(values.get("drafter", {}))
        return cls(**{**values, "drafter": drafter})
