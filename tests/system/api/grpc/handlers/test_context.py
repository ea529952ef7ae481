"""Tests of the context of a call, with clients of grpcio."""

from __future__ import annotations

from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import grpc
import pytest
import trio

from ovmstrio.core.peers import TrustedProxies
from ovmstrio.work.isolation.isolated_code import Isolation
from tests.support.handler_grpc import served
from tests.support.protos import FOUR_KINDS
from tests.support.waits import WAIT_SECONDS


def alpha(body: str) -> str:
    """Write a handler whose method Alpha has a body; the others do nothing."""
    lines = "\n".join(f"        {line}" for line in body.strip("\n").split("\n"))
    return f"""
import threading

import grpc


class Handler:
    def __init__(self, proto_module_pb2):
        self.pb = proto_module_pb2
        self.seen = []
        self.entered = threading.Event()
        self.left = threading.Event()

    def Alpha(self, payload, context):
{lines}

    def Beta(self):
        pass

    def Gamma(self):
        pass

    def Delta(self):
        pass
"""


def proto(folder: Path) -> str:
    """Give the services in a package of the test's own."""
    return FOUR_KINDS.format(package=f"context_{folder.name}")


async def test_the_call_is_described(tmp_path: Path) -> None:
    """Metadata, peer, deadline and liveness are what the client sees from its side."""
    handler = alpha("""
metadata = {entry.key: entry.value for entry in context.invocation_metadata()}
self.seen = [metadata, context.peer(), context.time_remaining(), context.is_active(), context.code(), context.details()]
return payload
""")
    async with served(tmp_path, proto(tmp_path), handler) as project:
        sent = (("colour", "red"), ("shade-bin", b"\x00\xff"))
        await project.ask(lambda stub: stub.Alpha(project.pb.Sample(), metadata=sent))
        metadata, peer, remaining, *rest = project.handler.seen
        assert metadata["user-agent"].startswith("grpc-python/")
        assert {key: metadata[key] for key in ("colour", "shade-bin")} == dict(sent)
        assert peer.startswith("ipv4:127.0.0.1:")
        assert 0 < remaining <= WAIT_SECONDS
        assert rest == [True, None, ""]
        await project.ask(lambda stub: stub.Alpha(project.pb.Sample(), timeout=None))
        assert project.handler.seen[2] is None


@pytest.mark.parametrize("isolation", [None, Isolation()], ids=["threads", "process"])
@pytest.mark.parametrize(
    ("proxies", "peers"),
    [
        (
            "127.0.0.1",
            {
                "198.51.100.7, 203.0.113.9:4711": "ipv4:203.0.113.9:4711",
                "2001:db8::9": "ipv6:[2001:db8::9]:0",
                "nonsense": "unknown",
            },
        ),
        ("10.0.0.0/8", {"203.0.113.9": "ipv4:127.0.0.1:"}),
    ],
)
async def test_the_peer_of_a_call_behind_a_trusted_proxy_is_the_client(
    tmp_path: Path, isolation: Isolation | None, proxies: str, peers: dict[str, str]
) -> None:
    """Behind any other proxy it is the proxy."""
    handler = alpha("context.abort(grpc.StatusCode.ABORTED, context.peer())")
    trusted = TrustedProxies.parse(proxies)
    async with served(tmp_path, proto(tmp_path), handler, isolation=isolation, trusted_proxies=trusted) as project:
        for forwarded, peer in peers.items():
            sent = (("x-forwarded-for", forwarded),)
            with pytest.raises(grpc.RpcError) as caught:
                await project.ask(partial(_call_alpha, message=project.pb.Sample(), metadata=sent))
            error: Any = caught.value
            assert error.details().startswith(peer)


def _call_alpha(stub: Any, *, message: Any, metadata: Any) -> Any:
    return stub.Alpha(message, metadata=metadata)


async def test_metadata_is_sent_ahead_and_behind(tmp_path: Path) -> None:
    """Initial and trailing metadata arrive, text and bytes; what cannot be sent is refused at once."""
    handler = alpha("""
context.send_initial_metadata((("first", "1"), ("raw-bin", b"\\x01")))
for send in (context.send_initial_metadata, context.set_trailing_metadata):
    try:
        send((("Not a key", "x"),))
    except ValueError as error:
        self.seen.append(str(error))
context.set_trailing_metadata([("last", "2")])
return payload
""")
    async with served(tmp_path, proto(tmp_path), handler) as project:

        def work(stub: Any) -> tuple[dict[str, Any], dict[str, Any]]:
            _, call = stub.Alpha.with_call(project.pb.Sample(), timeout=WAIT_SECONDS)
            return dict(call.initial_metadata()), dict(call.trailing_metadata())

        assert await project.ask(work) == ({"first": "1", "raw-bin": b"\x01"}, {"last": "2"})
        assert project.handler.seen == ["Invalid metadata key: 'Not a key'"] * 2


async def test_initial_metadata_does_not_wait_for_the_reply(tmp_path: Path) -> None:
    """The client has it while the method still runs."""
    handler = alpha("""
context.send_initial_metadata([("first", "1")])
try:
    context.send_initial_metadata([("first", "2")])
except ValueError:
    self.seen.append("once")
assert self.left.wait(60)
return payload
""")
    async with served(tmp_path, proto(tmp_path), handler) as project:

        def work(_stub: Any) -> Any:
            with grpc.insecure_channel(project.address) as channel:
                path = project.project.proto.services[0].rpcs[0].path
                # Of a call whose reply is no stream, grpcio gives the metadata only together with the reply.
                call = channel.unary_stream(path)(b"", timeout=WAIT_SECONDS)
                metadata = dict(call.initial_metadata())
                project.handler.left.set()
                return metadata, list(call)

        assert await project.ask(work) == ({"first": "1"}, [b""])
        assert project.handler.seen == ["once"]


async def test_a_code_that_was_set_counts_however_the_method_ends(tmp_path: Path) -> None:
    """Returning a reply, nothing at all, or raising: the client gets the code and the text."""
    handler = alpha("""
context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
context.set_details("full")
context.set_trailing_metadata([("retry", "later")])
self.seen.append((context.code(), context.details(), context.trailing_metadata()))
if payload.text == "raise":
    raise ValueError("secret")
return payload if payload.text == "reply" else None
""")
    async with served(tmp_path, proto(tmp_path), handler) as project:
        for text in ("reply", "nothing", "raise"):
            sample = project.pb.Sample(text=text)
            error = await project.failure(methodcaller("Alpha", sample))
            assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
            assert dict(error.trailing_metadata()) == {"retry": "later"}
        seen = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("retry", "later"),))
        assert project.handler.seen == [seen] * 3


async def test_an_abort_cannot_be_swallowed(tmp_path: Path) -> None:
    """The status stays, even if the method goes on and returns a reply."""
    handler = alpha("""
try:
    context.abort(grpc.StatusCode.NOT_FOUND, "gone")
except Exception:
    pass
return payload
""")
    async with served(tmp_path, proto(tmp_path), handler) as project:
        error = await project.failure(lambda stub: stub.Alpha(project.pb.Sample()))
        assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "gone")


async def test_a_rich_status_keeps_its_details(tmp_path: Path) -> None:
    """``abort_with_status`` sends code, text and trailing metadata, the encoded status included."""
    handler = alpha("""
import collections
kind = collections.namedtuple("Status", ["code", "details", "trailing_metadata"])
rich = (("grpc-status-details-bin", b"\\x08\\x05"), ("hint", "look elsewhere"))
context.abort_with_status(kind(grpc.StatusCode.NOT_FOUND, "gone", rich))
""")
    async with served(tmp_path, proto(tmp_path), handler) as project:
        error = await project.failure(lambda stub: stub.Alpha(project.pb.Sample()))
        assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "gone")
        assert dict(error.trailing_metadata()) == {"grpc-status-details-bin": b"\x08\x05", "hint": "look elsewhere"}


async def test_aborting_with_ok_or_nonsense_is_no_success(tmp_path: Path) -> None:
    """OK becomes UNKNOWN; a code that does not exist is the method's failure."""
    handler = alpha("context.abort(grpc.StatusCode.OK if payload.text else 99, 'fine')")
    async with served(tmp_path, proto(tmp_path), handler) as project:
        error = await project.failure(lambda stub: stub.Alpha(project.pb.Sample(text="x")))
        assert (error.code(), error.details()) == (grpc.StatusCode.UNKNOWN, "internal server error")
        error = await project.failure(lambda stub: stub.Alpha(project.pb.Sample()))
        assert error.code() is grpc.StatusCode.INTERNAL


async def test_callbacks_run_when_the_call_has_ended(tmp_path: Path) -> None:
    """All are called, in their order, whatever one of them raises; afterwards none can be added."""
    handler = alpha("""
self.context = context
assert context.add_callback(lambda: self.seen.append(context.is_active()))
assert context.add_callback(lambda: 1 / 0)
assert context.add_callback(self.left.set)
return payload
""")
    async with served(tmp_path, proto(tmp_path), handler) as project:
        await project.ask(lambda stub: stub.Alpha(project.pb.Sample()))
        assert await trio.to_thread.run_sync(project.handler.left.wait, WAIT_SECONDS)
        assert project.handler.seen == [False]
        assert project.handler.context.add_callback(print) is False


async def test_a_method_can_cancel_its_call(tmp_path: Path) -> None:
    """The client gets CANCELLED while the method goes on to its own end."""
    handler = alpha("""
context.add_callback(self.left.set)
context.cancel()
assert self.left.wait(60)
self.seen.append(context.is_active())
""")
    async with served(tmp_path, proto(tmp_path), handler) as project:
        error = await project.failure(lambda stub: stub.Alpha(project.pb.Sample()))
        assert error.code() is grpc.StatusCode.CANCELLED
    assert project.handler.seen == [False]


async def test_a_client_that_leaves_is_noticed_in_a_thread(tmp_path: Path) -> None:
    """A method that waits for its own work hears of it by a callback, while its thread is taken."""
    handler = alpha("""
context.add_callback(self.left.set)
self.entered.set()
assert self.left.wait(60)
self.seen.append(context.is_active())
""")
    async with served(tmp_path, proto(tmp_path), handler) as project:

        def work(_stub: Any) -> bool:
            with grpc.insecure_channel(project.address) as channel:
                path = project.project.proto.services[0].rpcs[0].path
                call = channel.unary_unary(path).future(b"", timeout=WAIT_SECONDS)
                assert project.handler.entered.wait(WAIT_SECONDS)
                return bool(call.cancel())

        assert await project.ask(work)
    assert project.handler.seen == [False]


async def test_the_deadline_ends_a_call(tmp_path: Path) -> None:
    """The client gets DEADLINE_EXCEEDED and the method is told."""
    handler = alpha("""
context.add_callback(self.left.set)
assert self.left.wait(60)
self.seen.append(context.is_active())
""")
    async with served(tmp_path, proto(tmp_path), handler) as project:
        error = await project.failure(lambda stub: stub.Alpha(project.pb.Sample(), timeout=2))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert project.handler.seen == [False]
