"""Sessions of streamed input: a piece continues the text so far, but for its last token."""

from vllm import SamplingParams

from tests.engine.test_parity import prompt
from tests.support.engine_harness import Engine
from tests.support.engine_models import Model

# Tokens of a piece, and canvases of its answer: one in part, one and a half, two.
TURNS = [(10, 0.75), (7, 1.5), (21, 2)]


def ask(engine: Engine, name: str, piece: list[int], params: SamplingParams) -> None:
    """Send a piece to the engine core, as vLLM's `AsyncLLM` does for a generator of pieces."""
    core = engine.llm.llm_engine
    request = core.input_processor.process_inputs(
        name, {"prompt_token_ids": piece}, params, supported_tasks=("generate",), resumable=True
    )
    request.external_req_id = name
    core.engine_core.add_request(request)


def answers(engine: Engine, names: list[str]) -> dict[str, list[int]]:
    """The tokens of a turn, by session."""
    tokens: dict[str, list[int]] = {name: [] for name in names}
    waiting = {*names}
    for _ in range(500):
        for output in engine.llm.llm_engine.engine_core.get_output().outputs:
            tokens[output.request_id] += output.new_token_ids
            waiting -= {output.request_id} if output.finish_reason is not None else set()
        if not waiting:
            return tokens
    raise AssertionError(f"{waiting} did not answer")


def test_a_piece_is_answered_as_the_whole_text(model: Model, is_async: bool) -> None:
    """Two sessions side by side."""
    engine = model.engine(is_async)
    texts: dict[str, list[int]] = {"a": [], "b": []}
    for turn, (length, num_canvases) in enumerate(TURNS):
        params = model.params(num_canvases)
        pieces = {name: prompt(length, salt=turn + ord(name)) for name in texts}
        texts = {name: text[:-1] + pieces[name] for name, text in texts.items()}
        whole = engine.generate(list(texts.values()), params)
        for name, piece in pieces.items():
            ask(engine, name, piece, params)
        given = answers(engine, list(texts))
        assert given == dict(zip(texts, whole, strict=True)), turn
        texts = {name: text + given[name] for name, text in texts.items()}
    engine.llm.llm_engine.engine_core.abort_requests(list(texts))
    assert not engine.scheduler.requests
