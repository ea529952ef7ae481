"""Ask for prime numbers: ``python -m ovmstrio_samples.handler_primes.client [--input FIRST] [--count COUNT]``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from typing import Any

import grpc

from ovmstrio.extras import Extra, way_to_install
from ovmstrio_samples.command_line import arguments

__all__ = ["check", "primes"]

TIMEOUT_SECONDS = 10


def _load() -> tuple[Any, Any]:
    """Compile the messages and the client of the service."""
    if find_spec("grpc_tools") is None:
        raise SystemExit(f"error: this client needs grpcio-tools: {way_to_install(Extra.HANDLERS)}")
    return grpc.protos_and_services("ovmstrio_samples/handler_primes/primes.proto")  # type: ignore[no-any-return]


def primes(address: str, first: int = 0, count: int = 0) -> Iterator[int]:
    """Give primes as they come; with no count, closing the iterator cancels the call."""
    messages, services = _load()
    with grpc.insecure_channel(address) as channel:
        call = services.PrimesStub(channel).Generate(messages.Range(first=first, count=count))
        try:
            for prime in call:
                yield prime.value
        finally:
            call.cancel()


def check(address: str, value: int) -> int:
    """Give the smallest divisor of a number above 1, which is itself if it is a prime."""
    messages, services = _load()
    with grpc.insecure_channel(address) as channel:
        verdict = services.PrimesStub(channel).Check(messages.Number(value=value), timeout=TIMEOUT_SECONDS)
    return int(verdict.divisor)


if __name__ == "__main__":
    first = {"metavar": "FIRST", "type": int, "default": 0, "help": "where to begin (default: %(default)s)"}
    count = ("--count", {"type": int, "default": 10, "help": "how many (default: %(default)s)"})
    options = arguments("Which numbers are primes?", count, url="localhost:8080", given=first)
    try:
        # The stream has no end; the client leaves when it has enough.
        print(*islice(primes(options.url, options.input), options.count))
        print("91 can be divided by", check(options.url, 91))
    except grpc.RpcError as error:
        raise SystemExit(f"error: {error.details()}; --url says where to look") from error
