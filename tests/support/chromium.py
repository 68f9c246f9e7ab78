"""A headless Chromium, driven through its DevTools protocol (a WebSocket with JSON messages).

``make chromium`` installs it from Debian's packages. With DLLM_PAGE_PICTURE, the path of a PNG,
tests write the pictures of docs/ there.

Files with ``pytest_plugins = ["tests.support.chromium"]`` share the fixture ``browser``.
"""

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from tests.support.patience import HANG_S

PAGES = {"VLLM_PLUGINS": "dllm,dllm_namesakes,dllm_canvas"}  # a server with our pages
STEP_S = 0.02  # between two looks at the page
KEYS = {"Enter": 13, "Delete": 46, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37, "Tab": 9}

EXECUTABLE = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(
    EXECUTABLE is None, reason="no chromium on this machine: make chromium"
)


class Page:
    """One page of a browser.

    Attributes:
        hosts: hosts that were asked for something.
        errors: what the console said in red, scripts' exceptions included.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._last = 0
        self.hosts: set[str] = set()
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **params: Any) -> Any:
        """Send a command and wait for its result; events that come meanwhile are noted."""
        self._last += 1
        self._socket.send(json.dumps({"id": self._last, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=HANG_S))
            if message.get("id") == self._last:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            address = re.match(r"\w+://([^/]+)/", params["request"]["url"])
            self.hosts |= {address[1]} if address else set()
        elif event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    def run(self, script: str) -> Any:
        result = self.command(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_until(self, condition: str, timeout_s: float = HANG_S) -> Any:
        """Wait until an expression is true, and return its value."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.run(condition)):
            assert time.monotonic() < deadline, (condition, self.run("document.body.innerText"))
            time.sleep(STEP_S)
        return value

    def open(self, url: str) -> None:
        """Load a page, and forget what was heard of the one before."""
        self.hosts.clear()
        self.errors.clear()
        self.command("Page.navigate", url=url)
        self.wait_until(f"location.href == {url!r} && document.readyState == 'complete'")

    def click(self, selector: str, number: int = 0) -> None:
        element = f"document.querySelectorAll({json.dumps(selector)})[{number}]"
        self.run(f"{element}.scrollIntoView({{block: 'center'}})")
        x, y = self.run(
            f"(() => {{ const r = {element}.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.command(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )

    def press(self, key: str) -> None:
        code = KEYS.get(key)
        text = "\r" if key == "Enter" else key if code is None else None
        about = {"key": key, "windowsVirtualKeyCode": code or ord(key.upper())}
        down = about | ({"text": text} if text else {})
        self.command("Input.dispatchKeyEvent", type="keyDown", **down)
        self.command("Input.dispatchKeyEvent", type="keyUp", **about)

    def type(self, text: str) -> None:
        for key in text:
            self.press(key)

    def fill(self, selector: str, text: str) -> None:
        """Put a text into a field, in the place of what is there."""
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        self.click(selector)
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        self.command("Input.insertText", text=text)

    def take_picture(self) -> None:
        """Write what is on the page, if DLLM_PAGE_PICTURE says where."""
        path = os.environ.get("DLLM_PAGE_PICTURE")
        if not path:
            return
        left, width, height = self.run(
            "[document.body.getBoundingClientRect().left, document.body.clientWidth,"
            " document.body.clientHeight]"
        )
        clip = {"x": left, "y": 0, "width": width, "height": height, "scale": 1}
        result = self.command(
            "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True
        )
        Path(path).write_bytes(base64.b64decode(result["data"]))


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("chromium")
    command = [
        str(EXECUTABLE),
        "--headless=new",
        "--no-sandbox",  # tests may run as root, which Chromium's sandbox refuses
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        "--window-size=1000,1100",
        "about:blank",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with connect(_page_address(process, folder), max_size=2**26) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(HANG_S)
        process.kill()
        process.wait()


def _page_address(process: subprocess.Popen[bytes], folder: Path) -> str:
    """The WebSocket of the page; Chromium writes its port into the profile."""
    deadline = time.monotonic() + HANG_S
    port_file = folder / "DevToolsActivePort"
    while True:
        assert process.poll() is None, (folder / "log").read_text(errors="replace")[-2000:]
        assert time.monotonic() < deadline, "Chromium did not start"
        if port_file.exists() and (lines := port_file.read_text().split()):
            with urllib.request.urlopen(f"http://127.0.0.1:{lines[0]}/json") as reply:
                pages = [one for one in json.load(reply) if one["type"] == "page"]
            if pages:
                return str(pages[0]["webSocketDebuggerUrl"])
        time.sleep(STEP_S)
