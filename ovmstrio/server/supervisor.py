"""The nursery tree of one server: what starts it, what ends it, and in which order.

::

    serve ── registry.run        loads, retirements, the watcher
          │  └─ services         what each runs besides its calls; outlives them
          ├─ gRPC front end      a nursery a connection, a task an RPC
          ├─ REST front end      a nursery a connection
          ├─ first load          of what is configured, behind the sequences of an earlier run
          ├─ sequence cleaner    removes what nobody goes on with
          └─ signals             the first drains, the second stops at once
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Final, Protocol

import structlog
import trio

from ovmstrio.config.ovms_json import parse_config
from ovmstrio.config.specs import ServerSpec
from ovmstrio.core.errors import ConfigError, Problem, ServerError
from ovmstrio.core.hooks import NULL_METERS
from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.observability.metrics import Metrics
from ovmstrio.observability.request_log import RequestLog
from ovmstrio.registry import Registry
from ovmstrio.registry.source import ConfigSource, reload_versions
from ovmstrio.runtimes.kind import LoadContext
from ovmstrio.runtimes.models.sequences import SequenceManagers
from ovmstrio.runtimes.models.sequences.cleaner import clean_sequences
from ovmstrio.runtimes.models.sequences.store import restore_sequences, save_sequences
from ovmstrio.runtimes.table import KINDS
from ovmstrio.server.command_line import (
    cache_directory,
    contradictions,
    listen_addresses,
    metric_families,
    single_servable,
)
from ovmstrio.server.grpc_front_end import GrpcFrontEnd
from ovmstrio.server.rest_front_end import RestFrontEnd
from ovmstrio.server.signals import obey_signals
from ovmstrio.wire.grpc.limits import TransportLimits
from ovmstrio.wire.http.cors import Cors
from ovmstrio.wire.listeners import tls_context

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

    from ovmstrio.server.settings import ServeSettings

__all__ = ["Running", "serve"]

log = structlog.get_logger(__name__)

_HTTP: Final = "http/1.1"
_HTTP2: Final = "h2"


class FrontEnd(Protocol):
    """One protocol's listeners and connections."""

    async def serve(self, *, task_status: trio.TaskStatus[list[str]]) -> None:
        """Serve until drained or cancelled; reports the bound addresses once connections are accepted."""
        ...

    async def drain(self, grace_seconds: float) -> None:
        """Close listeners, let calls in flight finish within the grace, end the rest."""
        ...


@dataclass(frozen=True, slots=True)
class Running:
    """A server that accepts connections, as it is reported to whoever started it."""

    plane: DataPlane
    grpc: list[str]
    rest: list[str]
    started: float

    @property
    def seconds(self) -> float:
        """How long the server has been running."""
        return perf_counter() - self.started


async def serve(
    settings: ServeSettings,
    *,
    handle_signals: bool = True,
    task_status: trio.TaskStatus[Running] = trio.TASK_STATUS_IGNORED,
) -> bool:
    """Run one server until a signal or its caller ends it; True if it ended gently.

    Reports a :class:`Running` once connections are accepted, which is before models are loaded.

    Raises:
        ConfigError: the configuration file cannot be used at all.
        OSError: an address cannot be bound, or a certificate cannot be read.

    Ownership: everything that the server opens is closed when this returns.

    Cancellation: ends everything at once, without drain; models are still unloaded, with a bound.
    """
    started = perf_counter()
    server = _Server(settings, await _read_configuration(settings))
    async with trio.open_nursery() as nursery:
        await nursery.start(server.registry.run)
        if handle_signals:
            drain = partial(server.drain, nursery.cancel_scope)
            await nursery.start(obey_signals, drain, nursery.cancel_scope)
        server.open_front_ends()
        addresses = {name: await nursery.start(end.serve) for name, end in server.front_ends.items()}
        server.plane.begin_serving()
        nursery.start_soon(server.first_load)
        nursery.start_soon(clean_sequences, server.sequences, settings.sequence_cleaner_poll_wait_minutes)
        task_status.started(Running(server.plane, addresses.get("gRPC", []), addresses.get("REST", []), started))
    return server.drained


async def _read_configuration(settings: ServeSettings) -> ServerSpec:
    """Read what the settings name, once, before anything is opened."""
    if settings.config_path is None:
        return single_servable(settings)
    try:
        content = await trio.Path(settings.config_path).read_bytes()
    except OSError as error:
        raise ConfigError([Problem(f"the file cannot be read: {error.strerror}", str(settings.config_path))]) from None
    spec = parse_config(KINDS.values(), content, settings.config_path, cache_dir=cache_directory(settings))
    problems = contradictions(settings, spec)
    if problems:
        raise ConfigError(problems)
    for problem in spec.problems:
        log.warning("configuration", problem=str(problem))
    return spec


class _Server:
    """The parts of one server, wired to each other."""

    def __init__(self, settings: ServeSettings, spec: ServerSpec) -> None:
        self._settings = settings
        self._spec = spec
        self._metrics = _metrics_of(settings, spec)
        lend = partial(
            LoadContext,
            meters=NULL_METERS if self._metrics is None else self._metrics,
            hide_errors=settings.hide_errors,
            isolates_nodes=settings.custom_node_isolation == "process",
        )
        self.registry = Registry(
            KINDS,
            lend,
            poll_seconds=settings.file_system_poll_wait_seconds,
            ready_when_empty=settings.allow_empty,
        )
        self._source: ConfigSource | None = None
        self.drained = False
        reload: Callable[[], Awaitable[bool]] = partial(reload_versions, self.registry)
        if settings.config_path is not None:
            parse = partial(parse_config, KINDS.values(), cache_dir=cache_directory(settings))
            self._source = ConfigSource(settings.config_path, self.registry, parse)
            self.registry.on_poll(self._source.poll)
            reload = self._source.reload
        self.plane = DataPlane(self.registry, reload=reload, observers=(RequestLog(),), metrics=self._metrics)
        self._tls = {protocol: _tls(settings, protocol) for protocol in (_HTTP, _HTTP2)}
        self.front_ends: dict[str, FrontEnd] = {}

    @property
    def sequences(self) -> SequenceManagers:
        """The sequences of all models; there once the registry runs."""
        return self.registry.context.shared(SequenceManagers)

    def open_front_ends(self) -> None:
        """Make the front end of each protocol that has a port."""
        settings = self._settings
        size = settings.max_message_size
        grpc = listen_addresses(settings.grpc_bind_address, settings.port)
        if grpc:
            limits = TransportLimits(max_receive_message_bytes=size, max_send_message_bytes=size)
            tls = self._tls[_HTTP2]
            self.front_ends["gRPC"] = GrpcFrontEnd(self.plane, grpc, tls=tls, limits=limits)
        rest = listen_addresses(settings.rest_bind_address, settings.rest_port)
        if rest:
            self.front_ends["REST"] = RestFrontEnd(
                self.plane,
                rest,
                tls=self._tls[_HTTP],
                max_body_bytes=size,
                cors=_cors(settings),
                shows_details=settings.debug,
            )

    async def first_load(self) -> None:
        """Load what is configured; what fails is a state of the registry and leaves the server up."""
        if self._settings.sequence_store is not None:
            await restore_sequences(self.sequences, self._settings.sequence_store)
        try:
            if self._source is not None:
                await self._source.reload(force=True)
            else:
                await self.registry.apply(self._spec.services)
        except ServerError as error:
            log.error("not everything could be loaded", reason=error.message)  # noqa: TRY400 - told, not unforeseen

    async def drain(self, everything: trio.CancelScope) -> None:
        """End gently: turn not ready, close listeners, let calls end, keep sequences; then end everything."""
        self.plane.begin_drain()
        await trio.sleep(self._settings.drain_delay)
        async with trio.open_nursery() as nursery:
            for end in self.front_ends.values():
                nursery.start_soon(end.drain, self._settings.drain_seconds)
        log.info("drained")
        if self._settings.sequence_store is not None:
            await save_sequences(self.sequences, self._settings.sequence_store)
        self.drained = True
        everything.cancel()


def _metrics_of(settings: ServeSettings, spec: ServerSpec) -> Metrics | None:
    if spec.metrics is not None:
        return Metrics(spec.metrics.families) if spec.metrics.enable else None
    return Metrics(metric_families(settings)) if settings.metrics_enable else None


def _cors(settings: ServeSettings) -> Cors | None:
    if settings.allowed_origins is None:
        return None
    return Cors(
        settings.allowed_origins,
        settings.allowed_methods,
        settings.allowed_headers,
        credentials=settings.allow_credentials,
    )


def _tls(settings: ServeSettings, protocol: str) -> ssl.SSLContext | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    try:
        return tls_context(settings.tls_cert, settings.tls_key, settings.client_ca, protocol=protocol)
    except OSError as error:
        # The ssl module does not say which file it means.
        files = ", ".join(
            f"--{name} {path}"
            for name in ("tls_cert", "tls_key", "client_ca")
            if (path := getattr(settings, name)) is not None
        )
        raise ConfigError([Problem(f"TLS cannot be set up from {files}: {error.strerror or error}")]) from error
