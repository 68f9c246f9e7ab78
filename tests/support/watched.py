"""The denoise steps of an answer, computed in this process: what a server has to stream.

They are those of Hugging Face's ``generate``, in fp32, with the server's random numbers.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoTokenizer

from dllm.models.gemma import rule
from dllm.models.gemma.settings import GemmaSettings
from dllm.tools.watch_drawing import Frame
from tests.support.hf_reference import generate_with_noise, load_hf


class Watched:
    def __init__(self, path: Path) -> None:
        config, generation = (
            json.loads((path / name).read_text())
            for name in ("config.json", "generation_config.json")
        )
        self.model = load_hf(path)
        self.settings = GemmaSettings.from_mappings(config, generation)
        self.eos_ids = frozenset(generation["eos_token_id"])
        self.tokenizer = AutoTokenizer.from_pretrained(path)

    def frames(self, question: str, max_blocks: int, seed: int) -> Iterator[Frame]:
        """Every step, up to the block with an end-of-sequence token or number ``max_blocks``."""
        chat = [{"role": "user", "content": question}]
        prompt = self.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
        found = generate_with_noise(self.model, prompt, max_blocks, seed, stop_at_eos=True)
        emitted: tuple[int, ...] = ()
        for block, canvases in enumerate(found.canvases):
            width = torch.tensor([len(canvases[0])])
            for step, (probs, following) in enumerate(
                zip(found.probs[block], [*canvases[1:], None], strict=True), start=1
            ):
                entropy = torch.special.entr(probs).sum(-1)
                accept = rule.accept_mask(entropy[None], width, self.settings.entropy_bound)
                argmax = tuple(probs.argmax(-1).tolist())
                yield Frame(
                    block=block,
                    step=step,
                    emitted=emitted,
                    argmax=argmax,
                    entropy=tuple(entropy.tolist()),
                    accepted=tuple(accept[0].tolist()),
                    next_canvas=argmax if following is None else tuple(following),
                    is_final=following is None,
                )
            emitted += argmax
