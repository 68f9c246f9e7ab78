"""Drafting at a real server: its metrics, over HTTP."""

import re

import pytest

from tests.support.dashboard import named_by_row, served
from tests.support.drafter_pairs import write_drafter, write_target
from tests.support.server_harness import COMMON_FLAGS, ENVIRONMENT, MODEL, Server

pytestmark = pytest.mark.slow

NUM_DRAFTS, WIDTH = 3, 2


def metrics(server: Server) -> dict[str, float]:
    """Our samples: name and the labels beside model and engine -> value."""
    found, text = {}, server.get("/metrics").text
    for name, labels, value in re.findall(r"^dllm:(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        own = re.sub(r'(model_name|engine)="[^"]*",?', "", labels).strip(",")
        found[name + own] = float(value)
    return found


def test_metrics_of_drafting(tmp_path):
    target, drafter = write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter")
    assert ENVIRONMENT["TORCHDYNAMO_DISABLE"] == "1"
    flags = (
        *COMMON_FLAGS,
        "--max-num-batched-tokens=128",
        "--speculative-config",
        f'{{"method": "dflash", "model": "{drafter}", "num_speculative_tokens": {NUM_DRAFTS}}}',
        "--additional-config",
        f'{{"dllm": {{"drafter": {{"width": {WIDTH}}}}}}}',
    )
    with Server(target, tmp_path / "log", flags) as server:
        server.wait_until_ready()
        body = {"prompt": [20, 21, 22], "max_tokens": 20, "ignore_eos": True, "temperature": 0}
        server.ask("/v1/completions", {"model": MODEL} | body)
        found = metrics(server)
        assert named_by_row()["Drafts"] <= served(server.get("/metrics").text)
    passes = found["draft_passes_total"]
    verifying = found['verified_tokens_per_pos_totalposition="0"']
    # At most 19 steps behind the prompt's; those that verify were all drafted for.
    assert 7 <= verifying <= 19
    assert verifying <= passes <= verifying + 1
    assert found["drafted_tokens_total"] == passes * NUM_DRAFTS
    assert found["drafting_seconds_total"] > 0
    # Less where the answer ends: the scheduler drafts no further than max_tokens.
    assert found['verified_tokens_per_pos_totalposition="1"'] in (verifying, verifying - 1)
    assert found[f'verified_tokens_per_pos_totalposition="{WIDTH}"'] == 0
    assert {key: n for key, n in found.items() if key.startswith("draft_widths_total")} == {
        f'draft_widths_totalwidth="{WIDTH}"': passes
    }
