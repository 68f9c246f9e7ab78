"""What config.json of a model with blocks says beside its backbone's fields."""

from dllm.models import is_ours


class Blocks:
    """A base class in front of the backbone's."""

    architectures: list[str] | None
    block_size: int | None = None

    @property
    def canvas_length(self) -> int | None:
        """A canvas is the rest of a block; vLLM recognizes a diffusion model by this name."""
        return self.block_size if is_ours(self.architectures) else None
