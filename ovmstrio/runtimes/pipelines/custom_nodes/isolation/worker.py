"""The program of a worker process: one node of one library, called in threads as it would be in the server.

::

    python -m ovmstrio.runtimes.pipelines.custom_nodes.isolation.worker DESCRIPTOR

Descriptor is the worker's end of a channel.  The first message says what to open; each later one is a call, answered
under its number in whatever order calls end.  The worker ends when the channel does, and only then: a signal that is
meant for the whole group of processes must not take it from a server that is still serving.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import trio

from ovmstrio.core.errors import ConfigError, ServerError
from ovmstrio.observability.logs import configure_logs
from ovmstrio.runtimes.pipelines.custom_nodes.isolation.channel import Channel
from ovmstrio.runtimes.pipelines.custom_nodes.isolation.memory_files import Message
from ovmstrio.runtimes.pipelines.custom_nodes.native import NativeNode, open_native_node
from ovmstrio.runtimes.pipelines.custom_nodes.ports import ItemInfo
from ovmstrio.work.processes import serve_descriptor

__all__ = ["main", "serve"]


async def serve(channel: Channel) -> None:
    """Open the node that the first message names, and answer calls until the other end is gone.

    Raises:
        OSError: there is no memory left for an answer.

    Ownership: the node, which is closed at the end.

    Cancellation: at once, but for the closing of the node.
    """
    opening = await channel.receive()
    if opening is None:
        return
    request, _ = opening
    async with trio.open_nursery() as tasks:
        try:
            node = await open_native_node(Path(request["path"]), request["name"], request["params"], tasks=tasks)
        except ConfigError as error:
            await channel.send({"problems": [asdict(problem) for problem in error.problems]}, {})
            return
        try:
            await channel.send({"inputs": _rows(node.inputs), "outputs": _rows(node.outputs)}, {})
            await _answer_all(channel, node)
        finally:
            await node.aclose()


def _rows(items: Mapping[str, ItemInfo]) -> list[tuple[str, str | None, tuple[int, ...]]]:
    return [(item.name, None if item.datatype is None else item.datatype.name, item.shape) for item in items.values()]


async def _answer_all(channel: Channel, node: NativeNode) -> None:
    async with trio.open_nursery() as nursery:
        while (received := await channel.receive()) is not None:
            nursery.start_soon(_answer, channel, node, *received)
        nursery.cancel_scope.cancel()


async def _answer(
    channel: Channel, node: NativeNode, request: Message, inputs: dict[str, np.ndarray[Any, Any]]
) -> None:
    """Run one call and send what it gives.

    Cancellation: at once; nobody is there to be answered then.
    """
    number = request["number"]
    with suppress(trio.BrokenResourceError):
        try:
            outputs = await node.execute(inputs)
        except ServerError as error:
            await channel.send({"number": number, "failure": error.message}, {})
        else:
            await channel.send({"number": number}, outputs)


async def _serve_socket(end: socket.socket) -> None:
    channel = Channel(end)
    try:
        await serve(channel)
    finally:
        channel.close()


def main() -> None:
    """Serve the channel whose descriptor is the first argument."""
    configure_logs(level="WARNING")
    serve_descriptor(_serve_socket)


if __name__ == "__main__":
    main()
