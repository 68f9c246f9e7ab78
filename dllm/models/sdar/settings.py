"""How SDAR fills in masks: the values of the checkpoint and of the command line, checked.

``generation_config.json`` may hold defaults, under the names of the attributes; the released ones
hold none, and those here are of the reference (``generate.py`` of JetAstra/SDAR; ``entropy_bound``
of the same authors' JetEngine). ``--override-generation-config`` changes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dllm.models.unmasking.rule import STRATEGIES
from dllm.models.unmasking.settings import MAX_STEPS, THRESHOLD, UnmaskingSettings
from dllm.settings.checks import Choices, FloatRange
from dllm.settings.denoising import Parameter


@dataclass(frozen=True)
class SDARSettings(UnmaskingSettings):
    """How a canvas is filled in unless a request says otherwise.

    Attributes:
        remasking_strategy: one of ``rule.STRATEGIES``; the names are the reference's.
        entropy_bound: nats; for ``entropy_bounded``.
    """

    parameters: ClassVar[tuple[Parameter, ...]] = (
        MAX_STEPS,
        THRESHOLD,
        Parameter("strategy", "remasking_strategy", Choices(STRATEGIES), "int32"),
        Parameter("entropy_bound", "entropy_bound", FloatRange(0.0, 1e6), "float32"),
    )
    defaults: ClassVar[Mapping[str, Any]] = {
        "threshold": 0.85,
        "remasking_strategy": "low_confidence_dynamic",
        "entropy_bound": 0.35,
    }

    remasking_strategy: str
    entropy_bound: float
