"""What the plugin touches of vLLM: every patched name and every import, and why. Data only.

Read from vLLM 0.32.0; ``tests/test_seams.py`` holds the code to it.
"""

from dataclasses import dataclass

ARCHITECTURE = "DiffusionGemmaForBlockDiffusion"
SCHEDULER = "dllm.scheduler.CanvasScheduler"
LOGGER = "vllm.dllm"  # below vLLM's own, whose handlers then show it
CPU_WORKER = "dllm.cpu.worker.CanvasCPUWorker"
IN_PROCESS_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
DRAFTER_WORKER = "dllm.drafter.worker.DrafterWorker"
DRAFTING_SCHEDULER = "dllm.drafter.scheduler.DraftingScheduler"


@dataclass(frozen=True)
class Seam:
    """One private name: where it is, what is done to it, and what it is for."""

    target: str
    action: str
    why: str


SEAMS = (
    Seam("vllm.ModelRegistry.register_model", "call", "our class serves the architecture"),
    Seam(
        "vllm.model_executor.models.config.MODELS_CONFIG_MAP",
        "replace our entry",
        "scheduler, worker, canvas length and limits are set for this architecture only",
    ),
    Seam(
        "vllm.v1.attention.backends.registry.register_backend",
        "call, on CUDA",
        "our attention kernel, as the backend that vLLM names CUSTOM",
    ),
    Seam(
        "vllm.sampling_params.SamplingParams._validate_diffusion",
        "wrap",
        "admits the parameters that the built-in sampler cannot honour and ours does",
    ),
    Seam(
        "vllm.v1.engine.input_processor.InputProcessor._validate_params",
        "wrap",
        "RequestOptions.parse refuses bad requests in the API server, with HTTP 400",
    ),
    Seam(
        "vllm.v1.engine.async_llm.AsyncLLM.generate",
        "wrap",
        "a bad streaming request gets HTTP 400, not 200 and then an error",
    ),
    Seam(
        "vllm.renderers.base.BaseRenderer.validate_token_ids",
        "wrap",
        "token ids outside the model's vocabulary are refused with the range",
    ),
    Seam(
        "vllm.entrypoints.generate.beam_search.online.BeamSearchOnlineMixin.beam_search",
        "wrap",
        "beam search is refused: a canvas has no next token to branch on",
    ),
    Seam(
        "vllm.multimodal.registry.MultiModalRegistry.create_processor",
        "wrap",
        "an image request gets HTTP 400 with the reason; vLLM only says 'not a multimodal model'",
    ),
    Seam(
        "vllm.config.VllmConfig.try_verify_and_update_config",
        "wrap",
        "with a DFlash drafter: the pair is checked, worker and attention chosen, for any target",
    ),
    Seam(
        "vllm.sampling_params.SamplingParams._validate_spec_decode",
        "wrap",
        "with a DFlash drafter of ours: admits min_p and logit_bias, which Model Runner V2 honours",
    ),
    Seam(
        "vllm.v1.worker.gpu.model_runner.init_speculator",
        "wrap, in the worker",
        "makes our speculator for a DFlash drafter",
    ),
    Seam(
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner.take_draft_token_ids",
        "wrap, in the worker",
        "each request's drafts are cut to the width that the policy chose",
    ),
    Seam(
        "vllm.v1.engine.core.EngineCore.post_step",
        "wrap, in the engine's process",
        "nobody drafts behind a step in which all requests ended",
    ),
    Seam(
        "vllm.v1.metrics.loggers.StatLoggerManager.record",
        "wrap, in the front end",
        "metrics of drafting: how much, how long, which widths",
    ),
    Seam(
        "vllm.config.VllmConfig._get_quantization_config",
        "call",
        "vLLM's checks of a quantized checkpoint, whose layers a CPU may have to emulate",
    ),
    Seam(
        "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update",
        "wrap, on layers of ours",
        "an FP8 KV cache holds the nearest values, as on a GPU; vLLM's CPU kernel truncates",
    ),
    Seam(
        "vllm.config.VllmConfig.use_v2_model_runner",
        "wrap",
        "Model Runner V2 on a CPU without Triton (vLLM insists on Triton)",
    ),
    Seam(
        "vllm.config.VllmConfig._validate_v2_model_runner",
        "wrap",
        "the same insistence, in a second place",
    ),
    Seam(
        "vllm.triton_utils.triton.next_power_of_2",
        "add to the placeholder",
        "Model Runner V2 calls it to size kernels that dllm.cpu.kernels replaces",
    ),
    Seam(
        "vllm.triton_utils.dispatcher.register_kernels",
        "call, in the CPU worker",
        "vLLM's own extension point for replacing Triton kernels",
    ),
    Seam(
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner._dummy_sampler_run",
        "wrap, in the worker",
        "memory profiling runs the largest denoise step; vLLM's dummy batch holds no canvas",
    ),
    Seam(
        "vllm.v1.worker.gpu.sample.prompt_logprob.PromptLogprobsWorker.compute_prompt_logprobs",
        "wrap, in the worker",
        "prompts that ask are scored, and no canvas or block beside them",
    ),
    Seam(
        "vllm.platforms.cpu.CpuPlatform.check_and_update_config",
        "wrap",
        "VLLM_WORKER_MULTIPROC_METHOD=fork may stand: spawned processes import everything again",
    ),
    Seam(
        "vllm.compilation.decorators._try_load_aot_compiled_fn",
        "wrap, in the CPU worker",
        "a restart loads the compiled backbone; vLLM finds its own file broken and traces again",
    ),
)

COMPRESSED = "vllm.model_executor.layers.quantization.compressed_tensors"

# What the plugin imports from vLLM, here and elsewhere: (module, names, what for). An import that
# is not listed fails ``tests/test_seams.py``; no names: the module as a whole.
IMPORTS: tuple[tuple[str, str, str], ...] = (
    # Public interface.
    ("vllm", "ModelRegistry SamplingParams", "what vLLM exports at its top"),
    ("vllm.sampling_params", "SamplingParams", "a request as it arrives"),
    ("vllm.exceptions", "VLLMValidationError", "a request refused with HTTP 400"),
    ("vllm.logger", "init_logger", "our lines among vLLM's"),
    ("vllm.platforms", "current_platform", "CPU or CUDA"),
    ("vllm.renderers.base", "BaseRenderer", "checks prompt token ids"),
    ("vllm.v1.engine.async_llm", "AsyncLLM", "where a streaming request enters"),
    (
        "vllm.entrypoints.generate.beam_search.online",
        "BeamSearchOnlineMixin",
        "where a beam search enters",
    ),
    # Configuration.
    (
        "vllm.config",
        "CacheConfig CompilationMode CUDAGraphMode VllmConfig",
        "what the server was told",
    ),
    ("vllm.config.compilation", "CUDAGraphMode", "whether a step is padded for a graph"),
    ("vllm.config.diffusion", "DiffusionConfig", "makes the scheduler reserve the canvas"),
    (
        "vllm.model_executor.models.config",
        "MODELS_CONFIG_MAP VerifyAndUpdateConfig",
        "the config hook of an architecture",
    ),
    # The model.
    ("vllm.compilation.decorators", "support_torch_compile", "compiles the backbone"),
    ("vllm.distributed", "tensor_model_parallel_all_reduce", "sums of sharded products"),
    ("vllm.model_executor.layers.attention", "Attention", "its type, for the anchored window"),
    ("vllm.model_executor.layers.layernorm", "RMSNorm", "norms of self-conditioning"),
    ("vllm.model_executor.layers.logits_processor", "LogitsProcessor", "gathers sharded logits"),
    (
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "ParallelLMHead VocabParallelEmbedding",
        "the sharded vocabulary",
    ),
    ("vllm.model_executor.models.gemma4", "Gemma4Model", "the backbone"),
    (
        "vllm.model_executor.models.interfaces",
        "SupportsMultiModal SupportsQuant",
        "image prompts; quantized checkpoints",
    ),
    (
        "vllm.model_executor.models.utils",
        "AutoWeightsLoader WeightsMapper maybe_prefix",
        "loading and renaming weights",
    ),
    ("vllm.model_executor.models.diffusion_gemma", "", "the built-in, with DLLM_DISABLE=1"),
    ("vllm.model_executor.models.gemma4_mm", "", "imported by the built-in; needs torchvision"),
    (
        "vllm.model_executor.models.gemma4_mm",
        "Gemma4DummyInputsBuilder Gemma4MultiModalProcessor Gemma4MultimodalEmbedder "
        "Gemma4ProcessingInfo",
        "images: the processor, and the projection behind the vision tower",
    ),
    ("vllm.multimodal", "MULTIMODAL_REGISTRY", "names the processor of a model class"),
    # The drafter.
    (
        "vllm.model_executor.layers.linear",
        "QKVParallelLinear ReplicatedLinear RowParallelLinear UnquantizedLinearMethod",
        "sharded products of the drafter",
    ),
    (
        "vllm.model_executor.layers.quantization.base_config",
        "QuantizationConfig",
        "the type of a quantized drafter's configuration",
    ),
    ("vllm.model_executor.layers.rotary_embedding", "get_rope", "RoPE of the drafter"),
    (
        "vllm.model_executor.models.interfaces",
        "SupportsEagle3",
        "marks a drafter with hidden states",
    ),
    ("vllm.model_executor.models.qwen2", "Qwen2MLP", "the MLP of Qwen3"),
    (
        "vllm.model_executor.models.utils",
        "get_draft_quant_config",
        "how the drafter is quantized, whatever the target is",
    ),
    (
        "vllm.transformers_utils.repo_utils",
        "get_hf_file_bytes",
        "tokenizer.json, mask_embedding.pt",
    ),
    (
        "vllm.v1.worker.gpu.spec_decode.dflash.speculator",
        "DFlashSpeculator",
        "base of ours: lays out a drafting step",
    ),
    ("vllm.v1.worker.gpu", "model_runner", "where the speculator is made"),
    (
        "vllm.v1.metrics.loggers",
        "PrometheusStatLogger StatLoggerManager",
        "where statistics reach the front end",
    ),
    (
        "vllm.v1.metrics.stats",
        "SchedulerStats",
        "in which those of drafting travel",
    ),
    ("vllm.v1.engine.core", "EngineCore", "asks for drafts behind each step"),
    (
        "vllm.v1.worker.gpu.spec_decode.utils",
        "DraftTokensHandler",
        "through which drafts reach the scheduler",
    ),
    ("vllm.v1.worker.gpu_worker", "Worker", "base of ours on CUDA"),
    ("vllm", "LLM", "runs the trials that a pilot is trained on"),
    ("vllm.outputs", "CompletionOutput", "how many steps an answer of theirs took"),
    # Quantized checkpoints.
    ("vllm.forward_context", "get_forward_context", "finds a layer by name in compiled code"),
    (
        "vllm.model_executor.layers.fused_moe",
        "RoutedExperts SharedExperts UnquantizedFusedMoEMethod",
        "experts, whose methods a CPU lacks",
    ),
    ("vllm.model_executor.layers.fused_moe.config", "FusedMoEConfig", "the shape of experts"),
    ("vllm.model_executor.layers.linear", "LinearBase", "a linear layer, or several fused"),
    (
        "vllm.model_executor.layers.quantization.base_config",
        "QuantizeMethodBase",
        "what creates, fills and applies the weights of a layer",
    ),
    (f"{COMPRESSED}.compressed_tensors", "CompressedTensorsConfig", "base of ours on a CPU"),
    (
        f"{COMPRESSED}.schemes",
        "CompressedTensorsScheme CompressedTensorsW4A4Fp4",
        "NVFP4 linear layers, whose loaders we keep",
    ),
    (
        f"{COMPRESSED}.compressed_tensors_moe.compressed_tensors_moe",
        "CompressedTensorsMoEMethod",
        "base of emulated experts",
    ),
    (
        f"{COMPRESSED}.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8",
        "CompressedTensorsW8A8Fp8MoEMethod",
        "FP8 experts, whose loaders we keep",
    ),
    (
        f"{COMPRESSED}.compressed_tensors_moe.compressed_tensors_moe_w8a8_int8",
        "CompressedTensorsW8A8Int8MoEMethod",
        "INT8 experts, likewise",
    ),
    (
        f"{COMPRESSED}.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4",
        "CompressedTensorsW4A4Nvfp4MoEMethod",
        "NVFP4 experts, likewise",
    ),
    # Front end.
    ("vllm.multimodal.registry", "MultiModalRegistry", "an image request is refused there"),
    ("vllm.v1.engine.input_processor", "InputProcessor", "requests are checked there"),
    # Scheduler.
    (
        "vllm.v1.core.sched.output",
        "CachedRequestData NewRequestData SchedulerOutput",
        "a schedule; the warm-up makes some of its own",
    ),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "base of ours"),
    ("vllm.v1.engine", "EngineCoreOutputs", "the signature of a scheduler method"),
    (
        "vllm.v1.outputs",
        "DraftTokenIds LogprobsTensors ModelRunnerOutput",
        "canvases and logprobs on their way",
    ),
    ("vllm.v1.request", "Request RequestStatus", "a request in the scheduler"),
    # Attention.
    ("vllm", "_custom_ops envs", "the CPU attention kernel; settings that vLLM reads"),
    (
        "vllm.v1.attention.backend",
        "AttentionBackend AttentionCGSupport AttentionImpl AttentionLayer "
        "AttentionMetadataBuilder AttentionType CommonAttentionMetadata MultipleOf",
        "bases of our backend on CUDA",
    ),
    (
        "vllm.v1.attention.backends.fa_utils",
        "is_fa_version_supported",
        "FlashAttention 4 takes a causal flag per sequence; older ones do not",
    ),
    (
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionBackend CPUAttentionBackendImpl CPUAttentionMetadata "
        "CPUAttentionMetadataBuilder",
        "bases of the anchored backend on a CPU",
    ),
    (
        "vllm.v1.attention.backends.registry",
        "AttentionBackendEnum register_backend",
        "our backend takes the name CUSTOM",
    ),
    ("vllm.v1.kv_cache_interface", "AttentionSpec KVCacheConfig", "signatures of hooks"),
    # Model Runner V2.
    ("vllm.v1.worker.gpu.attn_utils", "build_attn_metadata", "metadata of every cache group"),
    ("vllm.v1.worker.gpu.input_batch", "InputBatch InputBuffers", "one step's batch"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "where memory is profiled"),
    ("vllm.v1.worker.gpu.model_states.interface", "ModelState", "base of our model state"),
    (
        "vllm.v1.worker.gpu.sample.logit_bias",
        "MAX_NUM_ALLOWED_TOKEN_IDS MAX_NUM_LOGIT_BIAS_TOKENS MAX_NUM_STOP_TOKEN_IDS",
        "how much its state holds",
    ),
    (
        "vllm.v1.worker.gpu.sample.logits_processor.interface",
        "LogitsContext LogitsProcessor",
        "how its logit edits see a batch",
    ),
    ("vllm.v1.worker.gpu.sample.logprob", "compute_topk_scores", "logprobs of chosen rows"),
    ("vllm.v1.worker.gpu.sample.output", "SamplerOutput", "what a sampler returns"),
    (
        "vllm.v1.worker.gpu.sample.prompt_logprob",
        "CHUNK_SIZE PromptLogprobsWorker",
        "rows of logits it wants at once; where prompts are scored",
    ),
    ("vllm.v1.worker.gpu.sample.sampler", "Sampler", "whose states ours reads"),
    ("vllm.v1.worker.gpu.states", "RequestState", "canvases and tokens by slot"),
    ("vllm.v1.worker.utils", "AttentionGroup", "the signature of a hook"),
    # A CPU without Triton.
    ("vllm.triton_utils", "HAS_TRITON triton", "is it there, and the placeholder"),
    ("vllm.triton_utils.dispatcher", "register_kernels", "replaces kernels"),
    ("vllm.platforms.cpu", "CpuPlatform", "where vLLM overwrites how processes start"),
    ("vllm.compilation", "decorators", "where a restart loads the compiled backbone"),
    ("vllm.utils.math_utils", "next_power_of_2", "for the placeholder"),
    ("vllm.v1.worker.cpu.shm", "", "patches torch; before every other worker module"),
    ("vllm.v1.worker.cpu_worker", "CPUWorker", "base of ours"),
    ("vllm.v1.worker.worker_base", "CompilationTimes", "the signature of a hook"),
)
