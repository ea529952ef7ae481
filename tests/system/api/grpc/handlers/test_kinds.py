"""Tests of the four kinds of calls, with clients of grpcio."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.handler_grpc import HANDS_BACK, served
from tests.support.protos import FOUR_KINDS, PRIMES

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


@pytest.mark.parametrize("handler", [SYNC, ASYNC, ITERABLES], ids=["plain", "async", "iterables"])
async def test_each_method_of_a_service_is_called_by_its_own_name(tmp_path: Path, handler: str) -> None:
    """All four kinds work in one service, with plain and with async methods."""
    package = f"kinds_{tmp_path.name}"
    async with served(tmp_path, FOUR_KINDS.format(package=package), handler) as project:
        sample = project.pb.Sample

        def samples() -> Iterator[Any]:
            return (sample(number=number) for number in range(1, 51))

        def work(stub: Any) -> tuple[Any, ...]:
            return (
                stub.Alpha(sample(text="x")).text,
                stub.Beta(samples()).number,
                [(each.text, each.number) for each in stub.Gamma(sample(number=50))],
                [(each.text, each.number) for each in stub.Delta(samples())],
            )

        assert await project.ask(work) == (
            "alpha x",
            1275,
            [("gamma", number) for number in range(50)],
            [("delta", number * 2) for number in range(1, 51)],
        )


@pytest.mark.parametrize("handler", [SYNC, ASYNC], ids=["plain", "async"])
async def test_both_directions_of_a_stream_flow_at_once(tmp_path: Path, handler: str) -> None:
    """Each reply comes before the client sends its next request."""
    async with served(tmp_path, FOUR_KINDS.format(package=f"ping_{tmp_path.name}"), handler) as project:
        sample = project.pb.Sample

        def work(stub: Any) -> list[int]:
            questions: queue.SimpleQueue[Any] = queue.SimpleQueue()
            questions.put(sample(number=1))
            received = []
            for reply in stub.Delta(iter(questions.get, None)):
                received.append(reply.number)
                questions.put(sample(number=reply.number) if reply.number < 100 else None)
            return received

        assert await project.ask(work) == [2, 4, 8, 16, 32, 64, 128]


async def test_a_stream_may_be_empty_both_ways(tmp_path: Path) -> None:
    """No requests and no replies are an ordinary end."""
    async with served(tmp_path, FOUR_KINDS.format(package="nothing"), SYNC) as project:
        sample = project.pb.Sample
        assert await project.ask(lambda stub: stub.Beta(iter(())).number) == 0
        assert await project.ask(lambda stub: list(stub.Gamma(sample()))) == []
        assert await project.ask(lambda stub: list(stub.Delta(iter(())))) == []


async def test_twenty_megabytes_pass_both_ways(tmp_path: Path) -> None:
    """Messages are not limited in size, unary or streamed."""
    handler = HANDS_BACK
    async with served(tmp_path, FOUR_KINDS.format(package="large"), handler) as project:
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


async def test_the_first_primes_are_streamed(tmp_path: Path) -> None:
    """A generator gives as many values as it was asked for."""
    handler = """
        class Handler:
            def __init__(self, config, proto_module_pb2):
                self.proto_module_pb2 = proto_module_pb2

            def Predict(self, payload):
                found = []
                number = 2
                while len(found) < payload.prime_numbers_to_generate:
                    if all(number % prime for prime in found):
                        found.append(number)
                        yield self.proto_module_pb2.Output(prime_number=number)
                    number += 1
    """
    async with served(tmp_path, PRIMES, handler) as project:
        request = project.pb.Input(prime_numbers_to_generate=5)
        assert await project.ask(lambda stub: [each.prime_number for each in stub.Predict(request)]) == [
            2, 3, 5, 7, 11,
        ]  # fmt: skip


async def test_a_message_that_is_filled_again_is_sent_as_it_was(tmp_path: Path) -> None:
    """A generator that yields one object again and again does not change what it has yielded before."""
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
    """A client that goes on sending gets the reply all the same, of plain and async methods."""
    handler = """
        class Handler:
            def __init__(self, proto_module_pb2):
                pass

            def Alpha(self):
                pass

            def Beta(self, payload):
                return next(payload)

            def Gamma(self):
                pass

            async def Delta(self, payload):
                async for each in payload:
                    yield each
                    return
    """
    async with served(tmp_path, FOUR_KINDS.format(package="early"), handler) as project:

        def requests() -> Iterator[Any]:
            while True:
                yield project.pb.Sample(number=7)

        assert await project.ask(lambda stub: stub.Beta(requests()).number) == 7
        assert await project.ask(lambda stub: [each.number for each in stub.Delta(requests())]) == [7]


async def test_a_decorated_async_method_gets_its_requests(tmp_path: Path) -> None:
    """A plain wrapper around an async method does not change what its payload is."""
    handler = """
        import functools


        def decorated(method):
            @functools.wraps(method)
            def wrapper(*args, **kwargs):
                return method(*args, **kwargs)

            return wrapper


        class Handler:
            def __init__(self, proto_module_pb2):
                self.pb = proto_module_pb2

            def Alpha(self):
                pass

            @decorated
            async def Beta(self, payload):
                return self.pb.Sample(number=sum([each.number async for each in payload]))

            def Gamma(self):
                pass

            @decorated
            async def Delta(self, payload):
                async for each in payload:
                    yield each
    """
    async with served(tmp_path, FOUR_KINDS.format(package="decorated"), handler) as project:

        def samples() -> Iterator[Any]:
            return (project.pb.Sample(number=number) for number in range(4))

        assert await project.ask(lambda stub: stub.Beta(samples()).number) == 6
        assert await project.ask(lambda stub: [each.number for each in stub.Delta(samples())]) == [0, 1, 2, 3]
