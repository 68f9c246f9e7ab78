"""vLLM's configuration, derived: what we change of it for a server of ours.

Every server's is of our class, because what a server is is known when it is being completed.
"""

import os
from typing import Any

from vllm.config import SpeculativeConfig, VllmConfig

from dllm.engine.derived import as_one_of
from dllm.patches.contract import ASYNC_DRAFTING_SCHEDULER
from dllm.patches.cpu import is_on_cpu_runtime, needs_no_openmp_setup
from dllm.patches.drafts import Draft, draft_of
from dllm.patches.kinds import complete
from dllm.patches.neighbours import is_disabled
from dllm.patches.served import Server, served_as


class ServerConfig(VllmConfig):
    def __post_init__(self) -> None:
        """Honour ``VLLM_WORKER_MULTIPROC_METHOD=fork``, which vLLM makes spawn on a CPU.

        A spawned process imports everything again, which takes 10 s of CPU time each. vLLM has two
        reasons: OpenMP reads its environment variables when it is loaded, and its threads do not
        survive a fork. With one thread and no binding neither applies.
        """
        if self._draft() is Draft.ITSELF:
            given: Any = self.speculative_config  # type: ignore[has-type]
            self.speculative_config = as_one_of(SelfDraftConfig, given)
        asked = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD")
        super().__post_init__()
        if self._draft() is Draft.ITSELF:
            scheduler = self.scheduler_config
            scheduler.async_scheduling = scheduler.scheduler_cls == ASYNC_DRAFTING_SCHEDULER
        if asked == "fork" and is_on_cpu_runtime(self) and needs_no_openmp_setup():
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = asked

    @property
    def served(self) -> Server | None:
        """None: it is not ours."""
        return served_as(self)

    def try_verify_and_update_config(self) -> None:
        """The server is configured where vLLM completes its flags."""
        is_first = not getattr(self.model_config, "config_updated", True)
        super().try_verify_and_update_config()
        if is_first:
            complete(self)

    @property
    def use_v2_model_runner(self) -> bool:
        """Also on a CPU without Triton, where vLLM refuses it."""
        return is_on_cpu_runtime(self) or bool(super().use_v2_model_runner)

    def _validate_v2_model_runner(self) -> None:
        if not is_on_cpu_runtime(self):
            super()._validate_v2_model_runner()

    def _get_v2_model_runner_unsupported_features(self) -> list[str]:
        """A target with drafts of a class of ours runs there; vLLM refuses all classes."""
        unsupported: list[str] = super()._get_v2_model_runner_unsupported_features()
        if self._draft() is not None:
            unsupported = [each for each in unsupported if "custom_class" not in each]
        return unsupported

    @property
    def num_lookahead_tokens(self) -> int:
        """A pass over [last token, masks] needs as many KV slots as DFlash's."""
        if self._draft() is Draft.ITSELF:
            return int(self.speculative_config.num_speculative_tokens) + 1
        return int(super().num_lookahead_tokens)

    def _draft(self) -> Any:
        return None if is_disabled() else draft_of(self.speculative_config)


class SelfDraftConfig(SpeculativeConfig):
    @property
    def max_num_new_slots_for_drafting(self) -> int:
        """The slots of ``num_lookahead_tokens`` in the budget of a step."""
        return int(self.num_speculative_tokens)
