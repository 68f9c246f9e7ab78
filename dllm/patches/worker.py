"""What our workers do beside vLLM's: they choose the model runner, and reload weights safely."""

from functools import partial
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.worker.worker_base import CompilationTimes

from dllm.drafter.recording import layers_without_drafter, make_recorder
from dllm.patches.contract import SCHEDULERS
from dllm.patches.drafting import make_our_speculators
from dllm.patches.drafts import draft_of
from dllm.patches.new_weights import loading, refuse_other_checkpoint


class OurRunners:
    """A base class in front of vLLM's worker of a device, whose model runner is one of ours.

    Attributes:
        serves_canvases: whether it is a ``CanvasRunner``; else a ``DraftingRunner``. False for
            vLLM's built-in DiffusionGemma, which has the same architecture name.
    """

    vllm_config: VllmConfig
    model_runner: Any

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        self.serves_canvases = vllm_config.scheduler_config.scheduler_cls in SCHEDULERS
        if draft_of(vllm_config.speculative_config) is not None:
            make_our_speculators()
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """The steps of the warm-up are not recorded; those after it are."""
        times: CompilationTimes = super().compile_or_warm_up_model()  # type: ignore[misc]
        if layers_without_drafter(self.vllm_config):
            self.model_runner.recorder = make_recorder(self.vllm_config)
        return times

    def reload_weights(self, *args: Any, **options: Any) -> None:
        """After an error the server goes on. Raises ValueError for other tensors than it has."""
        config, path = self.vllm_config.model_config, options.get("weights_path")
        served = config.model
        if path is not None:
            refuse_other_checkpoint(path, served)
        load = partial(super().reload_weights, *args, **options)  # type: ignore[misc]
        try:
            loading(self.model_runner.model, load)
        except BaseException:
            config.model = served  # vLLM sets the new folder before it reads it
            raise

    def update_weights(self, update_info: Any) -> None:
        """After an error the server goes on with the weights that it has."""
        load = partial(super().update_weights, update_info)  # type: ignore[misc]
        loading(self.model_runner.model, load)

    def save_context_only(self) -> None:
        self.model_runner.save_context_only()
