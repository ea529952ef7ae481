"""The program of a worker process: one worker of one Op.

::

    python -m ovmstrio.runtimes.ops.executor.processes.child DESCRIPTOR

Descriptor is the worker's end of a channel.  The first message says which worker it is; each later one is a batch,
which is answered before the next one is taken.  The worker ends when the channel does, and only then: a signal that is
meant for the whole group of processes must not take it from a server that is still serving.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from contextlib import ExitStack, suppress
from typing import Any

import trio

from ovmstrio.core.errors import ConfigError
from ovmstrio.observability.logs import configure_logs
from ovmstrio.runtimes.ops.executor.processes.channel import ProcessChannel
from ovmstrio.runtimes.ops.executor.processes.codec import encode
from ovmstrio.runtimes.ops.executor.processes.messages import RECOVERED, BatchAnswer, encode_answer, samples_of
from ovmstrio.runtimes.ops.executor.processes.source import Source
from ovmstrio.runtimes.ops.executor.workers import InstanceWorker
from ovmstrio.runtimes.ops.observing.log_files import join_log_files
from ovmstrio.runtimes.ops.settings import settings_of
from ovmstrio.work.processes import serve_descriptor

__all__ = ["main", "serve"]


async def serve(channel: ProcessChannel) -> None:
    """Start the worker that the first message names, and answer batches until the other end is gone.

    Raises:
        OSError: there is no memory left for an answer.

    Ownership: the worker, which is closed at the end.

    Cancellation: at once.
    """
    request = await channel.receive()
    if request is None:
        return
    async with trio.open_nursery() as nursery:
        await _serve_worker(channel, request, nursery)
        nursery.cancel_scope.cancel()


async def _serve_worker(channel: ProcessChannel, request: dict[str, Any], nursery: trio.Nursery) -> None:
    answer = BatchAnswer()
    with ExitStack() as opened:
        try:
            worker = _worker(request, answer, opened, nursery)
            await worker.start()
        except Exception as error:  # noqa: BLE001 - the border of the user's script
            await channel.send(encode({"problem": _text(error)}))
            return
        try:
            await channel.send(encode({"pid": os.getpid()}))
            await _answer_all(channel, worker, answer)
        finally:
            await worker.aclose()


def _text(error: Exception) -> str:
    return error.message if isinstance(error, ConfigError) else "".join(traceback.format_exception(error))


def _worker(request: dict[str, Any], answer: BatchAnswer, opened: ExitStack, nursery: trio.Nursery) -> InstanceWorker:
    sys.path[:] = request["path"]
    loaded = Source(request["loader"], request["argument"]).load()
    opened.enter_context(join_log_files(loaded.settings.logging))
    op = loaded.graph.ops[request["op"]]
    settings = settings_of(op, loaded.settings)

    def report_stage(*stage: Any) -> None:
        answer.stages.append(stage)

    return InstanceWorker(
        op, settings, request["index"], loaded.make_predictor, report_stage=report_stage, nursery=nursery
    )


async def _answer_all(channel: ProcessChannel, worker: InstanceWorker, answer: BatchAnswer) -> None:
    with suppress(trio.BrokenResourceError):
        while (message := await channel.receive()) is not None:
            answer.results = await worker.run(samples_of(message))
            answer.is_spoiled = worker.is_spoiled
            await channel.send(encode_answer(answer))
            # What is large must not stay until the next batch comes.
            del message
            answer.results, answer.stages = [], []
            if answer.is_spoiled:
                await worker.recover()
                await channel.send(encode(RECOVERED))


async def _serve_socket(end: socket.socket) -> None:
    channel = ProcessChannel(end)
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
