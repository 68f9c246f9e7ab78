"""dllm: a vLLM plugin that serves diffusion language models without any flag.

pyproject.toml names ``register`` as a ``vllm.general_plugins`` entry point. vLLM calls it in every
process (API server, engine core, workers, model inspection), before any model is loaded.
"""

__version__ = "0.1.0"
LOGGER = "vllm.dllm"  # a child of vLLM's logger: vLLM's handlers print what we log


def refuse_namesakes() -> None:
    """Refuse servers of our models if another distribution is also called ``dllm``.

    vLLM loads only one plugin of a name, which may be the other one; this is a plugin, too.
    """
    from dllm.patches.neighbours import keep_out

    keep_out()


def register() -> None:
    """Install the plugin in this process; calling it again changes nothing.

    It imports no model and no module of Model Runner V2, and touches no device. With
    ``DLLM_DISABLE=1`` vLLM's own DiffusionGemma is served, and only the CPU runtime is installed.
    So the two implementations can be compared on one engine.

    In a version of vLLM that the plugin was not tested with, and beside another package called
    ``dllm``, it only refuses servers of our models (``patches.neighbours``).
    """
    from dllm.patches.neighbours import keep_out

    if keep_out():
        return
    from dllm.patches.install import install

    install()
