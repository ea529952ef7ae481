"""Client of the sample handler_caching: ``python -m ovmstrio.samples.handler_caching.client``."""

from __future__ import annotations

from ovmstrio.samples.command_line import arguments, call_json, failures_of_http_end_the_program

__all__ = ["TEXTS", "loads", "mood"]

TEXTS = (
    ("en", "What a wonderful, happy day!", 2),
    ("de", "Das Wetter ist schlecht und langweilig.", -2),
    ("en", "I hate rain.", -1),
    ("fr", "Une belle journée!", 1),
    ("de", "Der Film war gut.", 1),
    ("es", "Un libro malo y aburrido.", -2),
)


def mood(url: str, language: str, text: str) -> int:
    """Return the number of positive words minus the number of negative words in a text."""
    return int(call_json(url, {"language": language, "text": text})["mood"])


def loads(url: str) -> list[str]:
    """Return the models that the server has loaded since its start, in order."""
    return list(call_json(url)["loads"])


if __name__ == "__main__":
    options = arguments("Score the mood of texts in four languages.", url="http://localhost:8080")
    with failures_of_http_end_the_program():
        for language, text, _ in TEXTS:
            print(f"{mood(options.url, language, text):+d}", text)
        print("loaded:", *loads(options.url))
