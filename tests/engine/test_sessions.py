"""Sessions of streamed input: a piece continues the text so far, but for its last token."""

from vllm import SamplingParams

from tests.engine.test_parity import prompt
from tests.support.engine_harness import Engine
from tests.support.engine_models import Model

# Tokens of a piece, and canvases of its answer: one in part, one and a half, two.
TURNS = [(10, 0.75), (7, 1.5), (21, 2)]


def ask(
    engine: Engine, name: str, piece: list[int], params: SamplingParams, resumable: bool = True
) -> None:
    """Send a piece to the engine core, as vLLM's `AsyncLLM` does for a generator of pieces."""
    core = engine.llm.llm_engine
    request = core.input_processor.process_inputs(
        name, {"prompt_token_ids": piece}, params, ("generate",), resumable=resumable
    )
    request.external_req_id = name
    core.engine_core.add_request(request)


def answers(engine: Engine, names: list[str], is_last: bool = False) -> dict[str, list[int]]:
    """The tokens of a turn, by session. Behind the last turn, a session leaves its place."""
    core = engine.llm.llm_engine.engine_core
    tokens: dict[str, list[int]] = {name: [] for name in names}
    waiting = {*names}
    for _ in range(500):
        for output in core.get_output().outputs:
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                waiting.remove(output.request_id)
                core.abort_requests([output.request_id] if is_last else [])
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


def test_without_a_whole_block_a_session_waits_like_a_new_request(of_blocks, is_async):
    """Behind others, for a place; and what it says then, others may have said before."""
    engine, params = of_blocks.engine(is_async, max_num_seqs=2), of_blocks.params(0.25)
    firsts, piece = [[5, 6], [7, 8]], prompt(2 * of_blocks.size)
    begun = engine.generate(firsts, params)
    texts = [(a + b)[:-1] + piece for a, b in zip(firsts, begun, strict=True)]
    whole = engine.generate(texts, params)

    names, others = ["a", "b"], ["c", "d"]
    for name, text in zip(names, firsts, strict=True):
        ask(engine, name, text, params)
    for name, text in zip(others, texts, strict=True):
        ask(engine, name, text, params, resumable=False)
    assert [*answers(engine, names).values()] == begun
    for name in names:
        ask(engine, name, piece, params)
    assert [*answers(engine, names + others, is_last=True).values()] == whole * 2
