from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import trio
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from structlog.testing import capture_logs

from ovmstrio.isolation.isolated_code import Isolation
from tests.support.api_clients import with_channel
from tests.support.handler_grpc import ServedProject, as_async, kinds_source, served, served_kinds
from tests.support.waits import WAIT_SECONDS, until_async

SECRET = 'raise ValueError("secret")'
RAISING = kinds_source(
    SECRET,
    f"for each in payload: {SECRET}",
    f"yield self.pb.Sample(number=1)\n{SECRET}",
    f"for each in payload:\n    yield each\n{SECRET}",
)
ABORT = 'context.abort(grpc.StatusCode.NOT_FOUND, "no x")'
ABORTING = kinds_source(
    ABORT,
    f"for each in payload:\n    {ABORT}",
    f"yield self.pb.Sample(number=1)\n{ABORT}",
    f"for each in payload:\n    yield each\n{ABORT}",
)
WRONG = kinds_source('return {"text": "x"}', "pass", 'yield "x"', "yield 3")


async def errors(project: ServedProject) -> list[Any]:
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
        (as_async(RAISING), grpc.StatusCode.INTERNAL, "internal server error"),
        (ABORTING, grpc.StatusCode.NOT_FOUND, "no x"),
        (as_async(ABORTING), grpc.StatusCode.NOT_FOUND, "no x"),
        (WRONG, grpc.StatusCode.INTERNAL, "Failed to serialize response!"),
        (as_async(WRONG), grpc.StatusCode.INTERNAL, "Failed to serialize response!"),
    ],
    ids=["raising", "raising async", "aborting", "aborting async", "wrong reply", "wrong reply async"],
)
async def test_all_kinds_of_calls_fail_with_the_same_status(
    tmp_path: Path, handler: str, code: grpc.StatusCode, details: str
) -> None:
    async with served_kinds(tmp_path, handler) as project:
        assert [(error.code(), error.details()) for error in await errors(project)] == [(code, details)] * 4


async def test_an_exception_is_logged_with_its_line_and_an_abort_is_not(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with served_kinds(tmp_path / "one", RAISING) as project:
            await project.failure(lambda stub: stub.Alpha(project.pb.Sample()))
        async with served_kinds(tmp_path / "two", ABORTING) as project:
            await errors(project)
    (entry,) = [each for each in logs if each["log_level"] == "error"]
    line = RAISING.split("\n").index(f"        {SECRET}") + 1
    assert entry["error"] == f"ValueError: secret (handler.py:{line})"


async def test_replies_before_a_failure_are_received(tmp_path: Path) -> None:
    async with served_kinds(tmp_path, RAISING) as project:

        def work(stub: Any) -> tuple[int, grpc.StatusCode]:
            replies = stub.Gamma(project.pb.Sample())
            first = next(replies).number
            with pytest.raises(grpc.RpcError):
                next(replies)
            return first, replies.code()

        assert await project.ask(work) == (1, grpc.StatusCode.INTERNAL)


async def test_a_streaming_method_that_returns_nothing_fails(tmp_path: Path) -> None:
    handler = WRONG.replace('yield "x"', "return None")
    async with served_kinds(tmp_path, handler) as project:
        error = await project.failure(lambda stub: stub.Gamma(project.pb.Sample()))
        assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "internal server error")


async def test_malformed_requests_are_invalid_arguments_for_all_kinds(tmp_path: Path) -> None:
    async with served_kinds(tmp_path, kinds_source()) as project:

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
            expected = f"malformed kinds_{tmp_path.name}.Sample: its 2 bytes are not a protobuf message of that type"
            assert error.details() == expected


async def test_calls_above_the_concurrency_limit_are_unavailable(tmp_path: Path) -> None:
    async with served_kinds(tmp_path, kinds_source(), settings="threads_per_process: 2", most=1) as project:
        sample = project.pb.Sample(text="x")

        def work(stub: Any) -> tuple[grpc.StatusCode, list[str], str]:
            requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
            requests.put(sample)
            open_call = stub.Delta(iter(requests.get, None))
            first = next(open_call)
            with pytest.raises(grpc.RpcError) as caught:
                stub.Alpha(sample)
            requests.put(None)
            return caught.value.code(), [each.text for each in (first, *open_call)], stub.Alpha(sample).text

        assert await project.ask(work) == (grpc.StatusCode.UNAVAILABLE, ["x"], "x")


ENDLESS = kinds_source(
    beta="""
    try:
        for each in payload:
            self.began.set()
    finally:
        self.closed.set()
    """,
    gamma="""
    try:
        while True:
            self.made += 1
            yield self.pb.Sample(number=self.made, data=payload.data)
    finally:
        self.closed.set()
    """,
    delta="""
    try:
        for each in payload:
            self.began.set()
            yield each
    finally:
        self.closed.set()
    """,
    init="self.made = 0\nself.began, self.closed = threading.Event(), threading.Event()",
)
ENDLESS_ASYNC = as_async(ENDLESS)


async def closed(project: ServedProject) -> bool:
    return bool(await trio.to_thread.run_sync(project.handler.closed.wait, WAIT_SECONDS))


@pytest.mark.parametrize("handler", [ENDLESS, ENDLESS_ASYNC], ids=["plain", "async"])
async def test_a_cancelled_call_closes_its_generator_and_the_next_call_is_served(tmp_path: Path, handler: str) -> None:
    async with served_kinds(tmp_path, handler) as project:

        def work(stub: Any) -> list[int]:
            replies = stub.Gamma(project.pb.Sample())
            first = [next(replies).number for _ in range(5)]
            replies.cancel()
            return first

        assert await project.ask(work) == [1, 2, 3, 4, 5]
        assert await closed(project)
        project.handler.closed.clear()
        project.handler.made = 0
        assert await project.ask(work) == [1, 2, 3, 4, 5]
        assert await closed(project)


@pytest.mark.parametrize("handler", [ENDLESS, ENDLESS_ASYNC], ids=["plain", "async"])
@pytest.mark.parametrize("method", ["Beta", "Delta"])
async def test_a_cancelled_call_ends_a_wait_for_requests(tmp_path: Path, handler: str, method: str) -> None:
    async with served_kinds(tmp_path, handler) as project:
        ended = threading.Event()

        def requests() -> Iterator[bytes]:
            yield b""
            ended.wait(WAIT_SECONDS)

        def work(_stub: Any) -> None:
            with grpc.insecure_channel(project.address) as channel:
                path = next(rpc.path for rpc in project.project.proto.rpcs if rpc.name == method)
                call = channel.stream_stream(path)(requests(), timeout=WAIT_SECONDS)
                call.add_done_callback(lambda _: ended.set())
                assert project.handler.began.wait(WAIT_SECONDS)
                call.cancel()

        await project.ask(work)
        assert await closed(project)


async def test_a_generator_waits_for_a_client_that_does_not_read(tmp_path: Path) -> None:
    async with served_kinds(tmp_path, ENDLESS) as project:

        def work(stub: Any) -> None:
            replies = stub.Gamma(project.pb.Sample(data=bytes(100_000)))
            assert next(replies).number == 1
            replies.cancel()

        await project.ask(work)
        assert await closed(project)
        # The window of grpcio's clients grows to some megabytes at most.
        assert project.handler.made < 300


_CONTEXT = """
    import ctypes, os, time
    from pathlib import Path

    class Handler:
        def __init__(self, proto_module_pb2):
            self.pb = proto_module_pb2

        def Alpha(self, payload, context):
            text = payload.text
            if text == "segfault":
                ctypes.string_at(0)
            if text == "spin":
                while True:
                    pass
            if text == "raise":
                raise ValueError("my own")
            if text == "abort":
                context.abort(5, "not here")
            if text == "code":
                context.set_code(9)
                context.set_details("not now")
            if text.startswith("callback"):
                context.add_callback(lambda: Path(text.partition(" ")[2]).write_text("called"))
            context.send_initial_metadata([("first", "1")])
            context.set_trailing_metadata([("last", "2"), ("last-bin", b"\\x00")])
            metadata = dict(context.invocation_metadata())
            return self.pb.Sample(text=f"{metadata['mine']} {context.time_remaining() > 1}", number=os.getpid())

        def Beta(self, payload, context):
            for each in payload:
                if each.text == "segfault":
                    ctypes.string_at(0)
            return self.pb.Sample(text="wrong") if each.text == "fine" else None

        def Gamma(self, payload, context):
            yield self.pb.Sample(text="one")
            while not Path(payload.text).exists():
                time.sleep(0.005)
            if payload.number:
                ctypes.string_at(0)
            yield self.pb.Sample(text="two")

        def Delta(self, payload, context):
            try:
                for each in payload:
                    yield each
            finally:
                Path("closed").touch()
"""


def _call_alpha(request: Any, stub: Any) -> Any:
    return stub.Alpha(request, metadata=[("mine", "")])


async def test_the_context_works_in_an_isolated_process(tmp_path: Path) -> None:
    file = tmp_path / "called"
    async with served_kinds(tmp_path, _CONTEXT, isolation=Isolation()) as project:
        sample = project.pb.Sample

        def work(stub: Any) -> Any:
            reply, call = stub.Alpha.with_call(
                sample(text=f"callback {file}"), metadata=[("mine", "sent")], timeout=WAIT_SECONDS
            )
            return reply, dict(call.initial_metadata()), dict(call.trailing_metadata())

        reply, initial, trailing = await project.ask(work)
        assert reply.text == "sent True"
        assert reply.number in project.project.handler.processes.pids  # type: ignore[attr-defined]
        assert initial["first"] == "1"
        assert (trailing["last"], trailing["last-bin"]) == ("2", b"\x00")
        await until_async(file.exists)
        for text, code, details in (
            ("abort", grpc.StatusCode.NOT_FOUND, "not here"),
            ("code", grpc.StatusCode.FAILED_PRECONDITION, "not now"),
            ("raise", grpc.StatusCode.INTERNAL, "internal server error"),
        ):
            error = await project.failure(partial(_call_alpha, sample(text=text)))
            assert (error.code(), error.details()) == (code, details)
        error = await project.failure(lambda stub: stub.Beta(iter([sample(text="a")])))
        assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "Failed to serialize response!")


async def test_a_crash_fails_only_its_own_calls(tmp_path: Path) -> None:
    text = "the process that ran this call was killed by SIGSEGV"
    go = tmp_path / "go"
    go.touch()
    async with served_kinds(tmp_path, _CONTEXT, isolation=Isolation()) as project:
        sample = project.pb.Sample
        crashes = (
            lambda stub: stub.Alpha(sample(text="segfault")),
            lambda stub: stub.Beta(iter([sample(text="a"), sample(text="segfault")])),
            lambda stub: stub.Gamma(sample(text=str(go), number=1)),
        )
        for crash in crashes:
            error = await project.failure(crash)
            assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, text)
            replies = await project.ask(lambda stub: list(stub.Gamma(sample(text=str(go)))))
            assert [each.text for each in replies] == ["one", "two"]


async def test_a_call_above_the_time_limit_is_killed(tmp_path: Path) -> None:
    async with served_kinds(tmp_path, _CONTEXT, isolation=Isolation(limit_seconds=0.5)) as project:
        sample = project.pb.Sample
        error = await project.failure(lambda stub: stub.Alpha(sample(text="spin")))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert error.details().startswith("the process that ran this call was killed")
        reply = await project.ask(lambda stub: stub.Alpha(sample(text="a"), metadata=[("mine", "b")]))
        assert reply.text == "b True"


async def test_a_client_that_leaves_closes_the_generator_in_its_process(tmp_path: Path) -> None:
    async with served_kinds(tmp_path, _CONTEXT, isolation=Isolation()) as project:
        sample = project.pb.Sample
        leaving = threading.Event()

        def work(stub: Any) -> None:
            def requests() -> Any:
                yield sample(text="a")
                leaving.wait(WAIT_SECONDS)

            replies = stub.Delta(requests())
            assert next(replies).text == "a"
            replies.cancel()
            leaving.set()

        await project.ask(work)
        await until_async((tmp_path / "closed").exists)


TWO_SERVICES = """
    syntax = "proto3";
    package {package};
    import "google/protobuf/timestamp.proto";

    service First {{ rpc One (Moment) returns (Moment); }}
    service Second {{ rpc Two (Moment) returns (Moment); }}

    message Moment {{ google.protobuf.Timestamp at = 1; }}
"""
ECHO = """
    from google.protobuf.timestamp_pb2 import Timestamp


    class Handler:
        def One(self, payload):
            payload.at.seconds += 1
            return payload

        def Two(self, payload):
            payload.at.seconds += 2
            return payload
"""


async def test_a_client_with_reflection_calls_handlers_with_imported_messages(tmp_path: Path) -> None:
    async with served(tmp_path, TWO_SERVICES.format(package="reflected"), ECHO) as project:

        def work(channel: Any) -> tuple[list[str], list[int]]:
            database = ProtoReflectionDescriptorDatabase(channel)
            pool = DescriptorPool(database)
            replies = []
            for service, name in (("First", "One"), ("Second", "Two")):
                method = pool.FindServiceByName(f"reflected.{service}").methods_by_name[name]
                request: Any = GetMessageClass(method.input_type)()
                request.at.seconds = 40
                infer = channel.unary_unary(
                    f"/reflected.{service}/{name}",
                    request_serializer=type(request).SerializeToString,
                    response_deserializer=GetMessageClass(method.output_type).FromString,
                )
                replies.append(infer(request, timeout=WAIT_SECONDS).at.seconds)
            return sorted(name for name in database.get_services() if name.startswith("reflected.")), replies

        assert await with_channel(project.address, work) == (
            ["reflected.First", "reflected.Second"],
            [41, 42],
        )
