"""A vLLM engine that drafts: an autoregressive model, or a diffusion model, one canvas a run."""

import itertools
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine


class EngineDrafts:
    """Runs of an engine in this process (``worker.Drafts``).

    Args:
        canvas: of a diffusion model: tokens of a canvas; None for an autoregressive model.
        max_steps: of a diffusion model: denoise steps of a canvas at most.
    """

    def __init__(
        self, engine: LLMEngine, canvas: int | None = None, max_steps: int | None = None
    ) -> None:
        self._engine, self._canvas = engine, canvas
        model = engine.vllm_config.model_config
        self.vocab_size: int = model.get_vocab_size()
        self.max_len: int = model.max_model_len
        self._extra: dict[str, Any] | None = None
        if canvas is not None:
            self._extra = {"diffusion_canvas_length": canvas, "diffusion_max_steps": max_steps}
        self._numbers = itertools.count()

    def start(self, tokens: list[int], count: int) -> str:
        """Begin to write ``count`` tokens behind these; one canvas of them at most."""
        if self._canvas is not None:
            count = min(count, self._canvas)
        run = f"draft-{next(self._numbers)}"
        params = SamplingParams(
            temperature=0.0,
            max_tokens=count,
            detokenize=False,
            extra_args=self._extra,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(run, {"prompt_token_ids": tokens}, params)
        return run

    def stop(self, run: str) -> None:
        """Give up a run."""
        self._engine.abort_request([run])

    def step(self) -> list[tuple[str, list[int], bool]]:
        """One step of all runs: (run, new tokens, whether it has ended)."""
        return [
            (output.request_id, list(output.outputs[0].token_ids), output.finished)
            for output in self._engine.step()
        ]

    def warm_up(self) -> None:
        """Run once, because the first requests of an engine are slow."""
        for first in range(2):
            self.start([first, first + 1, first + 2], 4)
            while self._engine.has_unfinished_requests():
                self.step()
