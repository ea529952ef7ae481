"""What the clients of services share: a call over plain HTTP, as any program can make it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from urllib.request import Request, urlopen

__all__ = ["call"]


def call(url: str, feed: Mapping[str, str], *, timeout: float = 30) -> dict[str, str]:
    """Ask a pipeline: texts by key go in, texts by key come out; an error that it answers ends the program."""
    body = json.dumps({"key": list(feed), "value": list(feed.values())}).encode()
    request = Request(url, body, {"Content-Type": "application/json"})  # noqa: S310 - the user's own address
    with urlopen(request, timeout=timeout) as response:  # noqa: S310 - as above
        answer = json.load(response)
    if answer["err_no"]:
        raise SystemExit(f"error {answer['err_no']}: {answer['err_msg']}")
    return dict(zip(answer["key"], answer["value"], strict=True))
