"""Every name of vLLM that the plugin replaces, wraps or calls to register something, and why.

This module holds data only. It is true of vLLM 0.32.0. ``tests/patches/test_contract.py`` checks
that vLLM has these names, with the signatures that we expect. The same test finds in our source
which other names of vLLM we import, override and read, and checks those, too.
"""

from dataclasses import dataclass

SCHEDULER = "dllm.engine.scheduler.CanvasScheduler"
ASYNC_SCHEDULER = "dllm.engine.async_scheduler.CanvasAsyncScheduler"
SCHEDULERS = (SCHEDULER, ASYNC_SCHEDULER)
CPU_WORKER = "dllm.patches.cpu_worker.CanvasCPUWorker"
GPU_WORKER = "dllm.patches.gpu_worker.CanvasGPUWorker"
IN_PROCESS_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
DRAFTING_SCHEDULER = "dllm.patches.engine_core.PatchingScheduler"
REMOTE_SCHEDULER = "dllm.remote.scheduler.RemoteScheduler"


@dataclass(frozen=True)
class Patch:
    """One name of vLLM: where it is, what is done to it, and why."""

    target: str
    action: str
    why: str


PATCHES = (
    Patch(
        "vllm.multimodal.MULTIMODAL_REGISTRY.register_processor",
        "call, where torchvision is installed",
        "vLLM's Gemma4 image processor, for our model",
    ),
    Patch(
        "vllm.ModelRegistry.register_model",
        "call",
        "our classes serve the architectures",
    ),
    Patch(
        "vllm.engine.arg_utils.EngineArgs.create_engine_config",
        "wrap, and nothing else, with another version of vLLM or beside another dllm",
        "servers of our architectures, drafters or options are refused; others are left alone",
    ),
    Patch(
        "vllm.engine.arg_utils.EngineArgs._set_default_max_num_seqs_and_batched_tokens_args",
        "wrap",
        "fewer requests at a time by default; a configuration does not say what the user gave",
    ),
    Patch(
        "vllm.model_executor.models.config.MODELS_CONFIG_MAP",
        "replace our entry",
        "scheduler, worker, canvas length and limits are set for these architectures only",
    ),
    Patch(
        "vllm.v1.attention.backends.registry.register_backend",
        "call, on CUDA",
        "our attention kernel, as the backend that vLLM names CUSTOM",
    ),
    Patch(
        "vllm.sampling_params.SamplingParams._validate_diffusion",
        "wrap",
        "admits the parameters that the built-in sampler cannot honour and ours does",
    ),
    Patch(
        "vllm.v1.engine.input_processor.InputProcessor._validate_params",
        "wrap",
        "RequestOptions.parse refuses bad requests in the API server, with HTTP 400",
    ),
    Patch(
        "vllm.v1.engine.input_processor.InputProcessor.process_inputs",
        "wrap",
        "writes our arguments as vLLM's edits of logits: allowed tokens, min_tokens",
    ),
    Patch(
        "vllm.v1.engine.async_llm.AsyncLLM.generate",
        "wrap, twice",
        "a bad streaming request gets HTTP 400, not 200 and then an error; also a bad grammar",
    ),
    Patch(
        "vllm.sampling_params.SamplingParams._validate_structured_outputs",
        "wrap",
        "admits structured outputs, which vLLM refuses for diffusion models",
    ),
    Patch(
        "vllm.v1.engine.async_llm.AsyncLLM.add_request",
        "wrap",
        "the request's grammar is compiled and sent with it",
    ),
    Patch(
        "vllm.v1.engine.llm_engine.LLMEngine.add_request",
        "wrap",
        "the same for the offline engine",
    ),
    Patch(
        "vllm.tool_parsers.structural_tag_registry.register_vllm_structural_tag",
        "call, in the front end",
        "the grammar of tool calls in Gemma 4's syntax",
    ),
    Patch(
        "vllm.tool_parsers.gemma4_engine_tool_parser.Gemma4EngineToolParser.structural_tag_model",
        "replace, in the front end",
        "its tool calls are held to that grammar; vLLM leaves them free",
    ),
    Patch(
        "vllm.v1.engine.core_client.AsyncMPClient.get_output_async",
        "wrap",
        "frames of unfinished canvases go to their streams; vLLM would count them as first tokens",
    ),
    Patch(
        "vllm.entrypoints.openai.chat_completion.serving.OpenAIServingChat.create_chat_completion",
        "wrap",
        "unfinished canvases in the stream of a chat, pins by text; a stream waits for its grammar",
    ),
    Patch(
        "vllm.entrypoints.openai.completion.serving.OpenAIServingCompletion.create_completion",
        "wrap",
        "the same for completions, and the hole in front of a suffix is filled",
    ),
    Patch(
        "vllm.entrypoints.openai.responses.serving.OpenAIServingResponses.create_responses",
        "wrap",
        "Responses refuse what they do not serve with HTTP 400; their stream starts before that",
    ),
    Patch(
        "vllm.entrypoints.openai.chat_completion.batch_serving.OpenAIServingChatBatch"
        ".create_batch_chat_completion",
        "wrap",
        "refuses what only chats and completions serve",
    ),
    Patch(
        "vllm.entrypoints.scale_out.token_in_token_out.serving.ServingTokens.serve_tokens",
        "wrap",
        "refuses what only chats and completions serve",
    ),
    Patch(
        "vllm.plugins.load_endpoint_plugins",
        "wrap",
        "/canvas where VLLM_PLUGINS names dllm_canvas; an entry point would warn everybody else",
    ),
    Patch(
        "vllm.renderers.base.BaseRenderer.validate_token_ids",
        "wrap",
        "token ids outside the model's vocabulary are refused with the range",
    ),
    Patch(
        "vllm.entrypoints.generate.beam_search.online.BeamSearchOnlineMixin.beam_search",
        "wrap",
        "beam search is refused: a canvas has no next token to branch on",
    ),
    Patch(
        "vllm.multimodal.registry.MultiModalRegistry.create_processor",
        "wrap",
        "an image request gets HTTP 400 with the reason; vLLM only says 'not a multimodal model'",
    ),
    Patch(
        "vllm.config.VllmConfig.try_verify_and_update_config",
        "wrap",
        "with a drafter: the pair is checked, worker, scheduler, attention chosen, for any target",
    ),
    Patch(
        "vllm.sampling_params.SamplingParams._validate_spec_decode",
        "wrap",
        "with a drafter of ours: admits min_p and logit_bias, which Model Runner V2 honours",
    ),
    Patch(
        "vllm.v1.worker.gpu.model_runner.init_speculator",
        "wrap, in the worker",
        "makes our speculator for a DFlash drafter, or for drafts of other processes",
    ),
    Patch(
        "vllm.config.VllmConfig._get_v2_model_runner_unsupported_features",
        "wrap",
        "Model Runner V2 runs a target with remote drafts; vLLM's own has no custom_class",
    ),
    Patch(
        "vllm.v1.worker.gpu.model_runner.RejectionSampler",
        "replace, in a worker that drafts",
        "drafts are kept if they are the tokens of plain decoding: the text never depends on them",
    ),
    Patch(
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner.take_draft_token_ids",
        "wrap, in the worker",
        "each request's drafts are cut to the width that the policy chose",
    ),
    Patch(
        "vllm.v1.engine.core.EngineCore.post_step",
        "wrap, in the engine's process",
        "drafting is skipped after a step that finished every request",
    ),
    Patch(
        "vllm.v1.metrics.loggers.StatLoggerManager.record",
        "wrap, in the front end",
        "metrics of drafting, and passes that only write a block's KV",
    ),
    Patch(
        "vllm.config.VllmConfig._get_quantization_config",
        "call",
        "vLLM's checks of a quantized checkpoint, whose layers a CPU may have to emulate",
    ),
    Patch(
        "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update",
        "wrap, on layers of ours",
        "an FP8 KV cache holds the nearest values, as on a GPU; vLLM's CPU kernel truncates",
    ),
    Patch(
        "vllm.config.VllmConfig.use_v2_model_runner",
        "wrap",
        "Model Runner V2 on a CPU without Triton; vLLM refuses it there",
    ),
    Patch(
        "vllm.config.VllmConfig._validate_v2_model_runner",
        "wrap",
        "vLLM refuses it in a second place, too",
    ),
    Patch(
        "vllm.v1.worker.gpu_worker.HAS_TRITON",
        "add, in the CPU worker",
        "vLLM 0.33 refuses Model Runner V2 in this module, too; 0.32 has no such name",
    ),
    Patch(
        "vllm.triton_utils.triton.next_power_of_2",
        "add to the placeholder",
        "Model Runner V2 calls it to size kernels that dllm.cpu replaces",
    ),
    Patch(
        "vllm.triton_utils.dispatcher.register_kernels",
        "call, in the CPU worker",
        "vLLM's own extension point for replacing Triton kernels",
    ),
    Patch(
        "vllm._custom_ops.weight_packed_linear_cpu",
        "wrap, in the CPU worker",
        "a product of zero rows divides by zero and kills the process",
    ),
    Patch(
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner._dummy_sampler_run",
        "wrap, in the worker",
        "memory profiling runs the largest denoise step; vLLM's dummy batch holds no canvas",
    ),
    Patch(
        "vllm.v1.worker.gpu.sample.prompt_logprob.PromptLogprobsWorker.compute_prompt_logprobs",
        "wrap, in the worker",
        "prompts that ask are scored, and no canvas or block beside them",
    ),
    Patch(
        "vllm.v1.engine.core.EngineCoreProc.run_busy_loop",
        "wrap, in a worker that is in the engine core's process",
        "the denoise loop ends when a request arrives",
    ),
    Patch(
        "vllm.v1.engine.core.EngineCoreProc.run_engine_core",
        "wrap",
        "the engine core ends when the process that started it is gone, also after SIGKILL",
    ),
    Patch(
        "vllm.v1.executor.multiproc_executor.WorkerProc.worker_main",
        "wrap",
        "the same for a worker",
    ),
    Patch(
        "vllm.v1.engine.coordinator.DPCoordinatorProc.run_coordinator",
        "wrap",
        "the same for the coordinator of --data-parallel-size",
    ),
    Patch(
        "vllm.entrypoints.launchers.launcher.watchdog_loop",
        "replace",
        "the API server ends at once with its engine; vLLM's may take 5 s, or wait for clients",
    ),
    Patch(
        "vllm.v1.engine.utils.zmq_socket_ctx",
        "wrap",
        "SIGTERM while the engine core starts ends the server; vLLM swallows it",
    ),
    Patch(
        "vllm.v1.engine.core_client.AsyncMPClient._call_utility_async",
        "wrap",
        "calls of an engine core that dies fail, also before the server is ready; vLLM's wait",
    ),
    Patch(
        "vllm.platforms.cpu.CpuPlatform.check_and_update_config",
        "wrap",
        "VLLM_WORKER_MULTIPROC_METHOD=fork may stand: spawned processes import everything again",
    ),
    Patch(
        "vllm.compilation.decorators._try_load_aot_compiled_fn",
        "wrap, in the CPU worker",
        "damaged files are deleted before vLLM opens them; a restart loads the compiled backbone, "
        "where vLLM finds its own file broken and traces again",
    ),
)
