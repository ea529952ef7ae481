"""Command line of the samples' clients, with the same option names in all of them.

``--url`` is the server, ``--model`` the name of the called service, and ``--input`` the data to send.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

__all__ = ["Option", "arguments", "call_json", "failures_of_http_end_the_program"]

Option = tuple[str, dict[str, Any]]


def arguments(
    purpose: str,
    *others: Option,
    url: str,
    model: str = "",
    given: Mapping[str, Any] | None = None,
    has_rest: bool = False,
) -> argparse.Namespace:
    """Parse the command line.

    Args:
        purpose: the description in the help.
        others: names of additional options, each with its argparse keywords.
        url: the default of ``--url``.  If it begins with ``http://``, users may omit the scheme.
        model: the default of ``--model``.  If empty, the client has no ``--model`` option.
        given: the argparse keywords of ``--input``.  If None, the client has no ``--input`` option.
        has_rest: whether the client has ``--rest``; an empty ``url`` then means the default port of the protocol.
    """
    parser = argparse.ArgumentParser(description=purpose)
    url_help = f"HOST:PORT of the server (default: {url or 'port 9000 on this machine, with --rest port 8000'})"
    parser.add_argument("--url", default=url, help=url_help)
    if has_rest:
        parser.add_argument("--rest", action="store_true", help="call over REST instead of gRPC")
    parser.set_defaults(model=model)
    if model:
        parser.add_argument("--model", default=model, help="name of the service on the server (default: %(default)s)")
    if given is not None:
        parser.add_argument("--input", **given)
    for name, options in others:
        parser.add_argument(name, **options)
    read = parser.parse_args()
    if url.startswith("http://") and "://" not in read.url:
        read.url = f"http://{read.url}"
    read.url = read.url.rstrip("/")
    return read


def call_json(url: str, document: Any = None, *, timeout: float = 30) -> Any:
    """Send a plain HTTP request and return the JSON response: POST with a document, GET without."""
    body = None if document is None else json.dumps(document).encode()
    request = Request(url, body, {"Content-Type": "application/json"})  # noqa: S310 - the user's own address
    with urlopen(request, timeout=timeout) as answer:  # noqa: S310 - as above
        return json.load(answer)


@contextmanager
def failures_of_http_end_the_program() -> Iterator[None]:
    """Exit with a one-line message if the server returns an error or does not respond."""
    try:
        yield
    except HTTPError as error:
        raise SystemExit(f"error: {error.code}: {error.read().decode(errors='replace')}") from error
    except URLError as error:
        raise SystemExit(f"error: no response from the server: {error.reason}; check --url") from error
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
