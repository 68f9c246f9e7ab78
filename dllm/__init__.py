"""dllm: a vLLM plugin that serves diffusion language models without any flag.

pyproject.toml names ``register`` as a ``vllm.general_plugins`` entry point. vLLM calls it in every
process (API server, engine core, workers, model inspection), before any model is loaded.
"""

import functools
import os

__version__ = "0.1.0"
LOGGER = "vllm.dllm"  # a child of vLLM's logger: vLLM's handlers print what we log


@functools.cache  # vLLM calls it as a plugin, and `register` needs it where only `dllm` is loaded
def refuse_namesakes() -> None:
    """Stop this process if another distribution installs a plugin or a package called ``dllm``.

    vLLM loads only one plugin of a name, which may be the other one; this is a plugin, too.

    Raises:
        RuntimeError: it names the distributions.
    """
    from dllm.patches import install

    install.refuse_namesakes()


def register() -> None:
    """Install the plugin in this process; calling it again changes nothing.

    It imports no model and no module of Model Runner V2, and touches no device. With
    ``DLLM_DISABLE=1`` vLLM's own DiffusionGemma is served, and only the CPU runtime is installed.
    So the two implementations can be compared on one engine.

    Raises:
        RuntimeError: the plugin was not tested with this version of vLLM, or another installed
            package is also called ``dllm`` (``patches.install``).
    """
    from dllm.patches.install import install

    install(serve_with_dllm=os.environ.get("DLLM_DISABLE", "0") != "1")
