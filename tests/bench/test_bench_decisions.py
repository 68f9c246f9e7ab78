"""The table of typed decisions."""

from bench.decisions import BUILTIN, COUNTS, LOADS, OURS, table


def test_ratios_are_of_the_same_round():
    rows = []
    for load in LOADS:
        for count in COUNTS:
            for name, speed in ((OURS, 30.0), (BUILTIN, 20.0)):
                for pair in range(2):
                    row = {"contestant": name, "load": load, "count": str(count)}
                    speed_of_round = speed * (1 + pair)
                    found = {"pair": str(pair), "per_s": str(speed_of_round), "p50_ms": "7"}
                    rows.append(row | found | {"ece": ""})
    right = {"load": "right", "count": "300", "pair": "0", "p50_ms": ""}
    rows.append(right | {"contestant": OURS, "per_s": "0.98", "ece": "0.0123"})
    head, lines = table(rows)
    assert head[2] == f"beside {BUILTIN}" and len(lines) == len(LOADS) * len(COUNTS) + 1
    assert lines[0] == ["one input, 1", "45", "1.50 [1.50 .. 1.50]", "7 / 7"]
    assert lines[-1][:2] == [f"{OURS}, 300 questions", "0.980 right, ECE 0.012"]
    assert {len(line) for line in lines} == {len(head)}
