"""Addresses that do what a test says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ovmstrio.config.remote_entries import BreakerSpec, RemoteAddress, RemoteSpec
from ovmstrio.core.request import InferRequest, InferResponse
from ovmstrio.runtimes.remote.breaker import Breaker
from ovmstrio.runtimes.remote.endpoint import RemoteDescription
from ovmstrio.runtimes.remote.remote_servable import RemoteServable
from ovmstrio.runtimes.remote.targets import Target, Targets

Script = Callable[[InferRequest, float], Awaitable[InferResponse]]


async def answer(request: InferRequest, seconds: float) -> InferResponse:
    del seconds
    return InferResponse("far", "7", [], request.id)


class FakeEndpoint:
    """Answers as its script says, and counts."""

    def __init__(self, address: str, script: Script = answer) -> None:
        self.address = address
        self.script = script
        self.calls: list[InferRequest] = []
        self.seconds: list[float] = []

    async def infer(self, request: InferRequest, seconds: float) -> InferResponse:
        """Run the script."""
        self.calls.append(request)
        self.seconds.append(seconds)
        return await self.script(request, seconds)

    async def describe(self) -> RemoteDescription:
        """Describe nothing."""
        return RemoteDescription("fake", (), ())

    async def ask_ready(self) -> str:
        """Be well."""
        return ""

    def doubt(self) -> None:
        """Have nothing that could be doubted."""

    async def aclose(self) -> None:
        """Have nothing to close."""


def spec_with(**settings: Any) -> RemoteSpec:
    address = RemoteAddress("grpc", "127.0.0.1", 9)
    return RemoteSpec(name="m", remote_name="far", base_path=Path("/"), addresses=(address,), **settings)


def remote_of(*endpoints: FakeEndpoint, **settings: Any) -> RemoteServable:
    spec = spec_with(**settings)
    breaker: BreakerSpec = spec.breaker
    targets = [Target(each, Breaker(breaker.failures, breaker.open_seconds)) for each in endpoints]
    return RemoteServable(spec, RemoteDescription("fake", (), ()), Targets(targets))
