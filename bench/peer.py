"""SDAR-1.7B's shape beside transformers on this machine: tokens of finished canvases a second.

    python -m bench.peer                # one request at a time; takes 10 GiB of memory

    ours          an ``LLM`` in a process of its own, compiled
    transformers  Qwen3's class with its key-value cache, eager, which is its default; a plain loop

Both are in bf16 on all cores, with random weights, and take turns on the same random prompts, each
new to them. The threshold is 1, so every step decides the surest mask and no other: a block of 4
takes 4 denoise steps. transformers writes its keys and values in a pass of its own, as SDAR's
``generate.py`` does, and ours in the first pass of the next block. There is no table unless all
answers have all of their tokens. Written to --results: peer.csv, one row a run.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from bench.context import GateError, Row, Rows, command_line, publish, reporting_failures
from bench.race import Contestant, race, rounds, start_all
from bench.runs import TRANSFORMERS
from bench.serve import OURS
from bench.servers import SERVE_FLAGS, Engine
from bench.tables import Section, grouped, markdown, of, ratios, spread
from dllm.models.unmasking.reference import (
    DecodingRule,
    additive,
    backbone_of,
    block_causal,
    decide,
)

# config.json of JetLM/SDAR-1.7B-Chat, as in models/ of github.com/hxhcreate/DARE.
CONFIG: dict[str, Any] = {
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
    "attention_bias": False,
    "block_size": 4,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mask_token_id": 151669,
    "max_position_embeddings": 32768,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
FLAGS = (*SERVE_FLAGS, "--load-format", "dummy", "--skip-tokenizer-init", "--max-num-seqs", "1")


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--input-len", type=int, default=64, help="of prompts")
    parser.add_argument("--output-len", type=int, default=[32], nargs="+", help="of answers")
    options = parser.parse_args(arguments)
    size = CONFIG["block_size"]
    if any(length % size for length in (options.input_len, *options.output_len)):
        parser.error(f"--input-len, --output-len; allowed: whole blocks of {size} tokens.")
    torch.set_num_threads(os.cpu_count() or 1)

    def run(one: Contestant, num_tokens: int, seed: int) -> Row:
        draw = Random(seed)
        prompt = [draw.randrange(10, 500) for _ in range(options.input_len)]
        seconds = answer(one, prompt, num_tokens)
        return {"output_len": num_tokens, "tokens_per_s": num_tokens / seconds}

    def answer(one: Contestant, prompt: list[int], num_tokens: int) -> float:
        if isinstance(one.server, Engine):
            params = {"max_tokens": num_tokens, "ignore_eos": True, "detokenize": False}
            found = one.server.ask(prompts=[prompt], params=params)
            (tokens,), seconds = found["token_ids"], found["seconds"]
        else:
            start = time.perf_counter()
            tokens = peer.answer(prompt, num_tokens)
            seconds = time.perf_counter() - start
        if len(tokens) != num_tokens:
            raise GateError(f"{one.name}: {len(tokens)} tokens instead of {num_tokens}")
        return seconds

    def warm_up(one: Contestant) -> None:
        assert one.server is not None
        one.server.wait_until_ready()
        answer(one, [5] * options.input_len, max(options.output_len))

    path = options.results / SECTION.file
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dllm-peer-")))
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "generation_config.json").write_text(json.dumps({"threshold": 1.0}))
        threads = {"OMP_NUM_THREADS": str(os.cpu_count())}
        engine = Engine(OURS, str(folder), folder / "log", FLAGS, threads)
        racing = [Contestant(OURS, engine), Contestant(TRANSFORMERS)]
        start_all(racing, warm_up, stack)
        peer = Peer(folder)
        for rows in race(racing, options.output_len, rounds(options.rounds), run):
            publish(path, rows)
    print(SECTION(options.results))
    return 0


class Peer:
    """Blocks of masks with transformers and its cache, by the configurations of a folder."""

    def __init__(self, folder: Path) -> None:
        _, config = backbone_of(json.loads((folder / "config.json").read_text()))
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        self.rule = DecodingRule.of_checkpoint(folder)

    @torch.inference_mode()
    def answer(self, prompt: list[int], num_tokens: int) -> list[int]:
        """``num_tokens`` tokens behind a prompt; both are whole blocks."""
        cache, found = DynamicCache(config=self.model.config), torch.tensor([prompt])
        self._forward(cache, found)
        for _ in range(num_tokens // self.rule.block_size):
            canvas = torch.full((1, self.rule.block_size), self.rule.mask_token_id)
            is_canvas = torch.ones_like(canvas, dtype=torch.bool)
            while bool((canvas == self.rule.mask_token_id).any()):
                logits = self._forward(cache, canvas)
                cache.crop(found.shape[1])
                canvas, _ = decide(logits.float(), canvas, is_canvas, self.rule)
            self._forward(cache, canvas)
            found = torch.cat([found, canvas], dim=1)
        return found[0, len(prompt) :].tolist()

    def _forward(self, cache: DynamicCache, ids: torch.Tensor) -> torch.Tensor:
        """Logits of one block, ``[1, B, V]``; the keys and values of all ``ids`` are cached."""
        start, size = cache.get_seq_length(), self.rule.block_size
        end = start + ids.shape[1]
        mask = additive(block_causal(torch.arange(end), size)[None, start:]).to(self.model.dtype)
        return self.model(
            ids, past_key_values=cache, attention_mask=mask, logits_to_keep=size
        ).logits


def table(rows: Rows) -> str:
    lines = []
    for (length,), here in grouped(rows, "output_len").items():
        ours = of(here, OURS)
        for (name,), own in grouped(here, "contestant").items():
            compared = "" if name == OURS else ratios(ours, own, "tokens_per_s")
            lines.append([length, name, spread(own, "tokens_per_s", 2), compared])
    return markdown(["tokens of the answer", "", "tokens/s", "ours / this"], lines)


SECTION = Section("peer.csv", "python -m bench.peer", table)


if __name__ == "__main__":
    sys.exit(main())
