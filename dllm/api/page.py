"""``/canvas``, where canvases settle and are corrected, and ``/decisions``: typed questions.

A page is one file without data. It is served without a key; everything that it asks for is under
``/v1``, where ``--api-key`` guards. It runs no script but its own, sends nothing to any other host,
and shows what a model says as text, never as markup.
"""

import base64
import functools
import hashlib
import re
from pathlib import Path
from typing import Any

PAGES = {name: Path(__file__).parent / f"{name}.html" for name in ("canvas", "decisions")}
HOST = re.compile(r"[A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\]")  # a name, an IPv4 or an IPv6 address
PORT = re.compile(r"[0-9]{1,5}")


class CanvasPage:
    """An endpoint plugin of vLLM: adds the pages to the API server."""

    name = "dllm_canvas"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        from fastapi import Request
        from fastapi.responses import HTMLResponse

        async def page(request: Request) -> HTMLResponse:
            html = PAGES[request.url.path.rpartition("/")[2]].read_text()
            twin = twin_origins(request.url.hostname, request.query_params.get("twin"))
            return HTMLResponse(html, headers=headers(html, twin))

        for name in PAGES:
            app.add_api_route(f"/{name}", page, methods=["GET"], include_in_schema=False)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """The pages ask the server nothing that it would have to remember."""


def say_how(app: Any) -> None:
    """Answer 404 with the reason, in an API server whose user has not asked for the pages."""
    from fastapi.responses import PlainTextResponse

    async def absent() -> PlainTextResponse:
        text = (
            "This page is not served. Start the server with VLLM_PLUGINS=dllm,dllm_namesakes,"
            f"{CanvasPage.name} in its environment; the list names your other plugins, too.\n"
        )
        return PlainTextResponse(text, 404)

    for name in PAGES:
        app.add_api_route(f"/{name}", absent, methods=["GET"], include_in_schema=False)


def twin_origins(host: str | None, port: str | None) -> str:
    """Where the page may ask the model that it compares with: this host, another port.

    Only a port can be given. A link to the page must not send what its user types elsewhere.
    """
    host = f"[{host}]" if host and ":" in host else host
    if not port or not host or not PORT.fullmatch(port) or not HOST.fullmatch(host):
        return ""
    return f" http://{host}:{port} https://{host}:{port}"


@functools.lru_cache(maxsize=8)
def headers(html: str, twin: str = "") -> dict[str, str]:
    """Headers under which nothing runs, and nothing is asked, but what is written in the page."""
    return {
        "Content-Security-Policy": (
            f"default-src 'none'; script-src 'sha256-{_digest(html, 'script')}'; "
            f"style-src 'sha256-{_digest(html, 'style')}'; connect-src 'self'{twin}; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
            "require-trusted-types-for 'script'"
        ),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }


def _digest(html: str, tag: str) -> str:
    """The SHA-256 of the only element ``tag`` of the page, as a CSP writes it."""
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
