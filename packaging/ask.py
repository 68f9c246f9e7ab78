"""Starts a server, asks README's first question, and fails if the answer is another one.

``python ask.py COMMAND...``: COMMAND serves the bundled checkpoint at port 8000. It needs
nothing but Python, so that it runs wherever a server does.
"""

import json
import signal
import subprocess
import sys
import time
import urllib.request

URL = "http://127.0.0.1:8000"
PATIENCE_S = 1200  # a first start compiles the model, on a machine that may do much else
QUESTION = {
    "model": "checkpoints/tiny-dllm",
    "seed": 1,
    "messages": [
        {
            "role": "user",
            "content": "Write name, age and city as JSON: Lou is 28 and lives in Baku.",
        }
    ],
}
ANSWER = '{"name": "Lou", "age": 28, "city": "Baku"}'


def wait_until_ready(server: subprocess.Popen[bytes]) -> None:
    """Wait until /health answers; raises SystemExit if the server ends or takes too long."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"the server ended with status {server.returncode}")
        try:
            urllib.request.urlopen(f"{URL}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    sys.exit(f"the server was not ready after {PATIENCE_S} s")


def ask() -> str:
    """What the server answers to the question."""
    request = urllib.request.Request(
        f"{URL}/v1/chat/completions",
        data=json.dumps(QUESTION).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return str(json.load(response)["choices"][0]["message"]["content"]).strip()


def main(command: list[str]) -> None:
    server = subprocess.Popen(command)
    try:
        wait_until_ready(server)
        answer = ask()
    finally:
        server.send_signal(signal.SIGTERM)
        status = server.wait(120)
    print(f"asked: {QUESTION['messages']}\nanswered: {answer}\nthe server ended with {status}")
    if answer != ANSWER:
        sys.exit(f"expected: {ANSWER}")


if __name__ == "__main__":
    main(sys.argv[1:])
