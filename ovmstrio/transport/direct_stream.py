"""Socket stream with few function calls per system call, and connection shutdown helpers.

trio's SocketStream needs about twenty Python calls per system call. DirectStream reads after the socket became readable
and writes before waiting for writability.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import termios
from contextlib import suppress
from functools import partial
from types import coroutine
from typing import TYPE_CHECKING, Any, Final, TypeVar

import trio

from ovmstrio.core.connection import UNKNOWN, socket_address

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Sequence
    from contextvars import Context

    from ovmstrio.core.connection import ClientAddress
    from ovmstrio.core.request import Buffer

# -- Stream ------------------------------------------------------------------------------------------------------------

_T = TypeVar("_T")

READ_BYTES: Final = 64 * 1024
MAX_WRITEV_BUFFERS: Final = 512
"""Buffers per ``writev`` call; Linux allows 1,024."""
_MAX_SKIPPED_READS: Final = 31
"""Maximum number of speculative reads to skip after failed ones, so that slow clients cost few system calls."""


class DirectStream(trio.abc.HalfCloseableStream):
    """Stream of a connected socket, with the ``peer_address`` reported by ``accept``.

    Sending is no checkpoint if the socket takes all bytes at once. Methods raise like those of ``trio.SocketStream``.
    """

    def __init__(self, stream: trio.SocketStream, peer_address: ClientAddress = UNKNOWN) -> None:
        self._stream = stream
        self.peer_address = peer_address
        self.socket = stream.socket
        self._fileno: Callable[[], int] = stream.socket.fileno
        self._may_have_more = False
        self._reads_to_skip = 0
        self._skip_count = 0
        self._is_sending = False

    def expect(self) -> None:
        """Make the next receive try to read before it waits for readability.

        Other tasks run before the read. On a busy server most clients have sent by then, which saves an epoll
        registration. After unsuccessful reads the shortcut is skipped increasingly often.
        """
        if self._reads_to_skip:
            self._reads_to_skip -= 1
        else:
            self._may_have_more = True

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive available bytes; empty at the end."""
        size = max_bytes or READ_BYTES
        while True:
            if is_speculative := self._may_have_more:
                await trio.lowlevel.checkpoint()
            elif (number := self._fileno()) >= 0:
                await trio.lowlevel.wait_readable(number)
            try:
                data = os.read(self._fileno(), size)
            except BlockingIOError:
                self._may_have_more = False
                self._reads_to_skip = self._skip_count = min(2 * self._skip_count + 1, _MAX_SKIPPED_READS)
            except OSError as error:
                raise _translate_error(error) from error
            else:
                self._may_have_more = len(data) == size
                if is_speculative:
                    self._skip_count = 0
                return data

    async def receive_into(self, target: memoryview) -> int:
        """Receive into a buffer and return the number of bytes; 0 at the end."""
        while True:
            await self._wait_readable()
            try:
                size = os.readv(self._fileno(), [target])
            except BlockingIOError:
                self._may_have_more = False
            except OSError as error:
                raise _translate_error(error) from error
            else:
                self._may_have_more = size == len(target)
                return size

    async def _wait_readable(self) -> None:
        if self._may_have_more:
            await trio.lowlevel.checkpoint()
            return
        number = self._fileno()
        if number < 0:
            raise trio.ClosedResourceError("the connection is closed")
        await trio.lowlevel.wait_readable(number)

    def send_now(self, *buffers: Buffer) -> int:
        """Send what the socket takes without blocking and return how many bytes; 0 while another task is sending."""
        # After shutdown the write must fail: a sender that got 0 would wait for room forever.
        if self._is_sending and not self.socket.did_shutdown_SHUT_WR:
            return 0
        try:
            return os.write(self._fileno(), buffers[0]) if len(buffers) == 1 else os.writev(self._fileno(), buffers)
        except BlockingIOError:
            return 0
        except OSError as error:
            if self.socket.did_shutdown_SHUT_WR:
                raise trio.ClosedResourceError("the sending side is closed") from error
            raise _translate_error(error) from error

    async def send_all(self, data: Buffer) -> None:
        """Send all bytes; after a cancellation an unknown part was sent."""
        self._check_sending()
        sent = self.send_now(data)
        if sent < len(data):
            with memoryview(data) as view:
                await self._send_rest([view[sent:]])

    async def send_buffers(self, buffers: Sequence[Buffer]) -> None:
        """Send all buffers without joining them; like :meth:`send_all`."""
        self._check_sending()
        await self._send_rest([memoryview(each) for each in buffers if len(each)])

    def _check_sending(self) -> None:
        if self._is_sending:
            raise trio.BusyResourceError("another task is sending")
        if self.socket.did_shutdown_SHUT_WR:
            raise trio.ClosedResourceError("the sending side is closed")

    async def _send_rest(self, views: list[memoryview]) -> None:
        self._is_sending = True
        try:
            at = 0
            while at < len(views):
                try:
                    sent = os.writev(self._fileno(), views[at : at + MAX_WRITEV_BUFFERS])
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(self.socket)
                    continue
                except OSError as error:
                    raise _translate_error(error) from error
                while at < len(views) and sent >= len(views[at]):
                    sent -= len(views[at])
                    at += 1
                if sent:
                    views[at] = views[at][sent:]
        finally:
            self._is_sending = False

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until the socket is writable."""
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """Shut down the sending side."""
        await self._stream.send_eof()

    def close(self) -> None:
        """Close the connection without a checkpoint."""
        self.socket.close()

    async def aclose(self) -> None:
        """Close the connection."""
        self.close()
        await trio.lowlevel.checkpoint()


async def send_buffers(stream: trio.abc.Stream, buffers: Sequence[Buffer]) -> None:
    """Send all buffers, without joining them if the stream is a :class:`DirectStream`."""
    if len(buffers) == 1:
        await stream.send_all(buffers[0])
    elif isinstance(stream, DirectStream):
        await stream.send_buffers(buffers)
    else:
        await stream.send_all(b"".join(buffers))


def to_direct_stream(stream: trio.abc.Stream) -> trio.abc.Stream:
    """Return a :class:`DirectStream` for a socket stream; other streams unchanged."""
    return DirectStream(stream, get_peer_address(stream)) if isinstance(stream, trio.SocketStream) else stream


def underlying_stream(stream: trio.abc.Stream) -> trio.abc.Stream:
    """Return the stream below TLS, or the stream itself."""
    return stream.transport_stream if isinstance(stream, trio.SSLStream) else stream


def get_peer_address(stream: trio.abc.Stream) -> ClientAddress:
    """Return the address of the other end: as reported by ``accept``, else ``getpeername``.

    ``getpeername`` fails after a reset, so call this once, as soon as there is a stream.
    """
    transport: Any = underlying_stream(stream)
    known: ClientAddress | None = getattr(transport, "peer_address", None)
    if known is not None:
        return known
    sock = getattr(transport, "socket", None)
    with suppress(OSError):
        return UNKNOWN if sock is None else socket_address(sock.family, sock.getpeername())
    return UNKNOWN


def _translate_error(error: OSError) -> Exception:
    if error.errno == errno.EBADF:
        return trio.ClosedResourceError("the connection is closed")
    return trio.BrokenResourceError(f"the connection broke: {error}")


@coroutine
def run_eagerly(
    running: Coroutine[Any, Any, _T], on_first_block: Callable[[], object], context: Context | None = None
) -> Generator[Any, Any, _T]:
    """Run a coroutine to its end; call ``on_first_block`` when the coroutine first blocks.

    The coroutine runs in ``context``, or in the context of the running task.
    """
    try:
        trap = running.send(None) if context is None else context.run(running.send, None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    on_first_block()
    send: Callable[[Any], Any] = running.send
    throw: Callable[[BaseException], Any] = running.throw
    if context is not None:
        within: Any = context.run
        send, throw = partial(within, send), partial(within, throw)
    outcome: _T = yield from _resume(send, throw, trap)
    return outcome


@coroutine
def resume(running: Coroutine[Any, Any, _T], trap: Any) -> Generator[Any, Any, _T]:
    """Resume a coroutine that was started with ``send(None)`` and blocked with ``trap``; run it to its end."""
    outcome: _T = yield from _resume(running.send, running.throw, trap)
    return outcome


def _resume(send: Callable[[Any], Any], throw: Callable[[BaseException], Any], trap: Any) -> Generator[Any, Any, Any]:
    try:
        while True:
            try:
                outcome = yield trap
            except BaseException as error:  # noqa: BLE001 - forwarded to the coroutine
                trap = throw(error)
            else:
                trap = send(outcome)
    except StopIteration as done:
        return done.value


# -- Shutdown of connections -------------------------------------------------------------------------------------------

LINGER_SECONDS: Final = 2.0
"""How long a client may continue to send after its last response."""


def has_unread(stream: trio.abc.Stream) -> bool:
    """Return whether unread bytes or EOF have arrived; False for streams without a socket."""
    if (number := _descriptor_of(stream)) < 0:
        return False
    poll = select.poll()
    poll.register(number, select.POLLIN)
    return bool(poll.poll(0))


def has_unread_bytes(stream: trio.abc.Stream) -> bool:
    """Return whether unread bytes have arrived; EOF does not count."""
    if (number := _descriptor_of(stream)) >= 0:
        with suppress(OSError):
            return any(fcntl.ioctl(number, termios.FIONREAD, bytes(4)))
    return False


def _descriptor_of(stream: trio.abc.Stream) -> int:
    sock = getattr(underlying_stream(stream), "socket", None)
    return -1 if sock is None else int(sock.fileno())


async def close_forcefully(stream: trio.abc.Stream) -> None:
    """Close a stream without notifying the peer, also on cancellation.

    A plain socket is closed directly: cancel scopes and checkpoints are slower, and thousands may close at once.
    """
    if isinstance(stream, DirectStream):
        stream.close()
    elif isinstance(stream, trio.SocketStream):
        stream.socket.close()
    else:
        await trio.aclose_forcefully(stream)


async def linger(stream: trio.abc.Stream) -> None:
    """Send EOF and discard input until the peer closes.

    Closing a socket with unread bytes resets the connection and discards what the peer has not read yet.
    """
    transport = underlying_stream(stream)
    if isinstance(transport, trio.abc.HalfCloseableStream):
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await transport.send_eof()
            while await transport.receive_some(READ_BYTES):
                pass


async def close_gracefully(stream: trio.abc.Stream, seconds: float = LINGER_SECONDS) -> None:
    """Send EOF, discard input until the peer closes or ``seconds`` have passed, then close."""
    try:
        with trio.move_on_after(seconds):
            await linger(stream)
    finally:
        await close_forcefully(stream)
