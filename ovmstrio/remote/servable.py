"""Servable of a remote model: deadline, hedging, retries and sequences.

::

    call ── deadline ── hedge after a delay ── attempt ── address ── Endpoint
                                                  └── not sent: next address, then a pause
"""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import trio

from ovmstrio.config.remote_entries import RemoteSpec
from ovmstrio.core.errors import DeadlineExceeded, InvalidRequest, NotFound, NotReady, PayloadTooLarge, ServerError
from ovmstrio.core.request import ServableMetadata
from ovmstrio.core.tracing import current_span
from ovmstrio.remote.endpoint import NotSent, client_tls
from ovmstrio.remote.grpc_endpoint import GrpcEndpoint
from ovmstrio.remote.targets import (
    CircuitBreaker,
    SequenceStep,
    Target,
    Targets,
    sequence_step,
    server_sequence_id,
    watch_health,
)
from ovmstrio.serving.hosted_service import HostedService
from ovmstrio.util.backoff import Backoff

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from ovmstrio.config.remote_entries import RemoteAddress
    from ovmstrio.core.request import InferRequest, InferResponse
    from ovmstrio.remote.endpoint import Endpoint, RemoteDescription

# Hedging

_T = TypeVar("_T")


async def hedge(
    call: Callable[[], Awaitable[_T]], after_seconds: float, *, is_final: Callable[[ServerError], bool]
) -> _T:
    """Return the first response of a call that is repeated after ``after_seconds`` without a response.

    A call that fails earlier is not repeated.  Raises the first failure if both calls fail; a final failure ends both.
    """
    race = _Race(call, is_final)
    async with trio.open_nursery() as nursery:
        race.begin(nursery)
        with trio.move_on_after(after_seconds):
            await race.over.wait()
        if not race.over.is_set():
            race.begin(nursery)
            await race.over.wait()
        nursery.cancel_scope.cancel()
    if race.answers:
        return race.answers[0]
    raise race.failures[0]


class _Race(Generic[_T]):
    def __init__(self, call: Callable[[], Awaitable[_T]], is_final: Callable[[ServerError], bool]) -> None:
        self._call = call
        self._is_final = is_final
        self._running = 0
        self.answers: list[_T] = []
        self.failures: list[ServerError] = []
        self.over = trio.Event()

    def begin(self, nursery: trio.Nursery) -> None:
        self._running += 1
        nursery.start_soon(self._run)

    async def _run(self) -> None:
        try:
            self.answers.append(await self._call())
        except ServerError as error:
            self._running -= 1
            # A final failure takes precedence.
            self.failures.insert(0 if self._is_final(error) else len(self.failures), error)
            if self._running and not self._is_final(error):
                return
        self.over.set()


# Servable

_VERSION: Final = "1"
_MAX_PAUSE_SECONDS: Final = 5.0


class RemoteServable(HostedService):
    """Servable of one remote model, with its metadata from the remote server.

    Args:
        count_unreachable: counts a call that no server answered.
    """

    def __init__(
        self,
        spec: RemoteSpec,
        description: RemoteDescription,
        targets: Targets,
        count_unreachable: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__()
        self._spec = spec
        self._targets = targets
        self._count_unreachable = count_unreachable
        self.metadata = ServableMetadata(
            spec.name, description.platform or "remote", description.inputs, description.outputs
        )

    @property
    def unready_reason(self) -> str:
        """Why no address can be called; empty if one can."""
        details = self._targets.unready_reason(trio.current_time())
        return f'remote model "{self._spec.name}": {details}' if details else ""

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run an inference on the remote server, within the request's deadline and the configured timeout.

        Raises NotReady if no address can be called or the connection was lost, DeadlineExceeded, PayloadTooLarge, and
        errors of the server.  Cancellation cancels the call on the server.
        """
        now = trio.current_time()
        deadline = min(request.deadline, now + self._spec.timeout_seconds)
        step = sequence_step(request)
        try:
            if step is not None and step.id:
                response = await self._infer_step(request, step, deadline)
            elif step is None and self._spec.hedge_after_ms:
                tried: set[Target] = set()
                call = partial(self._attempt, request, deadline, tried=tried)
                response = await hedge(call, self._spec.hedge_after_ms / 1000, is_final=_is_final)
            else:
                response = await self._attempt(request, deadline, step)
        except NotReady as error:
            self._count_unreachable()
            if isinstance(error, NotSent):
                raise NotReady(error.message) from error
            raise
        if response.nbytes > request.max_output_bytes:
            raise PayloadTooLarge.of_outputs(response.nbytes, request.max_output_bytes)
        response.model_name, response.model_version, response.id = self._spec.name, _VERSION, request.id
        return response

    # Attempts

    async def _infer_step(self, request: InferRequest, step: SequenceStep, deadline: float) -> InferResponse:
        target = self._targets.target_of_sequence(step, trio.current_time())
        response = await self._attempt(request, deadline, step, only=target)
        if step.ends:
            self._targets.forget(step.id)
        return response

    async def _attempt(
        self,
        request: InferRequest,
        deadline: float,
        step: SequenceStep | None = None,
        *,
        only: Target | None = None,
        tried: set[Target] | None = None,
    ) -> InferResponse:
        """Call addresses until one processes the request; pause after each round.

        ``tried`` holds the addresses of a concurrent attempt, which come last.
        """
        pauses = Backoff(self._spec.retry_pause_ms / 1000, _MAX_PAUSE_SECONDS)
        tried = set() if tried is None else tried
        failure: NotSent | None = None
        for attempt in range(self._spec.max_attempts):
            target = self._choose(tried, only)
            if target is None and tried:
                if attempt:
                    await self._pause(pauses.seconds_after(), deadline)
                tried.clear()
                target = self._choose(tried, only)
            if target is None:
                break
            tried.add(target)
            try:
                response = await self._call(target, request, deadline)
            except NotSent as error:
                failure = error
                continue
            if step is not None and step.starts and (sequence_id := server_sequence_id(response)):
                self._targets.place(sequence_id, target)
            return response
        if failure is not None:
            raise failure
        reason = self._targets.unready_reason(trio.current_time()) or "another call is probing it"
        unavailable = NotReady(f'remote model "{self._spec.name}" is not available: {reason}')
        if (span := current_span.get()) is not None:
            # Traces show the attempt that was not made because the circuit is open.
            span.begin(f"call {self._spec.remote_name}", self._span_attributes(only), "client").end(unavailable)
        raise unavailable

    def _choose(self, tried: set[Target], only: Target | None) -> Target | None:
        now = trio.current_time()
        if only is None:
            return self._targets.choose(now, tried)
        return only if only not in tried and only.breaker.allows(now) else None

    async def _pause(self, seconds: float, deadline: float) -> None:
        """Sleep for 50 to 100 % of a pause, so that callers do not retry at the same time."""
        seconds *= random.uniform(0.5, 1)  # noqa: S311 - not a secret
        await trio.sleep_until(min(trio.current_time() + seconds, deadline))

    async def _call(self, target: Target, request: InferRequest, deadline: float) -> InferResponse:
        started_at = trio.current_time()
        if started_at >= deadline:
            raise self._deadline_exceeded(target)
        target.breaker.begin()
        try:
            with trio.move_on_at(deadline):
                response = await self._ask(target, request, deadline - started_at)
                target.breaker.succeed()
                return response
            error: ServerError = self._deadline_exceeded(target)
        except ServerError as raised:
            error = raised
        except BaseException:
            target.breaker.abandon()
            raise
        self._note(target, error, is_callers_deadline=request.deadline <= deadline)
        raise error

    async def _ask(self, target: Target, request: InferRequest, seconds: float) -> InferResponse:
        span = current_span.get()
        if span is None:
            return await target.endpoint.infer(request, seconds)
        with span.part(f"call {self._spec.remote_name}", self._span_attributes(target), "client"):
            return await target.endpoint.infer(request, seconds)

    def _span_attributes(self, target: Target | None) -> dict[str, str]:
        """Return the attributes of a call to an address; None for all addresses."""
        targets = self._targets.all if target is None else (target,)
        addresses = ", ".join(each.endpoint.address for each in targets)
        return {"server.address": addresses, "ovmstrio.remote.name": self._spec.remote_name}

    def _note(self, target: Target, error: ServerError, *, is_callers_deadline: bool) -> None:
        is_late = isinstance(error, DeadlineExceeded)
        if is_late and is_callers_deadline:
            # A deadline of the caller says nothing about the address.
            target.breaker.abandon()
        elif is_late or isinstance(error, NotReady):
            target.breaker.fail(trio.current_time())
            target.suspect.set()
        else:
            target.breaker.succeed()
        if isinstance(error, NotSent):
            target.failure_reason = error.message

    def _deadline_exceeded(self, target: Target) -> DeadlineExceeded:
        return DeadlineExceeded(f'{target.endpoint.address} did not answer for "{self._spec.name}" in time')


def _is_final(error: ServerError) -> bool:
    """Return whether other addresses would fail in the same way."""
    return isinstance(error, InvalidRequest | NotFound | DeadlineExceeded)


# ----------------------------------------------------------------------
# Loading
# ----------------------------------------------------------------------

_DESCRIBE_SECONDS: Final = 20.0
"""Time limit of a metadata request to one address."""


@asynccontextmanager
async def open_remote(
    spec: RemoteSpec, count_unreachable: Callable[[], object] = lambda: None
) -> AsyncIterator[RemoteServable]:
    """Load the remote model's metadata and watch its addresses within the block.

    Raises ConfigError for TLS files, NotReady if no address is reachable, ServerError if the model does not exist.
    """
    contexts: list[ssl.SSLContext | None] = []
    for address in spec.addresses:
        read = partial(client_tls, spec.tls, is_grpc=address.speaks_grpc)
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
            yield RemoteServable(spec, description, targets, count_unreachable)
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
