from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.work.isolation.isolated_code import Isolation
from tests.support.handler_grpc import HANDS_BACK, served, served_kinds
from tests.support.protos import PRIMES

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
            return self.pb.Sample(text="beta", number=sum(each.number for each in payload))

        def Gamma(self, payload, context):
            for number in range(payload.number):
                yield self.pb.Sample(text="gamma", number=number)

        def Delta(self, payload):
            for each in payload:
                yield self.pb.Sample(text="delta", number=each.number * 2)
"""
ASYNC = """
    class Handler:
        def __init__(self, proto_module_pb2):
            self.pb = proto_module_pb2

        async def Alpha(self, payload):
            return self.pb.Sample(text="alpha " + payload.text)

        async def Beta(self, context, payload):
            return self.pb.Sample(text="beta", number=sum([each.number async for each in payload]))

        async def Gamma(self, payload, context):
            for number in range(payload.number):
                yield self.pb.Sample(text="gamma", number=number)

        async def Delta(self, payload):
            async for each in payload:
                yield self.pb.Sample(text="delta", number=each.number * 2)
"""
ITERABLES = """
    class Handler:
        def __init__(self, proto_module_pb2):
            self.pb = proto_module_pb2

        def Alpha(self, payload):
            return self.pb.Sample(text="alpha " + payload.text)

        def Beta(self, payload):
            return self.pb.Sample(text="beta", number=sum(each.number for each in payload))

        def Gamma(self, payload):
            return [self.pb.Sample(text="gamma", number=number) for number in range(payload.number)]

        def Delta(self, payload):
            return map(lambda each: self.pb.Sample(text="delta", number=each.number * 2), payload)
"""


EARLY = HANDS_BACK.replace("list(payload)[-1]", "next(payload)").replace("def Delta", "async def Delta")
DECORATED = """
    import functools


    def decorated(method):
        @functools.wraps(method)
        def wrapper(*args, **kwargs):
            return method(*args, **kwargs)

        return wrapper

""" + ASYNC.replace("        async def", "        @decorated\n        async def")


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


@pytest.mark.parametrize("handler", [SYNC, ASYNC], ids=["plain", "async"])
async def test_each_reply_of_a_stream_arrives_before_the_next_request(tmp_path: Path, handler: str) -> None:
    async with served_kinds(tmp_path, handler) as project:
        sample = project.pb.Sample

        def work(stub: Any) -> list[int]:
            requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
            requests.put(sample(number=1))
            received = []
            for reply in stub.Delta(iter(requests.get, None)):
                received.append(reply.number)
                requests.put(sample(number=reply.number) if reply.number < 100 else None)
            return received

        assert await project.ask(work) == [2, 4, 8, 16, 32, 64, 128]


async def test_messages_of_20_mb_pass_both_ways(tmp_path: Path) -> None:
    async with served_kinds(tmp_path, HANDS_BACK) as project:
        large = project.pb.Sample(data=bytes(range(256)) * (80 * 1024))
        assert large.ByteSize() > 20_000_000

        def work(stub: Any) -> bool:
            replies = [
                stub.Alpha(large),
                stub.Beta(iter([large])),
                *stub.Gamma(large),
                *stub.Delta(iter([large])),
            ]
            return [reply == large for reply in replies] == [True] * 4

        assert await project.ask(work)


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


async def test_a_method_may_answer_before_the_last_request(tmp_path: Path) -> None:
    answer_once = "async for each in payload:\n                    yield each\n                    return"
    async with served_kinds(tmp_path, EARLY.replace("yield from payload", answer_once)) as project:

        def requests() -> Iterator[Any]:
            while True:
                yield project.pb.Sample(number=7)

        assert await project.ask(lambda stub: stub.Beta(requests()).number) == 7
        assert await project.ask(lambda stub: [each.number for each in stub.Delta(requests())]) == [7]
