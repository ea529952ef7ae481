"""``PipelineService`` over several pipelines, of which each request chooses one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import trio

from ovmstrio.config.specs import OpPipelineSpec, ServableSpec
from ovmstrio.core.events import CallEvent, CallObserver
from ovmstrio.core.request import InferRequest, InferResponse, ServableMetadata
from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.protocol.pipeline_messages import METHOD, REQUEST, RESPONSE
from ovmstrio.runtimes.ops.values import PipelineRequest, PipelineResponse
from ovmstrio.server.grpc_front_end import GrpcFrontEnd
from tests.support.grpc_clients import call
from tests.support.stub_registry import registry_of

RESPONSE_NAME = RESPONSE.DESCRIPTOR.full_name


class NamedPipeline:
    """Answers with its entry's name, or with the number that it is asked for."""

    def __init__(self, entry: str, name: str) -> None:
        self.metadata = ServableMetadata(entry, "test", (), ())
        self.name = name

    async def answer(self, request: PipelineRequest, deadline: float) -> PipelineResponse:
        """Answer."""
        del deadline
        await trio.lowlevel.checkpoint()
        return PipelineResponse(int("".join(request.values) or 0), "", ["entry"], [self.metadata.name])

    async def infer(self, request: InferRequest) -> InferResponse:
        """Have no tensors."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Hold nothing."""


@dataclass
class Ends(CallObserver):
    """Notes calls that have ended."""

    events: list[CallEvent] = field(default_factory=list)

    def call_finished(self, event: CallEvent) -> None:
        """Note it."""
        self.events.append(event)


@asynccontextmanager
async def serving(entries: dict[str, str], root: str = "", ends: Sequence[Ends] = ()) -> AsyncIterator[str]:
    """Serve pipelines, given by entry and the name of their service, and give the address."""

    async def load(spec: ServableSpec, _version: int, _directory: Path) -> NamedPipeline:
        return NamedPipeline(spec.name, entries[spec.name])

    registry = registry_of(load, poll_seconds=0)
    front_end = GrpcFrontEnd(DataPlane(registry, observers=ends), ["127.0.0.1:0"], root=root)
    async with trio.open_nursery() as nursery:
        await nursery.start(registry.run)
        await registry.apply([OpPipelineSpec(name=name, base_path=Path.cwd()) for name in entries])
        (address,) = await nursery.start(front_end.serve)
        yield address
        nursery.cancel_scope.cancel()


async def ask(address: str, name: str, *values: str) -> Any:
    """Make one call."""
    return await call(address, METHOD, REQUEST(name=name, value=values), RESPONSE_NAME)


@pytest.mark.parametrize(
    ("asked", "root", "answered"),
    [
        ("first", "", "first"),
        ("second", "", "second"),
        ("uci", "", "second"),
        ("", "first", "first"),
        ("", "", None),
        ("", "gone", None),
        ("other", "first", None),
    ],
)
async def test_the_name_of_a_request_chooses_the_pipeline(asked: str, root: str, answered: str | None) -> None:
    """It is an entry's or its service's; no name is the root's, and any other is 3002."""
    async with serving({"first": "first", "second": "uci"}, root) as address:
        answer = await ask(address, asked)
    if answered is None:
        assert (answer.err_no, answer.err_msg) == (3002, "Failed to inference: Service name error.")
    else:
        assert (answer.err_no, list(answer.value)) == (0, [answered])


async def test_the_only_pipeline_needs_no_name() -> None:
    """A request without a name is its own."""
    async with serving({"first": "uci"}) as address:
        assert list((await ask(address, "")).value) == ["first"]


async def test_servers_without_pipelines_have_no_such_service() -> None:
    """The method is unknown."""
    async with serving({}) as address:
        with pytest.raises(grpc.RpcError) as raised:
            await ask(address, "")
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_each_call_of_a_pipeline_is_one_event() -> None:
    """It has the entry's name, the method, the sizes, and the name of an error that is in the answer."""
    ends = Ends()
    async with serving({"first": "uci"}, ends=[ends]) as address:
        for number in ("0", "6000", "123"):
            await ask(address, "uci", number)
    seen = [(event.name, event.door.api, event.door.interface, event.method) for event in ends.events]
    assert seen == [("first", "PaddleServing", "gRPC", "inference")] * 3
    assert [event.code for event in ends.events] == ["OK", "TIMEOUT", "PRODUCT_ERROR"]
    assert all(event.received and event.sent for event in ends.events)
