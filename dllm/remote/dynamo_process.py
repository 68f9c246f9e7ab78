"""Talks to NVIDIA Dynamo's discovery, in a process of its own that has ai-dynamo-runtime.

    python dynamo_process.py serve ADDRESS   a draft worker listens there; printed once it is listed
    python dynamo_process.py watch           the addresses of all draft workers

Each line of standard output is a JSON list of addresses; ``watch`` prints it when it changes. The
process ends when its standard input does, that is with the process that started it, and takes the
worker off the list. Needs nothing but Python and Dynamo's runtime.

Dynamo is configured by its own environment variables (DYN_..., ETCD_ENDPOINTS). Unless they say
otherwise, workers are listed in a folder of this user, and Dynamo listens at loopback.
"""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path.home() / ".cache" / "dllm" / "draft-workers"
# Dynamo's own default is an address that other machines reach.
HOST = os.environ.get("DYN_TCP_RPC_HOST", "127.0.0.1")
DEFAULTS = {
    "DYN_DISCOVERY_BACKEND": "file",
    "DYN_FILE_KV": str(FOLDER),
    "DYN_NAMESPACE": "dllm",  # one for each draft model, if there are several
    "DYN_TCP_RPC_HOST": HOST,
    "DYN_TCP_RESPONSE_STREAM_HOST": HOST,
    "DYN_SYSTEM_HOST": "127.0.0.1",
    "DYN_LOG": "error",
}
FIRST_LOOK_S, LOOK_EVERY_S = 0.5, 0.1  # by the first look Dynamo has what is listed already
ANSWER_WITHIN_S = 2.0


def main(argv: Sequence[str]) -> None:
    """Give Dynamo our defaults and a private folder for its list, and do what ``argv`` says."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if os.environ["DYN_FILE_KV"] == str(FOLDER):
        FOLDER.mkdir(mode=0o700, parents=True, exist_ok=True)
    asyncio.run(_main(argv))


async def _main(argv: Sequence[str]) -> None:
    from dynamo.runtime import DistributedRuntime

    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, os.environ["DYN_DISCOVERY_BACKEND"], "tcp")
    endpoint = runtime.endpoint(f"{os.environ['DYN_NAMESPACE']}.draft.address")
    work = _serve(endpoint, argv[1]) if argv[0] == "serve" else _watch(endpoint)
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(_end_of_input(loop))]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    runtime.shutdown()
    if not tasks[1].done():
        await tasks[0]  # raises what went wrong
        raise RuntimeError("Dynamo's runtime has ended.")  # for instance a lease was lost
    if argv[0] == "serve":
        await asyncio.wait(tasks[:1], timeout=ANSWER_WITHIN_S)  # until it is off the list


async def _end_of_input(loop: asyncio.AbstractEventLoop) -> None:
    is_over = asyncio.Event()
    loop.add_reader(0, lambda: None if os.read(0, 4096) else is_over.set())
    await is_over.wait()
    loop.remove_reader(0)


async def _serve(endpoint: Any, address: str) -> None:
    """List a worker; whoever asks gets its address."""

    async def answer(request: Any) -> Any:
        yield {"address": address}

    served = asyncio.ensure_future(endpoint.serve_endpoint(answer))
    client = await endpoint.client()
    while not served.done():
        if endpoint.connection_id() in client.instance_ids():
            _print([address])
            break
        await asyncio.sleep(LOOK_EVERY_S)
    await served


async def _watch(endpoint: Any) -> None:
    client = await endpoint.client()
    known: dict[int, str] = {}  # instance -> address
    failed: set[int] = set()  # did not say; asked again
    printed = None
    await asyncio.sleep(FIRST_LOOK_S)
    while True:
        there = client.instance_ids()
        new = [each for each in there if each not in known]
        # Whatever one process does, the others are still there.
        asked = (asyncio.wait_for(_ask(client, each), ANSWER_WITHIN_S) for each in new)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        known = {each: known[each] for each in there if each in known}
        for each, address in zip(new, answers, strict=True):
            if isinstance(address, str):
                known[each] = address
            elif each not in failed:
                print(f"draft worker {each:x}: {address!r}", file=sys.stderr, flush=True)
                failed.add(each)
        addresses = sorted(set(known.values()))
        if addresses != printed:
            _print(addresses)
            printed = addresses
        await asyncio.sleep(LOOK_EVERY_S)


async def _ask(client: Any, instance: int) -> Any:
    async for each in await client.direct({}, instance, annotated=False):
        return each["address"]


def _print(addresses: Sequence[str]) -> None:
    print(json.dumps(addresses), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
