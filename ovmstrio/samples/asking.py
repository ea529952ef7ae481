"""Shared code of the samples' clients: command line, connection and output."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ovmstrio.client import open_client
from ovmstrio.errors import ServerError
from ovmstrio.samples import command_line
from ovmstrio.samples.question import Arrays, Ask, Question

__all__ = ["arguments", "connect", "main"]


def arguments(
    purpose: str, *others: command_line.Option, model: str = "", file: str = "", required: bool = False
) -> argparse.Namespace:
    """Parse the command line: ``url``, ``rest``, ``model`` and, if ``file`` names its value, ``input``."""
    nargs = {"nargs": "+", "required": True} if required else {"nargs": "*", "default": []}
    files = {"metavar": file, "type": Path, **nargs} if file else None
    return command_line.arguments(purpose, *others, url="", model=model, given=files, has_rest=True)


@contextmanager
def connect(options: argparse.Namespace) -> Iterator[Ask]:
    """Open a client of the server and return its call function; exit with a message if the server returns an error."""
    with open_client(options.url, rest=options.rest) as client:

        def ask(model: str, inputs: Arrays) -> Arrays:
            return client.infer(options.model or model, inputs)

        try:
            yield ask
        except ServerError as error:
            raise SystemExit(f"error: {error}") from error


def main(options: argparse.Namespace, questions: Sequence[Question]) -> None:
    """Send every call, print the answers, and exit with status 1 unless all are right."""
    wrong = 0
    with connect(options) as ask:
        for question in questions:
            answer = question.read(ask(question.model, question.inputs))
            right = question.is_right(answer)
            wrong += not right
            print(f"{question.subject}: {answer}" + ("" if right else f" (expected {question.expected})"))
    if wrong:
        raise SystemExit(1)
