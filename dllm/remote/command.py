"""``dllm draft-worker``: serves drafts to targets, from a vLLM engine in this process."""

import argparse
import os
import signal
from collections.abc import Sequence
from typing import Any

from dllm.remote.address import DEFAULT, Address, parse
from dllm.remote.discovery import Child, find_python, list_with_dynamo
from dllm.remote.keys import Keys
from dllm.remote.stream import Server
from dllm.remote.worker import DraftWorker, Limits
from dllm.settings.checks import FloatRange, IntRange
from dllm.settings.command import OK, CommandError
from dllm.settings.denoising import block_size_of
from dllm.settings.remote import DISCOVERIES
from dllm.settings.request import MAX_INT32

MAX_STEPS = 4  # denoise steps of a canvas
ALLOWED: dict[str, IntRange | FloatRange] = {
    "ahead": IntRange(0, MAX_INT32),
    "max_sessions": IntRange(1, MAX_INT32),
    "max_tokens_kept": IntRange(1, MAX_INT32),
    "session_ttl": FloatRange(0, 1e9, excludes_low=True),
    "canvas": IntRange(1, MAX_INT32),  # compared with the model's in `_diffusion_options`
    "max_steps": IntRange(1, MAX_INT32),
}


def main(argv: Sequence[str]) -> int:
    """Serve until the process is told to end (SIGTERM, SIGINT), and print what it did."""
    # The loop below takes the engine's steps itself. Before vLLM is imported.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if {"-h", "--help"} & set(argv):
        _parser().print_help()
        return OK
    options, rest = _parser().parse_known_args(argv)
    address, keys = _check(options)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="dllm draft-worker"))
    engine_args = EngineArgs.from_cli_args(parser.parse_args(["--model", options.model, *rest]))
    _prepare(engine_args)
    worker = _make_worker(engine_args, options)

    server = Server(address, keys)
    listing = _listed(str(server.address)) if options.discovery == "dynamo" else None
    is_told_to_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: is_told_to_end.append(number))
    print(f"dllm draft-worker: {options.model} at {server.address}", flush=True)
    worker.serve(server, lambda: not is_told_to_end)
    if listing is not None:
        listing.close()
    server.close()
    counts = ", ".join(f"{name} {count}" for name, count in vars(worker.counts).items())
    print(f"dllm draft-worker: {counts}, refused {server.num_refused}", flush=True)
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dllm draft-worker",
        description="Serve drafts to `vllm serve` targets with remote drafts. Every other option "
        "is one of vLLM's engine, as for `vllm serve`.",
        add_help=False,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="draft model: autoregressive, or a diffusion model")
    add("--listen", default=DEFAULT, help="unix:///PATH or tcp://HOST:PORT (default: %(default)s)")
    add("--discovery", choices=DISCOVERIES, default="static", help="dynamo: targets find it there")
    add("--keys", metavar="DIR", help="folder of `dllm draft-keys`; needed for TCP")
    add("--ahead", type=int, default=Limits.ahead, help="tokens drafted while the target verifies")
    add("--max-sessions", type=int, default=Limits.max_sessions, help="requests that are kept")
    add("--max-tokens-kept", type=int, default=Limits.max_tokens, help="their tokens, together")
    add(
        "--session-ttl",
        type=float,
        default=Limits.ttl_s,
        metavar="SECONDS",
        help="until a request that nobody asks for is dropped",
    )
    add("--canvas", type=int, help="of a diffusion model: tokens of a canvas; its maximum if unset")
    add("--max-steps", type=int, help=f"of a diffusion model: denoise steps, {MAX_STEPS} if unset")
    return parser


def _check(options: argparse.Namespace) -> tuple[Address, Keys | None]:
    """Refuse wrong values and an address at which nothing can listen; read the keys, if any.

    Raises:
        CommandError: names the option, its value and what is allowed.
    """
    for name, allowed in ALLOWED.items():
        value = getattr(options, name)
        if value is not None and value not in allowed:
            raise CommandError(f"--{name.replace('_', '-')} {value}; allowed: {allowed}.")
    try:
        address = parse(options.listen, options.keys, "--listen", is_own=True)
        if options.discovery == "dynamo":
            if address.host in ("0.0.0.0", "::"):
                raise ValueError(
                    f"--listen {address} with --discovery dynamo: targets are told this address. "
                    "Name the one at which they reach this machine."
                )
            find_python()
        keys = None if options.keys is None else Keys(options.keys)
        Server(address, keys).close()
    except ValueError as error:
        raise CommandError(str(error)) from None
    return address, keys


def _listed(address: str) -> Child:
    try:
        child = list_with_dynamo(address)
        child.wait_until_ready()
    except ValueError as error:
        raise CommandError(str(error)) from None
    return child


def _prepare(engine_args: Any) -> None:
    """Token ids come and go: no tokenizer. Prefix caching finds what a session's runs share."""
    engine_args.skip_tokenizer_init = True
    engine_args.enable_prefix_caching = True
    engine_args.disable_log_stats = True
    given = engine_args.additional_config or {}
    ours = {**given.get("dllm", {}), "draft_worker": True}
    engine_args.additional_config = {**given, "dllm": ours}


def _make_worker(engine_args: Any, options: argparse.Namespace) -> DraftWorker:
    from vllm.v1.engine.llm_engine import LLMEngine

    from dllm.remote.engine import EngineDrafts

    config = engine_args.create_engine_config()
    canvas, max_steps = _diffusion_options(options, config)
    engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
    drafts = EngineDrafts(engine, canvas, max_steps)
    drafts.warm_up()
    limits = Limits(
        options.ahead, options.max_sessions, options.max_tokens_kept, options.session_ttl
    )
    return DraftWorker(drafts, limits)


def _diffusion_options(
    options: argparse.Namespace, config: Any
) -> tuple[int, int] | tuple[None, None]:
    """Tokens and denoise steps of a canvas; both None for an autoregressive model.

    Raises:
        CommandError: one of them was given for an autoregressive model, or the model has no such
            canvas.
    """
    if not config.model_config.is_diffusion:
        for flag, value in (("--canvas", options.canvas), ("--max-steps", options.max_steps)):
            if value is not None:
                raise CommandError(f"{flag} is of diffusion models; {options.model} is none.")
        return None, None
    longest = config.diffusion_config.canvas_length
    canvas = longest if options.canvas is None else options.canvas
    # With blocks, a canvas is the rest of its block.
    allowed = IntRange(longest if block_size_of(config) > 1 else 1, longest)
    if canvas not in allowed:
        raise CommandError(
            f"--canvas {canvas}; allowed for {options.model}: {allowed}. Leave it out for "
            f"{longest}."
        )
    return canvas, options.max_steps or MAX_STEPS
