"""Shared code of the Op pipeline samples' clients: a plain HTTP call."""

from __future__ import annotations

from collections.abc import Mapping

from ovmstrio.samples.command_line import call_json

__all__ = ["call"]


def call(url: str, feed: Mapping[str, str], *, timeout: float = 30) -> dict[str, str]:
    """Call a pipeline with texts by key and return its texts by key; exit with a message on an error response."""
    answer = call_json(url, {"key": list(feed), "value": list(feed.values())}, timeout=timeout)
    if answer["err_no"]:
        raise SystemExit(f"error {answer['err_no']}: {answer['err_msg']}")
    return dict(zip(answer["key"], answer["value"], strict=True))
