"""The table of typed decisions."""

from bench.decisions import BUILTIN, COUNTS, ONE_INPUT, OURS, OWN_INPUTS, RIGHT, table


def test_ratios_are_of_the_same_round():
    rows = [
        {"contestant": name, "load": load, "count": str(count), "pair": str(pair)}
        | {"per_s": str(speed * (1 + pair)), "p50_ms": "7", "ece": ""}
        for load in (ONE_INPUT, OWN_INPUTS)
        for count in COUNTS
        for name, speed in ((OURS, 30.0), (BUILTIN, 20.0))
        for pair in range(2)
    ]
    right = {"load": RIGHT, "count": "300", "pair": "0", "p50_ms": ""}
    rows.append(right | {"contestant": OURS, "per_s": "0.98", "ece": "0.0123"})
    head, _, first, *lines = table(rows).splitlines()
    assert f"beside {BUILTIN}" in head and len(lines) == 2 * len(COUNTS)
    assert first == "| one input, 1 | 45 | 1.50 [1.50 .. 1.50] | 7 / 7 |"
    assert lines[-1].startswith(f"| {OURS}, 300 questions | 0.980 right, ECE 0.012 |")
