"""``dllm plan``: how many drafts a target should ask for, from measured times.

For K drafts of a request and step, by the share of drafts that are kept at each place:

    E    tokens of a request and step: 1 + the sum of survival[0..K-1]
    T    milliseconds of a step: step + K * per_draft + round trip + K * draft
    gain E / T over 1 / step, plain decoding

Survival of place i is the share of verified drafts at that place that were kept, so that all drafts
before were kept, too. A worker that serves several targets, running ahead and prompts are not in
the formula.
"""

import argparse
import http.client
import re
import urllib.request
from collections.abc import Callable, Sequence

import numpy as np

from dllm.settings.checks import FloatRange
from dllm.settings.command import OK, CommandError
from dllm.settings.remote import MAX_DRAFTS

SHARE, TIME = FloatRange(0.0, 1.0), FloatRange(0.0, 1e6)
ABOVE_0 = FloatRange(0.0, 1e6, excludes_low=True)


def gains(
    survival: Sequence[float],
    step_ms: float,
    per_draft_ms: float,
    draft_ms: float,
    round_trip_ms: float,
    is_block: bool = False,
) -> list[tuple[float, float, float]]:
    """(tokens of a request and step, milliseconds of a step, gain) of 0, 1, 2, ... drafts.

    Args:
        survival: ``[N]``, from 1 down to 0.
        step_ms: of the target, without drafts.
        per_draft_ms: what each verified draft adds to it.
        draft_ms: of the worker: one draft of each request, or all at once (``is_block``).
        round_trip_ms: of an empty ask and its reply.
        is_block: all drafts come out of one step, as of a diffusion model.
    """
    found = [(1.0, step_ms, 1.0)]
    for width in range(1, len(survival) + 1):
        tokens = 1.0 + sum(survival[:width])
        drafting_ms = draft_ms if is_block else draft_ms * width
        ms = step_ms + per_draft_ms * width + round_trip_ms + drafting_ms
        found.append((tokens, ms, tokens * step_ms / ms))
    return found


def main(argv: Sequence[str]) -> int:
    """Print, from measured times, what each number of drafts gains, and the best one."""
    parser = argparse.ArgumentParser(prog="dllm plan", description=main.__doc__)
    add = parser.add_argument
    add("--step-ms", type=_in(ABOVE_0), required=True, help="a step of the target without drafts")
    add("--draft-ms", type=_in(ABOVE_0), required=True, help="a step of the draft model")
    add("--per-draft-ms", type=_in(TIME), default=0.0, help="what a verified draft adds to a step")
    add("--round-trip-ms", type=_in(TIME), default=0.5, help="to the worker and back (%(default)s)")
    add("--block", action="store_true", help="one step of the draft model makes all drafts")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--alpha", type=_in(SHARE), help="each draft is kept with this probability")
    given.add_argument("--survival", type=_in(SHARE), nargs="+", help="share kept at each place")
    given.add_argument("--metrics", metavar="URL", help="of a target that drafts, as .../metrics")
    add("--drafts", type=int, default=16, help="with --alpha: the most (%(default)s)")
    options = parser.parse_args(argv)
    if not 1 <= options.drafts <= MAX_DRAFTS:
        raise CommandError(f"--drafts {options.drafts}; allowed: 1 to {MAX_DRAFTS}.")
    survival = options.survival
    if options.alpha is not None:
        survival = [options.alpha**place for place in range(1, options.drafts + 1)]
    elif survival is None:
        survival = survival_of(_fetch(options.metrics))
    elif list(survival) != sorted(survival, reverse=True):
        raise CommandError(f"--survival {survival}; allowed: numbers from 1 down to 0.")
    rows = gains(
        survival,
        options.step_ms,
        options.per_draft_ms,
        options.draft_ms,
        options.round_trip_ms,
        options.block,
    )
    best = max(range(len(rows)), key=lambda width: rows[width][2])
    print("  drafts  tokens/step  ms/step   gain")
    for width, (tokens, ms, gain) in enumerate(rows):
        mark = "*" if width == best else " "
        print(f"{mark} {width:6}  {tokens:11.2f}  {ms:7.2f}  {gain:4.2f}x")
    return OK


def _in(allowed: FloatRange) -> Callable[[str], float]:
    """What reads an argument that has to be in a range."""

    def number(text: str) -> float:
        if float(text) not in allowed:
            raise argparse.ArgumentTypeError(f"{text}; allowed: {allowed}")
        return float(text)

    return number


def _fetch(url: str) -> str:
    """The text of a server's metrics."""
    if not url.startswith(("http://", "https://")):
        raise CommandError(f"--metrics {url}; allowed: http://HOST:PORT/metrics.")
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return str(response.read().decode())
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise CommandError(f"--metrics {url}: {error}") from None


def survival_of(metrics: str) -> list[float]:
    """Accepted by verified drafts of each position, all engines of a server together.

    Raises:
        CommandError: the server has verified no drafts.
    """

    def by_position(name: str) -> dict[int, float]:
        counts: dict[int, float] = {}
        for place, value in re.findall(rf'^{name}{{.*?position="(\d+)".*?}} (\S+)$', metrics, re.M):
            counts[int(place)] = counts.get(int(place), 0.0) + float(value)
        return counts

    accepted = by_position("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    verified = by_position("dllm:verified_tokens_per_pos_total")
    places = [
        accepted.get(place, 0.0) / count for place, count in sorted(verified.items()) if count
    ]
    if not places:
        raise CommandError("this server has verified no drafts.")
    # A policy verifies late places where it expects more, so their share may rise by a little.
    return np.minimum.accumulate(places).tolist()
