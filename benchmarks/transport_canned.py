"""A gRPC server with one canned unary answer, to compare the transport's cost per call with other servers.

Run ``python benchmarks/transport_canned.py [trio|grpc.aio] [port]`` and load it with::

    h2load -n 20000 -c 4 -m 8 -d FILE -H 'content-type: application/grpc' -H 'te: trailers' \
        http://127.0.0.1:PORT/bench.CannedService/Call

where FILE holds a gRPC prefix and 100 bytes (written by ``--payload FILE``). On SIGINT the server prints the CPU time
that each call cost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import trio
from grpclib.const import Cardinality, Handler
from grpclib.encoding.base import CodecBase

from ovmstrio.transport.grpc.call import Call
from ovmstrio.transport.grpc.server import GrpcServer
from ovmstrio.transport.listeners import open_listeners

METHOD = "/bench.CannedService/Call"
ANSWER = b"a" * 100


class Count:
    """Number of answered calls, and the CPU time at the first one."""

    calls = 0
    cpu_started = 0.0

    @classmethod
    def add(cls) -> None:
        """Count one call."""
        if not cls.calls:
            cls.cpu_started = time.process_time()
        cls.calls += 1

    @classmethod
    def report(cls) -> None:
        """Print the result."""
        micros = (time.process_time() - cls.cpu_started) / max(1, cls.calls) * 1e6
        print(f"calls={cls.calls} cpu_us_per_call={micros:.1f}", flush=True)


class RawCodec(CodecBase):
    """Codec for messages that are already encoded."""

    __content_subtype__ = "proto"

    def encode(self, message: bytes, _message_type: Any) -> bytes:
        """Return the bytes unchanged."""
        return message

    def decode(self, data: bytes, _message_type: Any) -> bytes:
        """Return the bytes unchanged."""
        return data


class CannedService:
    """Service with one method and one answer."""

    async def call(self, stream: Call) -> None:
        """Send the canned answer."""
        Count.add()
        await stream.recv_message()
        await stream.send_message(ANSWER)

    def __mapping__(self) -> dict[str, Handler]:
        return {METHOD: Handler(self.call, Cardinality.UNARY_UNARY, bytes, bytes)}


async def serve_trio(port: int) -> None:
    """Serve with this project's transport until SIGINT."""
    server = GrpcServer([CannedService()], RawCodec())
    async with open_listeners([f"127.0.0.1:{port}"]) as listeners, trio.open_nursery() as nursery:
        print(*await nursery.start(server.serve, listeners), flush=True)
        with trio.open_signal_receiver(signal.SIGINT) as signals:
            async for _ in signals:
                await server.drain(1)
                nursery.cancel_scope.cancel()


async def serve_grpc_aio(port: int) -> None:
    """Serve with grpcio's asyncio server until SIGINT."""

    async def call(_request: bytes, _context: Any) -> bytes:
        Count.add()
        return ANSWER

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(call)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.CannedService", {"Call": handler}),))
    print(f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}", flush=True)
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    await stop.wait()
    await server.stop(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", nargs="?", choices=["trio", "grpc.aio"], default="trio")
    parser.add_argument("port", nargs="?", type=int, default=0)
    parser.add_argument("--payload", type=Path, help="write the request body for h2load here")
    arguments = parser.parse_args()
    if arguments.payload:
        arguments.payload.write_bytes(b"\0" + (100).to_bytes(4, "big") + b"q" * 100)
    with contextlib.suppress(KeyboardInterrupt):
        if arguments.server == "trio":
            trio.run(serve_trio, arguments.port)
        else:
            asyncio.run(serve_grpc_aio(arguments.port))
    Count.report()


if __name__ == "__main__":
    main()
