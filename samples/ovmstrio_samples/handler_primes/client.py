"""Ask for prime numbers: ``python -m ovmstrio_samples.handler_primes.client [ADDRESS] [FIRST] [COUNT]``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import grpc

__all__ = ["check", "primes"]

TIMEOUT_SECONDS = 10


def _load() -> tuple[Any, Any]:
    """Compile the messages and the client of the service."""
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
    address = sys.argv[1] if len(sys.argv) > 1 else "localhost:8080"
    first, wanted = (int(sys.argv[place]) if len(sys.argv) > place else other for place, other in ((2, 0), (3, 10)))
    # The stream has no end; the client leaves when it has enough.
    print(*islice(primes(address, first), wanted))
    print("91 can be divided by", check(address, 91))
