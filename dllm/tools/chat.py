"""``dllm chat``: a conversation with a running server, in the terminal.

Ctrl-C stops an answer, not the program; the part that had arrived stays in the history.
"""

import argparse
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from openai.types.chat import ChatCompletionMessageParam, ChatCompletionUserMessageParam
from rich.console import Console

from dllm.settings.command import OK, CommandError
from dllm.tools import client
from dllm.tools.visible import visible

HELP = "/reset forgets the conversation, /quit ends it; Ctrl-C stops an answer."


@dataclass
class Conversation:
    """The messages so far, and the server and options that answer the next one.

    Attributes:
        system: the system prompt; None sends none.
        max_tokens, temperature: of each answer; None leaves them to the server.
    """

    connection: client.Connection
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    messages: list[ChatCompletionMessageParam] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.messages.clear()
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})

    def ask(self, question: str) -> Generator[str, None, None]:
        """Yield the pieces of the answer as they arrive.

        Question and answer are added to the history when the iteration ends. If it is closed early,
        the answer is what had arrived; if nothing had arrived, neither is added.

        Raises:
            CommandError: the server failed or refused.
        """
        said = ChatCompletionUserMessageParam(role="user", content=question)
        pieces: list[str] = []
        try:
            with (
                client.explained(self.connection.url),
                self.connection.client.chat.completions.create(
                    model=self.connection.model,
                    messages=[*self.messages, said],
                    stream=True,
                    max_tokens=client.if_given(self.max_tokens),
                    temperature=client.if_given(self.temperature),
                ) as stream,
            ):
                for chunk in stream:
                    if chunk.choices and chunk.choices[0].delta.content:
                        pieces.append(chunk.choices[0].delta.content)
                        yield pieces[-1]
        finally:
            if pieces:
                self.messages += [said, {"role": "assistant", "content": "".join(pieces)}]


def main(argv: Sequence[str]) -> int:
    """Run the command until /quit or the end of the input; returns its exit status."""
    parser = argparse.ArgumentParser(prog="dllm chat", description=__doc__, epilog=HELP)
    client.add_arguments(parser)
    parser.add_argument("--system", help="a system prompt")
    parser.add_argument("--max-tokens", type=int, help="of an answer")
    parser.add_argument("--temperature", type=float)
    given = parser.parse_args(argv)
    connection = client.connect(given.base_url, given.model, given.api_key)
    with suppress(ImportError):
        import readline  # noqa: F401  (editing and history in input())
    console = Console()
    console.print(f"{connection.model} at {connection.url}. {HELP}", style="dim", highlight=False)
    conversation = Conversation(connection, given.system, given.max_tokens, given.temperature)
    talk(conversation, console, input)
    return OK


def talk(conversation: Conversation, console: Console, read: Callable[[str], str]) -> None:
    """Read lines and answer them, or do what a command (/reset, /quit) says, until the end.

    Args:
        read: shows its argument as a prompt and returns a line; raises EOFError at the end.
    """
    while True:
        try:
            line = read("> ").strip()
        except KeyboardInterrupt:
            console.print()
            continue
        except EOFError:
            console.print()
            return
        if line == "/quit":
            return
        if line == "/reset":
            conversation.reset()
            console.print("Forgotten.", style="dim")
        elif line.startswith("/"):
            console.print(f"No command {line}. {HELP}", style="dim", highlight=False)
        elif line:
            _answer(conversation, console, line)


def _answer(conversation: Conversation, console: Console, line: str) -> None:
    """Print the answer as it arrives; Ctrl-C stops it, an error is printed."""
    pieces = conversation.ask(line)
    try:
        for piece in pieces:
            shown = visible(piece, kept="\n\t")
            console.print(shown, end="", markup=False, highlight=False, soft_wrap=True)
        console.print()
    except KeyboardInterrupt:
        pieces.close()
        console.print("\nStopped.", style="dim")
    except CommandError as error:
        said = visible(str(error), kept="\n\t")
        console.print(f"\n{said}", style="red", markup=False, highlight=False)
