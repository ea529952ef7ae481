"""Messages between a worker process and the server, for threads: the other end of a ``MessageChannel``."""

from __future__ import annotations

import array
import os
import select
import socket
import threading
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.isolation.channel import MOST_FILES, MOST_PACKET, Message, MessagePackets
from ovmstrio.isolation.stack_requests import is_for_samples, sample_in_thread

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["BlockingChannel", "ChannelLost"]

_DESCRIPTOR: Final = "i"
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(MOST_FILES * array.array(_DESCRIPTOR).itemsize)


class ChannelLost(Exception):
    """The socket is not there any more: whoever has closed it was none of the server's."""


class BlockingChannel:
    """One end; any thread may send, one at a time may receive.  Requests for samples of stacks are answered in it.

    Args:
        end: a socket of a pair for packets, which belongs to the channel from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        end.set_inheritable(False)
        end.setblocking(True)
        self._end = end
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._identity = os.fstat(end.fileno()).st_ino
        self._packets = MessagePackets(self._send_now)
        self._ahead: list[Message | None] = []
        self._preparing = threading.Lock()
        self._sending = threading.Lock()

    def send(self, value: Any) -> None:
        """Send a value, which is copied once; arrays that lie in memory that came from the server are not.

        Raises:
            ChannelLost: code of users has closed the socket.
            TypeError: the value is not of what can be sent; nothing has been.
            OSError: there is no memory left.
        """
        with self._preparing:
            message = self._packets.prepare(value)
        try:
            packet = message.write()
            with self._sending:
                for late in self._packets.backlog():
                    self._send(late, [])
                self._send(packet, message.files)
        except BaseException:
            with self._preparing:
                self._packets.withdrawn(message)
            raise
        self._packets.sent(message)

    def _send(self, packet: bytes | bytearray, files: list[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array(_DESCRIPTOR, files))] if files else []
        try:
            self._check()
            self._end.sendmsg([packet], rights)
        except OSError as error:
            raise ChannelLost(str(error)) from error

    def _check(self) -> None:
        """See that the descriptor is still the socket's: code of users may have closed it and opened something else.

        Raises:
            OSError: it is not.
        """
        if os.fstat(self._end.fileno()).st_ino != self._identity:
            raise OSError("the descriptor of the channel is another file's")

    def _send_now(self, packet: bytes) -> bool:
        try:
            self._check()
            self._end.send(packet, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def receive(self) -> Message | None:
        """Wait for a message; None once the server has nothing more to say, or is gone.

        Raises:
            ChannelLost: code of users has closed the socket.
        """
        while not self._ahead:
            self._receive_one()
        return self._ahead.pop()

    def has_message(self) -> bool:
        """Tell whether :meth:`receive` would have something to give now, were it only the end.

        Raises:
            ChannelLost: code of users has closed the socket.
        """
        try:
            while not self._ahead and self._poll.poll(0):
                self._receive_one()
        except OSError as error:
            raise ChannelLost(str(error)) from error
        return bool(self._ahead)

    def _receive_one(self) -> None:
        """Read one packet, with which a message may be whole.

        Raises:
            ChannelLost: code of users has closed the socket.
        """
        try:
            packet, ancillary, _, _ = self._end.recvmsg(MOST_PACKET, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise ChannelLost(str(error)) from error
        if not packet:
            self._ahead.append(None)
            return
        files = array.array(_DESCRIPTOR)
        for _, _, data in ancillary:
            files.frombytes(data)
        with self._preparing:
            message = self._packets.read(packet, files.tolist())
        if message is None:
            return
        if is_for_samples(message.value):
            sample_in_thread(message.value, self.send)
            return
        self._ahead.append(message)

    def wait(self, descriptors: Collection[int], seconds: float | None = None) -> None:
        """Wait until :meth:`has_message` would return True, or another descriptor can be read, or for so long.

        Raises:
            ChannelLost: code of users has closed the socket.
        """
        for descriptor in descriptors:
            self._poll.register(descriptor, select.POLLIN)
        try:
            self._poll.poll(None if seconds is None else seconds * 1e3)
        except OSError as error:
            raise ChannelLost(str(error)) from error
        finally:
            for descriptor in descriptors:
                self._poll.unregister(descriptor)

    def disown(self) -> None:
        """Let a process that code of users has forked have no part in this."""
        self._end.close()
