"""``dllm draft-worker``: serves drafts to targets, from a vLLM engine in this process."""

import argparse
import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dllm.remote.address import DEFAULT, Address, parse
from dllm.remote.keys import Keys
from dllm.remote.stream import Server
from dllm.remote.worker import DraftWorker
from dllm.settings.command import OK, CommandError
from dllm.settings.remote import DISCOVERIES

if TYPE_CHECKING:
    from dllm.remote.discovery import Child


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
    from vllm.v1.engine.llm_engine import LLMEngine

    from dllm.remote.engine import EngineDrafts

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="dllm draft-worker"))
    engine_args = EngineArgs.from_cli_args(parser.parse_args(["--model", options.model, *rest]))
    _prepare(engine_args)
    drafts = EngineDrafts(LLMEngine.from_engine_args(engine_args))
    drafts.warm_up()
    worker = DraftWorker(drafts, options.ahead)

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
    add("--ahead", type=int, default=0, help="tokens drafted while the target verifies")
    return parser


def _check(options: argparse.Namespace) -> tuple[Address, Keys | None]:
    """Raises CommandError for a wrong value, or an address at which nothing can listen."""
    if options.ahead < 0:
        raise CommandError(f"--ahead {options.ahead}; allowed: an integer of at least 0.")
    from dllm.remote.discovery import find_python  # imports vLLM

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


def _listed(address: str) -> "Child":
    from dllm.remote.discovery import list_with_dynamo

    try:
        child = list_with_dynamo(address)
        child.wait_until_ready()
    except ValueError as error:
        raise CommandError(str(error)) from None
    return child


def _prepare(engine_args: Any) -> None:
    """Load no tokenizer, because only token ids are exchanged; keep prefixes for later runs.

    Prefix caching finds what the runs of a session have in common.
    """
    engine_args.skip_tokenizer_init = True
    engine_args.enable_prefix_caching = True
    engine_args.disable_log_stats = True
    given = engine_args.additional_config or {}
    ours = {**given.get("dllm", {}), "draft_worker": True}
    engine_args.additional_config = {**given, "dllm": ours}
