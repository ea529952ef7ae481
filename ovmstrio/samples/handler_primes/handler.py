"""Handler of a gRPC service that finds prime numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from math import isqrt
from typing import Any

import grpc


class Handler:
    """Handler with one method for each RPC of ``primes.proto``."""

    def __init__(self, config: dict[str, Any], proto_module_pb2: Any) -> None:
        self.largest = config["largest"]
        self.messages = proto_module_pb2

    def Generate(self, payload: Any) -> Iterator[Any]:  # noqa: N802 - the RPC's name
        """Stream primes until the requested count is reached or the client cancels."""
        found = (number for number in count(max(payload.first, 2)) if _divisor(number) == number)
        for prime in islice(found, payload.count or None):
            yield self.messages.Prime(value=prime)

    def Check(self, payload: Any, context: Any) -> Any:  # noqa: N802 - as above
        """Return the smallest divisor of a number, and whether the number is a prime."""
        if not 2 <= payload.value <= self.largest:
            context.abort(grpc.StatusCode.OUT_OF_RANGE, f"expected 2 to {self.largest}, got {payload.value}")
        divisor = _divisor(payload.value)
        return self.messages.Verdict(is_prime=divisor == payload.value, divisor=divisor)


def _divisor(number: int) -> int:
    return next((each for each in range(2, isqrt(number) + 1) if number % each == 0), number)
