"""Keeps prompt logprobs in the scheduler until the request emits its first block.

vLLM's worker returns prompt logprobs in the step that reads the last chunk of the prompt. An
autoregressive model emits its first token in that step, and vLLM's scheduler asserts that both come
together. A diffusion model emits nothing in that step: its first canvas only starts there.
"""

from collections.abc import Collection

import torch
from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput


class PendingPromptLogprobs:
    """Prompt logprobs of requests that have not emitted anything yet, by request id."""

    def __init__(self) -> None:
        self._top: dict[str, LogprobsTensors | None] = {}
        self._of_ids: dict[str, torch.Tensor] = {}

    def postpone(self, output: ModelRunnerOutput, live: Collection[str]) -> None:
        """Replace a step's prompt logprobs by those of the requests that emit in this step.

        The step's own prompt logprobs are kept until their request emits. What is kept of requests
        that are not in ``live`` is dropped.

        Args:
            output: of the step; changed in place.
            live: ids of the requests that have not been finished or aborted.
        """
        self._top |= output.prompt_logprobs_dict
        self._of_ids |= output.prompt_token_id_logprobs_dict
        if not self._top and not self._of_ids:
            return
        emitting = {
            req_id
            for req_id, index in output.req_id_to_index.items()
            if output.sampled_token_ids and output.sampled_token_ids[index]
        }
        output.prompt_logprobs_dict = {r: x for r, x in self._top.items() if r in emitting}
        output.prompt_token_id_logprobs_dict = {
            r: x for r, x in self._of_ids.items() if r in emitting
        }
        waiting = set(live) - emitting
        self._top = {r: x for r, x in self._top.items() if r in waiting}
        self._of_ids = {r: x for r, x in self._of_ids.items() if r in waiting}
