"""config.json of Nemotron-Labs-Diffusion: that of Ministral 3, a mask and the length of a canvas.

The released checkpoints bring a class like this as remote code, which is not needed here.
"""

from transformers import Ministral3Config

from dllm.models import is_ours

AUTOREGRESSIVE = "NemotronLabsDiffusionForCausalLM"


class NemotronLabsDiffusionConfig(Ministral3Config):
    """vLLM recognizes a diffusion model by ``canvas_length``, which ``--hf-overrides`` may set.

    None: the model is served as the autoregressive one that it also is, under the name
    ``AUTOREGRESSIVE``. ``widest_canvas`` is the same, however the model is served; config.json says
    with which it was trained.
    """

    model_type = "nemotron_labs_diffusion"
    mask_token_id = 100
    widest_canvas = 32

    @property
    def block_size(self) -> None:
        """None: a token of a prompt sees none behind it.

        What config.json calls so is the length of a canvas, wherever that starts.
        """
        return None

    @block_size.setter
    def block_size(self, value: int) -> None:
        self.widest_canvas = value

    @property
    def canvas_length(self) -> int | None:
        return self.widest_canvas if is_ours(self.architectures) else None

    @canvas_length.setter
    def canvas_length(self, value: int | None) -> None:
        if value is None:
            self.architectures = [AUTOREGRESSIVE]
        else:
            self.widest_canvas = value

    @property
    def llama_4_scaling(self) -> dict[str, float] | None:
        """Of queries by their positions, as vLLM's class of the backbone reads it."""
        rope = self.rope_parameters
        if rope.get("llama_4_scaling_beta") is None:
            return None
        return {
            "beta": rope["llama_4_scaling_beta"],
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
        }
