"""Checks before anything is loaded that a server's drafter fits its target and the options."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from transformers import PreTrainedConfig
from vllm.config import VllmConfig
from vllm.transformers_utils.config import get_config
from vllm.transformers_utils.repo_utils import get_hf_file_bytes

from dllm.drafter.cache import refuse_cache_dtype
from dllm.drafter.checkpoint import (
    Config,
    DrafterConfig,
    LayerAttention,
    TargetFacts,
    check_pair,
    check_tokenizers,
)
from dllm.drafter.widths.pilot import PilotConfig
from dllm.settings.drafting import WHERE
from dllm.settings.server import options_of


def drafter_config(vllm_config: VllmConfig) -> DrafterConfig:
    """Raises ValueError as ``DrafterConfig.from_config`` does."""
    assert vllm_config.speculative_config is not None, "no drafter"
    return _read(vllm_config, vllm_config.speculative_config.draft_model_config.hf_config)


def refuse_other_config(vllm_config: VllmConfig, path: Path) -> None:
    """Raises ValueError for a folder whose config.json describes another drafter than is served."""
    assert vllm_config.speculative_config is not None, "no drafter"
    trusted = vllm_config.speculative_config.draft_model_config.trust_remote_code
    new, served = _read(vllm_config, get_config(path, trusted)), drafter_config(vllm_config)
    for field in (each.name for each in fields(DrafterConfig)):
        given, expected = getattr(new, field), getattr(served, field)
        if given != expected:
            raise ValueError(
                f"its config.json: {field} is {given}, and {expected} is served. Publish drafters "
                "with the config.json that the server was started with, or start it anew."
            )


def _read(vllm_config: VllmConfig, hf_config: PreTrainedConfig) -> DrafterConfig:
    target = vllm_config.model_config
    config: Config = {**vars(hf_config), "model_type": hf_config.model_type}

    def token_id(token: str) -> int | None:
        return _vocabulary(target.tokenizer, target.tokenizer_revision).get(token)

    return DrafterConfig.from_config(config, options_of(vllm_config).drafter, token_id)


def end_ids(vllm_config: VllmConfig) -> set[int]:
    """The end-of-sequence tokens of the target's configuration; a request may name others."""
    target = vllm_config.model_config
    found: set[int] = set()
    for config in (target.hf_text_config.to_dict(), target.try_get_generation_config()):
        ids = config.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return found


def refuse_mismatch(vllm_config: VllmConfig) -> DrafterConfig:
    """The drafter's configuration. Raises ValueError if target or options do not fit it."""
    speculative, target = vllm_config.speculative_config, vllm_config.model_config
    assert speculative is not None, "no drafter"
    draft = speculative.draft_model_config
    check_options(vllm_config)
    refuse_cache_dtype(speculative)
    drafter = drafter_config(vllm_config)
    refuse_pilot(vllm_config, drafter.layers)
    if options_of(vllm_config).drafter.renew is not None:
        refuse_reload_of(draft.model)
    check_pair(
        drafter,
        TargetFacts(
            hidden_size=target.get_hidden_size(),
            num_layers=target.get_total_num_hidden_layers(),
            vocab_size=target.get_vocab_size(),
            is_neox_style=not getattr(target.hf_text_config, "rope_interleave", False),
        ),
    )
    check_tokenizers(
        _vocabulary(draft.model, draft.revision),
        _vocabulary(target.tokenizer, target.tokenizer_revision),
        drafter.mask_token_id,
    )
    return drafter


def refuse_pilot(vllm_config: VllmConfig, layers: Sequence[LayerAttention] = ()) -> None:
    """Raises ValueError for a pilot that does not fit the server, or the drafter's ``layers``.

    A block is shortened by hiding its last keys from everybody, for which no layer may count keys
    from the end of the block.
    """
    file, speculative = options_of(vllm_config).drafter.pilot, vllm_config.speculative_config
    if file is None:
        return
    assert speculative is not None, "no drafter"
    vocab_size = vllm_config.model_config.get_vocab_size()
    PilotConfig.read(file).check_against(speculative.num_speculative_tokens, vocab_size)
    for index, layer in enumerate(layers):
        if layer != LayerAttention():
            raise ValueError(
                f'{WHERE}: policy "pilot", and layer {index} of the drafter is causal or has a '
                "window; allowed: layers that see everything. Leave out the pilot, or the window."
            )


def refuse_reload_of(drafter: str) -> None:
    """Raises ValueError for a drafter that cannot be read again if newer weights fail halfway."""
    if not Path(drafter).is_dir():
        raise ValueError(
            f"{WHERE}: renew with the drafter {drafter}, which is no folder of this machine; "
            "allowed: a drafter in a folder, which the server can go back to."
        )


def check_options(vllm_config: VllmConfig) -> None:
    """Of any server whose worker drafts. Raises ValueError for what does not fit each other."""
    refuse_other_rules(vllm_config)
    speculative = vllm_config.speculative_config
    assert speculative is not None, "no drafter"
    options_of(vllm_config).drafter.check_against(
        speculative.num_speculative_tokens, speculative.enable_adaptive_verification
    )


def refuse_other_rules(vllm_config: VllmConfig) -> None:
    """Raises ValueError for options of verification that neither of our rules has."""
    speculative = vllm_config.speculative_config
    assert speculative is not None, "no drafter"
    rules = f'which drafts are kept is said by "verification" of {WHERE}, and neither of its rules'
    if speculative.rejection_sample_method != "standard":
        raise ValueError(
            f"rejection_sample_method = {speculative.rejection_sample_method!r}; allowed: "
            f"'standard': {rules} has another method. Leave it out."
        )
    if vllm_config.watermark_config is not None:
        raise ValueError(
            f"A watermark with a drafter: {rules} draws watermarked tokens. Leave one of them out."
        )


def _vocabulary(model: str, revision: str | None) -> Mapping[str, int]:
    """Token -> id from a model's tokenizer.json; empty if it has none, as many drafters."""
    data = get_hf_file_bytes("tokenizer.json", model, revision)
    if data is None:
        return {}
    tokenizer = json.loads(data)
    vocabulary = tokenizer["model"].get("vocab", {})
    if isinstance(vocabulary, list):  # Unigram: pairs of token and score
        vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    return vocabulary | added
