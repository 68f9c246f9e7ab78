"""Reads the config.json of a DFlash checkpoint, in either format, and refuses what does not fit.

The two formats differ in conventions. Reading one by the other's rules raises no error: the drafter
only guesses worse.

    z-lab's         ``dflash_config.target_layer_ids`` are 0-based: i is the output of layer i.
                    Full layers are bidirectional, layers of type ``sliding_attention`` causal;
                    ``is_causal`` or ``dflash_config.causal`` overrides both.
    speculators'    ``aux_hidden_state_layer_ids`` are 1-based: i is the output of layer i - 1.
                    Full layers are always bidirectional, sliding ones are causal unless
                    ``sliding_window_non_causal`` (vLLM 0.32 makes all of them causal).

vLLM translates the second format into the first before this module reads it, except for causality.
Sources: vLLM 0.32, ``model_executor/models/qwen3_dflash.py`` and
``transformers_utils/configs/speculators``; vllm-project/speculators, ``models/dflash/config.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from dllm.attention.masks import ALL, Mask
from dllm.settings.drafting import WHERE, DrafterOptions

Config = Mapping[str, object]
TokenId = Callable[[str], int | None]  # of a token of the target's tokenizer; None: no such token
T = TypeVar("T")

SPECULATORS = "speculators"  # the model type that vLLM gives to a checkpoint of that format

LEAVE_TO_VLLM = "DLLM_DISABLE=1 leaves the pair to vLLM's own drafter."


@dataclass(frozen=True)
class LayerAttention:
    """Which keys the draft positions of one drafter layer see."""

    mask: Mask = ALL  # without blocks: the rows of a draft block are those of a canvas
    is_causal: bool = False  # a draft position sees no later one


@dataclass(frozen=True)
class DrafterConfig:
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    rope_parameters: dict[str, object]
    max_positions: int  # tokens
    is_neox_style: bool | None  # RoPE rotates halves, not neighbours; None: see ``check_pair``
    vocab_size: int  # of its input, the same as the target's
    draft_vocab_size: int  # different tokens that it can draft
    target_layer_ids: tuple[int, ...]  # whose outputs it reads, 0-based, ascending
    target_hidden_size: int
    num_target_layers: int | None  # of the target that it was trained for; None: not said
    mask_token_id: int
    layers: tuple[LayerAttention, ...]

    @classmethod
    def from_config(
        cls, config: Config, options: DrafterOptions, token_id: TokenId | None = None
    ) -> "DrafterConfig":
        """Raises ValueError if a key is missing, of a wrong type, or asks for what is not there.

        ``token_id`` finds a mask token that is named by its string; None refuses such names.
        """
        dflash: Config = _get(config, "dflash_config", dict) or {}
        _refuse_unsupported(config, dflash)
        hidden_size = _require(config, "hidden_size", int)
        num_heads = _require(config, "num_attention_heads", int)
        layers = _layers(config, dflash)
        return cls(
            hidden_size=hidden_size,
            intermediate_size=_require(config, "intermediate_size", int),
            num_heads=num_heads,
            num_kv_heads=_get(config, "num_key_value_heads", int) or num_heads,
            head_dim=_get(config, "head_dim", int) or hidden_size // num_heads,
            rms_norm_eps=_require(config, "rms_norm_eps", float),
            hidden_act=_require(config, "hidden_act", str),
            attention_bias=_get(config, "attention_bias", bool) or False,
            rope_parameters=_rope_parameters(config),
            max_positions=_require(config, "max_position_embeddings", int),
            is_neox_style=_get(config, "is_neox_style", bool),
            vocab_size=(vocab_size := _require(config, "vocab_size", int)),
            draft_vocab_size=_get(config, "draft_vocab_size", int) or vocab_size,
            target_layer_ids=_target_layer_ids(config, dflash),
            target_hidden_size=_get(config, "target_hidden_size", int) or hidden_size,
            num_target_layers=_get(config, "num_target_layers", int),
            mask_token_id=_mask_token_id(config, dflash, options, token_id),
            layers=_windowed(layers, options.window),
        )


@dataclass(frozen=True)
class TargetFacts:
    hidden_size: int
    num_layers: int
    vocab_size: int
    is_neox_style: bool


def check_pair(drafter: DrafterConfig, target: TargetFacts) -> None:
    """Raises ValueError for a drafter that was made for another target."""
    hidden, layers, vocab = target.hidden_size, target.num_layers, target.vocab_size
    for what, given, name, expected in (
        ("reads hidden states of size", drafter.target_hidden_size, "hidden size", hidden),
        ("has hidden size", drafter.hidden_size, "embedding size", hidden),
        ("has a vocabulary of", drafter.vocab_size, "vocabulary", vocab),
        (
            "was made for a number of layers of",
            drafter.num_target_layers or layers,
            "number of layers",
            layers,
        ),
    ):
        if given != expected:
            raise ValueError(
                f"The drafter {what} {given}, and the target's {name} is {expected}. Serve the "
                "target that the drafter was trained for."
            )
    for layer in drafter.target_layer_ids:
        if not 0 <= layer < layers:
            raise ValueError(
                f"The drafter reads layer {layer} of the target (target_layer_ids = "
                f"{list(drafter.target_layer_ids)}), which has {layers} layers; allowed: 0 to "
                f"{layers - 1}."
            )
    if not 0 <= drafter.mask_token_id < vocab:
        raise ValueError(
            f"The drafter's mask token is {drafter.mask_token_id}, and the target's vocabulary has "
            f"{vocab} tokens; allowed: 0 to {vocab - 1}."
        )
    if drafter.draft_vocab_size > vocab:
        raise ValueError(
            f"The drafter drafts {drafter.draft_vocab_size} different tokens, and the target's "
            f"vocabulary has {vocab}."
        )
    if drafter.is_neox_style is None and not target.is_neox_style:
        raise ValueError(
            "The target's RoPE rotates interleaved pairs (is_neox_style false), and the drafter's "
            "config.json does not say which its own does; halves (true) is the default. Write "
            '"is_neox_style": true or false into it, as it was trained.'
        )


def check_tokenizers(
    drafter: Mapping[str, int], target: Mapping[str, int], mask_token_id: int
) -> None:
    """Raises ValueError if a token has two ids, or an id two tokens, in these two (token -> id).

    The drafter's may have a token more, at an id that the target's leaves free: its mask, usually.
    What the mask is called does not matter: no text holds it.
    """
    names = {number: token for token, number in target.items()}
    for token, given in sorted(drafter.items(), key=lambda item: item[1]):
        if given == mask_token_id:
            continue
        if target.get(token, given) != given:
            different = f"token {token!r} as {given}, the target's as {target[token]}"
        elif token not in target and given in names:
            different = f"{token!r} as token {given}, the target's has {names[given]!r}"
        else:
            continue
        raise ValueError(
            f"The drafter's tokenizer has {different}. Serve the target that the drafter was "
            "trained for."
        )


# --- reading --------------------------------------------------------------------------------------


def _require(config: Config, key: str, kind: type[T]) -> T:
    value = _get(config, key, kind)
    if value is None:
        raise ValueError(f"The drafter's config.json lacks {key!r} ({kind.__name__}).")
    return value


def _get(config: Config, key: str, kind: type[T]) -> T | None:
    value = config.get(key)
    if value is None:
        return None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"The drafter's config.json: {key} = {value!r}; allowed: {kind.__name__}.")
    return value


def _refuse_unsupported(config: Config, dflash: Config) -> None:
    names = ("sample_from_anchor", "attention_sink_bias", "attention_value_scale")
    given = {name: dflash.get(name) for name in (*names, "conv_kernel_size")}
    given["add_swa_attention_sink_bias"] = config.get("add_swa_attention_sink_bias")
    for name, value in given.items():
        if value:
            raise ValueError(
                f"The drafter's config.json: {name} = {value!r} is not implemented. {LEAVE_TO_VLLM}"
            )
    if config.get("use_aux_hidden_state", dflash.get("use_aux_hidden_state", True)) is False:
        raise ValueError(
            "The drafter's config.json: use_aux_hidden_state is false; a DFlash drafter reads "
            "hidden states of the target. " + LEAVE_TO_VLLM
        )


def _target_layer_ids(config: Config, dflash: Config) -> tuple[int, ...]:
    """The 0-based ids. They must ascend: vLLM always gives hidden states in ascending order."""
    given = dflash.get("target_layer_ids", config.get("target_layer_ids"))
    if not isinstance(given, Sequence) or not given or not all(type(i) is int for i in given):
        raise ValueError(
            f"The drafter's config.json: target_layer_ids = {given!r}; allowed: a list of layers "
            "of the target, 0-based."
        )
    if list(given) != sorted(set(given)):
        raise ValueError(
            f"The drafter's config.json: target_layer_ids = {list(given)}; the columns of fc are "
            f"in this order, but hidden states come as {sorted(set(given))}. Sort the list and the "
            "columns of fc.weight with it."
        )
    return tuple(given)


def _rope_parameters(config: Config) -> dict[str, object]:
    given = _get(config, "rope_parameters", dict) or _get(config, "rope_scaling", dict) or {}
    if "mrope_section" in given or config.get("mrope_section") is not None:
        raise ValueError(
            "The drafter's config.json has mrope_section, RoPE over several dimensions; draft "
            "positions have one. " + LEAVE_TO_VLLM
        )
    # The default is Qwen3's theta, as in vLLM.
    theta = _get(config, "rope_theta", float) or 1_000_000.0
    return {"rope_type": "default", "rope_theta": theta} | given


def _layers(config: Config, dflash: Config) -> list[LayerAttention]:
    num_layers = _require(config, "num_hidden_layers", int)
    types = config.get("layer_types")
    types = (
        list(types) if isinstance(types, Sequence) and types else ["full_attention"] * num_layers
    )
    if len(types) != num_layers:
        raise ValueError(
            f"The drafter's config.json has {len(types)} layer_types and num_hidden_layers = "
            f"{num_layers}."
        )
    is_sliding = [kind == "sliding_attention" for kind in types]
    causal = [_is_causal(config, dflash, sliding) for sliding in is_sliding]
    if _get(dflash, "use_swa", bool) and not any(is_sliding):
        is_sliding = [True] * num_layers
    window = None
    if any(is_sliding):
        window = _get(dflash, "swa_window_size", int) or _require(config, "sliding_window", int)
    return [
        LayerAttention(Mask(window if slides else None), causes)
        for slides, causes in zip(is_sliding, causal, strict=True)
    ]


def _is_causal(config: Config, dflash: Config, is_sliding: bool) -> bool:
    override = _get(dflash, "causal", bool)
    if _get(config, "is_causal", bool) is not None:
        return bool(config["is_causal"])
    if config.get("model_type") == SPECULATORS:
        # vLLM's translation sets dflash_config.causal = not sliding_window_non_causal. The format
        # means it for sliding layers only.
        return is_sliding and override is not False
    return is_sliding if override is None else override


def _windowed(layers: Sequence[LayerAttention], window: int | None) -> tuple[LayerAttention, ...]:
    """The layers, none of which sees more than ``window`` tokens before the draft block."""
    if window is None:
        return tuple(layers)
    size = window + 1  # a window includes the row itself
    return tuple(
        layer
        if layer.mask.window is not None and layer.mask.window <= size
        else replace(layer, mask=Mask(size, is_anchored=not layer.is_causal))
        for layer in layers
    )


def _mask_token_id(
    config: Config, dflash: Config, options: DrafterOptions, token_id: TokenId | None
) -> int:
    """The mask token's id, which all places that name it must agree on."""
    given: dict[str, int | str | None] = {
        "dflash_config.mask_token_id": _get(dflash, "mask_token_id", int),
        "dflash_config.mask_token": _get(dflash, "mask_token", str),
        "mask_token_id of config.json": _get(config, "mask_token_id", int),
        f"{WHERE}: mask_token_id": options.mask_token_id,
    }
    ids: dict[str, int] = {}
    for name, token in given.items():
        if isinstance(token, str):
            ids[f"{name} {token!r}"] = _resolve(name, token, token_id)
        elif token is not None:
            ids[name] = token
    if len(set(ids.values())) == 1:
        return next(iter(ids.values()))
    if not ids:
        raise ValueError(
            "The drafter's config.json names no mask token (dflash_config.mask_token_id). Name it "
            f"in {WHERE}: mask_token_id."
        )
    listed = ", ".join(f"{name} = {token}" for name, token in ids.items())
    raise ValueError(f"The drafter's mask token is ambiguous: {listed}. Leave one of them.")


def _resolve(name: str, token: str, token_id: TokenId | None) -> int:
    if token_id is None:
        raise ValueError(f"{name} = {token!r}; allowed here: an id, as mask_token_id.")
    found = token_id(token)
    if found is None:
        raise ValueError(
            f"{name} = {token!r} is not one token of the target's tokenizer; allowed: a token of "
            "its vocabulary, or an id."
        )
    return found
