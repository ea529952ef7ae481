"""Client of the sample text_generation: ``python -m ovmstrio.samples.text_generation.client [--input PROMPT]``."""

from __future__ import annotations

from collections.abc import Iterator

from ovmstrio.samples.triton import Stream, arguments, as_text, failures_end_the_program

__all__ = ["completions"]


def completions(url: str, prompt: str, max_new_tokens: int = 128, *, model: str = "text_generation") -> Iterator[str]:
    """Stream the parts of the answer until the end signal.

    Closing the iterator early cancels the stream and the generation.
    """
    with Stream(url, model) as stream:
        stream.send({"prompt": prompt}, max_new_tokens=max_new_tokens)
        while (reply := stream.receive()).name != "end_signal":
            yield as_text(reply.value)


if __name__ == "__main__":
    default = "What is the capital of France?"
    prompt = {"metavar": "TEXT", "default": default}
    options = arguments("Stream the answer to a prompt.", "text_generation", prompt)
    with failures_end_the_program():
        for piece in completions(options.url, options.input, model=options.model):
            print(piece, end="", flush=True)
    print()
