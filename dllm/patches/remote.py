"""Patches for remote drafts: a target that is served with ``dllm.remote``.

A target asks for it in ``--speculative-config``: method "custom_class", and as the model
``dllm.remote.speculator.RemoteDrafts``.
"""

from collections.abc import Iterator
from typing import Any, NoReturn

from dllm.patches.drafts import REMOTE_DRAFTS
from dllm.settings.remote import WHERE
from dllm.settings.server import options_of

WHY_STEPS_WAIT = "the host decides behind each step what is verified in the next one"


def remote_limits(vllm_config: Any) -> Iterator[tuple[Any, str, str]]:
    """As ``kinds.Kind.refuses`` says."""
    is_given = vllm_config.speculative_config.enable_adaptive_verification
    yield is_given, "enable_adaptive_verification", WHY_STEPS_WAIT


def refuse_without_speculator() -> NoReturn:
    """Raises ValueError: draft workers are named, but vLLM is not told to take their drafts."""
    raise ValueError(
        f'{WHERE} without --speculative-config \'{{"method": "custom_class", "model": '
        f'"{REMOTE_DRAFTS}", "num_speculative_tokens": K}}\'. Give both or none.'
    )


def configure_remote(vllm_config: Any) -> None:
    """Raises ValueError if an option or a flag does not work with remote drafts."""
    from dllm.drafter.pair import refuse_other_rules
    from dllm.remote.address import parse
    from dllm.remote.discovery import find_python
    from dllm.remote.keys import Keys

    speculative, options = vllm_config.speculative_config, options_of(vllm_config).remote
    if options is None:
        raise ValueError(
            f"--speculative-config names {REMOTE_DRAFTS}; name draft workers, too: {WHERE}: "
            '{"workers": ["~/.cache/dllm/drafts/worker.sock"]}.'
        )
    refuse_other_rules(vllm_config)
    options.check_against(speculative.num_speculative_tokens)
    for address in options.workers:
        parse(address, options.keys, f"{WHERE}: workers")
    if options.keys is not None:
        Keys(options.keys)
    if options.discovery == "dynamo":
        find_python()
