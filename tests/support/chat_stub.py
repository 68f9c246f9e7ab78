"""A small OpenAI-compatible server inside the test process, whose answers a test chooses."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CANVAS = 32
COMPLETED = ("/v1/completions", "/v1/decisions")


@dataclass
class Stub:
    """What the server answers, and which requests it got.

    Attributes:
        loaded_from: what /v1/models says of all models, as vLLM's ``root``.
        reply: makes the text of an answer from the messages of a request.
        num_tokens: completion tokens that every answer reports.
        passes: forward passes that the metrics count for every answer; None: no such metrics.
        page: the metrics, if they are others.
        status: HTTP status of chat requests; anything but 200 is an error.
        complete: makes the answer to a body that is sent to /v1/completions or /v1/decisions.
        requests: bodies of the chat requests so far.
        url: set while the server runs.
    """

    reply: Callable[[list[dict[str, str]]], str]
    models: tuple[str, ...] = ("stub",)
    loaded_from: str | None = None
    num_tokens: int = 10
    passes: int | None = None
    page: str | None = None
    key: str | None = None
    status: int = 200
    complete: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def metrics(self) -> str:
        """The metrics page. One name only starts like a real one, and must not be counted."""
        if self.page is not None:
            return self.page
        if self.passes is None:
            return "vllm:num_requests_running 0\n"
        passes = self.passes * len(self.requests)
        labels = '{engine="0",model_name="stub"}'
        return (
            "# TYPE vllm:diffusion_num_denoising_steps_total counter\n"
            f"vllm:diffusion_num_denoising_steps_total{labels} {float(passes)}\n"
            f"vllm:diffusion_num_denoising_steps_total_of_warm_up{labels} 1000.0\n"
            f"vllm:diffusion_num_canvas_positions_total{labels} {float(CANVAS * passes)}\n"
        )


@contextmanager
def serve(stub: Stub) -> Iterator[Stub]:
    """Run the server on a free port; its address is ``stub.url``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._send(200, stub.metrics().encode(), "text/plain")
            elif self._is_allowed():
                shared = {"object": "model", "root": stub.loaded_from}
                models = [{"id": name, **shared} for name in stub.models]
                self._send_json(200, {"object": "list", "data": models})

        def _is_allowed(self) -> bool:
            is_allowed = self.headers["Authorization"] == f"Bearer {stub.key}" or stub.key is None
            if not is_allowed:
                self._send_json(401, {"error": "Unauthorized"})  # as vLLM's servers do
            return is_allowed

        def do_OPTIONS(self) -> None:
            self._send(200, b"", "text/plain")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stub.requests.append(body)
            if not self._is_allowed():
                return
            if stub.status != 200:
                self._send_json(stub.status, {"error": {"message": "the stub refuses"}})
            elif stub.complete is not None and self.path in COMPLETED:
                self._send_json(200, stub.complete(body))
            elif body.get("stream"):
                self._stream(stub.reply(body["messages"]))
            else:
                self._send_json(200, completion(stub.reply(body["messages"]), stub.num_tokens))

        def _stream(self, text: str) -> None:
            pieces = [text[i : i + 3] for i in range(0, len(text), 3)]
            deltas = [{"choices": [{"index": 0, "delta": {"content": p}}]} for p in pieces]
            events = [f"data: {json.dumps(delta)}\n\n" for delta in deltas]
            self._send(200, "".join([*events, "data: [DONE]\n\n"]).encode(), "text/event-stream")

        def _send_json(self, status: int, body: object) -> None:
            self._send(status, json.dumps(body).encode(), "application/json")

        def _send(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Access-Control-Allow-Origin", "*")  # as vLLM's servers do
            self.send_header("Access-Control-Allow-Headers", "*")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Do not log requests."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        stub.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield stub
        finally:
            server.shutdown()
            thread.join()


def completion(text: str, num_tokens: int) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {
        "id": "0",
        "object": "chat.completion",
        "created": 0,
        "model": "stub",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": 1},
    }
