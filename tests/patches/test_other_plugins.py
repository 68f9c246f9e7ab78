"""Other plugins of vLLM work beside ours, and ours beside them.

They are installed as pip installs them, by entry points. The process is this file as a script.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import family_checkpoints
from tests.support.process import QUIET_ENGINE, ROOT, printed_json, python_path, run_python

pytestmark = pytest.mark.slow

ARCHITECTURE = "LLaDAMoEModelLM"  # of a model that we do not serve, and that their plugin does
INSTALLED = {
    "theirs-1.0.dist-info/METADATA": "Name: theirs\nVersion: 1.0\n",
    "theirs-1.0.dist-info/entry_points.txt": (
        "[vllm.general_plugins]\ntheirs = theirs:register\n"
        "[vllm.stat_logger_plugins]\ntheirs = theirs:Statistics\n"
    ),
    "theirs.py": f"""
from vllm.v1.metrics.loggers import StatLoggerBase
TOKENS = []
def register():
    from vllm import ModelRegistry
    qwen3 = "vllm.model_executor.models.qwen3:Qwen3ForCausalLM"
    ModelRegistry.register_model("{ARCHITECTURE}", qwen3)
class Statistics(StatLoggerBase):
    def __init__(self, vllm_config, engine_index=0): pass
    def log_engine_initialized(self): pass
    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        if iteration_stats is not None:
            TOKENS.append(iteration_stats.num_generation_tokens)
""",
}


def test_a_model_a_stat_logger_and_ours(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    for name, text in INSTALLED.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    fields = family_checkpoints.SDAR | {"model_type": "llada", "architectures": [ARCHITECTURE]}
    fields["auto_map"] = {"AutoConfig": "configuration_remote.RemoteConfig"}
    (tmp_path / "llada").mkdir()
    (tmp_path / "llada/config.json").write_text(json.dumps(fields))
    (tmp_path / "llada/configuration_remote.py").write_text(
        "from transformers import Qwen3Config\n"
        "class RemoteConfig(Qwen3Config):\n    model_type = 'llada'\n"
    )
    environment = QUIET_ENGINE | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PYTHONPATH": python_path(ROOT, tmp_path),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
    }
    arguments = ("-m", __name__, str(checkpoint()), str(tmp_path / "llada"))
    seen = printed_json(run_python(*arguments, environment=environment, timeout=600))
    assert seen["served"] == ARCHITECTURE
    assert sum(seen["recorded"]) == seen["tokens"] == 8


async def main(diffusion: str, llada: str) -> None:
    """Print, as JSON, what their plugins and ours do in one process."""
    from vllm import AsyncEngineArgs, EngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    theirs_model = EngineArgs(llada, trust_remote_code=True, skip_tokenizer_init=True)
    served = theirs_model.create_engine_config().model_config.architecture
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(diffusion, enforce_eager=True, max_model_len=256, max_num_seqs=2)
    )
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    answers = [each async for each in engine.generate({"prompt_token_ids": [20, 30]}, params, "a")]
    import theirs

    tokens = len(answers[-1].outputs[0].token_ids)
    seen = {"served": served, "tokens": tokens, "recorded": theirs.TOKENS}
    engine.shutdown()
    print(json.dumps(seen))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
