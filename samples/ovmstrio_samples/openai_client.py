"""OpenAI's client of a server, for the samples that are called by it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from openai import APIConnectionError, DefaultHttpxClient, OpenAI

__all__ = ["openai_client"]


@contextmanager
def openai_client(url: str) -> Iterator[OpenAI]:
    """Give the client of a server, whose REST port is at ``url``, until the block ends.

    Raises:
        APIConnectionError: an answer breaks off; OpenAI's own iterators let the error of their library of HTTP through.
    """
    with OpenAI(base_url=f"{url}/v3", api_key="unused") as client:
        try:
            yield client
        except _transport_error() as error:
            raise APIConnectionError(message=f"the answer broke off: {error}", request=error.request) from error


def _transport_error() -> Any:
    """Give the class of errors of the library of HTTP, which is another one in other versions of OpenAI's client."""
    theirs = next(cls for cls in DefaultHttpxClient.__mro__ if not cls.__module__.startswith("openai"))
    return import_module(theirs.__module__.partition(".")[0]).TransportError
