"""Client of the sample counter_stream: ``python -m ovmstrio.samples.counter_stream.client [--input TEXT]``."""

from __future__ import annotations

from collections.abc import Iterator

from ovmstrio.samples.triton import Stream, arguments, as_text, failures_end_the_program

__all__ = ["words"]


def words(url: str, text: str, model: str = "counter_stream") -> Iterator[str | int]:
    """Stream the words of ``text`` as they arrive, and finally their number."""
    with Stream(url, model) as stream:
        stream.send({"text": text})
        while (reply := stream.receive()).name == "word":
            yield as_text(reply.value)
        yield int(reply.value[0])


if __name__ == "__main__":
    default = "one request, many responses"
    options = arguments("Receive a text word by word.", "counter_stream", {"metavar": "TEXT", "default": default})
    with failures_end_the_program():
        for word in words(options.url, options.input, options.model):
            print(word, flush=True)
