"""Configures a server of a diffusion model (``kinds``): attention, pages, CUDA graphs, limits."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm import envs, platforms
from vllm.logger import init_logger

from dllm import LOGGER
from dllm.models import settings_of
from dllm.models.quantized import emulate_on_cpu
from dllm.patches import cpu
from dllm.patches.contract import CPU_WORKER, GPU_WORKER
from dllm.patches.cuda_graphs import choose_cuda_graphs
from dllm.patches.replace import replaces
from dllm.patches.served import Server
from dllm.settings.checks import refuse_value
from dllm.settings.denoising import WHOLE_SEQUENCE, DenoiseSettings, block_size_of
from dllm.settings.server import WHERE, options_of

if TYPE_CHECKING:
    from dllm.engine.attention_layers import Layer

logger = init_logger(LOGGER)

# How many requests run at a time unless the user chooses. Logits that do not fit the workspace are
# computed in tiles (``engine.logit_rows``), so that memory does not limit this.
DEFAULT_CONCURRENCY = 64
PROMPT_CHUNK = 2048  # tokens of prompts that a step has room for beside all canvases
GPU_PAGE_SIZE = 64  # tokens of a page of the KV cache
# In a model with shorter blocks, asynchronous scheduling has to be asked for: it takes one more
# pass for each block, which is much where a block takes few steps.
LEAST_ASYNC_BLOCK = 32


def configure_canvases(vllm_config: Any) -> None:
    """Raises ValueError if a value of the checkpoint or of a flag is not allowed."""
    from vllm.config.diffusion import DiffusionConfig

    settings = settings_of(vllm_config)
    if vllm_config.diffusion_config is None:
        vllm_config.diffusion_config = DiffusionConfig(canvas_length=settings.canvas_length)
    if settings.begins_causally:
        _separate_passes(vllm_config)
    vllm_config.scheduler_config.async_scheduling = _is_asynchronous(vllm_config, settings)
    if settings.block_size == WHOLE_SEQUENCE:  # every token is computed in every step
        vllm_config.cache_config.enable_prefix_caching = False
        longest = vllm_config.model_config.max_model_len
        _refuse_small_budgets(vllm_config.scheduler_config, "--max-model-len", longest)
        _choose_pages(vllm_config.cache_config, 1)
    else:
        if (value := options_of(vllm_config).context_cache) != "none":
            refuse_value(f"{WHERE}: context_cache", value, "'none': this model caches contexts")
        _refuse_small_budgets(vllm_config.scheduler_config, "the canvas", settings.canvas_length)
        _choose_pages(vllm_config.cache_config, settings.block_size)
    choose_cuda_graphs(vllm_config, settings.canvas_length)
    if vllm_config.model_config.is_multimodal_model and vllm_config.model_config.is_mm_prefix_lm:
        # The tokens of an image see each other, so they have to come in one chunk of the prompt.
        vllm_config.scheduler_config.disable_chunked_mm_input = True
    cpu.keep_few_products(vllm_config)
    cpu.make_replicas_independent(vllm_config)
    worker = vllm_config.parallel_config.worker_cls
    if worker not in ("auto", CPU_WORKER, GPU_WORKER):
        logger.warning(
            "dllm: the worker %s does not patch vLLM's model runner: memory profiling sees no "
            "canvas, and a request for prompt logprobs scores every token of its steps",
            worker,
        )
    emulate_on_cpu(vllm_config)
    # With vLLM's default (0) the prefix cache keeps only the end of a prompt for sliding-window
    # layers. The next turn of a conversation could then not reuse what was generated. With None it
    # keeps every page until the space is needed.
    if vllm_config.cache_config.prefix_cache_retention_interval == 0:
        vllm_config.cache_config.prefix_cache_retention_interval = None
    # As in vLLM's built-in class: a checkpoint's max_new_tokens is not the default of a request's
    # max_tokens.
    vllm_config.model_config.override_generation_config.setdefault("max_new_tokens", None)
    canvas_attention(vllm_config)


def _separate_passes(vllm_config: Any) -> None:
    """Give prompts and emitted blocks passes of their own, which decide the first tokens."""
    given = vllm_config.additional_config or {}
    ours = {**(given.get("dllm") or {}), "separate_passes": True}
    vllm_config.additional_config = {**given, "dllm": ours}


def set_batch_defaults() -> None:
    """Choose how many requests run at a time, and the tokens of a step, unless the user does.

    On a GPU the canvases of all of them and PROMPT_CHUNK tokens of a prompt fit into a step. On a
    CPU a few canvases keep all cores busy, and vLLM's default stays.
    """
    from vllm.engine.arg_utils import EngineArgs

    @replaces(EngineArgs, of=Server.CANVASES)
    def _set_default_max_num_seqs_and_batched_tokens_args(
        theirs: Any, self: Any, usage_context: Any, model_config: Any, parallel_config: Any
    ) -> None:
        has_seqs, has_tokens = (
            self.max_num_seqs is not None,
            self.max_num_batched_tokens is not None,
        )
        theirs(self, usage_context, model_config, parallel_config)
        if not has_seqs:
            self.max_num_seqs = min(self.max_num_seqs, DEFAULT_CONCURRENCY)
        if has_tokens:
            return
        config = SimpleNamespace(
            model_config=model_config, additional_config=self.additional_config
        )
        if block_size_of(config) == WHOLE_SEQUENCE:
            longest = model_config.max_model_len
            self.max_num_batched_tokens = max(self.max_num_batched_tokens, longest)
        elif not platforms.current_platform.is_cpu():
            config.diffusion_config = self.create_diffusion_config()
            canvases = self.max_num_seqs * settings_of(config).canvas_length
            self.max_num_batched_tokens = max(self.max_num_batched_tokens, canvases + PROMPT_CHUNK)


def refuse_missing_positions(model_config: Any) -> None:
    """Raises ValueError if requests may be longer than the model's table of positions: vLLM would
    read what is in memory behind it.
    """
    if not envs.VLLM_ALLOW_LONG_MAX_MODEL_LEN:
        return
    most = model_config.get_and_verify_max_len(None)
    if model_config.max_model_len > most:
        raise ValueError(
            f"--max-model-len {model_config.max_model_len}: the model has {most} positions, and "
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN gives it no more. Allowed: at most these. More of them, "
            "which it was not trained for: max_position_embeddings in --hf-overrides."
        )


def _refuse_small_budgets(scheduler: Any, what: str, length: int) -> None:
    """``what`` has so many tokens."""
    for flag, limit in (
        ("--max-num-batched-tokens", scheduler.max_num_batched_tokens),
        ("--max-num-scheduled-tokens", scheduler.max_num_scheduled_tokens),
        ("--long-prefill-token-threshold", scheduler.long_prefill_token_threshold or None),
    ):
        if limit is not None and limit < length:
            raise ValueError(
                f"{flag} {limit} is less than {what} of {length} tokens, which are scheduled "
                f"together or not at all. Allowed: at least {length}."
            )


def _is_asynchronous(vllm_config: Any, settings: DenoiseSettings) -> bool:
    """As vLLM does; models with short blocks only if the user asks.

    Raises ValueError if the user asks for it, and something forbids it.
    """
    from vllm.v1.executor.abstract import Executor

    given = vllm_config.scheduler_config.async_scheduling
    if given is False:
        return False
    loop_ms = options_of(vllm_config).denoise_loop_ms
    for forbids, why in (
        (cpu.is_synchronous(), "vLLM has none on a CPU"),
        (
            not Executor.get_class(vllm_config).supports_async_scheduling(),
            "the executor of --distributed-executor-backend supports none",
        ),
        (settings.block_size == WHOLE_SEQUENCE, "this model's steps compute whole sequences"),
        (settings.begins_causally, "with first_token = 'causal' it knows too late what is emitted"),
        (
            loop_ms not in ("auto", 0),
            f"denoise_loop_ms is {loop_ms}, and a loop needs the scheduler to wait for it",
        ),
    ):
        if forbids and given:
            raise ValueError(f"--async-scheduling does not work: {why}. Leave the flag out.")
        if forbids:
            return False
    return bool(given) or not 1 < settings.block_size < LEAST_ASYNC_BLOCK


def canvas_limits(vllm_config: Any) -> Iterator[tuple[Any, str, str]]:
    """As ``kinds.Kind.refuses`` says."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    yield vllm_config.speculative_config, "--speculative-config", "a canvas is its own draft"
    why = "what the last stage decides is the first stage's input in the next step"
    yield parallel.pipeline_parallel_size > 1, "--pipeline-parallel-size", why
    why = "canvas rows see each other across the shards"
    yield parallel.decode_context_parallel_size > 1, "--decode-context-parallel-size", why
    yield parallel.prefill_context_parallel_size > 1, "--prefill-context-parallel-size", why
    why = "every rank denoises all canvases"
    yield parallel.enable_batch_sharded_sampling, "--enable-batch-sharded-sampling", why
    why = "causal spans and canvases of a batch are not split"
    yield parallel.use_ubatching, "--enable-dbo (and --ubatch-size above 1)", why
    transfers = vllm_config.kv_transfer_config or cache.kv_offloading_size
    why = "the last block of a request has no KV that another request may load"
    yield transfers, "--kv-transfer-config (and KV offloading)", why
    backend = vllm_config.structured_outputs_config.backend
    why = "canvases need xgrammar's automata, which is the default"
    yield backend not in ("auto", "xgrammar"), "--structured-outputs-config.backend", why
    processors = vllm_config.model_config.logits_processors
    yield processors, "--logits-processors", "the canvas sampler runs none"


def _choose_pages(cache: Any, block_length: int) -> None:
    """Make every page of the KV cache hold whole blocks, and on a GPU a whole tile of keys.

    Our kernel looks up a page for each tile of 64 keys or less; in smaller pages, one for each key.
    The prefix cache recognizes a page by the tokens up to its end: one that ends within a block
    would be reused for another block. Raises ValueError if the user asks for other pages.
    """
    for flag, size in (
        ("--block-size", cache.block_size if cache.user_specified_block_size else None),
        ("--prefix-match-unit", cache.prefix_match_unit),
    ):
        if size is not None and size % block_length != 0:
            raise ValueError(
                f"{flag} {size}: the prefix cache would reuse parts of the model's blocks of "
                f"{block_length} tokens, behind which other tokens follow. Allowed: a multiple of "
                f"{block_length}. Leave the flag out."
            )
    default = 128 if platforms.current_platform.is_cpu() else GPU_PAGE_SIZE
    if not cache.user_specified_block_size:
        cache.block_size = math.lcm(default, block_length)
        cache.user_specified_block_size = True  # or vLLM sets its default later


def canvas_attention(vllm_config: Any) -> None:
    """On CUDA, the backend that ``choose_kernel`` names; a CPU has only one.

    Ours gives rows to FlashAttention where ``flash_attn_version`` is 4, which is set if some layer
    has a use for it. Raises ValueError if the backend that the user asks for cannot serve this
    model.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if platforms.current_platform.is_cpu():
        return
    from dllm.attention.choice import OURS

    attention = vllm_config.attention_config
    attention.use_non_causal = True
    given = attention.backend.name if attention.backend else None
    if given in (None, OURS):
        _refuse_cache_dtype(vllm_config.cache_config.cache_dtype)
    attention.backend = AttentionBackendEnum[given or OURS]
    if flash_layers(vllm_config, given):
        attention.flash_attn_version = 4


def flash_layers(vllm_config: Any, option: str | None) -> "dict[str, Layer]":
    """By name, those in which FlashAttention serves rows; ``option``: as of ``flash_kinds``."""
    from dllm.attention.flash import flash_kinds
    from dllm.engine.attention_layers import layers_of

    attention = vllm_config.attention_config
    layers = layers_of(vllm_config, settings_of(vllm_config))
    return {name: one for name, one in layers.items() if flash_kinds(one, attention, option)}


def _refuse_cache_dtype(cache_dtype: str) -> None:
    """It may be the checkpoint's: those of NVIDIA Model Optimizer often ask for FP8."""
    if cache_dtype in ("auto", "float16", "bfloat16", "fp8_e5m2"):
        return
    if cache_dtype not in ("fp8", "fp8_e4m3"):
        why = "the kernels of diffusion models read 16-bit and FP8 numbers"
    elif not platforms.current_platform.has_device_capability(89):
        has = platforms.current_platform.get_device_capability().as_version_str()
        why = f"E4M3 needs a GPU of compute capability 8.9, and this one has {has}"
    else:
        return
    raise ValueError(
        f"--kv-cache-dtype {cache_dtype} (the flag's value, or what the checkpoint's "
        f"quantization_config asks for): {why}. Use --kv-cache-dtype bfloat16."
    )
