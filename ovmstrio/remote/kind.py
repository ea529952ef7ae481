"""Models of other servers as a kind of service."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

import trio

from ovmstrio.config.remote_entries import RemoteSpec, read_remotes
from ovmstrio.core.errors import ConfigError, NotReady, ServerError
from ovmstrio.remote.connecting import client_tls
from ovmstrio.remote.grpc_endpoint import GrpcEndpoint
from ovmstrio.remote.servable import RemoteServable
from ovmstrio.remote.targets import Breaker, Target, Targets, watch
from ovmstrio.serving.hosted_service import host
from ovmstrio.serving.kind import Kind, Takes
from ovmstrio.serving.model_versions import ONLY_VERSION, Listing

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from ovmstrio.config.config_file import ConfigFile
    from ovmstrio.config.remote_entries import RemoteAddress
    from ovmstrio.core.service import Service
    from ovmstrio.remote.endpoint import Endpoint, RemoteDescription
    from ovmstrio.serving.kind import LoadContext

__all__ = ["RemoteKind", "open_remote"]

# ----------------------------------------------------------------------
# Models of other servers as a kind of service
# ----------------------------------------------------------------------


class RemoteKind(Kind[RemoteSpec]):
    """Entries among the models that say where else the model is."""

    name: ClassVar[str] = RemoteSpec.kind
    spec = RemoteSpec
    takes: ClassVar[frozenset[Takes]] = frozenset({Takes.TENSORS})
    runs_user_code = False
    occupied: ClassVar[str] = "Remote model has a name that is taken"

    def read(self, file: ConfigFile) -> list[RemoteSpec]:
        """Read the entries of the file."""
        return read_remotes(file)

    def list_versions(self, spec: RemoteSpec) -> Listing:
        """Give the one version."""
        return Listing({ONLY_VERSION: spec.base_path}, mark=self.files_mark(spec, spec.base_path))

    def files_mark(self, spec: RemoteSpec, directory: Path) -> str:
        """Give nothing: it has no files here."""
        del spec, directory
        return ""

    async def load(self, spec: RemoteSpec, version: int, directory: Path, context: LoadContext) -> Service:
        """Ask the other server for its model; the caller owns the service and closes it.

        Raises:
            ConfigError: the settings cannot be used.
            ServerError: the other server cannot be reached, or has no such model.

        Cancellation: at any checkpoint; nothing is left.
        """
        # What only these models need is left alone by those who have none.

        del version, directory
        if spec.errors:
            raise ConfigError(spec.errors)
        return await host(context.tasks, open_remote(spec), kind=self.name, name=spec.name)

    def obstacle(self, service: Service) -> str:
        """Tell when no address of it can be called."""
        from ovmstrio.remote.servable import RemoteServable  # noqa: PLC0415 - as in `load`

        return service.obstacle if isinstance(service, RemoteServable) else ""


# ----------------------------------------------------------------------
# From the settings of a remote model to a servable that is kept in touch with its server
# ----------------------------------------------------------------------

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
    from ovmstrio.remote.rest_endpoint import RestEndpoint  # noqa: PLC0415 - for REST only

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
