"""vLLM's GPU worker, patched for diffusion models and for our drafter.

``cpu_worker`` is a module of its own because importing its base class patches torch for a CPU.
"""

import gc
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any
from weakref import ref

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from dllm.drafter.runner import DraftingRunner
from dllm.engine.runner import CanvasRunner
from dllm.engine.warm_up import warm_up
from dllm.patches.compile_check import drop_wrong_code
from dllm.patches.cuda_graphs import keep_mixed_batches_out
from dllm.patches.drafts import Draft, draft_of
from dllm.patches.graph_check import drop_wrong_graphs
from dllm.patches.self_test import replace_wrong_drafter_kernels, replace_wrong_kernels
from dllm.patches.worker import OurRunners


class CanvasGPUWorker(OurRunners, Worker):
    loaded: "LoadedTensors | None" = None  # where sleep mode is enabled
    warms_up = False

    def _make_model_runner(self) -> Any:
        """vLLM's where the server needs another one than V2."""
        if self.serves_canvases:
            keep_mixed_batches_out(self.vllm_config)
            return CanvasGPURunner(self.vllm_config, self.device)
        theirs = super()._make_model_runner
        is_v2 = self.use_v2_model_runner and not self.vllm_config.is_mm_encoder_only
        return DraftingGPURunner(self.vllm_config, self.device) if is_v2 else theirs()

    def load_model(self, **options: Any) -> None:
        """Test the kernels first. For sleep mode, note which tensors lie beside the weights."""
        draft = draft_of(self.vllm_config.speculative_config)
        if self.serves_canvases:
            replace_wrong_kernels(self.vllm_config, self.device)
        elif draft in (Draft.NETWORK, Draft.SOURCE):
            replace_wrong_drafter_kernels(self.vllm_config, self.device)
        load = partial(super().load_model, **options)
        if self.model_config.enable_sleep_mode:
            self.loaded = LoadedTensors(load, self.device)
        else:
            load()

    def sleep(self, level: int = 1) -> None:
        """At level 2 vLLM saves the buffers of the models alone: save the other tensors, too."""
        if level == 2 and self.loaded is not None:
            draft = self.get_draft_model()
            models = [self.model_runner.model] + ([] if draft is None else [draft])
            self.loaded.save(chain(*((*m.parameters(), *m.buffers()) for m in models)))
        super().sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """When the weights' memory comes back, restore the tensors that lay beside them."""
        super().wake_up(tags)
        if self.loaded is not None and (tags is None or "weights" in tags):
            self.loaded.restore()

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """First emit and score canvases, so that no request waits for it.

        First, because vLLM captures CUDA graphs at the end: a workspace that grew later would take
        its memory from under them. ``--enforce-eager`` does without, as with vLLM's own kernels.
        """
        if not self.serves_canvases:
            return super().compile_or_warm_up_model()
        runner, kernels = self.model_runner, self.vllm_config.kernel_config
        if kernels.enable_jit_warmup:
            warm_up(runner, self.execute_model)
        # vLLM's own made-up requests count each canvas as if it were emitted, and would read pages
        # behind the longest request of a short model.
        kernels.enable_jit_warmup &= runner.max_model_len > 6 * runner.decode_query_len
        self.warms_up = True
        times = super().compile_or_warm_up_model()
        self.warms_up = False
        return times

    def sample_tokens(self, grammar_output: Any) -> Any:
        """While vLLM warms up, wait for each pass.

        vLLM would wait once, at the end. What a pass reads is written into two buffers in turn, so
        that a third pass would overwrite what the first one may still have to read.
        """
        output: Any = super().sample_tokens(grammar_output)
        is_late = self.warms_up and isinstance(output, AsyncModelRunnerOutput)
        return output.get_output() if is_late else output


class DraftingGPURunner(DraftingRunner, GPUModelRunner):
    """On a GPU: of a target with or without drafts."""


class CanvasGPURunner(CanvasRunner, GPUModelRunner):
    """On a GPU: of a diffusion model. What is compiled and captured is compared at start."""

    check_code = staticmethod(drop_wrong_code)
    check_graphs = staticmethod(drop_wrong_graphs)

    def capture_model(self, *, profile_only: bool = False) -> int:
        if profile_only:
            return int(super().capture_model(profile_only=True))
        self.check_code(self)
        taken: int = super().capture_model()
        self.check_graphs(self)
        return taken


class LoadedTensors:
    """All tensors of a device that were made while a model was loaded.

    Sleep mode of level 2 gives their memory back. After ``wake_up`` a trainer sends weights again,
    and vLLM restores the model's buffers. What else was built beside them would hold whatever is in
    that memory then, for instance the state of canvases and the tables of the sampler.
    """

    def __init__(self, load: Callable[[], None], device: torch.device) -> None:
        before = _tensors(device)  # kept, so that no new tensor has the id of one of them
        known = {id(tensor) for tensor in before}
        load()
        self._made = [ref(tensor) for tensor in _tensors(device) if id(tensor) not in known]
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.inference_mode()
    def save(self, others: Iterable[torch.Tensor]) -> None:
        """Copy their memory to the host, each piece once. Somebody else restores ``others``."""
        seen = {tensor.untyped_storage().data_ptr() for tensor in others}
        for reference in self._made:
            tensor = reference()
            if tensor is None or tensor.untyped_storage().data_ptr() in seen:
                continue
            seen.add(tensor.untyped_storage().data_ptr())
            memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            memory.set_(tensor.untyped_storage())
            self._saved.append((memory, memory.to("cpu", copy=True)))

    @torch.inference_mode()
    def restore(self) -> None:
        """Copy it back to where it was, because captured graphs read these addresses."""
        for memory, copy in self._saved:
            memory.copy_(copy)
        self._saved = []


def _tensors(device: torch.device) -> list[torch.Tensor]:
    # Not isinstance(): it asks every object for its class, and some answer with a warning.
    found = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    return [tensor for tensor in found if tensor.device == device]
