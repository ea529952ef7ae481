"""What the clients of services share: a call over plain HTTP, as any program can make it."""

from __future__ import annotations

from collections.abc import Mapping

from ovmstrio_samples.command_line import call_json

__all__ = ["call"]


def call(url: str, feed: Mapping[str, str], *, timeout: float = 30) -> dict[str, str]:
    """Ask a pipeline: texts by key go in, texts by key come out; an error that it answers ends the program."""
    answer = call_json(url, {"key": list(feed), "value": list(feed.values())}, timeout=timeout)
    if answer["err_no"]:
        raise SystemExit(f"error {answer['err_no']}: {answer['err_msg']}")
    return dict(zip(answer["key"], answer["value"], strict=True))
