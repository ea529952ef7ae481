"""Projects with user-defined gRPC services, served on the test's event loop and called by grpcio."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from textwrap import dedent, indent
from typing import Any, TypeVar

import grpc
import trio

from ovmstrio.config.specs import HandlerSpec
from ovmstrio.core.connection import NO_PROXIES, TrustedProxies
from ovmstrio.core.limits import make_local_limit
from ovmstrio.handlers.config.project_file import read_project
from ovmstrio.handlers.grpc.project import GrpcProject, open_project_proto, open_rpc_handler
from ovmstrio.handlers.grpc.proto_compiler import UserService
from ovmstrio.handlers.handler_loading import LoadedHandler
from ovmstrio.handlers.handler_service import HandlerService
from ovmstrio.handlers.isolated_handler import open_isolated_handler
from ovmstrio.isolation.isolated_code import Isolation
from ovmstrio.server.front_ends import GrpcFrontEnd
from ovmstrio.transport.grpc.limits import TransportLimits
from tests.support.projects import FOUR_KINDS, written
from tests.support.stub_registry import open_plane_of
from tests.support.waits import WAIT_SECONDS

_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_LARGEST = 2**31 - 1

_T = TypeVar("_T")


def kinds_source(
    alpha: str = "return payload",
    beta: str = "return list(payload)[-1]",
    gamma: str = "yield payload",
    delta: str = "yield from payload",
    *,
    init: str = "",
) -> str:
    """Return the source of a handler of the service ``Kinds`` with bodies of its methods, which return requests."""
    lines = ["import threading", "import grpc", "class Handler:", "    def __init__(self, proto_module_pb2):"]
    lines += ["        self.pb = proto_module_pb2", indent(dedent(init), " " * 8)]
    for name, body in {"Alpha": alpha, "Beta": beta, "Gamma": gamma, "Delta": delta}.items():
        lines += [f"    def {name}(self, payload, context):", indent(dedent(body), " " * 8)]
    return "\n".join(lines) + "\n"


def as_async(source: str) -> str:
    """Return the source of a handler with async methods, whose loops over ``each`` are asynchronous."""
    source = source.replace("def ", "async def ").replace("async def __init__", "def __init__")
    return source.replace("for each in", "async for each in")


class Stub:
    def __init__(self, channel: Any, service: UserService) -> None:
        for rpc in service.rpcs:
            client, server = (
                "stream" if streams else "unary" for streams in (rpc.client_streaming, rpc.server_streaming)
            )
            method = getattr(channel, f"{client}_{server}")(
                rpc.path,
                request_serializer=rpc.request_class.SerializeToString,
                response_deserializer=rpc.reply_class.FromString,
            )
            setattr(self, rpc.name, _with_deadline(method))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def _with_deadline(method: Any) -> Any:
    def call(request: Any, **options: Any) -> Any:
        return method(request, **{"timeout": WAIT_SECONDS, **options})

    call.with_call = getattr(method, "with_call", None)  # type: ignore[attr-defined]
    return call


class ServedProject:
    def __init__(self, project: GrpcProject, address: str) -> None:
        self.address = address
        self.project = project
        self.pb: Any = project.proto.module
        self.handler: Any = project.handler.instance if isinstance(project.handler, LoadedHandler) else None

    async def ask(self, work: Callable[[Any], _T]) -> _T:
        def connected() -> _T:
            with grpc.insecure_channel(self.address, _UNLIMITED) as channel:
                return work(Stub(channel, self.project.proto.services[0]))

        return await trio.to_thread.run_sync(connected)

    async def failure(self, work: Callable[[Any], Any]) -> Any:
        def failing(stub: Any) -> Any:
            try:
                result = work(stub)
                if hasattr(result, "__next__"):
                    list(result)
            except grpc.RpcError as error:
                return error
            raise AssertionError("the call did not fail")

        return await self.ask(failing)


@asynccontextmanager
async def served(
    folder: Path,
    proto: str,
    handler: str,
    *,
    settings: str = "",
    isolation: Isolation | None = None,
    most: int = 0,
    trusted_proxies: TrustedProxies = NO_PROXIES,
) -> AsyncIterator[ServedProject]:
    """Serve a handler's source with the services of a protobuf source, with so many calls at most."""
    written(folder, "service.proto", proto)
    written(folder, "handler.py", handler)
    lines = ["type: python", "path: handler.py", "protobuf_path: service.proto", settings]
    spec, _ = read_project(written(folder, "nucleus.yaml", "\n".join(lines)))
    models: Any = None
    limits = TransportLimits(max_receive_message_bytes=_LARGEST, max_send_message_bytes=_LARGEST)
    async with contextlib.AsyncExitStack() as stack:
        made = await stack.enter_async_context(open_project_proto(spec))
        opened: Any = open_rpc_handler(spec, made)
        if isolation is not None:
            opened = open_isolated_handler(spec, isolation, mounted_as="")
        project = GrpcProject(made, await stack.enter_async_context(opened))
        mounted = HandlerService("project", project.handler, make_local_limit(most, "project"), project, models)  # type: ignore[arg-type]
        mounted.gone()
        entry = HandlerSpec(name="project", base_path=folder, path=folder)
        plane = await stack.enter_async_context(open_plane_of(entry, mounted))
        front_end = GrpcFrontEnd(plane, ["127.0.0.1:0"], limits=limits, trusted_proxies=trusted_proxies)
        nursery = await stack.enter_async_context(trio.open_nursery())
        (address,) = await nursery.start(front_end.serve)
        yield ServedProject(project, address)
        nursery.cancel_scope.cancel()


def served_kinds(folder: Path, handler: str, **options: Any) -> AbstractAsyncContextManager[ServedProject]:
    """Serve a handler of the service ``Kinds``, in a separate package; options are those of ``served``."""
    return served(folder, FOUR_KINDS.format(package=f"kinds_{folder.name}"), handler, **options)
