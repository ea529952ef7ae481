"""Process that renders a model's chat template, so that a slow template delays no other request.

The sandbox's budget (:mod:`.chat_template`) stops loops and growth. It cannot count inside one C call, such as the
comparison of deeply self-nested lists, during which no signal handler runs either. The kernel ends the process once a
rendering has used its CPU time.
"""

from __future__ import annotations

import json
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from ovmstrio.core.errors import InvalidField
from ovmstrio.inference.engine.template_program import HEADER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.generation import Conversation

_PROGRAM: Final = "ovmstrio.inference.engine.template_program"
_FIELD: Final = "messages"
_CPU_SECONDS: Final = 2.0
_SEND_SECONDS: Final = 5.0
_WALL_SECONDS: Final = 30.0  # wall-clock limit, for a process that gets no CPU time
_END_SECONDS: Final = 1.0
_CHUNK: Final = 1 << 20

T = TypeVar("T")


class TemplateProcess:
    """Renders one conversation at a time; owns a process, which is replaced if it ends.

    ``parts`` are arguments of :class:`ChatTemplate`; ``cpu_seconds`` limits compilation and each rendering.
    """

    def __init__(self, parts: Mapping[str, Any], name: str, cpu_seconds: float = _CPU_SECONDS) -> None:
        self._parts = dict(parts)
        self._name = name
        self._cpu_seconds = cpu_seconds
        self._received = bytearray()
        self._ends = 0.0
        self._status = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    @property
    def descriptor(self) -> int:
        """Descriptor that becomes readable when the process has answered or ended."""
        return self._socket.fileno()

    @property
    def seconds_left(self) -> float:
        """Time left for the current rendering."""
        return max(0.0, self._ends - time.monotonic())

    @property
    def pid(self) -> int:
        """Process id; -1 if there is none."""
        return -1 if self._process is None else self._process.pid

    def begin(self, conversation: Conversation) -> None:
        """Start rendering a conversation."""
        tools = conversation.tools if conversation.tool_choice != "none" else ()
        request = {"messages": conversation.messages, "tools": tools, "options": conversation.template_options}
        self._ends = time.monotonic() + _WALL_SECONDS
        try:
            data = _encode(request)
        except (RecursionError, TypeError, ValueError) as error:
            self._received[:] = _encode({"failed": f"not JSON serializable: {error}"})
            return
        try:
            self._socket.sendall(data)
        except OSError:
            # The process was killed since the last rendering, for example by the OOM killer.
            self._replace()
            with suppress(OSError):
                self._socket.sendall(data)

    def render(self, conversation: Conversation) -> str:
        """Render a conversation synchronously; see :meth:`take`."""
        self.begin(conversation)
        self.has_ended(_WALL_SECONDS)
        return self.take()

    def has_ended(self, within_seconds: float = 0) -> bool:
        """Wait up to ``within_seconds`` for the rendering; return whether :meth:`take` can be called."""
        ends = time.monotonic() + within_seconds
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while not self._has_answer():
            left = max(0.0, ends - time.monotonic())
            if not poll.poll(left * 1e3):
                return self.seconds_left <= 0
            try:
                chunk = self._socket.recv(_CHUNK)
            except OSError:
                return True
            if not chunk:
                return True
            self._received += chunk
        return True

    def take(self) -> str:
        """Return the prompt of the finished rendering; raise InvalidField if it failed or exceeded its limits."""
        if not self._has_answer():
            raise InvalidField(f"{self._name} {self._replace()}", field=_FIELD)
        answer = json.loads(self._received[HEADER.size :])
        self._received.clear()
        if "unusable" in answer:
            raise InvalidField(f"{self._name} of the model is invalid: {answer['unusable']}", field=_FIELD)
        if "failed" in answer:
            raise InvalidField(f"{self._name} rejects the messages: {answer['failed']}", field=_FIELD)
        return str(answer["text"])

    def close(self) -> None:
        """Kill the process."""
        self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._status = self._process.wait()
            self._process = None

    def _start(self) -> None:
        self._received.clear()
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_SEND_SECONDS)
        number = theirs.fileno()
        command = [sys.executable, "-P", "-m", _PROGRAM, str(number), str(self._cpu_seconds)]
        with theirs, suppress(OSError):
            # If fork fails, the socket is closed and the next rendering retries.
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(number,))  # noqa: S603 - our own
        with suppress(OSError):
            self._socket.sendall(_encode({"template": self._parts}))

    def _replace(self) -> str:
        """Start a new process; return why the last one ended."""
        is_late = self.seconds_left <= 0
        if self._process is None:
            self._start()
            return "could not be rendered: no process could be started"
        with suppress(subprocess.TimeoutExpired):
            # The kernel closes the socket of a process before its status can be read.
            self._process.wait(0 if is_late else _END_SECONDS)
        self.close()
        status = self._status
        self._start()
        if status == -signal.SIGPROF:
            return f"used more than {self._cpu_seconds:g} s of CPU time and was stopped"
        if is_late:
            return f"took longer than {_WALL_SECONDS:g} s and was stopped"
        return f"ended its process with status {status}"

    def _has_answer(self) -> bool:
        size = len(self._received) - HEADER.size
        return size >= 0 and size >= HEADER.unpack_from(self._received)[0]


class RenderQueue(Generic[T]):
    """Queue of requests whose conversations are rendered one after the other."""

    def __init__(self, process: TemplateProcess) -> None:
        self._process = process
        self._waiting: deque[tuple[T, Conversation]] = deque()
        self._current: tuple[T | None] | None = None

    @property
    def waiting(self) -> int:
        """Number of requests."""
        return len(self._waiting) + (self._current is not None and self._current[0] is not None)

    @property
    def descriptor(self) -> int:
        """Descriptor that becomes readable when a rendering has ended."""
        return self._process.descriptor

    @property
    def seconds_left(self) -> float | None:
        """Seconds until :attr:`has_ended` must be checked; None while idle."""
        return None if self._current is None else self._process.seconds_left

    @property
    def has_ended(self) -> bool:
        """Return whether :meth:`take` has a request to return."""
        return self._current is not None and self._process.has_ended()

    def add(self, item: T, conversation: Conversation, within_seconds: float) -> None:
        """Add a request; if idle, wait up to ``within_seconds`` for its prompt."""
        self._waiting.append((item, conversation))
        if self._current is None:
            self._begin_next()
            self._process.has_ended(within_seconds)

    def take(self) -> tuple[T, str | InvalidField] | None:
        """Return the rendered request with its prompt or error; None if it was withdrawn."""
        if self._current is None:
            return None
        (item,), self._current = self._current, None
        try:
            outcome: str | InvalidField = self._process.take()
        except InvalidField as error:
            outcome = error
        self._begin_next()
        return None if item is None else (item, outcome)

    def withdraw(self, item: T) -> None:
        """Remove a request; a started rendering continues without effect."""
        if self._current is not None and self._current[0] is item:
            self._current = (None,)
        self._waiting = deque(each for each in self._waiting if each[0] is not item)

    def _begin_next(self) -> None:
        if self._waiting:
            item, conversation = self._waiting.popleft()
            self._current = (item,)
            self._process.begin(conversation)


def _encode(value: Any) -> bytes:
    data = json.dumps(value, default=dict).encode()  # converts mappings of other types
    return HEADER.pack(len(data)) + data
