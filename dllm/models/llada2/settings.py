"""How LLaDA2 fills in masks, and edits what it filled in: values of checkpoint and command line.

``generation_config.json`` may hold defaults, under the names of the attributes, or a ``mode``; the
released ones hold none, and those here are SGLang's (``threshold``) and diffusers' (the others).
``--override-generation-config`` changes them.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from dllm.models.unmasking.settings import OF_ALL, UnmaskingSettings
from dllm.settings.denoising import Parameter
from dllm.settings.options import CHECKED, Natural32, Share

# What a request or a server asks for by one name: LLaDA2.1's two modes are those of its model card,
# without editing LLaDA2.0 and 2.1 are decoded alike.
MODES: dict[str, dict[str, Any]] = {
    "plain": {"threshold": 0.95, "editing": 0, "editing_threshold": 0.5, "max_post_steps": 16},
    "quality": {"threshold": 0.7, "editing": 1, "editing_threshold": 0.5, "max_post_steps": 16},
    "speed": {"threshold": 0.5, "editing": 1, "editing_threshold": 0.0, "max_post_steps": 16},
}

# Keys of LLaDA2.2, whose architecture has the same name.
BLOCK_ROUTING = ("expert_capacity", "delete_token_id", "split_token_id")


@dataclass(frozen=True, config=CHECKED)
class LLaDA2Settings(UnmaskingSettings):
    """How a canvas is filled in unless a request says otherwise."""

    parameters: ClassVar[tuple[Parameter, ...]] = (
        *OF_ALL,
        Parameter("editing", "editing", "int32"),
        Parameter("editing_threshold", "editing_threshold", "float32"),
        Parameter("max_post_steps", "max_post_steps", "int32"),
    )
    one_step: ClassVar[Mapping[str, int]] = {"diffusion_max_steps": 1, "diffusion_editing": 0}
    modes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODES
    defaults: ClassVar[Mapping[str, Any]] = MODES["plain"]

    # 1 if tokens that are no masks any more may be replaced. LLaDA2.1 was trained for it and
    # LLaDA2.0 was not, but their config.json do not say which they are.
    editing: Annotated[int, Field(ge=0, le=1)]
    # A probability; a token is replaced by another that is likelier than this. 0 replaces every
    # token that is not the model's choice. (In diffusers 0 means no editing, in SGLang it is the
    # default of editing; here ``editing`` says it.)
    editing_threshold: Share
    max_post_steps: Natural32  # how many steps without a mask may edit, after the first such step

    def of_request(self, asked: Mapping[str, float], temperature: float) -> dict[str, float]:
        """A request cannot raise the server's numbers of steps."""
        parameters = super().of_request(asked, temperature)
        return {**parameters, "max_post_steps": min(asked["max_post_steps"], self.max_post_steps)}

    @classmethod
    def from_vllm(cls, vllm_config: Any) -> "LLaDA2Settings":
        """Raises ValueError as ``UnmaskingSettings.from_vllm``, and for a LLaDA2.2."""
        config = vllm_config.model_config.hf_config
        found = [key for key in BLOCK_ROUTING if getattr(config, key, None) is not None]
        if found:
            raise ValueError(
                f"config.json: {', '.join(found)}: this is a LLaDA2.2, which inserts and deletes "
                "tokens and routes blocks to experts; neither is served here. Serve LLaDA2.0 or "
                "LLaDA2.1."
            )
        return super().from_vllm(vllm_config)
