"""Client of a server for programs on trio or asyncio."""

# ruff: noqa: ASYNC109 - one deadline for all tries of a call, which the server learns

from __future__ import annotations

import math
import select
import socket
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, cast

import anyio
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.tls import TLSStream

from ovmstrio.client.calls import ClientCall, GrpcCalls, T, single_request
from ovmstrio.client.client_base import (
    DEFAULT_RETRIES,
    DEFAULT_TIMEOUT_SECONDS,
    END_SECONDS,
    READ_BYTES,
    Attempts,
    ClientBase,
    NotSent,
    Refused,
    SequenceControls,
    call_parameters,
)
from ovmstrio.client.links import LinkError
from ovmstrio.core.errors import NotFound, ServerError
from ovmstrio.core.request import Buffer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType
    from typing import Self

    from anyio.abc import TaskGroup

    from ovmstrio.client import api
    from ovmstrio.client.chat import ChatAnswer, ChatDelta, ChatMessage
    from ovmstrio.client.links import Answer, Link
    from ovmstrio.client.tls import ClientTls

_PROFILE_SECONDS = 120.0
"""Additional time for a profile: compiling and running models with timing."""
_MAX_CONNECTIONS = 100
_CHECK_SECONDS = 1.0
_HTTP_OK = 200
_RESET_SECONDS = 0.1
"""Longest time to send the reset of a stream, before its connection is closed."""


class AsyncClient(ClientBase):
    """Client of one server over gRPC or REST, on trio or asyncio; use as async context manager, in one event loop.

    Parallel calls have a connection each, at most ``max_connections``; further calls wait. The other arguments are
    those of ``Client``, with the same defaults, deadlines, retries and errors. A cancelled call closes its connection,
    which cancels the call on the server at once.
    """

    def __init__(
        self,
        url: str = "",
        *,
        timeout: float | None = DEFAULT_TIMEOUT_SECONDS,
        retries: int = DEFAULT_RETRIES,
        tls: ClientTls | bool | None = None,
        api_key: str = "",
        headers: Mapping[str, str] | None = None,
        max_connections: int = _MAX_CONNECTIONS,
        connect: Callable[[], Awaitable[ByteStream]] | None = None,
    ) -> None:
        super().__init__(url, timeout=timeout, retries=retries, tls=tls, api_key=api_key, headers=headers)
        self._idle: deque[_Connection] = deque()
        self._slots = anyio.Semaphore(max_connections, fast_acquire=True)
        self._open_stream = connect or self._connect

    # -- Inference -----------------------------------------------------------------------------------------------------

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, api.Value],
        *,
        version: str = "",
        datatypes: Mapping[str, str] | None = None,
        parameters: Mapping[str, api.Parameter] | None = None,
        outputs: Sequence[str] = (),
        request_id: str = "",
        timeout: float | None = None,
    ) -> api.InferResult:
        """Infer with a model and return its outputs by name.

        Args:
            model: name of a model, graph or pipeline.
            inputs: arrays by name, what NumPy makes an array of, or bytes; see ``Value``.
            version: of the model; default: the default version.
            datatypes: KServe datatypes that an array does not determine (``BF16``), or of another type to send.
            parameters: parameters of the request, such as ``priority``.
            outputs: names of outputs to return; default: all.
            request_id: id of the request, for logs and traces.
            timeout: seconds, instead of the client's.
        """
        call = self._calls.infer(model, inputs, version, datatypes, parameters, outputs, request_id)
        return await self._run(call, timeout)

    @asynccontextmanager
    async def stream(
        self,
        model: str,
        requests: Iterable[api.StreamRequest] | AsyncIterable[api.StreamRequest],
        *,
        timeout: float | None = None,
    ) -> AsyncIterator[AsyncIterator[api.StreamReply]]:
        """Stream to a graph or text model; the end of the block cancels the stream at once.

        The block iterates over the replies, while a task reads ``requests`` one by one; their exceptions end the block.
        REST has one request only. ``timeout`` is the maximum seconds of the stream. Streams are not repeated once they
        have begun.
        """
        calls = self._calls
        call, read = calls.stream(model), calls.reply_reader()
        if not isinstance(calls, GrpcCalls):
            only = [each async for each in requests] if isinstance(requests, AsyncIterable) else requests
            call.body = calls.stream_request(model, single_request(only))
        async with self._stream(call, read, timeout) as stream:
            if isinstance(calls, GrpcCalls):
                stream.tasks.start_soon(stream.send, requests, partial(calls.stream_request, model))
            yield stream

    @asynccontextmanager
    async def sequence(
        self,
        model: str,
        sequence_id: int | str | None = None,
        *,
        version: str = "",
        datatypes: Mapping[str, str] | None = None,
    ) -> AsyncIterator[AsyncSequencer]:
        """Start a sequence of a stateful model with the first ``infer`` of the block, and end it with the block.

        ``infer(inputs, end=True)`` ends the sequence with its last data. Otherwise the end of the block sends the
        latest inputs once more, with the end, and ignores the outputs; after an error or a cancellation this takes at
        most 5 seconds, and its own errors are ignored. ``sequence_id`` is random by default.
        """
        sequencer = AsyncSequencer(self, model, sequence_id, version, datatypes)
        try:
            yield sequencer
        except BaseException:
            with anyio.CancelScope(shield=True), suppress(ServerError):
                await sequencer.end(END_SECONDS)
            raise
        await sequencer.end(None)

    async def chat(
        self, model: str, messages: Sequence[ChatMessage], *, timeout: float | None = None, **options: Any
    ) -> ChatAnswer:
        """Return the answer of a language model (REST only); ``options`` are fields such as ``temperature``."""
        return await self._run(self._calls.chat(model, messages, options), timeout)

    @asynccontextmanager
    async def chat_stream(
        self, model: str, messages: Sequence[ChatMessage], *, timeout: float | None = None, **options: Any
    ) -> AsyncIterator[AsyncIterator[ChatDelta]]:
        """Stream the answer of a language model (REST only); the end of the block cancels the call at once."""
        call = self._calls.chat_stream(model, messages, options)
        async with self._stream(call, self._calls.delta_reader(), timeout) as stream:
            yield cast("AsyncIterator[ChatDelta]", stream)

    async def post(self, service: str, body: bytes, content_type: str, *, timeout: float | None = None) -> api.Posted:
        """Post a body to a service at ``/{service}`` (REST only)."""
        return await self._run(self._calls.post(service, body, content_type), timeout)

    # -- Metadata ------------------------------------------------------------------------------------------------------

    async def server_metadata(self) -> api.ServerInfo:
        """Return name, version and extensions of the server."""
        return await self._run(self._calls.server_metadata())

    async def metadata(self, model: str, version: str = "") -> api.ModelInfo:
        """Return inputs, outputs and versions of a model."""
        return await self._run(self._calls.metadata(model, version))

    async def models(self) -> list[api.ModelState]:
        """Return all model versions of the server."""
        return await self._run(self._calls.models())

    async def sequences(self, model: str, version: str = "") -> list[api.SequenceState]:
        """Return the live sequences of a stateful model (REST only)."""
        return await self._run(self._calls.sequences(model, version))

    async def metrics(self, families: Sequence[str] = ()) -> str:
        """Return metrics in Prometheus text format, optionally of some families (REST only)."""
        return await self._run(self._calls.metrics(families))

    async def server_live(self) -> bool:
        """Return whether the server is live."""
        return await self._run(self._calls.server_live())

    async def server_ready(self) -> api.Health:
        """Return the readiness of the server, over REST with the reason."""
        return await self._run(self._calls.server_ready())

    async def model_ready(self, model: str, version: str = "") -> api.Health:
        """Return the readiness of a model, over REST with the reason."""
        return await self._run(self._calls.model_ready(model, version))

    # -- Administration ------------------------------------------------------------------------------------------------

    async def load(self, model: str, config: Mapping[str, Any] | None = None, *, timeout: float | None = None) -> None:
        """Load a model, optionally with other settings; returns when it is served."""
        await self._run(self._calls.load(model, config), timeout)

    async def unload(self, model: str, *, timeout: float | None = None) -> None:
        """Unload a model."""
        await self._run(self._calls.unload(model), timeout)

    async def reload_config(self, *, timeout: float | None = None) -> bool:
        """Reload the configuration file and return whether something changed (REST only)."""
        return await self._run(self._calls.reload_config(), timeout)

    async def profile(self, seconds: float, rate: float, models: Sequence[str] | None = None) -> dict[str, Any]:
        """Profile the server and return the document of ``POST /v2/profile`` (REST, admin scope).

        Samples for ``seconds`` at ``rate`` per second, then times the layers of ``models``, for 120 seconds at most.
        """
        return await self._run(self._calls.profile(seconds, rate, models), seconds + _PROFILE_SECONDS)

    # -- Connections ---------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close the idle connections."""
        while self._idle:
            await self._idle.pop().aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self.aclose()

    async def _run(self, call: ClientCall[T], timeout: float | None = None) -> T:
        attempts = Attempts(self._retries, self._timeout if timeout is None else timeout, anyio.current_time)
        await self._take_slot(attempts)
        try:
            while True:
                connection = await self._connection(attempts)
                failure: NotSent | Refused
                seconds = attempts.left()
                try:
                    with anyio.fail_after(_timeout(seconds)):
                        answer = await connection.run(call, seconds)
                except BaseException as error:  # noqa: BLE001 - raised again
                    await connection.aclose()
                    failure = self._failure(_translated(error))
                else:
                    try:
                        return self._finish(call, answer, connection.link)
                    except Refused as refusal:
                        failure = refusal
                    finally:
                        await self._return_connection(connection)
                await anyio.sleep(attempts.pause_after(failure))
        finally:
            self._slots.release()

    async def _take_slot(self, attempts: Attempts) -> None:
        """Take one of the connections, of which there are ``max_connections``."""
        try:
            self._slots.acquire_nowait()
        except anyio.WouldBlock:
            with anyio.move_on_after(_timeout(attempts.left())) as limited:
                await self._slots.acquire()
            if limited.cancelled_caught:
                raise self._late() from None

    async def _return_connection(self, connection: _Connection) -> None:
        if connection.link.is_reusable and not connection.is_closed:
            self._idle.append(connection)
        else:
            await connection.aclose()

    async def _connection(self, attempts: Attempts) -> _Connection:
        """Return an idle connection that is still open, or a new one."""
        while self._idle:
            connection = self._idle.pop()
            if await connection.is_alive():
                return connection
            await connection.aclose()
        while True:
            try:
                with anyio.fail_after(_timeout(attempts.left())):
                    return _Connection(await self._open_stream(), self._calls.new_link())
            except TimeoutError:
                raise self._unreachable("connecting took too long") from None
            except (OSError, anyio.BrokenResourceError) as error:
                reason = _reason(error)
            await anyio.sleep(attempts.pause_after(self._unreachable(reason)))

    async def _connect(self) -> ByteStream:
        address = self._address
        if address.path is not None:
            stream: ByteStream = await anyio.connect_unix(address.path)
        else:
            stream = await anyio.connect_tcp(address.host, address.port)
        if address.context is None:
            return stream
        return await TLSStream.wrap(
            stream, hostname=address.host or None, ssl_context=address.context, standard_compatible=False
        )

    # -- Streams -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _stream(
        self, call: ClientCall[None], read: Callable[[Buffer], Iterable[T]], timeout: float | None
    ) -> AsyncIterator[_Stream[T]]:
        attempts = Attempts(self._retries, timeout, anyio.current_time)
        await self._take_slot(attempts)
        try:
            connection = await self._connection(attempts)
            stream = _Stream(self, connection, call, read)
            try:
                with anyio.move_on_after(_timeout(attempts.left())) as limited:
                    try:
                        async with anyio.create_task_group() as stream.tasks:
                            connection.link.begin(call.head, call.body, attempts.left())
                            await stream.flush()
                            yield stream
                            stream.tasks.cancel_scope.cancel()
                    except BaseExceptionGroup as group:
                        if len(group.exceptions) > 1:
                            raise
                        raise group.exceptions[0] from None
                if limited.cancelled_caught:
                    raise self._late()
            finally:
                with anyio.CancelScope(shield=True):
                    if connection.link.answer is None:
                        await stream.cancel()
                    await self._return_connection(connection)
        finally:
            self._slots.release()

    def finish(self, call: ClientCall[T], answer: Answer, link: Link) -> T:
        """Return the value of a stream's answer; raises its error."""
        try:
            return self._finish(call, answer, link)
        except Refused as failure:
            raise failure.error from None

    def reading(self) -> AbstractContextManager[None]:
        """Raise ``ServerError`` for parse errors in the block."""
        return self._reading()

    def broken(self, error: Exception, *, has_begun: bool) -> ServerError:
        """Return the error of a stream whose connection failed."""
        return self._failure(_translated(error), is_stream=has_begun)


_BROKEN = (anyio.BrokenResourceError, BrokenPipeError, ConnectionResetError)
"""Errors of sending: the server may have answered, and closed the connection, before it read everything."""
_CONNECTION_ERRORS = (OSError, LinkError, anyio.BrokenResourceError, anyio.ClosedResourceError)


def _timeout(seconds: float) -> float | None:
    return None if seconds == math.inf else seconds


def _translated(error: BaseException) -> BaseException:
    """Return the error of a broken stream as ``OSError``."""
    if isinstance(error, anyio.BrokenResourceError | anyio.ClosedResourceError):
        return OSError(str(error.__cause__ or error) or type(error).__name__)
    return error


def _reason(error: BaseException) -> object:
    """Return the reason why no connection was opened; several addresses fail with a group."""
    cause = error.__cause__
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    found = cause if isinstance(cause, OSError) else error
    return getattr(found, "strerror", None) or found


class AsyncSequencer:
    """One sequence; see ``AsyncClient.sequence``."""

    def __init__(
        self,
        client: AsyncClient,
        model: str,
        sequence_id: int | str | None,
        version: str,
        datatypes: Mapping[str, str] | None,
    ) -> None:
        self._client = client
        self._model = model
        self._version = version
        self._datatypes = datatypes
        self._state = SequenceControls(model, sequence_id)

    @property
    def id(self) -> int | str:
        """Return the id of the sequence."""
        return self._state.id

    async def infer(
        self,
        inputs: Mapping[str, api.Value],
        *,
        end: bool = False,
        parameters: Mapping[str, api.Parameter] | None = None,
        timeout: float | None = None,
    ) -> api.InferResult:
        """Make the next request of the sequence; ``end`` makes it the last."""
        controls = self._state.parameters(inputs, end=end)
        return await self._send(inputs, call_parameters(parameters, controls), timeout, end=end)

    async def end(self, timeout: float | None) -> None:
        """End the sequence on the server, if it has begun and not ended."""
        if (inputs := self._state.last) is not None:
            was_started = self._state.is_started
            try:
                controls = self._state.parameters(inputs, end=True, may_start=False)
                await self._send(inputs, controls, timeout, end=True)
            except NotFound:
                if was_started:
                    raise

    async def _send(
        self, inputs: Mapping[str, api.Value], parameters: dict[str, Any], timeout: float | None, *, end: bool
    ) -> api.InferResult:
        try:
            result = await self._client.infer(
                self._model,
                inputs,
                version=self._version,
                datatypes=self._datatypes,
                parameters=parameters,
                timeout=timeout,
            )
        except BaseException as error:
            self._state.failed(error)
            raise
        return self._state.answered(result, end=end)


class _Connection:
    """A byte stream and its link."""

    def __init__(self, stream: ByteStream, link: Link) -> None:
        self.stream = stream
        self.link = link
        self.is_closed = False
        self._socket = stream.extra(SocketAttribute.raw_socket, None)  # noqa: S610 - no Django
        # trio's own socket. That of asyncio belongs to its transport, and TLS encrypts.
        is_plain = isinstance(self._socket, socket.socket) and not isinstance(stream, TLSStream)
        self._send_now = self._socket.send if is_plain and self._socket is not None else None
        self._poll = select.poll()
        if self._socket is not None:
            self._poll.register(self._socket.fileno(), select.POLLIN)

    async def aclose(self) -> None:
        self.is_closed = True
        await anyio.aclose_forcefully(self.stream)

    async def is_alive(self) -> bool:
        """Return whether the server has kept an idle connection open."""
        if self._socket is None:
            return True
        if self._socket.fileno() < 0:
            return False
        if not self._poll.poll(0):
            return True
        try:
            with anyio.move_on_after(_CHECK_SECONDS):
                self.link.receive(await self.receive())
        except _CONNECTION_ERRORS:
            return False
        return self.link.is_reusable

    async def receive(self) -> bytes:
        """Receive bytes; empty at the end of the connection."""
        try:
            return await self.stream.receive(READ_BYTES)
        except anyio.EndOfStream:
            return b""

    async def send(self, buffer: Buffer) -> None:
        """Send bytes; no checkpoint if the socket takes them at once, because the receipt of the answer is one."""
        if self._send_now is not None:
            try:
                sent = self._send_now(buffer)
            except BlockingIOError:
                sent = 0
            if sent == len(buffer):
                return
            buffer = memoryview(buffer)[sent:]
        await self.stream.send(buffer)  # type: ignore[arg-type]  # any buffer

    async def run(self, call: ClientCall[Any], seconds: float) -> Answer:
        """Make a call and return its answer."""
        link = self.link
        link.begin(call.head, call.body, seconds)
        is_broken = False
        while True:
            buffers = link.outbound()
            try:
                for buffer in () if is_broken else buffers:
                    await self.send(buffer)
            except _BROKEN:
                is_broken = True
            if link.answer is not None:
                return link.answer
            link.receive(await self.receive())


class _Stream(Generic[T]):
    """Stream on a connection: an iterator over what comes, while a task sends the messages."""

    tasks: TaskGroup

    def __init__(
        self,
        client: AsyncClient,
        connection: _Connection,
        call: ClientCall[None],
        read: Callable[[Buffer], Iterable[T]],
    ) -> None:
        self._client = client
        self._connection = connection
        self._call = call
        self._read = read
        self._values: Iterator[T] = iter(())
        self._sending = anyio.Lock()
        self._changed = anyio.Event()
        self._is_broken = False
        self.has_begun = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        link = self._connection.link
        while True:
            with self._client.reading():
                for value in self._values:
                    if value is None:
                        raise StopAsyncIteration
                    return value
            # Of a failed REST call the body is the error.
            if link.received and (not link.status or link.status == _HTTP_OK):
                self.has_begun = True
                with self._client.reading():
                    self._values = iter(self._read(link.received.popleft()))
            elif link.answer is None:
                try:
                    link.receive(await self._connection.receive())
                except _CONNECTION_ERRORS as error:
                    raise self._client.broken(error, has_begun=self.has_begun) from None
                self.has_begun = self.has_begun or link.status == _HTTP_OK
                await self.flush()
                self._changed.set()
                self._changed = anyio.Event()
            else:
                self._client.finish(self._call, link.answer, link)
                raise StopAsyncIteration

    async def flush(self) -> None:
        """Send what can be sent."""
        async with self._sending:
            buffers = self._connection.link.outbound()
            try:
                for buffer in () if self._is_broken else buffers:
                    await self._connection.send(buffer)
            except _BROKEN:
                self._is_broken = True

    async def send(
        self,
        requests: Iterable[api.StreamRequest] | AsyncIterable[api.StreamRequest],
        encode: Callable[[api.StreamRequest], list[Buffer]],
    ) -> None:
        """Send all requests, and the end."""
        if isinstance(requests, AsyncIterable):
            async for request in requests:
                await self._send_message(encode(request))
        else:
            for request in requests:
                await self._send_message(encode(request))
        if self._connection.link.answer is None:
            self._connection.link.end_request()
            await self.flush()

    async def _send_message(self, message: list[Buffer]) -> None:
        link = self._connection.link
        if link.answer is None:
            link.send_message(message)
            await self.flush()
            while link.has_unsent and link.answer is None:
                await self._changed.wait()

    async def cancel(self) -> None:
        """Reset the stream and close the connection."""
        if not self._sending.locked():
            self._connection.link.cancel()
            with anyio.move_on_after(_RESET_SECONDS), suppress(ServerError, anyio.ClosedResourceError):
                await self.flush()
        await self._connection.aclose()
