"""An endpoint plugin of vLLM: routes that vLLM lacks, and bounds of the bodies of all routes."""

from typing import Any

from vllm.logger import init_logger

from dllm import LOGGER
from dllm.api.early_refusal import bound_bodies, bounded_type
from dllm.api.page import CanvasPage, say_how
from dllm.models import FAMILIES, settings_of
from dllm.patches.replace import replaces
from dllm.patches.served import Server, has_canvases

logger = init_logger(LOGGER)


class OurRoutes:
    """Typed decisions and scores for our models, and bounds of all bodies."""

    name = "dllm_routes"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """vLLM's own route reads our families with our strategy."""
        from dllm.api.decisions.reads import CanvasReads  # imports vLLM's API server
        from dllm.settings.vllm_names import strategies

        class Reads(CanvasReads):
            def __init__(self, context: Any) -> None:
                try:
                    super().__init__(context, settings_of(context.engine_client.vllm_config))
                except ValueError as error:
                    app.state.why_no_decisions = str(error)
                    raise  # vLLM logs it at the level DEBUG

        self._app = app
        for architecture in FAMILIES:
            strategies.READ_STRATEGIES[architecture] = Reads

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """vLLM's route of decisions takes as many options as ours."""
        from dllm.api import scores
        from dllm.api.decisions import reads, route
        from dllm.settings.vllm_names import question_types

        if not engine_client or engine_client.vllm_config.served is not Server.CANVASES:
            return
        question_types.QUESTION_TYPES["choice"] = reads.WideChoice()
        question_types.QUESTION_TYPES["score"] = reads.WideScore()
        route.attach(self._app)
        scores.attach(self._app, settings_of(engine_client.vllm_config))
        if getattr(state, "serving_structured_decisions", None) is None:
            logger.warning("/v1/decisions answers HTTP 501: %s", route.why_not(state))
        if not _serves_pages():
            say_how(self._app)
        bound_bodies(self._app.routes)
        _read_no_structural_tags()


def add_endpoint_plugins() -> None:
    """Serve decisions, refuse wrong bodies early, serve ``/canvas`` if ``VLLM_PLUGINS`` names it.

    Entry points would do as well; but then vLLM would warn every user who does not set
    ``VLLM_PLUGINS``, whether they know of the page or not.
    """
    from vllm import plugins

    _bound_invocations()

    @replaces(plugins)
    def load_endpoint_plugins(theirs: Any, supported_tasks: Any = None) -> list[Any]:
        loaded = theirs(supported_tasks)
        if "generate" in (supported_tasks or ()):
            loaded = [*loaded, OurRoutes()]
            if _serves_pages():
                loaded.append(CanvasPage())
        return loaded


def _serves_pages() -> bool:
    from vllm import envs

    return CanvasPage.name in (envs.VLLM_PLUGINS or ())


def _bound_invocations() -> None:
    """``/invocations`` has validators of its own."""
    from vllm.entrypoints.serve.sagemaker import api_router

    @replaces(api_router)
    def get_generate_invocation_types(
        theirs: Any, supported_tasks: Any, model_config: Any = None
    ) -> Any:
        given = theirs(supported_tasks, model_config)
        if not has_canvases(model_config):
            return given
        return [(bounded_type(model), served) for model, served in given]


def _read_no_structural_tags() -> None:
    """Leave structural tags to the process that compiles them, which has limits (``grammar``).

    vLLM lets xgrammar read them on the event loop: 65 kB with ``minProperties`` take minutes.
    """
    from vllm.entrypoints.generate.base import protocol
    from vllm.exceptions import VLLMValidationError

    @replaces(protocol)
    def validate_structural_tag_payload(theirs: Any, payload: Any, *, parameter: str) -> None:
        if not isinstance(payload, str) or not payload:
            raise VLLMValidationError(f"{parameter}: no structural tag", parameter=parameter)
