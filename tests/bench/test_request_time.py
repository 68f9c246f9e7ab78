"""What a request costs: the parts that stacks of py-spy belong to, and the table."""

import pytest

from bench.context import write_csv
from bench.request_time import API, ENGINE, PARTS, PLUGIN, REST, SECTION, parts_of

MESSAGES = "messages to and from the engine"
SERVE = "run (asyncio/runners.py:1);app (fastapi/routing.py:2)"
VISIT = "step (vllm/v1/engine/core.py:1);sample (vllm/v1/worker/gpu/model_runner.py:2)"


@pytest.mark.parametrize(
    ("process", "stack", "part"),
    [
        (API, f"{SERVE};read (dllm/settings/request.py:9)", PLUGIN),
        (API, f"{SERVE};deliver (dllm/patches/streaming.py:9);loads (json/x.py:1)", PLUGIN),
        (API, f"{SERVE};get (dllm/patches/a.py:9);get (vllm/v1/core_client.py:1)", MESSAGES),
        (API, f"{SERVE};root (<template>:3)", "chat template"),
        (API, f"{SERVE};encode (vllm/v1/serial_utils.py:3)", MESSAGES),
        (API, f"{SERVE};body (starlette/requests.py:3)", "HTTP"),
        (ENGINE, f"{VISIT};__call__ (dllm/engine/sampler.py:3)", "sampler"),
        (ENGINE, f"{VISIT};f (dllm/engine/loop.py:3);forward (vllm/x.py:3)", "forward"),
        (ENGINE, f"{VISIT};_logits (dllm/models/gemma/backbone.py:3)", "head"),
        (ENGINE, "run (threading.py:1);process_output_sockets (vllm/x.py:2)", "messages"),
        (ENGINE, "run (threading.py:1)", REST),
    ],
)
def test_a_stack_belongs_to_the_first_part_that_matches(process: str, stack: str, part: str):
    assert parts_of(process, [(stack, 1)])[part] == 1


def test_shares_are_those_of_the_samples_in_the_order_of_the_parts():
    stacks = [
        (f"{VISIT};__call__ (dllm/engine/sampler.py:3)", 3),
        ("main (x.py:1)", 1),
        ("run (threading.py:1);Condition.wait (threading.py:331)", 99),
    ]

    shares = parts_of(ENGINE, stacks)

    assert list(shares) == [*PARTS[ENGINE], REST]
    assert shares["sampler"] == 0.75
    assert shares[REST] == 0.25
    assert sum(shares.values()) == 1


def test_the_table_has_sums_and_the_clients_time(tmp_path):
    about = {"commit": "c", "machine": "m", "versions": "v", "command": "x", "num_requests": "9"}
    rows = [
        {"server": server, "steps": steps, "process": process, "part": part}
        | {"cpu_ms": ms, "wall_ms": wall}
        | about
        for server, steps, wall, ms in (("ours", "4", "8.5", "1.5"), ("built-in", "1", "9.25", "2"))
        for process, part in ((API, "HTTP"), (API, REST), (ENGINE, "forward"))
    ]
    write_csv(tmp_path / "request_cpu.csv", rows)

    lines = SECTION(tmp_path).splitlines()

    assert lines[0] == "| process | part, ms | ours, 4 steps | built-in, 1 step |"
    assert "| API server | **together** | **3.00** | **4.00** |" in lines
    assert "| engine | **together** | **1.50** | **2.00** |" in lines
    assert "| client | waits (wall time) | 8.50 | 9.25 |" in lines
