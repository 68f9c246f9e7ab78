"""Patches for remote drafts: a target that is served with ``dllm.remote``, and a draft worker.

A target asks for it in ``--speculative-config``: method "custom_class", and as the model
``dllm.remote.speculator.RemoteDrafts``.
"""

from typing import Any

from dllm.patches.contract import REMOTE_SCHEDULER
from dllm.patches.cpu import set_cpu_worker
from dllm.patches.decoding import drafts_itself
from dllm.patches.serving import use_our_worker

SPECULATOR = "dllm.remote.speculator.RemoteDrafts"


def drafts_remotely(speculative_config: Any) -> bool:
    return (
        speculative_config is not None
        and speculative_config.method == "custom_class"
        and speculative_config.model == SPECULATOR
    )


def configure_remote(vllm_config: Any) -> bool:
    """Choose worker and scheduler of a target with remote drafts, or of a draft worker.

    Returns:
        Whether it is such a target.

    Raises:
        ValueError: an option or a flag does not work with remote drafts.
    """
    from dllm.settings.remote import WHERE
    from dllm.settings.server import PluginOptions

    options = PluginOptions.from_vllm(vllm_config)
    if options.draft_worker:
        set_cpu_worker(vllm_config)
    if not drafts_remotely(vllm_config.speculative_config):
        if options.remote is not None:
            raise ValueError(
                f'{WHERE} without --speculative-config \'{{"method": "custom_class", "model": '
                f'"{SPECULATOR}", "num_speculative_tokens": K}}\'. Give both or none.'
            )
        return False
    if options.remote is None:
        raise ValueError(
            f"--speculative-config names {SPECULATOR}; name draft workers, too: {WHERE}: "
            '{"workers": ["~/.cache/dllm/drafts/worker.sock"]}.'
        )
    _check(vllm_config, options.remote)
    _choose_classes(vllm_config)
    return True


def _check(vllm_config: Any, options: Any) -> None:
    from dllm.drafter.pair import refuse_other_rules
    from dllm.remote.address import parse
    from dllm.remote.discovery import find_python
    from dllm.remote.keys import Keys
    from dllm.settings.remote import WHERE

    speculative = vllm_config.speculative_config
    refuse_other_rules(speculative, vllm_config.watermark_config is not None)
    options.check_against(speculative.num_speculative_tokens)
    for address in options.workers:
        parse(address, options.keys, f"{WHERE}: workers")
    if options.keys is not None:
        Keys(options.keys)
    if options.discovery == "dynamo":
        find_python()
    for flag, is_given in (
        ("--async-scheduling", vllm_config.scheduler_config.async_scheduling),
        ("enable_adaptive_verification", speculative.enable_adaptive_verification),
    ):
        if is_given:
            raise ValueError(
                f"{flag}: the host decides behind each step what is verified in the next one. "
                "Leave it out."
            )


def _choose_classes(vllm_config: Any) -> None:
    use_our_worker(vllm_config, "remote drafts need")
    scheduler = vllm_config.scheduler_config
    if scheduler.scheduler_cls not in (None, REMOTE_SCHEDULER):
        raise ValueError(
            f"--scheduler-cls {scheduler.scheduler_cls}: remote drafts need {REMOTE_SCHEDULER}. "
            "Leave the flag out."
        )
    scheduler.scheduler_cls = REMOTE_SCHEDULER
    scheduler.async_scheduling = False


def run_our_speculators_on_v2() -> None:
    from vllm.config import VllmConfig

    find = VllmConfig._get_v2_model_runner_unsupported_features

    def _get_v2_model_runner_unsupported_features(self: Any) -> list[str]:
        unsupported: list[str] = find(self)
        if drafts_remotely(self.speculative_config) or drafts_itself(self.speculative_config):
            unsupported = [each for each in unsupported if "custom_class" not in each]
        return unsupported

    VllmConfig._get_v2_model_runner_unsupported_features = (  # type: ignore[method-assign]
        _get_v2_model_runner_unsupported_features
    )
