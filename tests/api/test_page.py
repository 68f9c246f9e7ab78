"""The page's file and its headers; ``tests/server/test_canvas_page.py`` has it in a browser."""

import base64
import hashlib
import re

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from dllm.api.page import PAGES, CanvasPage, headers, twin_origins
from dllm.patches import install

install.install()


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    CanvasPage().attach_router(app)
    return TestClient(app, base_url="http://canvas.test:8000")


def policy(reply) -> dict[str, str]:
    parts = reply.headers["Content-Security-Policy"].split("; ")
    return {part.split()[0]: part.partition(" ")[2] for part in parts}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_needs_nothing_but_itself(name):
    html = PAGES[name].read_text()
    html = html.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"https?:|@import|<link(?! rel=\"icon\" href=\"data:,\")| src=", html)
    assert "innerHTML" not in html and "eval(" not in html and " onclick=" not in html


@pytest.mark.parametrize("name", PAGES)
def test_only_the_pages_own_script_and_style_run(client, name):
    reply = client.get(f"/{name}")
    assert reply.status_code == 200 and reply.headers["Content-Type"].startswith("text/html")
    allowed = policy(reply)
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", reply.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert allowed[f"{tag}-src"] == f"'sha256-{digest}'"
    assert allowed["default-src"] == allowed["frame-ancestors"] == "'none'"
    assert allowed["connect-src"] == "'self'"
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert reply.headers["Referrer-Policy"] == "no-referrer"


def test_the_twin_is_on_the_same_host(client):
    reply = client.get("/canvas?twin=8001")
    expected = "'self' http://canvas.test:8001 https://canvas.test:8001"
    assert policy(reply)["connect-src"] == expected


@pytest.mark.parametrize(
    "twin", ["evil.test", "80;script-src *", "8001 http://evil.test", "123456", "", "٣", "-1"]
)
def test_a_twin_that_is_no_port_is_none(client, twin):
    allowed = policy(client.get("/canvas", params={"twin": twin}))
    assert allowed["connect-src"] == "'self'" and allowed["script-src"].startswith("'sha256-")


def test_hosts_that_are_none_are_left_out():
    assert twin_origins("::1", "80") == " http://[::1]:80 https://[::1]:80"
    assert twin_origins("a b", "80") == twin_origins("a;b", "80") == twin_origins(None, "80") == ""
    assert headers(PAGES["canvas"].read_text(), "")["Cache-Control"] == "no-cache"


@pytest.mark.parametrize(
    ("named", "tasks", "is_loaded"),
    [
        (None, ("generate",), False),
        ("dllm", ("generate",), False),
        ("dllm,dllm_canvas", ("generate",), True),
        ("dllm,dllm_canvas", ("embed",), False),
        ("dllm,dllm_canvas", None, False),
    ],
)
def test_vllm_loads_it_where_it_is_named(monkeypatch, caplog, named, tasks, is_loaded):
    from vllm import envs, plugins

    # Not the environment: an engine that ran in this process has let vLLM remember that.
    monkeypatch.setitem(vars(envs), "VLLM_PLUGINS", named and named.split(","))
    found = [plugin.name for plugin in plugins.load_endpoint_plugins(tasks)]
    assert ("dllm_canvas" in found) == is_loaded
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
