"""A vLLM engine that drafts: an autoregressive model, or a diffusion model, one canvas a run."""

import itertools

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

MAX_STEPS = 4  # denoise steps of a canvas


class EngineDrafts:
    """Runs of an engine in this process (``worker.Drafts``)."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        config = engine.vllm_config
        self.vocab_size: int = config.model_config.get_vocab_size()
        self.max_len: int = config.model_config.max_model_len
        self._longest, self._extra = self.max_len, None
        if config.model_config.is_diffusion:
            self._longest = config.diffusion_config.canvas_length
            self._extra = {"diffusion_max_steps": MAX_STEPS}
        self._numbers = itertools.count()

    def start(self, tokens: list[int], count: int) -> str:
        run = f"draft-{next(self._numbers)}"
        params = SamplingParams(
            temperature=0.0,
            max_tokens=min(count, self._longest),
            detokenize=False,
            extra_args=self._extra,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(run, {"prompt_token_ids": tokens}, params)
        return run

    def stop(self, run: str) -> None:
        self._engine.abort_request([run])

    def step(self) -> list[tuple[str, list[int], bool]]:
        """(run, new tokens, whether it has ended) of every run."""
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
