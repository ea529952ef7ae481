"""Ask for the mood of texts: ``python -m ovmstrio_samples.handler_caching.client [URL]``."""

from __future__ import annotations

import json
import sys
from typing import Any
from urllib.request import Request, urlopen

__all__ = ["TEXTS", "loads", "mood"]

TEXTS = (
    ("en", "What a wonderful, happy day!", 2),
    ("de", "Das Wetter ist schlecht und langweilig.", -2),
    ("en", "I hate rain.", -1),
    ("fr", "Une belle journée!", 1),
    ("de", "Der Film war gut.", 1),
    ("es", "Un libro malo y aburrido.", -2),
)


def _ask(url: str, body: bytes | None = None) -> dict[str, Any]:
    request = Request(url, body, {"Content-Type": "application/json"})  # noqa: S310 - the user's own address
    with urlopen(request, timeout=10) as answer:  # noqa: S310 - as above
        told: dict[str, Any] = json.load(answer)
    return told


def mood(url: str, language: str, text: str) -> int:
    """Give how many more good words than bad ones a text has."""
    return int(_ask(url, json.dumps({"language": language, "text": text}).encode())["mood"])


def loads(url: str) -> list[str]:
    """Give the models that the server has loaded since it started, in their order."""
    return list(_ask(url)["loads"])


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
    for language, text, _ in TEXTS:
        print(f"{mood(url, language, text):+d}", text)
    print("loaded:", *loads(url))
