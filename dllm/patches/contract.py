"""Every name of vLLM that the plugin replaces, derives or calls to register something, and why.

This module holds data only. It is true of vLLM 0.32 and 0.33, in the names of 0.33
(``settings.vllm_names`` has those that differ). ``tests/patches/test_contract.py`` finds in
our source what is replaced, and checks that it stands here, and that vLLM has these names, with the
signatures that we expect. The same test finds which other names of vLLM we import, call and
override, and checks those, too.
"""

SCHEDULER = "dllm.engine.scheduler.CanvasScheduler"
ASYNC_SCHEDULER = "dllm.engine.async_scheduler.CanvasAsyncScheduler"
SCHEDULERS = (SCHEDULER, ASYNC_SCHEDULER)
CPU_WORKER = "dllm.patches.cpu_worker.CanvasCPUWorker"
GPU_WORKER = "dllm.patches.gpu_worker.CanvasGPUWorker"
IN_PROCESS_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
DRAFTING_SCHEDULER = "dllm.drafter.scheduler.DraftingScheduler"
ASYNC_DRAFTING_SCHEDULER = "dllm.drafter.scheduler.AsyncDraftingScheduler"
REMOTE_SCHEDULER = "dllm.remote.scheduler.RemoteScheduler"


# Of modules and classes. By dotted name: where it is done, unless in every process, and why; where
# vLLM has a hook for something like it, why that is not used. Functions are wrapped (``replace``);
# of classes, servers of ours get derived ones (``served``).
PATCHES = {
    "vllm.multimodal.MULTIMODAL_REGISTRY.register_processor": (
        "where torchvision is installed: vLLM's Gemma4 image processor, for our model"
    ),
    "vllm.ModelRegistry.register_model": "our classes serve the architectures",
    "vllm.ModelRegistry.models": "on a CPU: our classes are imported where vLLM asks about them",
    "vllm.engine.arg_utils.EngineArgs.create_engine_config": (
        "servers of our architectures, drafters or options are refused; others are left alone"
    ),
    "vllm.engine.arg_utils.EngineArgs.create_model_config": (
        "on a CPU without bf16 instructions: --dtype auto is float32 for what we serve; where our "
        "option says so, a model that can do both is served token by token; the reason why we "
        "do not serve a diffusion model takes the place of vLLM's error"
    ),
    "vllm.config.VllmConfig": (
        "worker, scheduler, attention backend and limits are chosen (kinds), for any target; Model "
        "Runner V2 serves on a CPU without Triton, and drafts of a class of ours; a model that "
        "drafts for itself gets KV slots as DFlash does; VLLM_WORKER_MULTIPROC_METHOD=fork may "
        "stand: spawned processes import everything again"
    ),
    "vllm.engine.arg_utils.EngineArgs._set_default_max_num_seqs_and_batched_tokens_args": (
        "fewer requests at a time by default; a configuration does not say what the user gave"
    ),
    "vllm.model_executor.models.config.MODELS_CONFIG_MAP": (
        "the class of config.json is ours, and vLLM's settings of its DiffusionGemma are left out"
    ),
    "vllm.entrypoints.openai.decisions.strategies.READ_STRATEGIES": (
        "typed decisions are read from a canvas by our strategy"
    ),
    "vllm.entrypoints.openai.decisions.question_types.QUESTION_TYPES": (
        "in an API server of our architectures: choices and scores take as many options as OpenAI's"
    ),
    "vllm.transformers_utils.config._CONFIG_REGISTRY": (
        "vLLM reads config.json of our families without remote code. AutoConfig.register would do "
        "so, too, also for those who read them with their own remote code and serve nothing"
    ),
    "vllm.v1.attention.backends.registry.register_backend": (
        "on CUDA: our attention kernel, as the backend that vLLM names CUSTOM; in our CPU worker: "
        "our CPU_ATTN, which adds blocks, anchored windows, rounded FP8, and zeros for padding"
    ),
    "vllm.v1.engine.async_llm.AsyncLLM": (
        "requests are prepared: a bad one gets HTTP 400, also if it streams; those of one body "
        "start one by one. LogitsProcessor.validate_params sees parameters alone: neither the "
        "model, nor its tokenizer; and its class would be a logits processor of every model. A "
        "stat logger of an entry point (vllm.stat_logger_plugins) would run for every model, turn "
        "statistics on against --disable-log-stats, and not run in LLM"
    ),
    "vllm.v1.engine.llm_engine.LLMEngine": (
        "the same without a server: requests are prepared, grammars compiled and sent with them"
    ),
    "vllm.v1.engine.input_processor.InputProcessor": (
        "it does not see what the built-in sampler cannot honour and ours does: parameters, "
        "structured outputs, places of a first canvas that stand for noise; of drafts, min_p and "
        "logit_bias. Ends and bad words outside of the vocabulary, which it adds, are left out"
    ),
    "vllm.v1.engine.core_client.AsyncMPClient": (
        "frames of unfinished canvases go to their streams; vLLM would count them as first tokens"
    ),
    "vllm.tool_parsers.structural_tag_registry.register_vllm_structural_tag": (
        "in the front end: the grammar of tool calls in Gemma 4's syntax"
    ),
    "vllm.v1.structured_output.backend_xgrammar.validate_xgrammar_grammar": (
        "in the front end of our architectures: xgrammar reads no structural tag on the event "
        "loop, and no response format beside tools"
    ),
    "vllm.entrypoints.launchers.api_server.app_state.init_endpoint_plugins_state": (
        "in vllm run-batch, which has a state without endpoint plugins: ours runs there, too"
    ),
    "vllm.entrypoints.anthropic.api_router.translate_error_response": (
        "Anthropic's SDK goes on without a thread where an error has the details that say so"
    ),
    "vllm.entrypoints.openai.responses.protocol.ResponsesRequest.build_tok_params": (
        "the prompt of a response is that of the chat; vLLM begins it twice where the template and "
        "the tokenizer write the token that begins a text"
    ),
    "vllm.entrypoints.openai.responses.serving.split_delta": (
        "in the front end: what a canvas adds to a response comes in the order of the answer"
    ),
    "vllm.entrypoints.serve.sagemaker.api_router.get_generate_invocation_types": (
        "/invocations reads bodies with bounds"
    ),
    "vllm.plugins.load_endpoint_plugins": (
        "serving objects of ours answer for our models, and bodies are read with bounds; /canvas "
        "where VLLM_PLUGINS names dllm_canvas. Entry points (vllm.endpoint_plugins) are loaded "
        "only where VLLM_PLUGINS names them, and warn everybody else"
    ),
    "vllm.multimodal.registry.MultiModalRegistry.create_processor": (
        "an image request gets HTTP 400 with the reason; vLLM only says 'not a multimodal model'"
    ),
    "vllm.v1.worker.cpu.model_runner.CPUModelRunner": (
        "while our CPU worker makes its runner: ours; vLLM's worker names its class itself"
    ),
    "vllm.v1.worker.gpu.model_runner.init_speculator": (
        "in the worker: makes our speculators, or our subclass of vLLM's where options ask for it"
    ),
    "vllm.v1.core.kv_cache_planning.get_kv_cache_config_from_groups": (
        "on a CPU without Triton: pages are cleared before a request gets them"
    ),
    "vllm.triton_utils.triton.next_power_of_2": (
        "Model Runner V2 calls it to size kernels that dllm.cpu replaces"
    ),
    "vllm.v1.worker.gpu_worker.HAS_TRITON": (
        "in our worker on a CPU: vLLM 0.33 asks for Triton, whose kernels are replaced there"
    ),
    "vllm.triton_utils.dispatcher.register_kernels": (
        "in the CPU worker: vLLM's own extension point for replacing Triton kernels"
    ),
    "vllm.v1.engine.core.EngineCore": (
        "in the engine core's process: the denoise loop ends when a request arrives; drafting is "
        "skipped after a step that finished every request"
    ),
    "vllm.v1.engine.core.EngineCoreProc.run_engine_core": (
        "it makes an engine core of ours, and ends when the process that started it is gone, also "
        "after SIGKILL; vLLM's stays, with the memory of the model"
    ),
    "vllm.model_executor.models.gemma4_mm": (
        "with DLLM_DISABLE=1 on a CPU without torchvision: a stand-in, while vLLM's DiffusionGemma "
        "is imported, for the image processing that it takes from there"
    ),
}

# Routes of vLLM's API server that are taken out, from 0.33 on. By vLLM's function: path, and why.
ROUTES = {
    "vllm.entrypoints.openai.decisions.api_router.create_decision": (
        "/v1/decisions",
        "in an API server of our architectures: ours takes samples, images and turns, and says how "
        "far an answer can be trusted",
    ),
}

# Of objects. By vLLM's name: the expression of ours that is assigned to, and why. vLLM has no hook
# for any of them.
OBJECTS = {
    "vllm.model_executor.layers.fused_moe.modular_kernel.FusedMoEKernelModularImpl.fused_experts": (
        "kernel.fused_experts",
        "on a CPU with --enable-lora: ours in front of vLLM's, which take no adapter",
    ),
    "vllm.model_executor.layers.fused_moe.runner.moe_runner.MoERunner.gate": (
        "layer.base_layer.gate",
        "with --enable-lora: the router that takes adapters, which vLLM gives to its wrapper alone",
    ),
    "vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager._candidates": (
        "runner.cudagraph_manager._candidates",
        "at start: steps run with one kind of graphs and without, and a wrong kind is not used, "
        "nor pieces of a compiled model that is wrong",
    ),
    "vllm.v1.worker.gpu.states.RequestState.draft_tokens": (
        "self.req_states.draft_tokens",
        "a row for each canvas, and one that is spare",
    ),
    "vllm.v1.worker.gpu.sample.sampler.Sampler.use_flashinfer": (
        "sampler.use_flashinfer",
        "with our drafter: FlashInfer would draw other numbers in steps without drafts",
    ),
    "vllm.v1.request.Request.spec_token_ids": (
        "request.spec_token_ids",
        "canvases are scheduled as drafts; places for drafts are cut to the width",
    ),
    "vllm.v1.request.Request.num_in_flight_tokens": (
        "request.num_in_flight_tokens",
        "counts a canvas that is scheduled with the last chunk of its prompt",
    ),
    "vllm.v1.request.Request.num_output_placeholders": (
        "self.requests[data.req_id].num_output_placeholders",
        "the same under asynchronous scheduling",
    ),
    "vllm.model_executor.layers.linear.LinearBase.quant_method": (
        "layer.quant_method",
        "with an adapter of drafting rows, which changes what the layer gives in these",
    ),
    "vllm.model_executor.layers.quantization.modelopt.ModelOptQuantConfigBase.exclude_modules": (
        "quant_config.exclude_modules",
        "layers without values of their own are in no list of the checkpoint",
    ),
    "vllm.compilation.caching.VllmSerializableFunction.finalize_loading": (
        "function.finalize_loading",
        "in the CPU worker: vLLM calls it also of functions that have none, finds its own file "
        "broken, and traces again",
    ),
    "vllm.model_executor.kernels.linear.scaled_mm.cpu.CPUInt8ScaledMMLinearKernel.linear_method": (
        "self.kernel.linear_method",
        "on a CPU with AMX: activations in fp32, which AMX refuses, go to oneDNN",
    ),
}
