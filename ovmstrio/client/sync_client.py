"""Blocking client of a server."""

from __future__ import annotations

import math
import select
import socket
import ssl
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from ovmstrio.client import api
    from ovmstrio.client.addresses import ServerAddress
    from ovmstrio.client.chat import ChatAnswer, ChatDelta, ChatMessage
    from ovmstrio.client.links import Answer, Link
    from ovmstrio.client.tls import ClientTls
    from ovmstrio.core.request import Buffer

_PROFILE_SECONDS = 120.0
"""Additional time for a profile: compiling and running models with timing."""
_HTTP_OK = 200


class Client(ClientBase):
    """Client of one server over gRPC or REST; use as context manager, from any thread.

    Args:
        url: ``grpc://``, ``grpcs://``, ``http://`` or ``https://`` with ``host:port``; ``host:port`` and
            ``unix:/path`` are gRPC. Empty: gRPC on this machine.
        timeout: seconds of each call, with its retries; None for no limit. The server learns it over gRPC, and
            over REST by the closed connection.
        retries: how often a call is repeated. It is repeated if no connection could be opened, if the server says that
            it has not begun the call, and if the server refuses it with 429, 503, RESOURCE_EXHAUSTED or UNAVAILABLE and
            a time to wait, which is kept. No other call is repeated: it may have changed something.
        tls: TLS settings; True for TLS with the system's CAs.
        api_key: API key or token; default: the environment variable OVMS_API_KEY.
        headers: further headers of each call.

    Every method raises the error class of ``ovmstrio.errors`` that the server raised, ``Unreachable`` if no server
    answers, ``DeadlineExceeded`` after ``timeout``, and ``InvalidRequest`` for arguments that cannot be sent. A call
    that is interrupted closes its connection, which cancels the call on the server.

    Outputs are read-only arrays. ``BYTES`` arrays contain ``bytes`` objects; ``BF16`` is returned as ``float32``.
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
        address: ServerAddress | None = None,
    ) -> None:
        super().__init__(
            url, timeout=timeout, retries=retries, tls=tls, api_key=api_key, headers=headers, address=address
        )
        self._idle: deque[_Connection] = deque()

    # -- Inference -----------------------------------------------------------------------------------------------------

    def infer(
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
        return self._run(call, timeout)

    def stream(
        self, model: str, requests: Iterable[api.StreamRequest], *, timeout: float | None = None
    ) -> Generator[api.StreamReply]:
        """Stream to a graph or text model; closing the iterator cancels the stream at once.

        ``requests`` are read one by one in a thread; their exceptions are raised here. REST has one request only.
        ``timeout`` is the maximum seconds of the stream. Streams are not repeated once they have begun.
        """
        call, read = self._calls.stream(model), self._calls.reply_reader()
        if isinstance(self._calls, GrpcCalls):
            messages = (self._calls.stream_request(model, request) for request in requests)
            return self._stream(call, read, messages, timeout)
        call.body = self._calls.stream_request(model, single_request(requests))
        return self._stream(call, read, None, timeout)

    @contextmanager
    def sequence(
        self,
        model: str,
        sequence_id: int | str | None = None,
        *,
        version: str = "",
        datatypes: Mapping[str, str] | None = None,
    ) -> Iterator[Sequencer]:
        """Start a sequence of a stateful model with the first ``infer`` of the block, and end it with the block.

        ``infer(inputs, end=True)`` ends the sequence with its last data. Otherwise the end of the block sends the
        latest inputs once more, with the end, and ignores the outputs; after an error this takes at most 5 seconds, and
        its own errors are ignored. ``sequence_id`` is random by default.
        """
        sequencer = Sequencer(self, model, sequence_id, version, datatypes)
        try:
            yield sequencer
        except BaseException:
            with suppress(ServerError):
                sequencer.end(END_SECONDS)
            raise
        sequencer.end(None)

    def chat(
        self, model: str, messages: Sequence[ChatMessage], *, timeout: float | None = None, **options: Any
    ) -> ChatAnswer:
        """Return the answer of a language model (REST only); ``options`` are fields such as ``temperature``."""
        return self._run(self._calls.chat(model, messages, options), timeout)

    def chat_stream(
        self, model: str, messages: Sequence[ChatMessage], *, timeout: float | None = None, **options: Any
    ) -> Generator[ChatDelta]:
        """Stream the answer of a language model (REST only); closing the iterator cancels the call at once."""
        call = self._calls.chat_stream(model, messages, options)
        for delta in self._stream(call, self._calls.delta_reader(), None, timeout):
            if delta is None:
                break
            yield delta

    def post(self, service: str, body: bytes, content_type: str, *, timeout: float | None = None) -> api.Posted:
        """Post a body to a service at ``/{service}`` (REST only)."""
        return self._run(self._calls.post(service, body, content_type), timeout)

    # -- Metadata ------------------------------------------------------------------------------------------------------

    def server_metadata(self) -> api.ServerInfo:
        """Return name, version and extensions of the server."""
        return self._run(self._calls.server_metadata())

    def metadata(self, model: str, version: str = "") -> api.ModelInfo:
        """Return inputs, outputs and versions of a model."""
        return self._run(self._calls.metadata(model, version))

    def models(self) -> list[api.ModelState]:
        """Return all model versions of the server."""
        return self._run(self._calls.models())

    def sequences(self, model: str, version: str = "") -> list[api.SequenceState]:
        """Return the live sequences of a stateful model (REST only)."""
        return self._run(self._calls.sequences(model, version))

    def metrics(self, families: Sequence[str] = ()) -> str:
        """Return metrics in Prometheus text format, optionally of some families (REST only)."""
        return self._run(self._calls.metrics(families))

    def server_live(self) -> bool:
        """Return whether the server is live."""
        return self._run(self._calls.server_live())

    def server_ready(self) -> api.Health:
        """Return the readiness of the server, over REST with the reason."""
        return self._run(self._calls.server_ready())

    def model_ready(self, model: str, version: str = "") -> api.Health:
        """Return the readiness of a model, over REST with the reason."""
        return self._run(self._calls.model_ready(model, version))

    # -- Administration ------------------------------------------------------------------------------------------------

    def load(self, model: str, config: Mapping[str, Any] | None = None, *, timeout: float | None = None) -> None:
        """Load a model, optionally with other settings; returns when it is served."""
        self._run(self._calls.load(model, config), timeout)

    def unload(self, model: str, *, timeout: float | None = None) -> None:
        """Unload a model."""
        self._run(self._calls.unload(model), timeout)

    def reload_config(self, *, timeout: float | None = None) -> bool:
        """Reload the configuration file and return whether something changed (REST only)."""
        return self._run(self._calls.reload_config(), timeout)

    def profile(self, seconds: float, rate: float, models: Sequence[str] | None = None) -> dict[str, Any]:
        """Profile the server and return the document of ``POST /v2/profile`` (REST, admin scope).

        Samples for ``seconds`` at ``rate`` per second, then times the layers of ``models``, for 120 seconds at most.
        """
        return self._run(self._calls.profile(seconds, rate, models), seconds + _PROFILE_SECONDS)

    # -- Connections ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, call: ClientCall[T], timeout: float | None = None) -> T:
        attempts = Attempts(self._retries, self._timeout if timeout is None else timeout, time.monotonic)
        while True:
            connection = self._connection(attempts)
            failure: NotSent | Refused
            try:
                answer = connection.run(call, attempts)
            except BaseException as error:  # noqa: BLE001 - raised again
                connection.close()
                failure = self._failure(error)
            else:
                try:
                    return self._finish(call, answer, connection.link)
                except Refused as refusal:
                    failure = refusal
                finally:
                    self._return_connection(connection)
            time.sleep(attempts.pause_after(failure))

    def _return_connection(self, connection: _Connection) -> None:
        if connection.link.is_reusable and not connection.is_closed:
            self._idle.append(connection)
        else:
            connection.close()

    def _connection(self, attempts: Attempts) -> _Connection:
        """Return an idle connection that is still open, or a new one."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                break
            if connection.is_alive():
                return connection
            connection.close()
        while True:
            try:
                return _Connection(self._connect(attempts.left()), self._calls.new_link())
            except OSError as error:
                reason = "connecting took too long" if isinstance(error, TimeoutError) else error.strerror or error
                time.sleep(attempts.pause_after(self._unreachable(reason)))

    def _connect(self, seconds: float) -> socket.socket:
        address = self._address
        timeout = None if seconds == math.inf else max(seconds, 1e-3)
        if address.path is not None:
            connected = socket.socket(socket.AF_UNIX)
            try:
                connected.settimeout(timeout)
                connected.connect(address.path)
            except BaseException:
                connected.close()
                raise
        else:
            connected = socket.create_connection((address.host, address.port), timeout)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.context is None:
            return connected
        return address.context.wrap_socket(connected, server_hostname=address.host or None)

    # -- Streams -------------------------------------------------------------------------------------------------------

    def _stream(
        self,
        call: ClientCall[None],
        read: Callable[[Buffer], Iterable[T]],
        messages: Iterator[list[Buffer]] | None,
        timeout: float | None,
        silence_seconds: float = math.inf,
    ) -> Generator[T]:
        """Yield what a stream brings; ``silence_seconds`` is the longest time without data."""
        attempts = Attempts(self._retries, timeout, time.monotonic)
        connection = self._connection(attempts)
        stream = _Stream(connection, call, messages, attempts)
        try:
            stream.begin()
            while True:
                # Of a failed REST call the body is the error.
                while connection.link.received and (self._address.is_grpc or connection.link.status == _HTTP_OK):
                    with self._reading():
                        stream.has_begun = True
                        yield from read(connection.link.received.popleft())
                if (answer := connection.link.answer) is not None:
                    self._finish(call, answer, connection.link)
                    break
                stream.receive(silence_seconds)
                if connection.link.status == _HTTP_OK:
                    stream.has_begun = True
        except Refused as failure:
            raise failure.error from None
        except (ServerError, GeneratorExit):
            raise
        except Exception as error:  # noqa: BLE001 - raised again
            raise stream.failure or self._failure(error, is_stream=stream.has_begun) from None
        finally:
            stream.close()
            self._return_connection(connection)


class Sequencer:
    """One sequence; see ``Client.sequence``."""

    def __init__(
        self,
        client: Client,
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

    def infer(
        self,
        inputs: Mapping[str, api.Value],
        *,
        end: bool = False,
        parameters: Mapping[str, api.Parameter] | None = None,
        timeout: float | None = None,
    ) -> api.InferResult:
        """Make the next request of the sequence; ``end`` makes it the last."""
        controls = self._state.parameters(inputs, end=end)
        return self._send(inputs, call_parameters(parameters, controls), timeout, end=end)

    def end(self, timeout: float | None) -> None:
        """End the sequence on the server, if it has begun and not ended."""
        if (inputs := self._state.last) is not None:
            was_started = self._state.is_started
            try:
                controls = self._state.parameters(inputs, end=True, may_start=False)
                self._send(inputs, controls, timeout, end=True)
            except NotFound:
                if was_started:
                    raise

    def _send(
        self, inputs: Mapping[str, api.Value], parameters: dict[str, Any], timeout: float | None, *, end: bool
    ) -> api.InferResult:
        try:
            result = self._client.infer(
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
    """A socket and its link."""

    def __init__(self, connected: socket.socket, link: Link) -> None:
        self.socket = connected
        self.link = link
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True
        self.socket.close()

    def is_alive(self) -> bool:
        """Return whether the server has kept an idle connection open."""
        if not _is_readable(self.socket, 0):
            return True
        self.socket.settimeout(0)
        try:
            self.link.receive(self.socket.recv(READ_BYTES))
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except (OSError, LinkError):
            return False
        return self.link.is_reusable

    def run(self, call: ClientCall[Any], attempts: Attempts) -> Answer:
        """Make a call and return its answer."""
        link, connected = self.link, self.socket
        seconds = attempts.left()
        link.begin(call.head, call.body, seconds)
        is_broken = False
        while True:
            connected.settimeout(_timeout(seconds))
            buffers = link.outbound()
            try:
                for buffer in () if is_broken else buffers:
                    connected.sendall(buffer)
            except _BROKEN:
                is_broken = True
            if link.answer is not None:
                return link.answer
            link.receive(connected.recv(READ_BYTES))
            seconds = attempts.left()


_BROKEN = (BrokenPipeError, ConnectionResetError)
"""Errors of sending: the server may have answered, and closed the connection, before it read everything."""


def _timeout(seconds: float) -> float | None:
    if seconds == math.inf:
        return None
    if not seconds:
        raise TimeoutError
    return seconds


def _is_readable(connected: socket.socket, milliseconds: float | None) -> bool:
    poll = select.poll()
    poll.register(connected, select.POLLIN)
    return bool(poll.poll(milliseconds))


class _Stream:
    """Stream on a connection: the caller reads, and a thread sends the messages.

    The lock guards link and socket. The caller waits for data without it.
    """

    def __init__(
        self,
        connection: _Connection,
        call: ClientCall[None],
        messages: Iterator[list[Buffer]] | None,
        attempts: Attempts,
    ) -> None:
        self._connection = connection
        self._call = call
        self._messages = messages
        self._attempts = attempts
        self._changed = threading.Condition()
        self._over = threading.Event()
        self._is_broken = False
        self.has_begun = False
        self.failure: Exception | None = None

    def begin(self) -> None:
        """Begin the call, and start the thread that sends its messages."""
        connection, seconds = self._connection, self._attempts.left()
        _timeout(seconds)
        connection.socket.settimeout(0)
        with self._changed:
            connection.link.begin(self._call.head, self._call.body, seconds)
            self._flush()
        if self._messages is not None:
            thread = threading.Thread(target=self._send, args=(self._messages,), name="ovmstrio-client-stream")
            thread.daemon = True
            thread.start()

    def receive(self, silence_seconds: float) -> None:
        """Wait for data and process it."""
        connected, seconds = self._connection.socket, min(self._attempts.left(), silence_seconds)
        _timeout(seconds)
        if not (isinstance(connected, ssl.SSLSocket) and connected.pending()) and not _is_readable(
            connected, None if seconds == math.inf else max(1.0, seconds * 1000)
        ):
            raise TimeoutError
        with self._changed:
            with suppress(BlockingIOError, ssl.SSLWantReadError):
                self._connection.link.receive(connected.recv(READ_BYTES))
            self._flush()
            self._changed.notify_all()

    def close(self) -> None:
        """Cancel the stream, unless it is complete."""
        with self._changed:
            self._over.set()
            self._changed.notify_all()
            if self._connection.link.answer is None or self.failure is not None:
                with suppress(OSError, TimeoutError):
                    self._connection.link.cancel()
                    self._flush(limit=0)
                self._connection.close()

    def _send(self, messages: Iterator[list[Buffer]]) -> None:
        link, message = self._connection.link, None
        while True:
            try:
                message = next(messages, None)
            except Exception as error:  # noqa: BLE001 - raised by the caller, which waits for data
                self.failure = error
            with self._changed, suppress(OSError, TimeoutError):
                if self.failure is not None and not self._over.is_set():
                    self._connection.socket.shutdown(socket.SHUT_RDWR)
                if self.failure is not None or self._over.is_set() or link.answer is not None:
                    return
                if message is None:
                    link.end_request()
                    self._flush()
                    return
                link.send_message(message)
                self._flush()
                while link.has_unsent and not self._over.is_set():
                    self._changed.wait()

    def _flush(self, limit: float | None = None) -> None:
        """Send what can be sent; ``limit`` is the time to wait for room in the socket."""
        connected = self._connection.socket
        for buffer in self._connection.link.outbound():
            view = memoryview(buffer)
            while view and not self._is_broken:
                try:
                    view = view[connected.send(view) :]
                except _BROKEN:
                    self._is_broken = True
                except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                    seconds = self._attempts.left() if limit is None else limit
                    poll = select.poll()
                    poll.register(connected, select.POLLOUT)
                    if not poll.poll(None if seconds == math.inf else seconds * 1000):
                        raise TimeoutError from None
