"""Message channel of a worker process for threads; the peer of a ``MessageChannel``."""

from __future__ import annotations

import os
import select
import socket
import threading
from typing import TYPE_CHECKING, Any

from ovmstrio.isolation.messages import (
    ANCILLARY_BYTES,
    MAX_PACKET_BYTES,
    Message,
    MessagePackets,
    decode_descriptors,
    encode_descriptors,
    encode_packed,
)
from ovmstrio.isolation.side_messages import (
    LOG_LEVELS,
    SAMPLING_REQUEST,
    RecordForwarder,
    apply_log_levels,
    sample_in_thread,
    side_message_kind,
)

if TYPE_CHECKING:
    from collections.abc import Collection


class ChannelClosedByUserCode(Exception):
    """User code has closed the socket of the channel."""


class BlockingChannel:
    """Channel for threads; takes over the socket. Handles stack sampling requests and log levels itself.

    Any thread may send, one at a time may receive. All methods raise ``ChannelClosedByUserCode``.
    """

    def __init__(self, end: socket.socket) -> None:
        end.set_inheritable(False)
        end.setblocking(True)
        self._end = end
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._inode = os.fstat(end.fileno()).st_ino
        self._packets = MessagePackets(self._send_now)
        self._received: list[Message | None] = []
        self._packets_lock = threading.Lock()
        self._send_lock = threading.Lock()

    def send(self, value: Any) -> None:
        """Send a value; raises ``TypeError`` or ``OSError``. Arrays that lie in memory of the server are not copied."""
        with self._packets_lock:
            message = self._packets.prepare(value)
        try:
            packet = message.write()
            with self._send_lock:
                for late in self._packets.backlog():
                    self._send(late, [])
                self._send(packet, message.files)
        except BaseException:
            with self._packets_lock:
                self._packets.withdraw(message)
            raise
        self._packets.sent(message)

    def send_json(self, value: list[Any]) -> None:
        """Send a value of finite JSON, which costs the receiver less if it is small; raises like :meth:`send`."""
        packet = encode_packed(value, ())
        if packet is None:
            self.send(value)
            return
        with self._send_lock:
            for late in self._packets.backlog():
                self._send(late, [])
            self._send(packet, [])

    def _send(self, packet: bytes | bytearray, files: list[int]) -> None:
        try:
            self._check()
            self._end.sendmsg([packet], encode_descriptors(files))
        except OSError as error:
            raise ChannelClosedByUserCode(str(error)) from error

    def _check(self) -> None:
        """Raise ``OSError`` if user code has closed the descriptor and the number now belongs to another file."""
        if os.fstat(self._end.fileno()).st_ino != self._inode:
            raise OSError("the descriptor of the channel belongs to another file")

    def _send_now(self, packet: bytes) -> bool:
        try:
            self._check()
            self._end.send(packet, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def log_forwarder(self) -> RecordForwarder:
        """Create a handler that sends log records to the server."""
        return RecordForwarder(self._send_now)

    def receive(self) -> Message | None:
        """Wait for a message; None when the server has closed the channel."""
        while not self._received:
            self._receive_one()
        return self._received.pop()

    def has_message(self) -> bool:
        """Return whether :meth:`receive` would return at once, also for the end of the channel."""
        try:
            while not self._received and self._poll.poll(0):
                self._receive_one()
        except OSError as error:
            raise ChannelClosedByUserCode(str(error)) from error
        return bool(self._received)

    def _receive_one(self) -> None:
        try:
            packet, ancillary, _, _ = self._end.recvmsg(MAX_PACKET_BYTES, ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise ChannelClosedByUserCode(str(error)) from error
        if not packet:
            self._received.append(None)
            return
        with self._packets_lock:
            message = self._packets.read(packet, decode_descriptors(ancillary))
        if message is None:
            return
        kind = side_message_kind(message.value)
        if kind == SAMPLING_REQUEST:
            sample_in_thread(message.value, self.send)
        elif kind == LOG_LEVELS:
            apply_log_levels(message.value[1])
        else:
            self._received.append(message)

    def wait(self, descriptors: Collection[int], seconds: float | None = None) -> None:
        """Wait until :meth:`has_message` may be true, another descriptor is readable, or ``seconds`` have passed."""
        for descriptor in descriptors:
            self._poll.register(descriptor, select.POLLIN)
        try:
            self._poll.poll(None if seconds is None else seconds * 1e3)
        except OSError as error:
            raise ChannelClosedByUserCode(str(error)) from error
        finally:
            for descriptor in descriptors:
                self._poll.unregister(descriptor)

    def close_in_fork(self) -> None:
        """Close the socket in a child process forked by user code."""
        self._end.close()
