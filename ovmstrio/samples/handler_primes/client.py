"""Client of handler_primes: ``python -m ovmstrio.samples.handler_primes.client [--input FIRST] [--count COUNT]``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from typing import Any

import grpc

from ovmstrio.extras import Extra, install_command
from ovmstrio.samples.command_line import arguments

__all__ = ["check", "primes"]

TIMEOUT_SECONDS = 10


def _load() -> tuple[Any, Any]:
    """Compile the messages and the client stub of the service."""
    if find_spec("grpc_tools") is None:
        raise SystemExit(f"error: this client needs grpcio-tools: {install_command(Extra.HANDLERS)}")
    return grpc.protos_and_services("ovmstrio/samples/handler_primes/primes.proto")  # type: ignore[no-any-return]


def primes(address: str, first: int = 0, count: int = 0) -> Iterator[int]:
    """Stream primes; without a count, closing the iterator cancels the call."""
    messages, services = _load()
    with grpc.insecure_channel(address) as channel:
        call = services.PrimesStub(channel).Generate(messages.Range(first=first, count=count))
        try:
            for prime in call:
                yield prime.value
        finally:
            call.cancel()


def check(address: str, value: int) -> int:
    """Return the smallest divisor above 1 of a number; a prime's is the number itself."""
    messages, services = _load()
    with grpc.insecure_channel(address) as channel:
        verdict = services.PrimesStub(channel).Check(messages.Number(value=value), timeout=TIMEOUT_SECONDS)
    return int(verdict.divisor)


if __name__ == "__main__":
    first = {"metavar": "FIRST", "type": int, "default": 0, "help": "first number to check (default: %(default)s)"}
    count = ("--count", {"type": int, "default": 10, "help": "number of primes (default: %(default)s)"})
    options = arguments("Stream prime numbers.", count, url="localhost:8080", given=first)
    try:
        # The stream is endless, so the client cancels the call after `count` primes.
        print(*islice(primes(options.url, options.input), options.count))
        print("91 can be divided by", check(options.url, 91))
    except grpc.RpcError as error:
        raise SystemExit(f"error: {error.details()}; check --url") from error
