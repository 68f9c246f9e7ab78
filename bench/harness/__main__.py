"""``lm_eval`` with a model more, ``dllm-scores``: how likely a model with masks finds a text.

It has the arguments of lm_eval's ``local-completions``. Loglikelihoods are the bounds of
``/v1/scores`` (docs/rollouts.md) instead of echoed logprobs, which a canvas does not have.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.openai_completions import LocalCompletionsAPI

AT_ONCE = 8


@register_model("dllm-scores")
class Scores(LocalCompletionsAPI):
    """Completions of a server, and scores of the same one."""

    def _loglikelihood_tokens(self, asked: list[Any], **_: Any) -> list[tuple[float, bool]]:
        """Bounds in nats. No text is called the greedy one: the bound does not say it."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return [(bound, False) for bound in pool.map(self._bound, asked)]

    def _bound(self, asked: Any) -> float:
        _, prompt, text = asked  # texts, then the token ids of each
        reply = requests.post(
            self.base_url.removesuffix("/completions") + "/scores",
            json={"model": self.model, "prompt": prompt, "text": text},
            headers=self.header,
            timeout=600,
        )
        if not reply.ok:
            raise ValueError(f"/v1/scores answers HTTP {reply.status_code}: {reply.text}")
        return float(reply.json()["elbo"])


if __name__ == "__main__":
    cli_evaluate()
