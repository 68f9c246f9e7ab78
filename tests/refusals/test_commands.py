"""Command lines that cannot work: (words behind `dllm`, exit status, what is said).

2: argparse's, a value that no run of the command may have; 1: what the command finds out.
"""

import re

import pytest

from dllm import cli
from tests.support.process import ROOT

TARGET = f"{ROOT}/checkpoints/tiny-ar"
EVAL, WATCH = "eval --decisions x", "watch question --model x"
PLAN, WORKER = "plan --step-ms 15 --draft-ms 2", "draft-worker --model /nowhere/model"
COMMANDS: list[tuple[str, int, str]] = [
    ("eval", 2, ""),
    (f"{EVAL} --samples 0", 2, "--samples"),
    (f"{EVAL} --concurrency 0", 2, "--concurrency"),
    (f"{EVAL} --output /no/such/folder/x.json", 2, "/no/such/folder"),
    (f"{EVAL} --no-such-flag", 2, "--no-such-flag"),
    ("watch", 2, ""),
    (f"{WATCH} --max-blocks 0", 2, "--max-blocks"),
    (f"{WATCH} --svg /no/such/folder/x.svg", 2, "/no/such/folder"),
    ("doctor --tensor-parallel-size=2", 2, ""),
    ("doctor --max-model-len 96 checkpoints/tiny-dllm", 2, ""),
    ("doctor checkpoints/tiny-dllm --max-model-len many", 2, ""),
    ("doctor checkpoints/tiny-dllm --enable-auto-tool-choice", 2, ""),
    *((f"doctor --port={number}", 2, "port") for number in ("70000", "-1", "0")),
    (f"{PLAN} --alpha 1.5", 2, "--alpha"),
    (f"{PLAN} --alpha nan", 2, "--alpha"),
    (f"{PLAN} --alpha 0.8 --round-trip-ms -1", 2, "--round-trip-ms"),
    (f"{PLAN} --alpha 0.8 --survival 0.8", 2, "--survival"),
    (PLAN, 2, "--metrics"),
    (f"{PLAN} --survival 0.6 0.8", 1, "--survival"),
    (f"{PLAN} --alpha 1 --drafts 0", 1, "--drafts"),
    (f"{PLAN} --alpha 1 --step-ms 0", 1, "--step-ms"),
    (f"{PLAN} --alpha 1 --model /no/such/folder", 1, "--kv-bytes"),
    (f"{WORKER} --listen tcp://0.0.0.0:5800", 1, "0.0.0.0.*draft-keys"),
    (f"{WORKER} --listen 0.0.0.0:5800", 1, "tcp://HOST:PORT"),
    (f"{WORKER} --listen tcp://127.0.0.1:5800", 1, "127.0.0.1.*draft-keys"),
    (f"{WORKER} --listen /tmp/worker.sock", 1, "chmod 700 /tmp"),
    (f"{WORKER} --keys /nowhere", 1, "/nowhere/key.pem"),
    (f"{WORKER} --ahead -1", 1, "--ahead -1.*at least 0"),
    (f"{WORKER} --discovery dynamo --listen tcp://0.0.0.0:5800", 1, "draft-keys"),
    ("quantize x --out y --scheme fp8", 2, "--scheme.*fp8-dynamic.*nvfp4"),
    ("quantize x --out y --scheme nvfp4 --samples 0", 2, "--samples.*at least 1"),
    (f"check-drafter {TARGET} /nowhere", 1, "no drafter with config.json"),
    (f"check-drafter {TARGET} /nowhere --num-prompts 0", 2, "--num-prompts is at least 1"),
    (f"train drafter --target {TARGET} --out x --from-buffer x --from-server http://x", 2,
     "--from-server"),
    (f"train drafter --target {TARGET} --out x --drafter x --from-buffer x --max-tokens 9", 2,
     "leave out the flags"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "status", "said"), COMMANDS)
def test_it_is_refused(words: str, status: int, said: str, capsys: pytest.CaptureFixture[str]):
    try:
        ended = cli.main(words.split())
    except SystemExit as end:
        ended = end.code
    assert ended == status
    assert re.search(said, capsys.readouterr().err, re.DOTALL)
