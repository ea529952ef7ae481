"""OpenAI client of a server, shared by the samples that use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from openai import APIConnectionError, DefaultHttpxClient, OpenAI

__all__ = ["openai_client"]


@contextmanager
def openai_client(url: str) -> Iterator[OpenAI]:
    """Open an OpenAI client of the server whose REST port is at ``url``, and close it at the end of the block.

    Raises:
        APIConnectionError: a response is incomplete.  OpenAI's iterators raise the error of their HTTP library instead.
    """
    with OpenAI(base_url=f"{url}/v3", api_key="unused") as client:
        try:
            yield client
        except _transport_error() as error:
            raise APIConnectionError(message=f"the answer broke off: {error}", request=error.request) from error


def _transport_error() -> Any:
    """Return the error class of the HTTP library, which depends on the version of OpenAI's client."""
    theirs = next(cls for cls in DefaultHttpxClient.__mro__ if not cls.__module__.startswith("openai"))
    return import_module(theirs.__module__.partition(".")[0]).TransportError
