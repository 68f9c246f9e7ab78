"""``dllm plan``: which width, how many workers, at what price; from measured times."""

import argparse
import http.client
import re
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dllm.remote.plan import Drafts, Grid, Row, Targets, constant, plan
from dllm.settings.checks import FloatRange, did_you_mean, known_fields, read_toml, refuse_value
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
MS = FloatRange(0, 1e6, excludes_low=True)
ROUND_TRIP = FloatRange(0, 1e6)
TOP = ("round_trip_ms", "targets", "drafts")


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
        rows = plan(*read_plan(read_toml(options.plan), survival))
    except ValueError as error:
        raise CommandError(f"{options.plan}: {error}") from None
    best = min(rows, key=lambda row: row.price if options.best == "price" else -row.tokens_per_s)
    print("\n".join(report(rows, best)))
    return OK


def read_plan(
    given: Mapping[str, Any], survival: tuple[float, ...] | None = None
) -> tuple[Targets, Drafts, float]:
    """The pools and the round trip (ms) of a TOML file; ``survival`` replaces the file's.

    Raises:
        ValueError: names the field, its value and what is allowed.
    """
    for key in given:
        if key not in TOP:
            raise ValueError(f"no table {key!r}{did_you_mean(key, list(TOP))}.")
    for key in TOP:
        if key not in given:
            raise ValueError(f"{key} is missing.")
    round_trip = given["round_trip_ms"]
    if round_trip not in ROUND_TRIP:
        refuse_value("round_trip_ms", round_trip, str(ROUND_TRIP))
    targets = dict(known_fields(Targets, given["targets"], "targets"))
    drafts = dict(given["drafts"]) if isinstance(given["drafts"], Mapping) else given["drafts"]
    if survival is None and isinstance(drafts, dict) and "acceptance" in drafts:
        survival = _constant(drafts.pop("acceptance"), drafts.pop("places", None))
    drafts = dict(known_fields(Drafts, drafts, "drafts"))
    drafts["survival"] = _numbers(
        "survival", drafts.get("survival", ()) if survival is None else survival, FloatRange(0, 1)
    )
    for name, pool in (("targets", targets), ("drafts", drafts)):
        pool["step"] = _grid(f"{name}.step", pool.get("step"))
        needed = ("engines", "requests") if name == "targets" else ("workers",)
        for field in needed:
            if field not in pool:
                raise ValueError(f"{name}.{field} is missing.")
    return Targets(**targets), Drafts(**drafts), float(round_trip)


def _constant(acceptance: object, places: object) -> tuple[float, ...]:
    if acceptance not in FloatRange(0, 1):
        refuse_value("acceptance", acceptance, str(FloatRange(0, 1)))
    if not isinstance(places, int) or not 1 <= places <= 64:
        refuse_value("places", places, "an integer from 1 to 64")
    return constant(float(acceptance), places)  # type: ignore[arg-type]


def _grid(where: str, given: object) -> Grid:
    """A table of times; without ``drafts`` its ``ms`` is a list, with it a list of lists."""
    if not isinstance(given, Mapping) or not {"requests", "ms"} <= set(given) <= set(Grid._fields):
        refuse_value(where, given, "a table with requests, ms, and drafts where the width matters")
    requests = _numbers(f"{where}.requests", given["requests"], MS)
    drafts = _numbers(f"{where}.drafts", given.get("drafts", (0,)), ROUND_TRIP)
    rows = given["ms"] if "drafts" in given else [[each] for each in _listed(given["ms"])]
    ms = [_numbers(f"{where}.ms", row, MS) for row in _listed(rows)]
    if len(ms) != len(requests) or any(len(row) != len(drafts) for row in ms):
        refuse_value(f"{where}.ms", given["ms"], f"{len(requests)} rows of {len(drafts)} times")
    if where == "targets.step" and drafts[0] != 0:
        refuse_value(
            f"{where}.drafts", list(drafts), "numbers from 0 on: plain decoding is compared"
        )
    for name, axis in (("requests", requests), ("drafts", drafts)):
        if list(axis) != sorted(set(axis)):
            refuse_value(f"{where}.{name}", list(axis), "numbers that increase")
    return Grid(requests, drafts, np.array(ms))


def _listed(given: object) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else []


def _numbers(name: str, given: object, allowed: FloatRange) -> tuple[float, ...]:
    values = _listed(given)
    if not values or not all(value in allowed for value in values):
        refuse_value(name, given, f"a list; each {allowed}")
    return tuple(float(value) for value in values)


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
    return tuple(np.minimum.accumulate(places))


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
