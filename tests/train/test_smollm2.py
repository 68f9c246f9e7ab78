"""dllm train drafter on a Llama: a random one, and SmolLM2-135M, which `make smollm2` installs."""

import os
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from dllm import cli
from dllm.train.export import read_checkpoint
from tests.support.calibrate_cases import TOML
from tests.support.drafter_pairs import MASK, give_byte_tokenizer, write_target

ROOT = Path(__file__).parents[2]
SMOLLM2 = Path(os.environ.get("SMOLLM2", ROOT / ".venv/smollm2"))
MASKS = {"random": MASK, "smollm2": 16}


@pytest.fixture
def llama(request, tmp_path):
    if request.param == "smollm2":
        if not (SMOLLM2 / "config.json").exists():
            pytest.skip(f"{SMOLLM2} is not there: `make smollm2`")
        return SMOLLM2
    path = write_target(tmp_path / "random", kind=LlamaForCausalLM, tie_word_embeddings=True)
    return give_byte_tokenizer(path)


@pytest.mark.parametrize("llama", list(MASKS), indirect=True)
def test_the_command_makes_a_drafter_that_drafts_frequent_tokens(llama, tmp_path, capsys, request):
    mask = MASKS[request.node.callspec.params["llama"]]
    (tmp_path / "prompts.txt").write_text("\n".join(f"What is {n} plus {n}?" for n in range(8)))
    small = TOML.replace(f"mask_token_id = {MASK}", "draft_vocab_size = 64")
    (tmp_path / "config.toml").write_text(small.replace("heldout = 4", "heldout = 2"))
    files = {"prompts": "prompts.txt", "config": "config.toml", "out": "run"}
    flags = [part for name, file in files.items() for part in (f"--{name}", tmp_path / file)]
    command = ["train", "drafter", "--target", llama, *flags, "--device", "cpu"]
    assert cli.main([str(part) for part in command]) == 1
    assert "--mask-token-id" in capsys.readouterr().err
    assert cli.main([str(part) for part in (*command, "--mask-token-id", mask)]) == 0
    config, weights = read_checkpoint(tmp_path / "run/model")
    assert config["draft_vocab_size"] == 64 and len(weights["lm_head.weight"]) == 64
    checked = ["check-drafter", llama, tmp_path / "run/model", "--num-prompts", "2"]
    checked += ["--prompts", tmp_path / "prompts.txt", "--max-tokens", "6", "--json", "-"]
    capsys.readouterr()
    cli.main([str(part) for part in (*checked, "--device", "cpu")])
    assert '"tokens_a_step": ' in capsys.readouterr().out
