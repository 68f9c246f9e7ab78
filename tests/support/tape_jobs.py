"""The servers whose graphs are replayed from a tape (``tape_worker``)."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.images import path_with_torchvision
from tests.support.patience import HANG_S
from tests.support.process import ROOT, run_python
from tests.support.tape_modes import IN_PIECES

# Names of vLLM's reasoning parser, of tokens that no random model needs.
NAMES = {'"<|image>"': '"<think>"', '"<|image|>"': '"</think>"'}
PARSER = "deepseek_r1"

REQUESTS = [["grammar", "pins"], ["thoughts", "prompt_logprobs"]]
OTHERS = ["sdar, other", "sdar"]  # the last ones are those of the start
ADAPTED = [["adapter"], ["greedy", "adapter", "sampled"]]
PICTURES = [["image"], ["image", "greedy"]]
SAMPLES = [["greedy"], ["sampled", "filtered", "logprobs"]]  # alone, and three padded to four
CANVAS = {"gemma": 12, "sdar": 4, "sdar-moe": 4, "stable-diffcoder": 4}  # the others: 32


def canvases(family: str, *batches: list[str], **more: Any) -> dict[str, Any]:
    """A job of a random model of a family, whose batches are those given."""
    size = CANVAS.get(family, 32)
    options = {"reasoning_parser": PARSER, "sizes": [size, 4 * size], "num_tokens": 8}
    if more.get("mode") == IN_PIECES:  # of prompts, too; slots beside those of SAMPLES for a start
        options |= {"sizes": [size, 4 * size, 128], "max_num_seqs": 8}
    return {"model": family, "batches": list(batches)} | options | more


def drafts(model: str, size: int, drafter: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A job of a target with graphs of one request and of four, and its drafter."""
    job = {"model": model, "batches": [["greedy"], ["greedy", "sampled", "filtered"]]}
    given = {"is_async": False, "sizes": [size, 4 * size], "num_tokens": 16}
    return job | given | dict(drafter) | more


def speculative(method: str, drafter: str, num_drafts: int) -> dict[str, Any]:
    config = {"method": method, "model": drafter, "num_speculative_tokens": num_drafts}
    return {"speculative_config": config, "additional_config": {"dllm": {"drafter": {}}}}


TINY_AR, TINY_DRAFTER, TINY_NEMOTRON = (
    str(ROOT / "checkpoints" / name) for name in ("tiny-ar", "tiny-drafter", "tiny-nemotron")
)
OURS = speculative("dflash", TINY_DRAFTER, 7)
FEW = {"override_generation_config": {"max_denoising_steps": 8}}
FAMILIES = ("llada2", "nemotron", "fast-dllm", "sdar-moe", "stable-diffcoder", "a2d-qwen3")
SPLIT = ("sdar", "llada2", "nemotron", "fast-dllm")
ALONE = {"additional_config": {"dllm": {"separate_passes": True}}}
SELF = {"additional_config": {"dllm": {"decoding": "self_speculation"}}}
SELF_ADAPTED = {"decoding": "self_speculation", "drafter": {"adapter": "nemotron, adapter"}}
MASKS = {"additional_config": {"dllm": SELF_ADAPTED}}
NOISE = {"method": "uno", "uno_lora_path": "target, adapter", "num_speculative_tokens": 5}
ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "adapter": "sdar, adapter"}

# By the process in which they run: none long, as it is one test that waits for it.
JOBS: dict[str, dict[str, dict[str, Any]]] = {
    "daily": {
        "gemma, full": canvases("gemma", *SAMPLES, **FEW, num_tokens=24),  # two canvases
        "drafter": drafts(TINY_AR, 8, OURS),
    },
    "families": {
        "sdar, full": canvases("sdar", *SAMPLES),
        **{f"{name}, full": canvases(name, *SAMPLES, **FEW) for name in FAMILIES},
    },
    "drafts": {
        "eagle3": drafts("target", 6, speculative("eagle3", "eagle3", 5), sizes=[4, 6, 24]),
        "draft_model": drafts("target", 6, speculative("draft_model", "target", 5)),
        "self-speculation": drafts(TINY_NEMOTRON, 32, SELF, num_tokens=8),
        **{
            f"{name}, {kind}": drafts(*of, is_async=kind == "ahead", num_tokens=count)
            for name, of, count in (
                ("self-speculation, adapter", ("nemotron", 32, MASKS), 4),
                ("noise", ("target", 6, {"speculative_config": NOISE}), 16),
            )
            for kind in ("in turn", "ahead")
        },
    },
    "requests": {
        "adapter": canvases("sdar", *ADAPTED, **ADAPTERS, max_num_seqs=8, checks=True),
        "decisions": canvases("sdar", ["decision"], ["decision"] * 3, **ALONE),
        "grammar, pins, thoughts": canvases("gemma", *REQUESTS, num_tokens=24),
    },
    "images": {
        "images": canvases("gemma, images", *PICTURES, mode=IN_PIECES, reasoning_parser=""),
    },
    "reload": {"new weights": canvases("sdar", ["greedy"], weights=OTHERS)},
    "pieces": {
        **{f"{name}, in pieces": canvases(name, *SAMPLES, **FEW, mode=IN_PIECES) for name in SPLIT},
        "gemma, in pieces": canvases(
            "gemma", *SAMPLES, **FEW, mode=IN_PIECES, code="right", checks=True
        ),
        "wrong code": canvases("gemma", *SAMPLES, **FEW, mode=IN_PIECES, code="wrong"),
        **{
            f"{name}, in pieces": canvases(name, *SAMPLES, mode=IN_PIECES, is_async=False)
            for name in ("llada", "dream")
        },
        "drafter, in pieces": drafts(TINY_AR, 8, OURS, mode=IN_PIECES),
        "eagle3, in pieces": drafts(
            "target", 6, speculative("eagle3", "eagle3", 5), sizes=[4, 6, 24], mode=IN_PIECES
        ),
        "draft_model, in pieces": drafts(
            "target", 6, speculative("draft_model", "target", 5), mode=IN_PIECES
        ),
        "self-speculation, in pieces": drafts(
            TINY_NEMOTRON, 32, SELF, num_tokens=8, mode=IN_PIECES
        ),
        "decisions, in pieces": canvases("gemma", ["decision"] * 3, **ALONE, mode=IN_PIECES),
    },
}


PLANTS = (
    "nothing",
    "python_number",
    "inputs_elsewhere",
    "metadata_of_capture",
    "lengths_of_capture",
    "wait",
    "number_of_host",
    "table_of_capture",
    "padding_with_a_slot",
    "memory_of_another_graph",
)
# One request, and two, padded to three; both still have slots when a start is tried.
PLANTED = canvases(
    "gemma",
    ["greedy"],
    ["greedy"] * 2,
    num_tokens=12,
    sizes=[12, 36],
    max_num_seqs=8,
    plants=PLANTS,
)


def write_with_thoughts(source: Path, path: Path) -> Path:
    """A copy of a checkpoint, in whose tokenizer the tokens have the parser's NAMES."""
    shutil.copytree(source, path)
    text = (path / "tokenizer.json").read_text()
    for name, new in NAMES.items():
        assert name in text
        text = text.replace(name, new)
    (path / "tokenizer.json").write_text(text)
    return path


def run_jobs(jobs: Mapping[str, Any], path_of: Callable[[str], Path], output: Path) -> Any:
    """What ``tape_worker.run`` returns, of each job.

    Args:
        path_of: the checkpoint of a name in JOBS.
        output: a file to write.
    """

    def real(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: of_paths(key, one) for key, one in value.items()}
        return value

    def of_paths(key: str, value: Any) -> Any:
        if key == "weights":
            return [str(path_of(name)) for name in value]
        is_path = key in ("model", "adapter", "uno_lora_path")
        return str(path_of(value)) if is_path else real(value)

    given = json.dumps({name: real(job) for name, job in jobs.items()})
    is_split = any(job.get("mode") == IN_PIECES for job in jobs.values())
    environment = {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": str(int(not is_split))}
    if any("images" in job["model"] for job in jobs.values()):
        environment["PYTHONPATH"] = path_with_torchvision()
    environment |= {"VLLM_DISABLE_COMPILE_CACHE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    worker = ("-m", "tests.support.tape_worker", given, str(output))
    run_python(*worker, environment=environment, timeout=10 * HANG_S)
    return torch.load(output)
