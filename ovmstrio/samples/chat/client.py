"""Client of the sample chat, with OpenAI's library: ``python -m ovmstrio.samples.chat.client [--input TEXT]``."""

from __future__ import annotations

from collections.abc import Iterator

from openai import OpenAIError

from ovmstrio.samples.command_line import arguments
from ovmstrio.samples.openai_client import openai_client

__all__ = ["answer"]


def answer(url: str, question: str, *, model: str = "chat", max_tokens: int = 256) -> Iterator[str]:
    """Stream the parts of an answer, with greedy decoding; closing the iterator early cancels the request.

    ``url`` is the address of the server's REST port.

    Raises:
        OpenAIError: the server does not respond, refuses the request, or the response is incomplete.
    """
    with (
        openai_client(url) as client,
        client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
        ) as pieces,
    ):
        for piece in pieces:
            if piece.choices:
                yield piece.choices[0].delta.content or ""


if __name__ == "__main__":
    text = {"metavar": "TEXT", "default": "What is the capital of France?"}
    options = arguments("Send a prompt to a language model.", url="http://127.0.0.1:8000", model="chat", given=text)
    try:
        for part in answer(options.url, options.input, model=options.model):
            print(part, end="", flush=True)
    except OpenAIError as error:
        raise SystemExit(f"error: {error}") from error
    print()
