"""DiffusionModelState: the methods through which vLLM's model runner asks about a diffusion model.

    custom_sampler  once, at start: vLLM's sampler is replaced by DiffusionSampler
    add_request     for each new request: Records.reset(slot)
    apply_staged_writes  after a step's new requests: what they brought goes to the device
    prepare_attn    each engine step: which rows are causal -> metadata for the attention backend
    prepare_inputs  each engine step: embeddings of the tokens, with self-conditioning on canvases

Our own loop asks for the canvases alone (``engine.loop``):

    canvas_attention  once for an engine step that goes on after its first pass
    canvas_inputs     for each further pass
    before_logits     behind each pass, the first one, too (``engine.runner``)
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.utils import AttentionGroup

from dllm.attention.ragged import spread, starts_of
from dllm.engine import pending
from dllm.engine.algorithm import DenoisingAlgorithm
from dllm.engine.compilation import maybe_compile
from dllm.engine.first_token import FirstTokens
from dllm.engine.grammars import CanvasGrammars, grammars_for
from dllm.engine.logit_rows import leave_out_rows
from dllm.engine.loop import CanvasForward, DenoiseLoop
from dllm.engine.records import Records, request_seed
from dllm.engine.sampler import DiffusionSampler
from dllm.engine.shifted_rows import ShiftedRows
from dllm.engine.spans import Sequences, Spans
from dllm.engine.state import CanvasState
from dllm.engine.step_rows import condition_rows
from dllm.engine.thoughts import Thought
from dllm.ops.staging import to_device
from dllm.settings.request import RequestOptions
from dllm.settings.thoughts import marks_of


class DiffusionModelState(ModelState):
    first_tokens: FirstTokens | None = None  # where the algorithm asks for them
    shifted_rows: ShiftedRows | None = None  # likewise
    map_adapters: Callable[[InputBatch], None] | None = None  # with --enable-lora (``runner``)
    # vLLM adds this to the number of draft tokens. A canvas has no extra token behind it.
    num_new_sampled_tokens_per_step = 0

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: nn.Module,
        encoder_cache: Any,
        device: torch.device,
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self._is_async = bool(vllm_config.scheduler_config.async_scheduling)
        self.algorithm: DenoisingAlgorithm = model.make_algorithm(vllm_config)  # type: ignore[operator]
        vocab_size = self.model_config.get_vocab_size()
        self.canvases = CanvasState.allocate(
            self.algorithm, self.max_num_reqs, vocab_size, self.dtype, device
        )
        self._records = Records(self.canvases)
        self._thought_marks = marks_of(vllm_config)
        self.grammars: CanvasGrammars = grammars_for(vllm_config, self.max_num_reqs, device)
        hidden_size = self.model_config.hf_text_config.hidden_size
        # The model's inputs stay in the same memory: a captured CUDA graph reads these addresses.
        # Longer than any batch: torch.compile takes two equal sizes for the same one, and would
        # compile again for the first batch that is not the longest.
        longest = self.max_num_tokens + 1
        self._inputs_embeds = torch.zeros(longest, hidden_size, dtype=self.dtype, device=device)
        self._is_canvas_row = torch.zeros(longest, dtype=torch.bool, device=device)
        # By slot, on the host: how many tokens of a canvas need logits (``RequestOptions``).
        self._num_logit_rows = np.full(self.max_num_reqs, self.algorithm.settings.canvas_length)
        self._is_causal = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)
        self._condition = maybe_compile(condition_rows, vllm_config)

    def get_supported_generation_tasks(self) -> tuple[Any, ...]:
        return ("generate",)

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        """It also says what is rejected: no rejection sampler."""
        self._requests = sampler.req_states
        forward = CanvasForward(self, self.canvases.canvas)
        self.loop = DenoiseLoop(self.vllm_config, self.device.type == "cpu", forward.of_batch)
        ours = DiffusionSampler(
            self.vllm_config,
            self.model,
            self.algorithm,
            self.canvases,
            sampler,
            self.grammars,
            self.loop,
        )
        if self.algorithm.begins_causally:
            mask = self.model_config.hf_config.mask_token_id
            self.first_tokens = FirstTokens(self.model, ours, mask)
        if self.algorithm.is_shifted:
            self.shifted_rows = ShiftedRows(self.canvases, self._inputs_embeds)
        return ours, None

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        assert new_req_data.sampling_params is not None, "a generation request has parameters"
        options = RequestOptions.read(new_req_data.sampling_params, self.algorithm.settings)
        prompt_len, tokens = new_req_data.prompt_len, new_req_data.prefill_token_ids or []
        origin = new_req_data.req_id  # random
        if new_req_data.sampling_params.temperature == 0:  # the same prompt, the same noise
            images = [feature.identifier for feature in new_req_data.mm_features]
            origin = f"{tokens[:prompt_len]}{images}"
        seed = request_seed(options, origin, self.model_config.seed)
        thought = Thought.of_request(
            new_req_data.sampling_params, tokens[:prompt_len], self._thought_marks
        )
        self.grammars.add_request(req_index, new_req_data, thought)
        if thought is not None:
            thought.read(tokens[prompt_len:], prompt_len)
        self._records.reset(req_index, options, seed, prompt_len, thought)
        self._num_logit_rows[req_index] = options.num_rows

    def remove_request(self, req_id: str) -> None:
        super().remove_request(req_id)
        self.grammars.remove_request(req_id)

    def apply_staged_writes(self) -> None:
        self._records.send()
        self.grammars.apply_staged_writes()

    def before_logits(self, hidden_states: torch.Tensor, input_batch: InputBatch) -> None:
        """Behind each forward pass; ``[tokens, hidden]`` may be changed in place."""
        if self.first_tokens is not None:
            self.first_tokens.write(hidden_states, input_batch)
        if self.shifted_rows is not None:
            self.shifted_rows.shift_(hidden_states, input_batch)

    def prepare_inputs_embeds(
        self,
        scheduled_encoder_inputs: dict[str, list[int]],
        input_batch: InputBatch,
        req_states: RequestState,
    ) -> torch.Tensor | None:
        """``prepare_inputs`` makes the embeddings of the whole batch."""
        return None

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        """Embeddings ``[padded tokens, hidden]``, conditioned in canvas rows; which rows are so.

        It completes the batch's ``input_ids``, and takes rows without logits out of it. vLLM has
        called ``prepare_attn``.
        """
        # With this flag vLLM would copy drafts to the host, for grammars that check them there. Our
        # sampler applies grammars on the device.
        input_batch.has_structured_output_reqs = False
        self._write_emitted_ids(input_batch, req_states)
        if self._is_async:
            pending.write_block_ids(self.canvases, input_batch)
        inputs = self.canvas_inputs(input_batch)
        if input_batch.num_draft_tokens > 0:
            leave_out_rows(input_batch, self._num_logit_rows)
        return inputs

    def canvas_inputs(self, batch: InputBatch) -> dict[str, Any]:
        """As ``prepare_inputs``, for a batch whose token ids are written."""
        num_tokens, num_padded = batch.num_tokens, batch.num_tokens_after_padding
        embeds, is_canvas_row = self._inputs_embeds, self._is_canvas_row
        embeds[:num_tokens] = self.model.embed_input_ids(batch.input_ids[:num_tokens])
        is_canvas_row[:num_padded].zero_()
        if batch.num_draft_tokens > 0:
            self._condition(
                batch.logits_indices,
                batch.expanded_idx_mapping,
                batch.expanded_local_pos,
                embeds,
                is_canvas_row,
                self.canvases,
                self.algorithm,
            )
        return self._inputs(num_padded)

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        """For memory profiling and graph capture."""
        return self._inputs(num_tokens)

    def _inputs(self, num_tokens: int) -> dict[str, Any]:
        return {
            "inputs_embeds": self._inputs_embeds[:num_tokens],
            "is_canvas_row": self._is_canvas_row[:num_tokens],
        }

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: list[list[AttentionGroup]],
        kv_cache_config: KVCacheConfig,
        for_capture: bool = False,
        ubatch_idx: int = 0,
    ) -> dict[str, Any]:
        """With ``for_capture`` a full CUDA graph is captured; vLLM says mode NONE then."""
        assert ubatch_idx == 0, "batches of causal spans and canvases are not split"
        self._attention = block_tables, slot_mappings, attn_groups, kv_cache_config
        is_full = for_capture or cudagraph_mode == CUDAGraphMode.FULL
        describe = self._metadata_of_full_graph if is_full else self._metadata_of_sequences
        return build_attn_metadata(
            attn_groups=attn_groups,
            slot_mappings=slot_mappings,
            kv_cache_config=kv_cache_config,
            for_cudagraph_capture=for_capture,
            **describe(input_batch, block_tables),
        )

    def canvas_attention(
        self, canvases: InputBatch, rows: torch.Tensor
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Of canvases and tails alone; ``rows``: which tokens of the step's batch they are."""
        block_tables, slot_mappings, attn_groups, kv_cache_config = self._attention
        slot_mapping = slot_mappings[:, rows]
        metadata = self.prepare_attn(
            canvases, CUDAGraphMode.NONE, block_tables, slot_mapping, attn_groups, kv_cache_config
        )
        return metadata, build_slot_mappings_by_layer(slot_mapping, kv_cache_config)

    def _metadata_of_sequences(
        self, input_batch: InputBatch, block_tables: tuple[torch.Tensor, ...]
    ) -> dict[str, Any]:
        """Any batch: a row may be several sequences, over the same pages."""
        sequences = self._sequences(input_batch)
        seq_lens = input_batch.seq_lens_cpu_upper_bound.numpy()[sequences.request_of]
        request_of = to_device(sequences.request_of, self.device)
        # Under asynchronous scheduling the host's lengths are upper bounds. Only their differences
        # are used: how many tokens of its request are behind a sequence.
        tokens_behind = to_device(seq_lens - sequences.seq_lens, self.device)
        is_causal = to_device(sequences.is_causal, self.device)
        if self._is_async:
            is_causal = is_causal | self._find_commits(input_batch)[request_of]
        return {
            "num_reqs": len(sequences.request_of),
            "num_tokens": input_batch.num_tokens,
            "query_start_loc_gpu": to_device(sequences.query_start_loc, self.device),
            "query_start_loc_cpu": torch.from_numpy(sequences.query_start_loc),
            "max_query_len": int(np.diff(sequences.query_start_loc).max()),
            "seq_lens": input_batch.seq_lens[request_of] - tokens_behind,
            "max_seq_len": int(sequences.seq_lens.max()),
            "block_tables": [table[request_of] for table in block_tables],
            "causal": is_causal,
            "is_prefilling": torch.from_numpy(sequences.is_causal != 0),
            "mm_req_doc_ranges": sequences.images,
        }

    def _metadata_of_full_graph(
        self, input_batch: InputBatch, block_tables: tuple[torch.Tensor, ...]
    ) -> dict[str, Any]:
        """Each request is one sequence: ``engine.runner`` keeps others out of full graphs."""
        sequences, num_padded = self._sequences(input_batch), input_batch.num_reqs_after_padding
        num_reqs = input_batch.num_reqs
        assert len(sequences.request_of) == num_reqs, "a request of a full graph is one sequence"
        flags = np.pad(sequences.is_causal, (0, num_padded - num_reqs))
        is_causal = self._is_causal[:num_padded].copy_(to_device(flags, self.device))
        if self._is_async:
            is_causal[:num_reqs] |= self._find_commits(input_batch)
        return {
            "num_reqs": num_padded,
            "num_tokens": input_batch.num_tokens_after_padding,
            "query_start_loc_gpu": input_batch.query_start_loc[: num_padded + 1],
            "query_start_loc_cpu": torch.from_numpy(
                input_batch.query_start_loc_np[: num_padded + 1]
            ),
            "max_query_len": int(input_batch.num_scheduled_tokens.max()),
            "seq_lens": input_batch.seq_lens,
            "max_seq_len": self.model_config.max_model_len,  # a graph is captured for any length
            "block_tables": block_tables,
            "causal": is_causal,
            # A graph serves causal rows and canvases, as the flags on the device say.
            "is_prefilling": torch.zeros(num_padded, dtype=torch.bool),
        }

    def _find_commits(self, input_batch: InputBatch) -> torch.Tensor:
        num_tokens = self._requests.total_len.gpu
        return pending.find_commits(self.canvases, input_batch, num_tokens)

    def _sequences(self, input_batch: InputBatch) -> Sequences:
        seq_lens = input_batch.seq_lens_cpu_upper_bound.numpy()[: input_batch.num_reqs]
        return _spans(input_batch).sequences(seq_lens, self.algorithm.settings.block_size)

    def _write_emitted_ids(self, input_batch: InputBatch, req_states: RequestState) -> None:
        """Emitted blocks, in the causal spans: vLLM's runner fills in prompts and canvases only."""
        computed = input_batch.num_computed_tokens_np
        prefill_len = input_batch.prefill_len_np
        # [R]: what is scheduled begins behind the prompt. A prompt length of 0 means a dummy run of
        # vLLM's. After a preemption the prompt has the emitted tokens, too, and the runner fills
        # them in.
        is_generated = (computed >= prefill_len) & (prefill_len > 0)
        causal_lens = np.where(is_generated, _spans(input_batch).causal_lens, 0)
        if not causal_lens.any():
            return
        # One entry for each token of a causal span: its index in the batch, and its request's slot.
        rows, offsets = spread(starts_of(causal_lens))
        tokens_np = input_batch.query_start_loc_np[rows] + offsets
        tokens, slots = to_device(
            np.stack([tokens_np, input_batch.idx_mapping_np[rows]]), self.device
        )
        ids = req_states.all_token_ids.gpu[slots, input_batch.positions[tokens]]
        input_batch.input_ids[tokens] = ids.to(input_batch.input_ids.dtype)


def _spans(input_batch: InputBatch) -> Spans:
    return Spans.of_schedule(input_batch.num_scheduled_tokens, input_batch.num_draft_tokens_per_req)
