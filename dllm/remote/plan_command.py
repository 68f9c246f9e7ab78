"""``dllm plan``: which width, how many workers, at what price; from measured times."""

import argparse
import http.client
import re
import tomllib
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from dllm.remote.plan import Plan, Row, plan
from dllm.settings.command import OK, CommandError

EXAMPLE = """\
# Times in ms, as measured. Prices an hour, in one currency. `dllm plan THIS_FILE`
round_trip_ms = 0.5

[targets]
engines = 1
requests = 8                # at once, in each engine
price = 8.0                 # of one engine
kv_bytes = 327680           # of one token, all layers
[targets.step]              # ms[i][j]: requests[i] with drafts[j] drafts each
requests = [1, 8]
drafts = [0, 8]
ms = [[14.0, 14.6], [15.0, 17.0]]

[drafts]
workers = 1
price = 1.2                 # of one worker
is_block = false            # true: all drafts come out of one step, as of a diffusion model
ahead = false
survival = [0.80, 0.66, 0.55, 0.46, 0.39, 0.33, 0.28, 0.24]  # or: acceptance = 0.8, places = 8
[drafts.step]               # one token of each request, or one block
requests = [1, 8]
ms = [2.0, 2.2]
"""


def main(argv: Sequence[str]) -> int:
    """Print a table of widths and the best one."""
    parser = argparse.ArgumentParser(prog="dllm plan", description=__doc__)
    parser.add_argument("plan", nargs="?", type=Path, help="TOML file; --example prints one")
    parser.add_argument("--example", action="store_true", help="print a file to start from")
    parser.add_argument(
        "--metrics",
        metavar="URL",
        help="take survival from a running target, as http://127.0.0.1:8000/metrics",
    )
    parser.add_argument(
        "--best", choices=("speed", "price"), default="speed", help="what counts (%(default)s)"
    )
    options = parser.parse_args(argv)
    if options.example:
        print(EXAMPLE, end="")
        return OK
    if options.plan is None:
        parser.error("a plan is needed; `dllm plan --example` prints one")
    survival = None if options.metrics is None else _survival_of(_fetch(options.metrics))
    try:
        given = read_plan(options.plan.read_text(), survival)
        rows = plan(given.targets, given.drafts, given.round_trip_ms)
    except (OSError, ValueError) as error:
        raise CommandError(f"{options.plan}: {error}") from None
    best = min(rows, key=lambda row: row.price if options.best == "price" else -row.tokens_per_s)
    print("\n".join(report(rows, best)))
    return OK


def read_plan(text: str, survival: tuple[float, ...] | None = None) -> Plan:
    """The plan of a TOML file; ``survival`` replaces the file's.

    Raises:
        ValueError: names the field, and what is allowed.
    """
    given = tomllib.loads(text)
    if survival is not None and isinstance(given.get("drafts"), dict):
        given["drafts"]["survival"] = survival
    plan: Plan = msgspec.convert(given, Plan)
    return plan


def _fetch(url: str) -> str:
    """The text of a server's metrics."""
    if not url.startswith(("http://", "https://")):
        raise CommandError(f"--metrics {url}; allowed: http://HOST:PORT/metrics.")
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return str(response.read().decode())
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise CommandError(f"--metrics {url}: {error}") from None


def _survival_of(metrics: str) -> tuple[float, ...]:
    """Accepted by verified drafts of each position, as far as there are any.

    Raises:
        CommandError: the server has verified no drafts.
    """

    def by_position(name: str) -> dict[int, float]:
        counts: dict[int, float] = {}
        for labels, value in re.findall(rf"^{name}{{(.*?)}} (\S+)$", metrics, re.M):
            position = int(re.search(r'position="(\d+)"', labels).group(1))  # type: ignore[union-attr]
            counts[position] = counts.get(position, 0.0) + float(value)
        return counts

    accepted = by_position("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    verified = by_position("dllm:verified_tokens_per_pos_total")
    places = [
        accepted.get(place, 0.0) / count for place, count in sorted(verified.items()) if count
    ]
    if not places:
        raise CommandError("this server has verified no drafts.")
    # A policy verifies late places where it expects more, so their share may rise by a little.
    return tuple(np.minimum.accumulate(places).tolist())


def report(rows: Sequence[Row], best: Row) -> list[str]:
    """The lines of the table, the best width marked, and what to look at next."""
    lines = ["  drafts  tokens/step  ms/step  tokens/s  speedup  price/M  KV MiB  target drafts"]
    for row in rows:
        lines.append(
            f"{'*' if row is best else ' '} {row.width:6}  {row.tokens:11.2f}  {row.step_ms:7.2f}  "
            f"{row.tokens_per_s:8.0f}  {row.speedup:6.2f}x  {row.price:7.3f}  "
            f"{row.kv_bytes / 2**20:6.1f}  {row.target_busy:5.0%} {row.drafts_busy:6.0%}"
        )
    if best.width == 0:
        return [*lines, "Plain decoding is best: drafts cost more than they give."]
    least = {
        "target": "a faster target gains most",
        "drafts": "faster drafts gain most: more workers, or a smaller draft model",
        "network": "a shorter round trip gains most",
    }[best.bottleneck]
    return [*lines, f"Best: {best.width} drafts, {best.speedup:.2f}x. Bottleneck: {least}."]
