"""The command line of the samples' clients, whose options are called the same in all of them.

``--url`` is the server, ``--model`` the name that is called there, and ``--input`` what it is asked about.
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
    """Read the command line.

    Args:
        purpose: what the client does.
        others: names of options of its own, each with argparse's.
        url: the default of ``--url``; one that begins with ``http://`` has it said with the scheme or without.
        model: the default of ``--model``; without one, the client calls several, or none by name.
        given: argparse's options of ``--input``, where there is something to ask about.
        has_rest: the client takes ``--rest`` as well, and then an empty ``url`` is the port of either protocol.
    """
    parser = argparse.ArgumentParser(description=purpose)
    told = f"HOST:PORT of the server (default: {url or 'port 9000 on this machine, with --rest port 8000'})"
    parser.add_argument("--url", default=url, help=told)
    if has_rest:
        parser.add_argument("--rest", action="store_true", help="ask over REST instead of gRPC")
    parser.set_defaults(model=model)
    if model:
        parser.add_argument("--model", default=model, help="its name on the server (default: %(default)s)")
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
    """Ask over plain HTTP, as any program can: by POST with a document, by GET without one."""
    body = None if document is None else json.dumps(document).encode()
    request = Request(url, body, {"Content-Type": "application/json"})  # noqa: S310 - the user's own address
    with urlopen(request, timeout=timeout) as answer:  # noqa: S310 - as above
        return json.load(answer)


@contextmanager
def failures_of_http_end_the_program() -> Iterator[None]:
    """Let what the server says, or that none answers, end the program in one line."""
    try:
        yield
    except HTTPError as error:
        raise SystemExit(f"error: {error.code}: {error.read().decode(errors='replace')}") from error
    except URLError as error:
        raise SystemExit(f"error: no server answers: {error.reason}; --url says where to look") from error
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
