"""A socket's stream in few steps: trio's own takes some twenty calls of functions for what one system call does.

Bytes are asked for when the system says that some have come, and sent before anybody asks whether there is room.
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
    from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
    from contextvars import Context

    from ovmstrio.core.connection import ClientAddress
    from ovmstrio.core.request import Buffer

__all__ = [
    "LINGER_SECONDS",
    "MOST_BUFFERS",
    "DirectStream",
    "carry_on",
    "close_gently",
    "close_now",
    "direct",
    "has_unread",
    "has_unread_bytes",
    "peer_address_of",
    "told_of_waiting",
    "transport_of",
]

# ----------------------------------------------------------------------
# A socket's stream in few steps: trio's own takes some twenty calls of functions for what one system call does
# ----------------------------------------------------------------------

_T = TypeVar("_T")

READ_BYTES: Final = 64 * 1024
MOST_BUFFERS: Final = 512
"""Buffers that go to the system in one call; it takes some 1,024."""
_MOST_LEFT_OUT: Final = 31
"""Looks for bytes that are left out behind one in vain, of which a client that takes its time costs the fewer so."""


class DirectStream(trio.abc.HalfCloseableStream):
    """A connected socket.

    Sending is no checkpoint where the socket takes all of the bytes at once.

    Args:
        stream: trio's, which this one takes the place of.
        peer_address: the other end, as ``accept`` reported it.

    Attributes:
        peer_address: of the arguments.
        socket: trio's.
    """

    def __init__(self, stream: trio.SocketStream, peer_address: ClientAddress = UNKNOWN) -> None:
        self._stream = stream
        self.peer_address = peer_address
        self.socket = stream.socket
        self._fileno: Callable[[], int] = stream.socket.fileno
        self._may_have_more = False
        self._left_out = 0
        self._misses = 0
        self._is_sending = False

    def expect(self) -> None:
        """Say that the peer may send soon: what is received next is looked for before it is waited for.

        Others have their turn first.  On a busy server most clients have sent by then, and the system need not be asked
        to tell of it.  Of a client that has not, it is tried ever less often.
        """
        if self._left_out:
            self._left_out -= 1
        else:
            self._may_have_more = True

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive what there is; nothing at the end.

        Raises:
            trio.BrokenResourceError: the connection broke.
            trio.ClosedResourceError: this end is closed.

        Cancellation: at any time; no bytes are lost.
        """
        size = max_bytes or READ_BYTES
        while True:
            if looks := self._may_have_more:
                await trio.lowlevel.checkpoint()
            elif (number := self._fileno()) >= 0:
                await trio.lowlevel.wait_readable(number)
            try:
                data = os.read(self._fileno(), size)
            except BlockingIOError:
                self._may_have_more = False
                self._left_out = self._misses = min(2 * self._misses + 1, _MOST_LEFT_OUT)
            except OSError as error:
                raise _translated(error) from error
            else:
                self._may_have_more = len(data) == size
                if looks:
                    self._misses = 0
                return data

    async def receive_into(self, target: memoryview) -> int:
        """Receive into a buffer, and tell how many bytes; 0 at the end.

        Raises, and Cancellation: as :meth:`receive_some`.
        """
        while True:
            await self._wait_readable()
            try:
                size = os.readv(self._fileno(), [target])
            except BlockingIOError:
                self._may_have_more = False
            except OSError as error:
                raise _translated(error) from error
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
        """Send what the socket takes, and tell how many bytes; 0 while another task is sending.

        Raises:
            trio.BrokenResourceError: the connection broke.
            trio.ClosedResourceError: this end is closed, or its sending side.
        """
        # Once nothing more can be sent, there will never be the room that a sender who is told of none waits for.
        if self._is_sending and not self.socket.did_shutdown_SHUT_WR:
            return 0
        try:
            return os.write(self._fileno(), buffers[0]) if len(buffers) == 1 else os.writev(self._fileno(), buffers)
        except BlockingIOError:
            return 0
        except OSError as error:
            if self.socket.did_shutdown_SHUT_WR:
                raise trio.ClosedResourceError("the sending side is closed") from error
            raise _translated(error) from error

    async def send_all(self, data: Buffer) -> None:
        """Send everything.

        Raises:
            trio.BrokenResourceError: the connection broke.
            trio.ClosedResourceError: this end is closed, or its sending side.
            trio.BusyResourceError: another task is sending.

        Cancellation: while the socket takes nothing; nobody knows then how much was sent.
        """
        self._check_sending()
        sent = self.send_now(data)
        if sent < len(data):
            with memoryview(data) as view:
                await self._send_rest([view[sent:]])

    async def send_buffers(self, buffers: Sequence[Buffer]) -> None:
        """Send everything, without joining it; as :meth:`send_all`."""
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
                    sent = os.writev(self._fileno(), views[at : at + MOST_BUFFERS])
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(self.socket)
                    continue
                except OSError as error:
                    raise _translated(error) from error
                while at < len(views) and sent >= len(views[at]):
                    sent -= len(views[at])
                    at += 1
                if sent:
                    views[at] = views[at][sent:]
        finally:
            self._is_sending = False

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until there is room; as trio's."""
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """Send no more; as trio's."""
        await self._stream.send_eof()

    def close(self) -> None:
        """Close the connection without a checkpoint."""
        self.socket.close()

    async def aclose(self) -> None:
        """Close the connection; as trio's."""
        self.close()
        await trio.lowlevel.checkpoint()


def direct(stream: trio.abc.Stream) -> trio.abc.Stream:
    """Return a :class:`DirectStream` of a socket's stream; other streams are returned as they are."""
    return DirectStream(stream, peer_address_of(stream)) if isinstance(stream, trio.SocketStream) else stream


def transport_of(stream: trio.abc.Stream) -> trio.abc.Stream:
    """Return the stream below TLS, or the stream itself."""
    return stream.transport_stream if isinstance(stream, trio.SSLStream) else stream


def peer_address_of(stream: trio.abc.Stream) -> ClientAddress:
    """Return the other end of a connection.

    That is the address that ``accept`` reported, if the stream has it.  Otherwise the socket is asked, which has no
    address once the client has reset the connection: call this once, as soon as there is a stream.
    """
    transport: Any = transport_of(stream)
    known: ClientAddress | None = getattr(transport, "peer_address", None)
    if known is not None:
        return known
    sock = getattr(transport, "socket", None)
    with suppress(OSError):
        return UNKNOWN if sock is None else socket_address(sock.family, sock.getpeername())
    return UNKNOWN


def _translated(error: OSError) -> Exception:
    if error.errno == errno.EBADF:
        return trio.ClosedResourceError("the connection is closed")
    return trio.BrokenResourceError(f"the connection broke: {error}")


@coroutine
def told_of_waiting(
    running: Coroutine[Any, Any, _T], tell: Callable[[], object], context: Context | None = None
) -> Generator[Any, Any, _T]:
    """Run a coroutine to its end, and ``tell`` when it first waits for something, if it ever does.

    It has the context variables of the running task, or those of ``context``.

    Cancellation: as the coroutine's.
    """
    try:
        trap = running.send(None) if context is None else context.run(running.send, None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    tell()
    send: Callable[[Any], Any] = running.send
    throw: Callable[[BaseException], Any] = running.throw
    if context is not None:
        within: Any = context.run
        send, throw = partial(within, send), partial(within, throw)
    outcome: _T = yield from _carry_on(send, throw, trap)
    return outcome


def carry_on(running: Coroutine[Any, Any, _T], trap: Any) -> Awaitable[_T]:
    """Run a coroutine to its end that was begun by its ``send``, which gave a trap of trio's, as it waits.

    Cancellation: as the coroutine's.
    """
    return _awaited(running.send, running.throw, trap)


@coroutine
def _awaited(send: Callable[[Any], Any], throw: Callable[[BaseException], Any], trap: Any) -> Generator[Any, Any, Any]:
    return (yield from _carry_on(send, throw, trap))


def _carry_on(send: Callable[[Any], Any], throw: Callable[[BaseException], Any], trap: Any) -> Generator[Any, Any, Any]:
    try:
        while True:
            try:
                outcome = yield trap
            except BaseException as error:  # noqa: BLE001 - the coroutine's to handle, whatever it is
                trap = throw(error)
            else:
                trap = send(outcome)
    except StopIteration as done:
        return done.value


# ----------------------------------------------------------------------
# Ends of connections at which nothing is lost: neither the last answer nor a request that had come
# ----------------------------------------------------------------------

LINGER_SECONDS: Final = 2.0
"""How long a client may go on sending once it has been answered for the last time."""

_READ_BYTES: Final = 64 * 1024


def has_unread(stream: trio.abc.Stream) -> bool:
    """Tell whether bytes of the peer, or its goodbye, have come that nobody has read; streams without a socket lie."""
    sock = getattr(transport_of(stream), "socket", None)
    if sock is None or sock.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def has_unread_bytes(stream: trio.abc.Stream) -> bool:
    """Return whether bytes of the peer have come that were not read, which a goodbye alone is not."""
    sock = getattr(transport_of(stream), "socket", None)
    if sock is None or sock.fileno() < 0:
        return False
    with suppress(OSError):
        return any(fcntl.ioctl(sock.fileno(), termios.FIONREAD, bytes(4)))
    return False


async def close_now(stream: trio.abc.Stream) -> None:
    """Close a stream without a word to the peer.

    A plain socket is closed in one step: cancel scopes and checkpoints take longer, and thousands may close at once.

    Cancellation: the stream is closed in any case.
    """
    if isinstance(stream, DirectStream):
        stream.close()
    elif isinstance(stream, trio.SocketStream):
        stream.socket.close()
    else:
        await trio.aclose_forcefully(stream)


async def close_gently(stream: trio.abc.Stream, seconds: float = LINGER_SECONDS) -> None:
    """Say that nothing more will come, drop what the peer still sends, and close when it does, or after a time.

    A socket that is closed with bytes unread resets the connection, and throws away what its peer has not read.

    Cancellation: closes at once.
    """
    transport = transport_of(stream)
    try:
        with trio.move_on_after(seconds), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            if isinstance(transport, trio.abc.HalfCloseableStream):
                await transport.send_eof()
                while await transport.receive_some(_READ_BYTES):
                    pass
    finally:
        await close_now(stream)
