"""Prompt logprobs wait in the scheduler for the first block.

vLLM's worker computes them with the prompt's last chunk, where an autoregressive model also emits
its first token, and vLLM's scheduler insists that both come together. Here the first block is only
begun by then. The rows of prompt chunks get no logits otherwise: vLLM's `PromptLogprobsWorker`
asks the model for them, in chunks, in the steps in which a request of the batch wants them.
"""

from collections.abc import Collection

import torch
from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput


class PendingPromptLogprobs:
    """What is known about the prompts of requests that have not emitted yet, by request id."""

    def __init__(self) -> None:
        self._top: dict[str, LogprobsTensors | None] = {}
        self._of_ids: dict[str, torch.Tensor] = {}

    def postpone(self, output: ModelRunnerOutput, live: Collection[str]) -> None:
        """Take the prompt logprobs out of a step's output, and put in those that are now due.

        Args:
            output: changed in place.
            live: ids of the requests that somebody still waits for.
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
