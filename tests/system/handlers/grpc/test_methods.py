from __future__ import annotations

from collections.abc import Iterator
from operator import methodcaller
from pathlib import Path
from typing import Any

import grpc
import pytest
import trio

from ovmstrio.core.connection import TrustedProxies
from ovmstrio.isolation.isolated_code import Isolation
from tests.support.handler_grpc import as_async, kinds_source, served, served_kinds
from tests.support.projects import PRIMES
from tests.support.waits import WAIT_SECONDS

SYNC = """
    import service_pb2
    import service_pb2_grpc


    class Handler:
        def __init__(self, config, module_proto_pb2):
            assert module_proto_pb2 is service_pb2
            assert service_pb2_grpc.KindsServicer
            self.pb = module_proto_pb2

        def Alpha(self, payload):
            return self.pb.Sample(text="alpha " + payload.text)

        def Beta(self, context, payload):
            return self.pb.Sample(text="beta", number=sum([each.number for each in payload]))

        def Gamma(self, payload, context):
            for number in range(payload.number):
                yield self.pb.Sample(text="gamma", number=number)

        def Delta(self, payload):
            for each in payload:
                yield self.pb.Sample(text="delta", number=each.number * 2)
"""
ASYNC = as_async(SYNC)
ITERABLES = kinds_source(
    'return self.pb.Sample(text="alpha " + payload.text)',
    'return self.pb.Sample(text="beta", number=sum(each.number for each in payload))',
    'return [self.pb.Sample(text="gamma", number=number) for number in range(payload.number)]',
    'return map(lambda each: self.pb.Sample(text="delta", number=each.number * 2), payload)',
)


EARLY = kinds_source(beta="return next(payload)", delta="for each in payload:\n    yield each\n    return")
DECORATED = """
    import functools


    def decorated(method):
        @functools.wraps(method)
        def wrapper(*args, **kwargs):
            return method(*args, **kwargs)

        return wrapper

""" + ASYNC.replace("        async def", "        @decorated\n        async def")


def _without_request_id(metadata: Any) -> dict[str, Any]:
    """Return metadata without the id that every response has."""
    found = dict(metadata)
    found.pop("x-request-id", None)
    return found


@pytest.mark.parametrize(
    ("handler", "isolation"),
    [(SYNC, None), (ASYNC, None), (ITERABLES, None), (DECORATED, None), (SYNC, Isolation()), (ASYNC, Isolation())],
    ids=["sync", "async", "iterables", "decorated async", "isolated sync", "isolated async"],
)
async def test_all_kinds_of_calls_are_answered(tmp_path: Path, handler: str, isolation: Isolation | None) -> None:
    async with served_kinds(tmp_path, handler, isolation=isolation) as project:
        sample = project.pb.Sample

        def samples() -> Iterator[Any]:
            return (sample(number=number) for number in range(1, 51))

        def work(stub: Any) -> tuple[Any, ...]:
            return (
                stub.Alpha(sample(text="x")).text,
                stub.Beta(samples()).number,
                [(each.text, each.number) for each in stub.Gamma(sample(number=50))],
                [(each.text, each.number) for each in stub.Delta(samples())],
                [stub.Beta(iter(())).number, list(stub.Gamma(sample())), list(stub.Delta(iter(())))],
            )

        assert await project.ask(work) == (
            "alpha x",
            1275,
            [("gamma", number) for number in range(50)],
            [("delta", number * 2) for number in range(1, 51)],
            [0, [], []],
        )


async def test_a_reused_reply_is_sent_as_it_was_yielded(tmp_path: Path) -> None:
    handler = """
        class Handler:
            def __init__(self, proto_module_pb2):
                self.reply = proto_module_pb2.Output()

            def Predict(self, payload):
                for number in range(100):
                    self.reply.prime_number = number
                    yield self.reply
    """
    async with served(tmp_path, PRIMES, handler) as project:
        request = project.pb.Input()
        numbers = await project.ask(lambda stub: [each.prime_number for each in stub.Predict(request)])
        assert numbers == list(range(100))


@pytest.mark.parametrize(
    "handler", [EARLY, as_async(EARLY).replace("return next(payload)", "return await anext(payload)")]
)
async def test_a_method_may_answer_before_the_last_request(tmp_path: Path, handler: str) -> None:
    async with served_kinds(tmp_path, handler) as project:

        def requests() -> Iterator[Any]:
            while True:
                yield project.pb.Sample(number=7)

        assert await project.ask(lambda stub: stub.Beta(requests()).number) == 7
        assert await project.ask(lambda stub: [each.number for each in stub.Delta(requests())]) == [7]


def alpha(body: str) -> str:
    init = "self.seen = []\nself.entered, self.left = threading.Event(), threading.Event()"
    return kinds_source(body, init=init)


SWALLOWED = """
try:
    context.abort(grpc.StatusCode.NOT_FOUND, "gone")
except Exception:
    pass
return payload
"""
RICH = """
import collections
kind = collections.namedtuple("Status", ["code", "details", "trailing_metadata"])
rich = (("grpc-status-details-bin", b"\\x08\\x05"), ("hint", "elsewhere"))
context.abort_with_status(kind(grpc.StatusCode.NOT_FOUND, "gone", rich))
"""
WAITING = alpha("""
context.add_callback(self.left.set)
self.entered.set()
if payload.text == "cancel":
    context.cancel()
assert self.left.wait(60)
self.seen.append(context.is_active())
""")


async def test_a_context_has_metadata_peer_deadline_and_liveness(tmp_path: Path) -> None:
    handler = alpha("""
metadata = {entry.key: entry.value for entry in context.invocation_metadata()}
self.seen = [metadata, context.peer(), context.time_remaining(), context.is_active(), context.code(), context.details()]
return payload
""")
    async with served_kinds(tmp_path, handler) as project:
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
    handler = alpha("context.abort(grpc.StatusCode.ABORTED, context.peer())")
    trusted = TrustedProxies.parse(proxies)
    async with served_kinds(tmp_path, handler, isolation=isolation, trusted_proxies=trusted) as project:
        for forwarded, peer in peers.items():
            sent = (("x-forwarded-for", forwarded),)
            with pytest.raises(grpc.RpcError) as caught:
                await project.ask(methodcaller("Alpha", project.pb.Sample(), metadata=sent))
            error: Any = caught.value
            assert error.details().startswith(peer)


async def test_initial_and_trailing_metadata_are_sent_and_invalid_keys_refused(tmp_path: Path) -> None:
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
    async with served_kinds(tmp_path, handler) as project:

        def work(stub: Any) -> tuple[dict[str, Any], dict[str, Any]]:
            _, call = stub.Alpha.with_call(project.pb.Sample(), timeout=WAIT_SECONDS)
            return _without_request_id(call.initial_metadata()), _without_request_id(call.trailing_metadata())

        assert await project.ask(work) == ({"first": "1", "raw-bin": b"\x01"}, {"last": "2"})
        assert project.handler.seen == ["Invalid metadata key: 'Not a key'"] * 2


async def test_initial_metadata_is_sent_before_the_reply_and_once(tmp_path: Path) -> None:
    handler = alpha("""
context.send_initial_metadata([("first", "1")])
try:
    context.send_initial_metadata([("first", "2")])
except ValueError:
    self.seen.append("once")
assert self.left.wait(60)
return payload
""")
    async with served_kinds(tmp_path, handler) as project:

        def work(_stub: Any) -> Any:
            with grpc.insecure_channel(project.address) as channel:
                path = project.project.proto.services[0].rpcs[0].path
                # Of a call whose reply is no stream, grpcio gives the metadata only together with the reply.
                call = channel.unary_stream(path)(b"", timeout=WAIT_SECONDS)
                metadata = _without_request_id(call.initial_metadata())
                project.handler.left.set()
                return metadata, list(call)

        assert await project.ask(work) == ({"first": "1"}, [b""])
        assert project.handler.seen == ["once"]


async def test_a_status_set_in_the_context_is_sent_however_the_method_ends(tmp_path: Path) -> None:
    handler = alpha("""
context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
context.set_details("full")
context.set_trailing_metadata([("retry", "later")])
self.seen.append((context.code(), context.details(), context.trailing_metadata()))
if payload.text == "raise":
    raise ValueError("secret")
return payload if payload.text == "reply" else None
""")
    async with served_kinds(tmp_path, handler) as project:
        for text in ("reply", "nothing", "raise"):
            sample = project.pb.Sample(text=text)
            error = await project.failure(methodcaller("Alpha", sample))
            assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
            assert _without_request_id(error.trailing_metadata()) == {"retry": "later"}
        seen = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("retry", "later"),))
        assert project.handler.seen == [seen] * 3


@pytest.mark.parametrize(
    ("body", "code", "details", "trailing"),
    [
        pytest.param(SWALLOWED, grpc.StatusCode.NOT_FOUND, "gone", {}, id="swallowed abort"),
        pytest.param(
            RICH, grpc.StatusCode.NOT_FOUND, "gone", {"grpc-status-details-bin": b"\x08\x05", "hint": "elsewhere"},
            id="rich status",
        ),
        pytest.param(
            "context.abort(grpc.StatusCode.OK, 'fine')", grpc.StatusCode.UNKNOWN, "internal server error", {}, id="OK"
        ),
        pytest.param(
            "context.abort(99, 'fine')", grpc.StatusCode.INTERNAL, "internal server error", {}, id="unknown code"
        ),
    ],
)  # fmt: skip
async def test_an_abort_ends_a_call_with_its_status(
    tmp_path: Path, body: str, code: grpc.StatusCode, details: str, trailing: dict[str, Any]
) -> None:
    async with served_kinds(tmp_path, alpha(body)) as project:
        error = await project.failure(lambda stub: stub.Alpha(project.pb.Sample()))
        assert (error.code(), error.details(), _without_request_id(error.trailing_metadata())) == (
            code,
            details,
            trailing,
        )


async def test_callbacks_run_in_order_after_the_call(tmp_path: Path) -> None:
    handler = alpha("""
self.context = context
assert context.add_callback(lambda: self.seen.append(context.is_active()))
assert context.add_callback(lambda: 1 / 0)
assert context.add_callback(self.left.set)
return payload
""")
    async with served_kinds(tmp_path, handler) as project:
        await project.ask(lambda stub: stub.Alpha(project.pb.Sample()))
        assert await trio.to_thread.run_sync(project.handler.left.wait, WAIT_SECONDS)
        assert project.handler.seen == [False]
        assert project.handler.context.add_callback(print) is False


@pytest.mark.parametrize(
    ("text", "seconds", "code"),
    [("cancel", WAIT_SECONDS, grpc.StatusCode.CANCELLED), ("", 2, grpc.StatusCode.DEADLINE_EXCEEDED)],
    ids=["cancelled by the method", "deadline"],
)
async def test_a_method_continues_after_the_end_of_its_call(
    tmp_path: Path, text: str, seconds: float, code: grpc.StatusCode
) -> None:
    async with served_kinds(tmp_path, WAITING) as project:
        error = await project.failure(lambda stub: stub.Alpha(project.pb.Sample(text=text), timeout=seconds))
        assert error.code() is code
    assert project.handler.seen == [False]
