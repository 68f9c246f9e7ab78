"""dllm: diffusion language models on vLLM, as a plugin that needs no flag.

``register`` is the ``vllm.general_plugins`` entry point. vLLM calls it in every process (API
server, engine core, workers, model inspection), before any model is loaded.
"""

import os

__version__ = "0.1.0"
LOGGER = "vllm.dllm"  # below vLLM's own, whose handlers then show it


def register() -> None:
    """Install the plugin in this process; calling it again changes nothing.

    Imports no model, no Model Runner V2 module and no device. With ``DLLM_DISABLE=1`` vLLM's own
    DiffusionGemma stays in place and only the CPU runtime is installed, so that the two
    implementations can be compared on one engine.

    Raises:
        RuntimeError: this vLLM was never tested with the plugin (see ``patches.install``).
    """
    from dllm.patches.install import install

    install(serve_with_dllm=os.environ.get("DLLM_DISABLE", "0") != "1")
