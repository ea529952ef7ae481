"""Program of a template process: renders conversations with one chat template within a CPU-time limit.

Each message is its length in eight bytes, then JSON::

    {"template": {...}}              compiles the template; not answered
    {"messages": [...], ...}         {"text": prompt} or {"failed": reason} or {"unusable": reason}
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import struct
import sys
from typing import Any, Final

from ovmstrio.inference.engine.chat_template import ChatTemplate, TemplateFailure

HEADER: Final = struct.Struct(">Q")

_MAX_ADDRESS_BYTES: Final = 2 * 2**30  # address space; templates fail with MemoryError beyond


def main() -> None:
    """Serve the engine on the socket of ``argv[1]`` until it closes; ``argv[2]`` is the CPU limit in seconds."""
    for server_signal in (signal.SIGINT, signal.SIGTERM):
        signal.signal(server_signal, signal.SIG_IGN)
    # The default action ends the process even within a C call; a Python handler would run after that call.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_ADDRESS_BYTES, _MAX_ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    end = socket.socket(fileno=int(sys.argv[1]))
    cpu_seconds = float(sys.argv[2])
    template: ChatTemplate | str = "no template received"
    while (request := _receive(end)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        if "template" in request:
            template = _compile(request["template"])
            answer = b""
        else:
            result = {"unusable": template} if isinstance(template, str) else _render(template, request)
            answer = json.dumps(result).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        if answer:
            end.sendall(HEADER.pack(len(answer)) + answer)


def _compile(parts: dict[str, Any]) -> ChatTemplate | str:
    try:
        return ChatTemplate(**parts)
    except TemplateFailure as error:
        return str(error)


def _render(template: ChatTemplate, request: dict[str, Any]) -> dict[str, str]:
    if "unreadable" in request:
        return {"failed": request["unreadable"]}
    try:
        return {"text": template.render(request["messages"], request["tools"], options=request["options"])}
    except TemplateFailure as error:
        return {"failed": str(error)}


def _receive(end: socket.socket) -> dict[str, Any] | None:
    header = _receive_exactly(end, HEADER.size)
    if header is None:
        return None
    data = _receive_exactly(end, HEADER.unpack(header)[0])
    if data is None:
        return None
    try:
        request: dict[str, Any] = json.loads(data)
    except (RecursionError, ValueError) as error:
        return {"unreadable": f"invalid messages: {error}"}
    return request


def _receive_exactly(end: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view, begin = memoryview(data), 0
    while begin < size:
        received = end.recv_into(view[begin:])
        if not received:
            return None
        begin += received
    return bytes(data)


if __name__ == "__main__":
    main()
