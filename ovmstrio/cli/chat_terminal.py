"""Line-based conversation: with prompts and colours on a terminal, without them from a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from ovmstrio.cli.chat_answers import ChatConversation
from ovmstrio.cli.console import print_message
from ovmstrio.cli.stream_text import safe_for_terminals
from ovmstrio.core.errors import ServerError
from ovmstrio.encoding.status_errors import Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.client.chat import ChatDelta

_PROMPT: Final = "> "
_MORE: Final = "... "
_COMMANDS: Final = {
    "/system": "TEXT  set the system message; without TEXT, show it; - removes it",
    "/reset": "remove all messages except the system message",
    "/help": "list the commands",
    "/exit": "exit, like Ctrl-D; Ctrl-C stops an answer",
}
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class _AnswerWriter:
    """Writer of streamed answers; reasoning is dim on a terminal, and omitted elsewhere."""

    def __init__(self) -> None:
        self._is_dim = False
        self._is_begun = False

    def piece(self, piece: ChatDelta) -> None:
        if piece.reasoning and sys.stdout.isatty():
            self._write(piece.reasoning, is_dim=True)
        self._write(piece.text + piece.calls, is_dim=False)

    def end(self) -> None:
        self._write("", is_dim=False)
        if self._is_begun:
            sys.stdout.write("\n")
            sys.stdout.flush()

    def _write(self, text: str, *, is_dim: bool) -> None:
        if is_dim != self._is_dim and (text or not is_dim):
            sys.stdout.write(_DIM if is_dim else f"{_PLAIN}\n\n")
            self._is_dim = is_dim
        if text:
            self._is_begun = True
            sys.stdout.write(safe_for_terminals(text))
            sys.stdout.flush()


def open_answer_writer() -> tuple[Callable[[ChatDelta], None], Callable[[], None]]:
    """Return a function that writes a delta of an answer, and a function that ends the answer."""
    writer = _AnswerWriter()
    return writer.piece, writer.end


def run_chat_loop(talk: ChatConversation, answer: Callable[[ChatConversation, str], bool]) -> bool:
    """Answer lines until the end of the input, and return whether all were answered.

    ``answer`` answers one message, and returns whether that succeeded.

    Raises:
        Unreachable: the server does not answer any more.
    """
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 - adds line editing and history to input()

        print_message(f"{talk.model} at {talk.client.url}; /help lists commands")
    went_well = True
    while (line := _next_message(is_terminal=is_terminal)) is not None:
        message = line.strip()
        if message in {"/exit", "/quit"}:
            break
        if message.startswith("/") and message.split()[0] in _COMMANDS:
            _run_command(talk, message)
        elif message.startswith("/") and is_terminal:
            print_message(f"unknown command {message.split()[0]}; /help lists commands")
        elif message:
            went_well = answer(talk, message) and went_well
    return went_well


def print_answer(talk: ChatConversation, message: str) -> bool:
    """Show a streamed answer with its figures; errors of the server are shown, and the conversation continues."""
    show, end = open_answer_writer()
    try:
        answer = talk.ask(message, show)
    except KeyboardInterrupt:
        end()
        if not sys.stdin.isatty():
            raise
        print_message("stopped")
        return True
    except Unreachable:
        raise
    except ServerError as error:
        print_message(f"error: {safe_for_terminals(error.message)}", style="red")
        return False
    end()
    print_message(answer.summary())
    return True


def _next_message(*, is_terminal: bool) -> str | None:
    """Return the next line, joined with the lines after a trailing backslash; None at the end of the input."""
    lines: list[str] = []
    while True:
        try:
            line = input((_MORE if lines else _PROMPT) if is_terminal else "")
        except EOFError:
            if is_terminal:
                print_message("")
            return "\n".join(lines) if lines else None
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print_message("\n/exit or Ctrl-D exits")
            lines.clear()
            continue
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def _run_command(talk: ChatConversation, message: str) -> None:
    command, _, text = message.partition(" ")
    match command:
        case "/system" if text.strip():
            talk.system = "" if text.strip() == "-" else text.strip()
            print_message("system message set" if talk.system else "system message removed")
        case "/system":
            print_message(talk.system or "no system message")
        case "/reset":
            talk.reset()
            print_message("conversation reset")
        case _:
            for name, meaning in _COMMANDS.items():
                print_message(f"{name:8} {meaning}")
