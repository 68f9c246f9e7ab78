"""Endpoint plugins of vLLM: objects of ours that answer, routes that it lacks, bounds of bodies."""

from typing import Any

from vllm.logger import init_logger

from dllm import LOGGER
from dllm.api.early_refusal import bound_bodies, bounded_type
from dllm.api.page import CanvasPage, say_how
from dllm.models import FAMILIES, settings_of
from dllm.patches.replace import replaces
from dllm.patches.served import Server
from dllm.patches.serving import refuse_canvases, serve_canvases

logger = init_logger(LOGGER)


class OurAnswers:
    """Serving objects of ours answer for our models."""

    name = "dllm_answers"
    required_tasks: tuple[str, ...] | None = None

    def attach_router(self, app: Any) -> None:
        """vLLM's routes ask the objects."""

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        served = state.vllm_config.served
        if served is Server.CANVASES:
            self.serve(state)
        elif served is Server.TOKENS:
            refuse_canvases(state)

    def serve(self, state: Any) -> None:
        """Of a diffusion model."""
        serve_canvases(state)


class OurRoutes(OurAnswers):
    """Typed decisions and scores, too, and bounds of all bodies."""

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

    def serve(self, state: Any) -> None:
        """vLLM's route of decisions takes as many options as ours."""
        from dllm.api import scores
        from dllm.api.decisions import reads, route
        from dllm.settings.vllm_names import question_types

        super().serve(state)
        question_types.QUESTION_TYPES["choice"] = reads.WideChoice()
        question_types.QUESTION_TYPES["score"] = reads.WideScore()
        route.attach(self._app)
        scores.attach(self._app, settings_of(state.vllm_config))
        if getattr(state, "serving_structured_decisions", None) is None:
            logger.warning("/v1/decisions answers HTTP 501: %s", route.why_not(state))
        if not _serves_pages():
            say_how(self._app)
        bound_bodies(self._app.routes)


def add_endpoint_plugins() -> None:
    """Ours come first, and ``/canvas`` if ``VLLM_PLUGINS`` names it.

    Entry points would do as well; but then vLLM would warn every user who does not set
    ``VLLM_PLUGINS``, whether they know of the page or not.
    """
    from vllm import plugins
    from vllm.entrypoints.launchers.api_server import app_state

    _bound_invocations()

    @replaces(plugins)
    def load_endpoint_plugins(theirs: Any, supported_tasks: Any = None) -> list[Any]:
        loaded, tasks = theirs(supported_tasks), supported_tasks or ()
        if "render" in tasks:
            return [OurAnswers(), *loaded]
        if "generate" not in tasks:
            return loaded
        return [OurRoutes(), *loaded, *([CanvasPage()] if _serves_pages() else ())]

    @replaces(app_state)
    async def init_endpoint_plugins_state(theirs: Any, engine: Any, state: Any, args: Any) -> None:
        """``vllm run-batch`` has a state without plugins."""
        if not hasattr(state, "endpoint_plugins"):
            state.endpoint_plugins = [OurAnswers()]
        await theirs(engine, state, args)


def _serves_pages() -> bool:
    from vllm import envs

    return CanvasPage.name in (envs.VLLM_PLUGINS or ())


def _bound_invocations() -> None:
    """``/invocations`` has validators of its own."""
    from vllm.entrypoints.serve.sagemaker import api_router

    @replaces(api_router, of=Server.CANVASES)
    def get_generate_invocation_types(
        theirs: Any, supported_tasks: Any, model_config: Any = None
    ) -> Any:
        given = theirs(supported_tasks, model_config)
        return [(bounded_type(model), served) for model, served in given]
