"""The files of a run: what it was started with, its log, and the drafter's checkpoint."""

import csv
import hashlib
import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig

from dllm.drafter.checkpoint import DrafterConfig, TargetFacts, check_pair
from dllm.settings.command import CommandError
from dllm.settings.drafting import DrafterOptions
from dllm.settings.files import whole
from dllm.train.network import DraftNetwork
from dllm.train.settings import DrafterShape
from dllm.train.target import rope_of

START = "run.json"  # settings and inputs
LOG = "log.csv"  # a row for each evaluation
STATE = "state.pt"  # the checkpoint to resume from
MODEL = "model"  # folder of the checkpoint to use
CARD = "README.md"  # model card, in that folder
WEIGHTS = "model.safetensors"  # in that folder


def begin(out: Path, given: Mapping[str, object], resume: bool) -> None:
    """``given``: what has to be the same in a resumed run, as JSON values by name.

    Raises CommandError, before anything is written, if the directory holds a run and ``resume`` was
    not asked for, or the reverse, or its run was started with something else.
    """
    start, state = out / START, out / STATE
    if not resume:
        if start.exists() or state.exists():
            raise CommandError(f"{out} holds a run; go on with --resume, or give another --out.")
        out.mkdir(parents=True, exist_ok=True)
        write_json(start, given)
        return
    if not start.exists():
        raise CommandError(
            f"{out} holds no {START}, which says what its run was started with, so there is "
            "nothing to resume; leave out --resume, or give another --out."
        )
    before = json.loads(start.read_text())
    for name, value in json.loads(json.dumps(given)).items():
        if before.get(name) != value:
            raise CommandError(
                f"{start}: the run was started with {name} = {before.get(name)!r}, given is "
                f"{value!r}; give another --out, or what it was started with."
            )


def write_log(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """The columns are the keys of the first row, which is needed."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def weights_digest(checkpoint: Path) -> str:
    with (checkpoint / WEIGHTS).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_weights(path: Path, tensors: Mapping[str, Tensor], kept: Container[str] = ()) -> None:
    """In bf16, those named in ``kept`` as they are. An interrupted write leaves the file before."""
    half = {
        name: (tensor if name in kept else tensor.to(torch.bfloat16)).cpu().contiguous()
        for name, tensor in tensors.items()
    }
    with whole(path) as part:
        save_file(half, part, metadata={"format": "pt"})
        part.chmod(0o644)  # safetensors writes it readable by its owner only


# Of a target's RoPE scaling: what is about positions of images, or about rotating a part of each
# head. A drafter has neither.
OF_TARGETS_ALONE = ("mrope_section", "mrope_interleaved", "partial_rotary_factor", "rope_theta")


def spread_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """``count`` layers spread evenly from the second to the third-last: z-lab's rule.

    A target with fewer than ``count`` + 4 layers gives its last ones.
    """
    if num_target_layers < count + 4:
        return tuple(range(max(0, num_target_layers - count), num_target_layers))
    if count == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + index * span / (count - 1)) for index in range(count))


def drafter_config(
    shape: DrafterShape, target: PreTrainedConfig, facts: TargetFacts
) -> dict[str, object]:
    given = target.to_dict().get
    num_heads = shape.num_heads or given("num_attention_heads")
    layers = shape.target_layer_ids or spread_layers(facts.num_layers, shape.num_layers)
    config: dict[str, object] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": facts.vocab_size,
        "hidden_size": facts.hidden_size,
        "intermediate_size": shape.intermediate_size or given("intermediate_size"),
        "num_hidden_layers": shape.num_layers,
        "layer_types": ["full_attention"] * shape.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": shape.num_kv_heads or given("num_key_value_heads") or num_heads,
        "head_dim": shape.head_dim or given("head_dim") or facts.hidden_size // int(str(num_heads)),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "max_position_embeddings": given("max_position_embeddings"),
        "tie_word_embeddings": False,
        "draft_vocab_size": min(shape.draft_vocab_size or facts.vocab_size, facts.vocab_size),
        "block_size": shape.block_size,
        "num_target_layers": facts.num_layers,
        "dflash_config": {"mask_token_id": shape.mask_token_id, "target_layer_ids": list(layers)},
    }
    rope = rope_of(target)
    config["rope_theta"] = rope["rope_theta"]
    if rope["rope_type"] != "default":
        config["rope_scaling"] = {key: rope[key] for key in rope if key not in OF_TARGETS_ALONE}
    if not facts.is_neox_style:
        config["is_neox_style"] = True
    return config


@dataclass(frozen=True)
class Drafter:
    config: dict[str, object]  # its config.json, which ``read`` is the parsed form of
    read: DrafterConfig
    block: int  # positions of a draft block, the last token included
    weights: dict[str, Tensor] | None  # fp32, by name; None: a new drafter's, to be drawn

    @classmethod
    def of(
        cls, config: dict[str, object], facts: TargetFacts, weights: dict[str, Tensor] | None = None
    ) -> "Drafter":
        """Raises CommandError if something is missing or wrong, or does not fit the target."""
        return cls(config, checked_config(config, facts), block_of(config), weights)

    @classmethod
    def load(cls, path: Path, facts: TargetFacts) -> "Drafter":
        """Raises as ``of``, ``read_checkpoint`` and ``network``."""
        config, weights = read_checkpoint(path)
        found = cls.of(config, facts, weights)
        found.network()
        return found

    def network(self) -> DraftNetwork:
        """Raises CommandError if config.json does not fit the weights."""
        network = DraftNetwork(self.read)
        if self.weights is not None:
            try:
                network.load_state_dict(self.weights)
            except RuntimeError as error:
                raise CommandError(
                    f"the drafter's tensors contradict its config.json: {error}"
                ) from None
        return network


def checked_config(config: dict[str, object], facts: TargetFacts) -> DrafterConfig:
    """Raises as ``Drafter.of``."""
    try:
        read = DrafterConfig.from_config(config, DrafterOptions())
        check_pair(read, facts)
    except ValueError as error:
        raise CommandError(str(error)) from None
    return read


def block_of(config: Mapping[str, object]) -> int:
    """Positions; without the key ``DrafterShape``'s. Raises CommandError: no such block."""
    size = config.get("block_size", DrafterShape.block_size)
    if type(size) is not int or size < 2:
        raise CommandError(
            f"The drafter's config.json: block_size = {size!r}; allowed: an integer of at least 2."
        )
    return size


def write_checkpoint(path: Path, config: Mapping[str, object], weights: dict[str, Tensor]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    write_weights(path / WEIGHTS, weights, kept=("d2t",))
    write_json(path / "config.json", config)


def read_checkpoint(path: Path) -> tuple[dict[str, object], dict[str, Tensor]]:
    """In fp32. Raises CommandError: there is none, or our training network cannot represent it."""
    try:
        config = json.loads((path / "config.json").read_text())
        weights = load_file(path / WEIGHTS)
    except (OSError, ValueError) as error:
        raise CommandError(
            f"{path}: no drafter with config.json and {WEIGHTS} ({error})."
        ) from None
    is_own = "embed_tokens.weight" in weights
    if "speculators_model_type" in config or is_own or "quantization_config" in config:
        raise CommandError(
            f"{path} is in the speculators format, quantized, or has "
            f"{'an embedding of its own' if is_own else 'such a config.json'}; allowed: z-lab's "
            "format with the target's embedding, in bf16 or wider."
        )
    return config, {name.removeprefix("model."): t.float() for name, t in weights.items()}
