"""What is served with what: ``KINDS`` has a row for each kind of server.

The first kind that a configuration asks for serves. Flags that cannot work with it are refused,
before anything is loaded. What a model's requests may ask for is in ``settings.admission``.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm import platforms

from dllm.patches import configure, contract, cpu, decoding, drafting, remote
from dllm.patches.drafts import NOISE_DRAFTER, Draft, draft_of
from dllm.patches.neighbours import is_disabled
from dllm.patches.served import Server
from dllm.settings.drafting import WHERE
from dllm.settings.server import PluginOptions, options_of

# Options of ``drafter`` that a kind may take: how many drafts are verified; recording; draft
# blocks; our drafter's network.
WIDTHS = frozenset({"policy", "width", "prompt_lookup"})
RECORDING = frozenset({"record", "record_mb"})
BLOCKS = frozenset({"pilot", "denoise_steps", "noise_schedule", "verification"})
NETWORK = frozenset({"fused_context", "window", "mask_token_id", "renew"})

Limits = Iterable[tuple[Any, str, str]]  # whether it is asked for, the flag, why it does not work
# Whose worker runs. With OURS, ``--worker-cls`` may name no other one.
OURS, UNLESS_NAMED, VLLMS = "ours", "ours unless --worker-cls names another", "vLLM's"


@dataclass(frozen=True)
class Kind:
    """A kind of server. What a row leaves out is vLLM's."""

    name: str  # as messages call it
    is_asked: Callable[[Any, PluginOptions], bool]  # by a server's configuration and options
    on_cpu: str = VLLMS  # whose worker runs
    on_cuda: str = VLLMS
    scheduler: str | None = None  # under synchronous scheduling
    async_scheduler: str | None = None  # the default on CUDA
    takes_scheduler: bool = True  # whether ``--scheduler-cls`` may name another one
    # options of ``drafter`` that do something; others are refused
    takes: frozenset[str] = frozenset()
    refuses: Callable[[Any], Limits] = lambda config: ()  # what does not work with it
    # Why no step may be scheduled ahead; None: vLLM decides.
    why_synchronous: Callable[[Any], str | None] = lambda config: None
    # checks and chooses what no other kind has, as attention
    configure: Callable[[Any], None] = lambda config: None


def serves(whom: Server) -> Callable[[Any, PluginOptions], bool]:
    return lambda config, options: config.served is whom


# To our schedulers a canvas is draft tokens; our worker profiles, warms up and repeats its steps;
# our attention backend has its masks.
CANVASES = Kind(
    "a diffusion model",
    serves(Server.CANVASES),
    on_cpu=UNLESS_NAMED,
    on_cuda=UNLESS_NAMED,
    scheduler=contract.SCHEDULER,
    async_scheduler=contract.ASYNC_SCHEDULER,
    takes_scheduler=False,
    refuses=configure.canvas_limits,
    configure=configure.configure_canvases,
)
# Our worker verifies drafts by our rule; our scheduler passes their counts to the metrics.
DRAFTING = partial(
    Kind,
    on_cpu=OURS,
    on_cuda=OURS,
    scheduler=contract.DRAFTING_SCHEDULER,
    async_scheduler=contract.ASYNC_DRAFTING_SCHEDULER,
    why_synchronous=drafting.why_steps_wait,
)
SELF_DRAFTS = DRAFTING(
    "drafting for itself",
    lambda config, options: draft_of(config.speculative_config) is Draft.ITSELF,
    takes=WIDTHS | BLOCKS | {"adapter"},
    refuses=decoding.self_drafting_limits,
    configure=decoding.configure_self_drafting,
)
# Of an autoregressive model with an adapter.
NOISE_DRAFTS = DRAFTING(
    "drafting for itself with noise",
    lambda config, options: (
        draft_of(config.speculative_config) is Draft.ITSELF
        and config.speculative_config.model == NOISE_DRAFTER
    ),
    takes=WIDTHS | {"adapter", "uno_mask_token_id", "uno_noise_seed", "verification"},
    refuses=decoding.noise_drafting_limits,
    configure=decoding.configure_noise_drafting,
)
DFLASH = DRAFTING(
    "drafting with a DFlash drafter",
    lambda config, options: drafting.asks_for_our_drafter(config),
    takes=WIDTHS | BLOCKS | NETWORK | RECORDING,
    refuses=drafting.draft_limits,
    configure=drafting.configure_drafting,
)
# With a speculator of vLLM, or with drafts that are looked up alone.
STEERED = DRAFTING(
    "drafting with options of dllm",
    lambda config, options: drafting.asks_for_steering(config),
    takes=WIDTHS | RECORDING,
    refuses=drafting.steering_limits,
    configure=drafting.configure_steering,
)
# Our scheduler asks the draft workers between two steps.
REMOTE = Kind(
    "remote drafting",
    lambda config, options: draft_of(config.speculative_config) is Draft.REMOTE,
    on_cpu=OURS,
    on_cuda=OURS,
    scheduler=contract.REMOTE_SCHEDULER,
    takes_scheduler=False,
    refuses=remote.remote_limits,
    why_synchronous=lambda config: remote.WHY_STEPS_WAIT,
    configure=remote.configure_remote,
)
# Our worker reads the hidden states of a target that has no drafter.
RECORDED = Kind(
    "recording",
    lambda config, options: (
        options.drafter.record is not None and config.speculative_config is None
    ),
    on_cpu=OURS,
    on_cuda=OURS,
    takes=RECORDING | {"record_layers"},
    refuses=decoding.adapter_limits,
    why_synchronous=drafting.why_steps_wait,
    configure=drafting.configure_recording,
)
# On a CPU, the runner that draws its numbers as drafts do: a seed gives the same text with both.
TOKEN_BY_TOKEN = Kind(
    "decoding token by token",
    serves(Server.TOKENS),
    on_cpu=OURS,
    refuses=decoding.adapter_limits,
)
DRAFT_WORKER = Kind("a draft worker", lambda config, options: options.draft_worker, UNLESS_NAMED)
OTHERS = Kind("another model", lambda config, options: True)
KINDS = (
    CANVASES,
    NOISE_DRAFTS,
    SELF_DRAFTS,
    DFLASH,
    REMOTE,
    STEERED,
    RECORDED,
    TOKEN_BY_TOKEN,
    DRAFT_WORKER,
    OTHERS,
)
# With DLLM_DISABLE=1, in the place of all others: on a CPU vLLM's class runs on our kernels.
BUILTIN = Kind(
    "vLLM's DiffusionGemma", CANVASES.is_asked, UNLESS_NAMED, configure=cpu.keep_few_products
)


def complete(vllm_config: Any) -> None:
    """Configure a server by its row."""
    if not is_disabled():
        _configure(vllm_config)
    elif BUILTIN.is_asked(vllm_config, PluginOptions()):
        BUILTIN.configure(vllm_config)
        _choose_worker(vllm_config, BUILTIN)


def _configure(vllm_config: Any) -> None:
    """Raises ValueError: a value of the checkpoint, an option or a flag does not work."""
    options = options_of(vllm_config)
    kind = next(kind for kind in KINDS if kind.is_asked(vllm_config, options))
    _refuse_options_of_others(kind, options)
    for is_given, flag, why in kind.refuses(vllm_config):
        if is_given:
            raise ValueError(f"{flag} does not work with {kind.name}: {why}. Leave it out.")
    if kind not in (DRAFT_WORKER, OTHERS):
        configure.refuse_missing_positions(vllm_config.model_config)
    kind.configure(vllm_config)
    _choose_scheduler(vllm_config, kind)
    if _choose_worker(vllm_config, kind):
        from dllm.patches import lifetime  # imports vLLM's engine core

        lifetime.end_together()


def _refuse_options_of_others(kind: Kind, options: PluginOptions) -> None:
    if options.remote is not None and kind is not REMOTE:
        remote.refuse_without_speculator()
    for name, value in options.drafter.given().items():
        if name not in kind.takes:
            owners = " or ".join(each.name for each in KINDS if name in each.takes)
            raise ValueError(
                f"{WHERE}: {name} = {value!r} does nothing on this server, which is of the kind "
                f'"{kind.name}"; it is for {owners}. Leave it out.'
            )


def _choose_scheduler(vllm_config: Any, kind: Kind) -> None:
    scheduler = vllm_config.scheduler_config
    if not kind.takes_scheduler:
        allowed = None, kind.scheduler, kind.async_scheduler
        _refuse_another("--scheduler-cls", scheduler.scheduler_cls, allowed, kind)
        scheduler.scheduler_cls = None
    if (why := kind.why_synchronous(vllm_config)) is not None:
        if scheduler.async_scheduling:
            raise ValueError(f"--async-scheduling: {why}. Leave the flag out.")
        scheduler.async_scheduling = False
    is_one_by_one = cpu.schedules_no_step_ahead(vllm_config, why)
    scheduler.scheduler_cls = scheduler.scheduler_cls or (
        kind.scheduler if is_one_by_one else kind.async_scheduler
    )
    if draft_of(vllm_config.speculative_config) is Draft.ITSELF:
        # vLLM refuses it for drafts of a class; `server_config` turns it on behind that check.
        scheduler.async_scheduling = False


def _choose_worker(vllm_config: Any, kind: Kind) -> bool:
    """Whether it is one of ours. Raises ValueError if the user's does not work."""
    parallel = vllm_config.parallel_config
    whose, our_class = kind.on_cuda, contract.GPU_WORKER
    is_cpu = platforms.current_platform.is_cpu()
    if is_cpu:
        whose, our_class = kind.on_cpu, contract.CPU_WORKER
    if whose == OURS:
        _refuse_another("--worker-cls", parallel.worker_cls, ("auto", our_class), kind)
    # On a CPU with Triton, vLLM's own worker can serve a kind that leaves it the choice.
    is_default = whose == OURS or not is_cpu or cpu.is_cpu_without_triton()
    if parallel.worker_cls == "auto" and is_default and whose != VLLMS:
        parallel.worker_cls = our_class
    if parallel.worker_cls == contract.CPU_WORKER:
        cpu.prepare_worker(vllm_config)
    return whose != VLLMS


def _refuse_another(
    flag: str, given: str | None, allowed: tuple[str | None, ...], kind: Kind
) -> None:
    if given not in allowed:
        raise ValueError(f"{flag} {given}: {kind.name} needs {allowed[1]}. Leave the flag out.")
