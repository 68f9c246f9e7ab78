"""CanvasRunner: what vLLM's Model Runner V2 does differently for a diffusion model.

It is a base class in front of vLLM's runner of a device (``patches.cpu_worker``,
``patches.gpu_worker``). The order of an engine step is vLLM's:

    execute_model   the runner prepares the batch, and runs the first forward pass
    sample_tokens   DiffusionSampler denoises, and repeats the pass while the loop goes on
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from dllm.engine.adapters import RunningAdapters, manager_of_adapters
from dllm.engine.channels import CanvasAnswer, LateAnswer, RepeatableSchedule
from dllm.engine.derived import as_one_of
from dllm.engine.warm_up import canvas_batch

Base: Any = GPUModelRunner if TYPE_CHECKING else object


class CanvasRunner(Base):
    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        # For prompt logprobs vLLM reads the id behind each scheduled token. A canvas may end at
        # max_model_len, and then the last request's next id is behind the table: a row more.
        self.req_states.all_token_ids = StagedWriteTensor(
            (self.max_num_reqs + 1, self.max_model_len),
            dtype=torch.int32,
            device=device,
            uva_instead_of_gpu=True,
        )
        self.lora_state = RunningAdapters(self.max_num_reqs)

    def load_model(self, *args: Any, **options: Any) -> None:
        """The table of draft tokens is the tensor of canvases: vLLM copies it to input ids."""
        # Experts keep their kernels, also if these take no adapter: with adapters vLLM would give
        # them Triton's, which a CPU lacks.
        self.vllm_config.lora_config = None
        super().load_model(*args, **options)
        self.req_states.draft_tokens = self.model_state.canvases.canvas
        # Our sampler applies grammars. vLLM's worker for them would take a bit for each token
        # and row, which is 0.5 GiB for 64 canvases of 256 rows.
        self.structured_outputs_worker = None
        if self.lora_config:
            self.model_state.map_adapters = self._map_adapters

    def load_lora_model(
        self, model: nn.Module, vllm_config: VllmConfig, device: torch.device
    ) -> nn.Module:
        """Raises ValueError if ``--lora-target-modules`` names something else."""
        vllm_config.lora_config = self.lora_config
        self.lora_manager = manager_of_adapters(model, vllm_config, device)
        served: nn.Module = self.lora_manager.create_lora_manager(model, vllm_config)
        return served

    def _map_adapters(self, batch: InputBatch) -> None:
        """As vLLM does for its batch."""
        inputs = self.lora_state.make_lora_inputs(
            batch.req_ids, batch.idx_mapping_np, batch.num_scheduled_tokens
        )
        self._set_active_loras(*inputs)

    @torch.inference_mode()
    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None:
        """Memory profiling sees the denoise step that needs the most; vLLM's sees no canvas."""
        length = self.num_speculative_steps
        batch = canvas_batch(self.input_buffers, self.max_num_reqs, length)
        hidden = hidden_states.new_zeros(batch.num_draft_tokens, hidden_states.shape[1])
        self.sampler.profile(hidden, batch)

    def gather_batch_req_state(self, scheduler_output: SchedulerOutput, dummy_run: bool) -> Any:
        """Let full graphs be replayed for canvases alone.

        vLLM uses a full graph where all requests have as many tokens as the widest canvas, and none
        reads its prompt. That may be a causal span and a narrower canvas behind it. With blocks it
        is always one block, which is one sequence. A part of it may be the tail of a prompt, which
        vLLM takes for a prompt that is read.
        """
        state, num_tokens_each = super().gather_batch_req_state(scheduler_output, dummy_run)
        widths = getattr(state, "num_draft_tokens_np", None)
        if widths is None:
            return state, num_tokens_each
        has_canvas, lengths = widths > 0, state.num_scheduled_tokens
        if self.model_state.algorithm.settings.block_size == 1:
            if (has_canvas & (widths < lengths)).any():
                num_tokens_each = None
        elif (has_canvas | ~state.is_prefilling_np).all() and (lengths == lengths[0]).all():
            num_tokens_each = int(lengths[0])
        return state, num_tokens_each

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **options: Any) -> Any:
        is_repeatable = isinstance(scheduler_output, RepeatableSchedule)
        self.model_state.loop.begin_engine_step(allows_more_passes=is_repeatable)
        return super().execute_model(scheduler_output, *args, **options)

    def prepare_inputs(
        self,
        scheduler_output: SchedulerOutput,
        batch_req_state: Any,
        batch_desc: BatchExecutionDescriptor,
        num_active_loras: int,
    ) -> InputBatch:
        """Let further passes replay the full CUDA graph of the first one, if it is one."""
        if batch_desc.cg_mode == CUDAGraphMode.FULL:
            graphs = self.cudagraph_manager
            self.model_state.loop.replay = partial(graphs.run_fullgraph, batch_desc)
        return super().prepare_inputs(
            scheduler_output, batch_req_state, batch_desc, num_active_loras
        )

    def sample(
        self, hidden_states: torch.Tensor, input_batch: InputBatch, grammar_output: Any
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        """Our sampler computes logits, as many at once as there is room for."""
        self.model_state.before_logits(hidden_states, input_batch)
        output = self.sampler(hidden_states[input_batch.logits_indices], input_batch)
        return output, output.num_sampled, output.num_rejected

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: Any) -> Any:
        """Passes and frames go into vLLM's answer."""
        answer = super().sample_tokens(grammar_output)
        own = {"num_passes": self.model_state.loop.num_passes, "frames": self.sampler.frames.take()}
        if isinstance(answer, AsyncModelRunnerOutput):
            return LateAnswer(answer, own)
        return None if answer is None else as_one_of(CanvasAnswer, answer, **own)
