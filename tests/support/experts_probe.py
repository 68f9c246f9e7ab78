"""How many of 32 experts the rows of a canvas choose in the last layer, with dummy weights.

python -m tests.support.experts_probe ours|built-in fill|vllm      # prints the number
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

NAME, WEIGHTS = sys.argv[1:3]
os.environ["DLLM_DISABLE"] = "1" if NAME == "built-in" else "0"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams, TokensPrompt  # noqa: E402
from vllm.model_executor.models import gemma4  # noqa: E402

from bench.gpu import engine  # noqa: E402
from bench.gpu.weights import compute_with_dummy_weights  # noqa: E402
from bench.toys import tiny  # noqa: E402

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
    route = gemma4.Gemma4Router.forward

    def forward(self: Any, x: Any) -> Any:
        logits = route(self, x)
        chosen.append(len(logits.topk(TOP_K, -1).indices.unique()))
        return logits

    gemma4.Gemma4Router.forward = forward
    if WEIGHTS == "fill":
        compute_with_dummy_weights()
    made = config()
    with tempfile.TemporaryDirectory() as folder:
        engine.write_model(Path(folder) / "model", is_toy=True)
        (Path(folder) / "model/config.json").write_text(json.dumps(made))
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
        chosen.clear()
        params = SamplingParams(max_tokens=32, ignore_eos=True, detokenize=False)
        llm.generate([TokensPrompt(prompt_token_ids=list(range(20, 52)))], params, use_tqdm=False)
    print(chosen[-1], flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
