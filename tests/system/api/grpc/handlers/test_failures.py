"""Tests of calls that end in another way than with a reply, with clients of grpcio."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from tests.support.handler_grpc import HANDS_BACK, ServedProject, served
from tests.support.protos import FOUR_KINDS
from tests.support.waits import WAIT_SECONDS

RAISING = """
    class Handler:
        def __init__(self, proto_module_pb2):
            self.pb = proto_module_pb2

        def Alpha(self, payload):
            raise ValueError("secret")

        def Beta(self, payload):
            for each in payload:
                raise ValueError("secret")

        def Gamma(self, payload):
            yield self.pb.Sample(number=1)
            raise ValueError("secret")

        def Delta(self, payload):
            for each in payload:
                yield each
            raise ValueError("secret")
"""
ABORTING = """
    import grpc


    class Handler:
        def __init__(self, proto_module_pb2):
            self.pb = proto_module_pb2

        def Alpha(self, payload, context):
            context.abort(grpc.StatusCode.NOT_FOUND, "no " + payload.text)

        def Beta(self, payload, context):
            list(payload)
            context.abort(grpc.StatusCode.NOT_FOUND, "no x")

        def Gamma(self, payload, context):
            yield self.pb.Sample(number=1)
            context.abort(grpc.StatusCode.NOT_FOUND, "no x")

        async def Delta(self, payload, context):
            async for each in payload:
                yield each
            context.abort(grpc.StatusCode.NOT_FOUND, "no x")
"""
WRONG = """
    class Handler:
        def __init__(self, proto_module_pb2):
            self.pb = proto_module_pb2

        def Alpha(self, payload):
            return {"text": "x"}

        def Beta(self, payload):
            pass

        def Gamma(self, payload):
            yield "x"

        async def Delta(self, payload):
            yield 3
"""


async def errors(project: ServedProject) -> list[Any]:
    """Give the error of each of the four kinds, in their order."""
    sample = project.pb.Sample(text="x")
    return [
        await project.failure(lambda stub: stub.Alpha(sample)),
        await project.failure(lambda stub: stub.Beta(iter([sample]))),
        await project.failure(lambda stub: stub.Gamma(sample)),
        await project.failure(lambda stub: stub.Delta(iter([sample]))),
    ]


@pytest.mark.parametrize(
    ("handler", "code", "details"),
    [
        (RAISING, grpc.StatusCode.INTERNAL, "internal server error"),
        (RAISING.replace("def ", "async def ").replace("async def __init__", "def __init__").replace(
            "for each", "async for each"), grpc.StatusCode.INTERNAL, "internal server error"),
        (ABORTING, grpc.StatusCode.NOT_FOUND, "no x"),
        (WRONG, grpc.StatusCode.INTERNAL, "Failed to serialize response!"),
    ],
    ids=["raising", "raising async", "aborting", "wrong reply"],
)  # fmt: skip
async def test_all_four_kinds_fail_alike(tmp_path: Path, handler: str, code: grpc.StatusCode, details: str) -> None:
    """What a handler raises is hidden, a status that it chose is kept, and a wrong reply is told."""
    async with served(tmp_path, FOUR_KINDS.format(package=f"fail_{tmp_path.name}"), handler) as project:
        assert [(error.code(), error.details()) for error in await errors(project)] == [(code, details)] * 4


async def test_an_exception_is_logged_once_and_an_abort_is_not(tmp_path: Path) -> None:
    """The log has the text and the line that the caller does not get."""
    with capture_logs() as logs:
        async with served(tmp_path / "one", FOUR_KINDS.format(package="logged"), RAISING) as project:
            await project.failure(lambda stub: stub.Alpha(project.pb.Sample()))
        async with served(tmp_path / "two", FOUR_KINDS.format(package="unlogged"), ABORTING) as project:
            await errors(project)
    (entry,) = [each for each in logs if each["log_level"] == "error"]
    assert entry["error"] == "ValueError: secret (handler.py:7)"


async def test_replies_before_a_failure_arrive(tmp_path: Path) -> None:
    """A stream is as long as the handler made it, and its status comes last."""
    async with served(tmp_path, FOUR_KINDS.format(package="partial"), RAISING) as project:

        def work(stub: Any) -> tuple[int, grpc.StatusCode]:
            replies = stub.Gamma(project.pb.Sample())
            first = next(replies).number
            with pytest.raises(grpc.RpcError):
                next(replies)
            return first, replies.code()

        assert await project.ask(work) == (1, grpc.StatusCode.INTERNAL)


async def test_something_that_cannot_be_iterated_is_a_failure(tmp_path: Path) -> None:
    """A method that should stream and returns nothing fails its call."""
    handler = WRONG.replace('yield "x"', "return None")
    async with served(tmp_path, FOUR_KINDS.format(package="none"), handler) as project:
        error = await project.failure(lambda stub: stub.Gamma(project.pb.Sample()))
        assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "internal server error")


PASSING_ON = "async for each in payload:\n                    yield each"


async def test_requests_that_are_no_messages_are_the_callers_fault(tmp_path: Path) -> None:
    """Bytes that cannot be parsed are told with the type that was expected, in every kind."""
    handler = HANDS_BACK.replace("def Delta", "async def Delta").replace("yield from payload", PASSING_ON)
    async with served(tmp_path, FOUR_KINDS.format(package="malformed"), handler) as project:

        def send(path: str, kind: str) -> Any:
            def work(_stub: Any) -> Any:
                with grpc.insecure_channel(project.address) as channel:
                    request: Any = iter([b"\xff\xff"]) if kind.startswith("stream") else b"\xff\xff"
                    result = getattr(channel, kind)(path)(request, timeout=WAIT_SECONDS)
                    return list(result) if kind.endswith("stream") else result

            return work

        for rpc, kind in zip(
            project.project.proto.rpcs, ("unary_unary", "stream_unary", "unary_stream", "stream_stream"), strict=True
        ):
            error = await project.failure(send(rpc.path, kind))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.details() == (
                "malformed malformed.Sample: its 2 bytes are not a protobuf message of that type"
            )


async def test_calls_beyond_max_concurrency_are_refused(tmp_path: Path) -> None:
    """One more call than may be in flight is told to come again, and the next one after an end is served."""
    handler = HANDS_BACK
    proto = FOUR_KINDS.format(package="crowded")
    async with served(tmp_path, proto, handler, settings="threads_per_process: 2", most=1) as project:
        sample = project.pb.Sample(text="x")

        def work(stub: Any) -> tuple[grpc.StatusCode, list[str], str]:
            questions: queue.SimpleQueue[Any] = queue.SimpleQueue()
            questions.put(sample)
            open_call = stub.Delta(iter(questions.get, None))
            first = next(open_call)
            with pytest.raises(grpc.RpcError) as caught:
                stub.Alpha(sample)
            questions.put(None)
            return caught.value.code(), [each.text for each in (first, *open_call)], stub.Alpha(sample).text

        assert await project.ask(work) == (grpc.StatusCode.UNAVAILABLE, ["x"], "x")
