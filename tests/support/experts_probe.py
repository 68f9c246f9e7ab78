"""How many of 32 experts the rows of a canvas choose in the last layer, with dummy weights.

python -m tests.support.experts_probe ours|built-in     # with vLLM's weights, then with ours
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["DLLM_DISABLE"] = "1" if sys.argv[1] == "built-in" else "0"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.model_executor.models import gemma4

from bench.gpu import engine
from bench.toys import tiny

LAYERS = 30
TOP_K = 4


def config() -> dict[str, Any]:
    """The 26B's kinds of layers, small."""
    made = tiny.tiny_config(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=192,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * (LAYERS // 6),
        num_attention_heads=4,
        head_dim=64,
        global_head_dim=128,
        sliding_window=64,
        canvas_length=32,
        max_position_embeddings=1024,
        num_experts=32,
        moe_intermediate_size=64,
    )
    made["text_config"]["top_k_experts"] = TOP_K
    return made


def main() -> None:
    chosen: list[int] = []
    found: dict[str, int] = {}
    route = gemma4.Gemma4Router.forward

    def forward(self: Any, x: Any) -> Any:
        logits = route(self, x)
        chosen.append(len(logits.topk(TOP_K, -1).indices.unique()))
        return logits

    gemma4.Gemma4Router.forward = forward
    made = config()
    with tempfile.TemporaryDirectory() as folder:
        engine.write_model(Path(folder) / "model", is_toy=True)
        (Path(folder) / "model/config.json").write_text(json.dumps(made))
        engines = []  # a dropped one would end the process groups of the other
        for weights in ("vllm", "fill"):
            if weights == "fill":
                engine.compute_with_dummy_weights()
            llm = LLM(
                str(Path(folder) / "model"),
                load_format="dummy",
                enforce_eager=True,
                max_model_len=512,
                max_num_seqs=2,
                kv_cache_memory_bytes=64 << 20,
                dtype="bfloat16",
                language_model_only=True,
            )
            engines.append(llm)
            chosen.clear()
            params = SamplingParams(max_tokens=32, ignore_eos=True, detokenize=False)
            prompt = TokensPrompt(prompt_token_ids=list(range(20, 52)))
            llm.generate([prompt], params, use_tqdm=False)
            found[weights] = chosen[-1]
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
