"""Services of handlers that run in processes of their own, called by clients of grpcio."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from ovmstrio.work.isolation.isolated_code import Isolation
from tests.support.handler_grpc import served
from tests.support.protos import FOUR_KINDS
from tests.support.waits import WAIT_SECONDS, until_async
from tests.system.api.grpc.handlers.test_kinds import ASYNC, SYNC

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
            told = dict(context.invocation_metadata())
            return self.pb.Sample(text=f"{told['mine']} {context.time_remaining() > 1}", number=os.getpid())

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


@pytest.mark.parametrize("handler", [SYNC, ASYNC], ids=["sync", "async"])
async def test_all_kinds_of_calls_are_answered(tmp_path: Path, handler: str) -> None:
    """One request or many, one reply or many; streams go both ways at once."""
    async with served(tmp_path, FOUR_KINDS.format(package="isolated"), handler, isolation=Isolation()) as project:
        sample = project.pb.Sample

        def work(stub: Any) -> Any:
            numbers = [sample(number=number) for number in range(100)]
            return (
                stub.Alpha(sample(text="a")).text,
                stub.Beta(iter(numbers)).number,
                [each.number for each in stub.Gamma(sample(number=100))],
                [each.number for each in stub.Delta(iter(numbers))],
            )

        told = await project.ask(work)
        assert told == ("alpha a", 4950, list(range(100)), [2 * number for number in range(100)])


async def test_the_context_works_from_there(tmp_path: Path) -> None:
    """Metadata both ways, deadlines, statuses, and callbacks when the call has ended."""
    file = tmp_path / "called"
    async with served(tmp_path, FOUR_KINDS.format(package="isolated"), _CONTEXT, isolation=Isolation()) as project:
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


async def test_a_crash_fails_its_own_calls(tmp_path: Path) -> None:
    """At once, with the signal's name, for all kinds of calls; the next ones are answered."""
    text = "the process that ran this call was killed by SIGSEGV"
    go = tmp_path / "go"
    go.touch()
    async with served(tmp_path, FOUR_KINDS.format(package="isolated"), _CONTEXT, isolation=Isolation()) as project:
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


async def test_a_call_without_end_is_ended(tmp_path: Path) -> None:
    """After the limit of a call."""
    async with served(
        tmp_path, FOUR_KINDS.format(package="isolated"), _CONTEXT, isolation=Isolation(limit_seconds=0.5)
    ) as project:
        sample = project.pb.Sample
        error = await project.failure(lambda stub: stub.Alpha(sample(text="spin")))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert error.details().startswith("the process that ran this call was killed")
        reply = await project.ask(lambda stub: stub.Alpha(sample(text="a"), metadata=[("mine", "b")]))
        assert reply.text == "b True"


async def test_a_client_that_leaves_ends_its_call_there(tmp_path: Path) -> None:
    """The generator of a stream is closed, whatever it waits for."""
    async with served(tmp_path, FOUR_KINDS.format(package="isolated"), _CONTEXT, isolation=Isolation()) as project:
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
