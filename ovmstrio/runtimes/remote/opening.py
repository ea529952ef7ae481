"""From the settings of a remote model to a servable that is kept in touch with its server."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.core.errors import NotReady, ServerError
from ovmstrio.runtimes.remote.breaker import Breaker
from ovmstrio.runtimes.remote.connecting import client_tls
from ovmstrio.runtimes.remote.grpc.grpc_endpoint import GrpcEndpoint
from ovmstrio.runtimes.remote.health import watch
from ovmstrio.runtimes.remote.remote_servable import RemoteServable
from ovmstrio.runtimes.remote.targets import Target, Targets

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Sequence

    from ovmstrio.config.remote_entries import RemoteAddress, RemoteSpec
    from ovmstrio.runtimes.remote.endpoint import Endpoint, RemoteDescription

__all__ = ["open_remote"]

_DESCRIBE_SECONDS: Final = 20.0
"""How long an address may take to say what its model is."""


@asynccontextmanager
async def open_remote(spec: RemoteSpec) -> AsyncIterator[RemoteServable]:
    """Ask the other server what its model is, and stay in touch while the block lasts.

    Raises:
        ConfigError: files for TLS cannot be used.
        NotReady: no address can be reached.
        ServerError: the model is not there.

    Ownership: connections and their tasks end with the block.
    Cancellation: at any checkpoint.
    """
    contexts: list[ssl.SSLContext | None] = []
    for address in spec.addresses:
        read = partial(client_tls, spec.tls, speaks_grpc=address.speaks_grpc)
        contexts.append(await trio.to_thread.run_sync(read) if address.has_tls else None)
    async with trio.open_nursery() as tasks:
        where = zip(spec.addresses, contexts, strict=True)
        endpoints = [_endpoint(spec, address, tasks, tls) for address, tls in where]
        try:
            breaker = partial(Breaker, spec.breaker.failures, spec.breaker.open_seconds)
            targets = Targets([Target(endpoint, breaker()) for endpoint in endpoints])
            description = await _describe(targets.all)
            for target in targets.all:
                returned = partial(_compare, description)
                tasks.start_soon(watch, target, spec.name, spec.health_seconds, returned)
            yield RemoteServable(spec, description, targets)
        finally:
            with trio.CancelScope(shield=True):
                for endpoint in endpoints:
                    await endpoint.aclose()
        tasks.cancel_scope.cancel()


def _endpoint(spec: RemoteSpec, address: RemoteAddress, tasks: trio.Nursery, tls: ssl.SSLContext | None) -> Endpoint:
    if address.speaks_grpc:
        return GrpcEndpoint(spec, address, tasks, tls)
    # The library is left alone by those who call no REST.
    from ovmstrio.runtimes.remote.rest_endpoint import RestEndpoint  # noqa: PLC0415 - for REST only

    return RestEndpoint(spec, address, tls)


async def _describe(targets: Sequence[Target]) -> RemoteDescription:
    """Ask one address after the other; those that do not answer are known not to be well."""
    failures: list[ServerError] = []
    for target in targets:
        try:
            with trio.move_on_after(_DESCRIBE_SECONDS):
                return await target.endpoint.describe()
            raise NotReady(f"{target.endpoint.address} did not say within {_DESCRIBE_SECONDS:g} s what its model is")
        except ServerError as error:
            target.ailment = error.message
            failures.append(error)
    others = [error for error in failures if not isinstance(error, NotReady)]
    if others:
        raise others[0]
    raise NotReady("; ".join(error.message for error in failures))


async def _compare(known: RemoteDescription, target: Target) -> str:
    """Tell what is wrong with a server that has come back, if its model is another one now."""
    now = await target.endpoint.describe()
    if (now.inputs, now.outputs) == (known.inputs, known.outputs):
        return ""
    told = (f"{name}: {spec}" for name, spec in _named(now))
    return f"its model has other inputs or outputs than when it was loaded here ({', '.join(told)}); reload it"


def _named(description: RemoteDescription) -> list[tuple[str, str]]:
    return [(each.name, str(each)) for each in (*description.inputs, *description.outputs)]
