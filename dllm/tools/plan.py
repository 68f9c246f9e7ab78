"""``dllm plan``: how many drafts pay, by measured times, and what they take of KV cache and money.

For K drafts of each request, by the share of drafts that are kept at each place:

    E     tokens of a request and step: 1 + the sum of survival[0..K-1]
    T     milliseconds of a step: step + K * per_draft + drafting
    gain  E / T over 1 / step, plain decoding
    cost  of a token: price of a millisecond * T / (requests * E)

Survival of a place is the share of verified drafts at that place that were kept, so that all drafts
before were kept, too. ``docs/planning.md`` says what is not in the formula.
"""

import argparse
import http.client
import json
import math
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from dllm.settings.command import OK, CommandError, positive
from dllm.settings.remote import MAX_DRAFTS

# Slots of KV that vLLM keeps for a drafter beside the target, beyond the K that are verified: for
# each draft, and for each request. Source: vLLM 0.32, ``VllmConfig.num_lookahead_tokens``.
LOOKAHEAD = {
    "remote": (0, 0),
    "dflash": (1, 1),
    "self_speculation": (1, 1),
    "draft_model": (1, 0),
    "eagle3": (1, 0),
    "ngram": (0, 0),
}
ONE_PASS = ("dflash", "self_speculation")  # over [last token, K masks]
ATTENTION = ("full_attention", "sliding_attention")
# Keys of config.json of models with layers that keep something else than keys and values.
OTHER_CACHES = ("kv_lora_rank", "hybrid_override_pattern", "full_attention_interval")
HEADER = "  drafts  tokens/step  ms/step   gain  KV slots     pages     MB  1M tokens"


class Row(NamedTuple):
    tokens: float  # of a request and step
    ms: float  # of a step
    gain: float


def gains(
    survival: Sequence[float], step_ms: float, per_draft_ms: float, drafting_ms: Sequence[float]
) -> list[Row]:
    """Of 0, 1, 2, ... drafts. ``survival``: ``[N]``, from 1 down to 0.

    ``drafting_ms``: ``[N]``, of 1, 2, ... drafts, the way to a worker and back included.
    """
    rows = [Row(1.0, step_ms, 1.0)]
    for width, drafting in enumerate(drafting_ms, 1):
        tokens = 1.0 + sum(survival[:width])
        ms = step_ms + per_draft_ms * width + drafting
        rows.append(Row(tokens, ms, tokens * step_ms / ms))
    return rows


def main(argv: Sequence[str]) -> int:
    """Print, from measured times, what each number of drafts gains and takes, and mark the best."""
    given = _parse(argv)
    is_block = given.block or given.source in ONE_PASS
    round_trip_ms = given.round_trip_ms if given.source == "remote" else 0.0
    survival, step_ms, draft_ms = given.survival, given.step_ms, given.draft_ms
    if given.alpha is not None:
        survival = [given.alpha**place for place in range(1, given.drafts + 1)]
    elif given.metrics is not None:
        survival, width, interval_ms, drafting_ms = measured(_fetch(given.metrics))
        if draft_ms is None:
            draft_ms = max(drafting_ms - round_trip_ms, 0.0) / (1 if is_block else width)
        if step_ms is None:
            step_ms = interval_ms - drafting_ms - given.per_draft_ms * width
    if not (step_ms and step_ms > 0) or draft_ms is None or math.isnan(step_ms + draft_ms):
        raise CommandError("--step-ms (above 0) and --draft-ms are needed: no metrics say them.")
    widths = range(1, len(survival) + 1)
    drafting = [round_trip_ms + draft_ms * (1 if is_block else width) for width in widths]
    rows = gains(survival, step_ms, given.per_draft_ms, drafting)
    kv_bytes = given.kv_bytes or sum(map(kv_bytes_of, given.model))
    best = max(range(len(rows)), key=lambda width: rows[width].gain)
    print(f"step {step_ms:.2f} ms, draft {draft_ms:.2f} ms{' for all' if is_block else ''}")
    print(HEADER)
    for width, (tokens, ms, gain) in enumerate(rows):
        of_each, more = LOOKAHEAD[given.source]
        slots = width * (1 + of_each) + more if width else 0  # of a request
        pages = f"{given.requests * slots / given.page:.0f}"
        pages += f"-{given.requests * math.ceil(slots / given.page)}"
        megabytes = f"{given.requests * slots * kv_bytes / 1e6:.0f}" if kv_bytes else "-"
        price = given.target_price + (given.draft_price if width else 0.0)
        cost = f"{price * ms / (3.6 * given.requests * tokens):.3f}" if price else "-"
        print(
            f"{'*' if width == best else ' '} {width:6}  {tokens:11.2f}  {ms:7.2f}  {gain:4.2f}x"
            f"  {given.requests * slots:8}  {pages:>8}  {megabytes:>5}  {cost:>9}"
        )
    return OK


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Raises CommandError for numbers that contradict each other."""
    parser = argparse.ArgumentParser(prog="dllm plan", description=main.__doc__)
    add, number = parser.add_argument, _up_to(1e9)
    add("--step-ms", type=number, help="a step of the target without drafts")
    add("--draft-ms", type=number, help="a pass of the draft model")
    add("--per-draft-ms", type=number, default=0.0, help="what a verified draft adds to a step")
    add("--source", choices=list(LOOKAHEAD), default="remote", help="what drafts (%(default)s)")
    add("--round-trip-ms", type=number, default=0.5, help="of remote: an empty ask (%(default)s)")
    add("--block", action="store_true", help="remote: one pass makes all drafts")
    kept = parser.add_mutually_exclusive_group(required=True)
    kept.add_argument("--alpha", type=_up_to(1), help="each draft is kept with this probability")
    kept.add_argument("--survival", type=_up_to(1), nargs="+", help="share kept at each place")
    kept.add_argument("--metrics", metavar="URL", help="of a target that drafts, as .../metrics")
    add("--drafts", type=int, default=16, help="with --alpha: the most (%(default)s)")
    add("--requests", type=positive, default=1, metavar="N", help="at once (%(default)s)")
    add("--page", type=positive, default=16, metavar="N", help="tokens in a page (%(default)s)")
    add(
        "--model",
        type=Path,
        nargs="+",
        default=[],
        metavar="DIR",
        help="target (and drafter), for MB",
    )
    add("--kv-bytes", type=positive, metavar="N", help="of a token, in place of --model")
    add("--target-price", type=number, default=0.0, help="of the target's GPUs, an hour")
    add("--draft-price", type=number, default=0.0, help="of the draft model's GPUs, an hour")
    given = parser.parse_args(argv)
    if not 1 <= given.drafts <= MAX_DRAFTS:
        raise CommandError(f"--drafts {given.drafts}; allowed: 1 to {MAX_DRAFTS}.")
    if given.survival and given.survival != sorted(given.survival, reverse=True):
        raise CommandError(f"--survival {given.survival}; allowed: numbers from 1 down to 0.")
    return given


def _up_to(most: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        if not 0 <= float(text) <= most:
            raise argparse.ArgumentTypeError(f"{text}; allowed: a number from 0 to {most:.10g}")
        return float(text)

    return number


def kv_bytes_of(model: Path) -> int:
    """Of a token in 16 bits. Raises CommandError if config.json does not say how layers attend."""
    try:
        config = json.loads((model / "config.json").read_text())
        config = config.get("text_config") or config
        heads, layers = config["num_attention_heads"], config.get("layer_types")
        if layers is None and any(key in config for key in OTHER_CACHES):
            raise ValueError("its layers do not all keep keys and values")
        layers = layers or ["full_attention"] * config["num_hidden_layers"]
        size = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        return int(2 * 2 * sum(kind in ATTENTION for kind in layers) * kv_heads * size)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(f"--model {model}: {error!r}. --kv-bytes says it instead.") from None


def _fetch(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise CommandError(f"--metrics {url}; allowed: http://HOST:PORT/metrics.")
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return str(response.read().decode())
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise CommandError(f"--metrics {url}: {error}") from None


def measured(metrics: str) -> tuple[list[float], float, float, float]:
    """What a server counted since it started, all its engines together.

    Survival ``[N]``; the mean number of verified drafts; milliseconds between the outputs of a
    request; milliseconds of a pass of the drafter, or of waiting for draft workers. NaN: it does
    not say. Raises CommandError if no drafts were verified.
    """
    total: defaultdict[tuple[str, int], float] = defaultdict(float)
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            total[sample.name, int(sample.labels.get("position", 0))] += sample.value

    def mean_ms(seconds: str, count: str) -> float:
        # An asynchronous scheduler counts draft passes, and no worker tells it their time.
        is_said = total[count, 0] and total[seconds, 0]
        return 1e3 * total[seconds, 0] / total[count, 0] if is_said else math.nan

    accepted = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    verified = [total["dllm:verified_tokens_per_pos_total", at] for at in range(MAX_DRAFTS)]
    if not any(verified):  # vLLM's own metrics: every draft is verified
        drafts = total["vllm:spec_decode_num_drafts_total", 0]
        verified = [drafts * ((accepted, at) in total) for at in range(MAX_DRAFTS)]
    places = [total[accepted, at] / count for at, count in enumerate(verified) if count]
    if not places:
        raise CommandError("this server has verified no drafts.")
    interval = "vllm:inter_token_latency_seconds"
    return (
        # A policy verifies late places where it expects more, so their share may rise by a little.
        np.minimum.accumulate(places).tolist(),
        sum(verified) / verified[0],
        mean_ms(f"{interval}_sum", f"{interval}_count"),
        mean_ms("dllm:drafting_seconds_total", "dllm:draft_passes_total"),
    )
