"""The policy ``pilot``: a small network chooses the length of a request's draft blocks, once.

The target's logits behind the prompt tell how predictable the answer is. Two linear layers map them
to one of a few widths around the one that the drafter was trained with. The request keeps it: its
blocks are drafted with so many masks, and all of their drafts are verified. ``dllm train pilot``
makes such a network.

Source: "BlockPilot: Instance-Adaptive Policy Learning for Diffusion-based Speculative Decoding".
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from vllm.logger import init_logger

from dllm.engine.ranks import answer_of_first_rank
from dllm.settings.drafting import Ascending
from dllm.settings.options import CHECKED, Count, read_options

logger = init_logger(__name__)

FILE = "pilot.safetensors"  # in the folder of a run of `dllm train pilot`
CONFIG = "pilot"  # key of the file's metadata


@dataclass(frozen=True, config=CHECKED)
class PilotConfig:
    """What a pilot reads, and what it chooses from."""

    widths: Ascending
    """drafts of a block"""

    vocab_size: Count
    """the target's"""

    hidden_size: Count = 2048
    """between the two layers; the paper's is 2048"""

    reads: Literal["raw", "softmax"] = "raw"
    """the target's logits as they are, or their `softmax`"""

    @classmethod
    def read(cls, file: str | Path) -> "PilotConfig":
        """Raises ValueError if the file holds no pilot."""
        try:
            with safe_open(file, "pt") as opened:
                given = json.loads((opened.metadata() or {})[CONFIG])
            found = read_options(cls, given)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{file} holds no pilot ({error}); allowed: a file of `dllm train pilot`."
            ) from None
        return replace(found, widths=tuple(found.widths))

    def check_against(self, num_drafts: int, vocab_size: int) -> None:
        """Raises ValueError for a pilot of another target, or of longer blocks than a server's."""
        if self.widths[-1] > num_drafts:
            raise ValueError(
                f"The pilot chooses up to {self.widths[-1]} drafts, and num_speculative_tokens is "
                f"{num_drafts}; allowed: at least {self.widths[-1]}."
            )
        if self.vocab_size != vocab_size:
            raise ValueError(
                f"The pilot reads logits of {self.vocab_size} tokens, and the target has "
                f"{vocab_size}. Train a pilot for this target."
            )


class Pilot(nn.Module):
    def __init__(self, config: PilotConfig) -> None:
        super().__init__()
        self.config = config
        self.hidden = nn.Linear(config.vocab_size, config.hidden_size)
        self.scores = nn.Linear(config.hidden_size, len(config.widths))

    def forward(self, logits: Tensor) -> Tensor:
        """A score of each width ``[rows, widths]``, from the target's logits ``[rows, vocab]``."""
        read = logits if self.config.reads == "raw" else logits.float().softmax(-1)
        scores: Tensor = self.scores(self.hidden(read.to(self.hidden.weight.dtype)).relu())
        return scores

    @torch.no_grad()
    def choose(self, logits: Tensor) -> Tensor:
        """``[rows]``: places in ``config.widths`` of the highest scores."""
        return self(logits).argmax(-1)

    @classmethod
    def load(cls, file: str | Path, device: torch.device | str) -> "Pilot":
        """Raises ValueError as ``PilotConfig.read``."""
        with torch.device("meta"):
            pilot = cls(PilotConfig.read(file))
        with safe_open(file, "pt", device=str(device)) as opened:
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        pilot.load_state_dict(weights, assign=True)
        return pilot.requires_grad_(False)

    def save(self, file: Path) -> None:
        """Write the weights, in bf16, and the configuration."""
        half = {name: one.bfloat16().cpu().contiguous() for name, one in self.state_dict().items()}
        save_file(half, file, metadata={CONFIG: json.dumps(asdict(self.config))})


class PilotLengths:
    """Every request's draft blocks are as long as the pilot chose behind its prompt."""

    def __init__(self, num_slots: int, file: str) -> None:
        self.file = file
        self._chosen = np.zeros(num_slots, dtype=np.int64)

    def load(self, device: torch.device) -> None:
        """Called while the models are loaded, so that vLLM counts the pilot's memory as theirs."""
        self.pilot = Pilot.load(self.file, device)
        size = sum(one.nbytes for one in self.pilot.parameters())
        logger.info("pilot %s: %.1f MB, widths %s", self.file, size / 1e6, self.pilot.config.widths)

    def read_prompts(self, slots: np.ndarray, logits: Tensor) -> None:
        """All tensor-parallel ranks take the first one's choice.

        ``slots``: ``[prompts]`` that ended in this step. ``logits``: ``[prompts, vocab]``, of the
        target, before any sampling parameter.
        """
        places = self.pilot.choose(logits).tolist()
        widths = self.pilot.config.widths
        self._chosen[slots] = [widths[answer_of_first_rank(place)] for place in places]

    def of(self, slots: np.ndarray) -> np.ndarray:
        """``[rows]``: drafts of each row's next block."""
        return self._chosen[slots]
