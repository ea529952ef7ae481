"""Loading of remote models: endpoints, their metadata, and the servable."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.config.remote_entries import RemoteSpec
from ovmstrio.core.errors import NotReady, ServerError
from ovmstrio.remote.connect import client_tls
from ovmstrio.remote.grpc_endpoint import GrpcEndpoint
from ovmstrio.remote.servable import RemoteServable
from ovmstrio.remote.targets import CircuitBreaker, Target, Targets, watch_health

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Sequence

    from ovmstrio.config.remote_entries import RemoteAddress
    from ovmstrio.remote.endpoint import Endpoint, RemoteDescription

_DESCRIBE_SECONDS: Final = 20.0
"""Time limit of a metadata request to one address."""


@asynccontextmanager
async def open_remote(spec: RemoteSpec) -> AsyncIterator[RemoteServable]:
    """Load the remote model's metadata and watch its addresses within the block.

    Raises ConfigError for TLS files, NotReady if no address is reachable, ServerError if the model does not exist.
    """
    contexts: list[ssl.SSLContext | None] = []
    for address in spec.addresses:
        read = partial(client_tls, spec.tls, speaks_grpc=address.speaks_grpc)
        contexts.append(await trio.to_thread.run_sync(read) if address.has_tls else None)
    async with trio.open_nursery() as tasks:
        addresses = zip(spec.addresses, contexts, strict=True)
        endpoints = [_endpoint(spec, address, tasks, tls) for address, tls in addresses]
        try:
            breaker = partial(CircuitBreaker, spec.breaker.failures, spec.breaker.open_seconds)
            targets = Targets([Target(endpoint, breaker()) for endpoint in endpoints])
            description = await _describe(targets.all)
            for target in targets.all:
                returned = partial(_compare, description)
                tasks.start_soon(watch_health, target, spec.name, spec.health_seconds, returned)
            yield RemoteServable(spec, description, targets)
        finally:
            with trio.CancelScope(shield=True):
                for endpoint in endpoints:
                    await endpoint.aclose()
        tasks.cancel_scope.cancel()


def _endpoint(spec: RemoteSpec, address: RemoteAddress, tasks: trio.Nursery, tls: ssl.SSLContext | None) -> Endpoint:
    if address.speaks_grpc:
        return GrpcEndpoint(spec, address, tasks, tls)
    from ovmstrio.remote.rest_endpoint import RestEndpoint  # noqa: PLC0415 - imports httpx

    return RestEndpoint(spec, address, tls)


async def _describe(targets: Sequence[Target]) -> RemoteDescription:
    failures: list[ServerError] = []
    for target in targets:
        try:
            with trio.move_on_after(_DESCRIBE_SECONDS):
                return await target.endpoint.describe()
            raise NotReady(f"{target.endpoint.address} sent no metadata within {_DESCRIBE_SECONDS:g} s")
        except ServerError as error:
            target.failure_reason = error.message
            failures.append(error)
    others = [error for error in failures if not isinstance(error, NotReady)]
    if others:
        raise others[0]
    raise NotReady("; ".join(error.message for error in failures))


async def _compare(known: RemoteDescription, target: Target) -> str:
    """Return the problem of a recovered server whose model has changed; empty if it has not."""
    now = await target.endpoint.describe()
    if (now.inputs, now.outputs) == (known.inputs, known.outputs):
        return ""
    tensors = (f"{each.name}: {each}" for each in (*now.inputs, *now.outputs))
    return f"inputs or outputs have changed since the model was loaded ({', '.join(tensors)}); reload it"
