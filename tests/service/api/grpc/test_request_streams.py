"""ModelStreamInfer to what takes single requests: answers in order, errors of one request alone, and a bound."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.request import InferRequest, InferResponse
from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.protocol.descriptors import message_class
from ovmstrio.server.grpc_front_end import GrpcFrontEnd
from tests.support import ir
from tests.support.both_doors import BothDoors, serving_both
from tests.support.grpc_clients import with_channel
from tests.support.pass_through import PassThrough
from tests.support.servables import EXACT
from tests.support.stub_registry import registry_of
from tests.support.waits import WAIT_SECONDS

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
Request = message_class("inference.ModelInferRequest")
Response = message_class("inference.ModelStreamInferResponse")


class Gated(PassThrough):
    """Answers a request with the parameter ``gate`` when the gate of that name is opened."""

    def __init__(self, spec: ModelSpec, version: int) -> None:
        super().__init__(spec, version)
        self.gates: dict[Any, trio.Event] = defaultdict(trio.Event)
        self.arrived: dict[str, trio.Event] = defaultdict(trio.Event)
        self.done: list[str] = []
        self.ended: dict[str, trio.Event] = defaultdict(trio.Event)
        self.under_way = 0
        self.most_under_way = 0

    async def infer(self, request: InferRequest) -> InferResponse:
        """Wait for the gate, if there is one."""
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        self.arrived[request.id].set()
        try:
            if "gate" in request.parameters:
                await self.gates[request.parameters["gate"]].wait()
            answer = await super().infer(request)
        finally:
            self.under_way -= 1
        self.done.append(request.id)
        self.ended[request.id].set()
        return answer


class Served:
    """A server of the model ``echo``."""

    def __init__(self, address: str, servable: Gated) -> None:
        self.address = address
        self.servable = servable


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """Serve as long as the test lasts."""
    async with _serving(tmp_path) as server:
        yield server


@asynccontextmanager
async def _serving(tmp_path: Path) -> AsyncIterator[Served]:
    async def load(spec: ModelSpec, version: int, directory: Path) -> Gated:
        await trio.lowlevel.checkpoint()
        return Gated(spec, version)

    registry = registry_of(load, poll_seconds=0)
    (tmp_path / "echo" / "1").mkdir(parents=True)
    front_end = GrpcFrontEnd(DataPlane(registry), ["127.0.0.1:0"])
    async with trio.open_nursery() as nursery:
        await nursery.start(registry.run)
        await registry.apply([ModelSpec(name="echo", base_path=tmp_path / "echo")])
        (address,) = await nursery.start(front_end.serve)
        servable: Any = registry.peek("echo")
        yield Served(address, servable)
        nursery.cancel_scope.cancel()


def request(number: int, *, model: str = "echo", **parameters: Any) -> bytes:
    """Make a request whose id and first number are ``number``."""
    message = Request(model_name=model, id=str(number))
    message.inputs.add(name="x", datatype="FP32", shape=[1, 10])
    message.raw_input_contents.append(np.full(10, number, "<f4").tobytes())
    for name, value in parameters.items():
        field = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(message.parameters[name], field, value)
    serialised: bytes = message.SerializeToString()
    return serialised


class Caller:
    """The client's end of one stream."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        method = channel.stream_stream(STREAM, response_deserializer=Response.FromString)
        self.replies = method(iter(self._requests.get, None), timeout=WAIT_SECONDS)

    def send(self, *requests: bytes) -> None:
        """Send requests."""
        for each in requests:
            self._requests.put(each)

    def finish(self) -> tuple[list[Any], str]:
        """Send no more, and give all replies and the status."""
        self._requests.put(None)
        replies = []
        try:
            replies.extend(self.replies)
        except grpc.RpcError as error:
            return replies, error.code().name
        return replies, "OK"


async def stream_of(served: Served, *requests: bytes) -> tuple[list[Any], str]:
    """Send requests over one stream; gives the replies and the status."""

    def work(channel: grpc.Channel) -> tuple[list[Any], str]:
        caller = Caller(channel)
        caller.send(*requests)
        return caller.finish()

    return await with_channel(served.address, work)


def numbers(replies: list[Any]) -> list[float]:
    """Give the first number of each reply."""
    return [float(np.frombuffer(each.infer_response.raw_output_contents[0], "<f4")[0]) for each in replies]


async def test_answers_come_in_the_order_of_their_requests(served: Served) -> None:
    """A request that is done before an earlier one waits for it; both were under way."""
    servable = served.servable
    got: list[Any] = []

    async def ask() -> None:
        got.append(await stream_of(served, request(0), request(1, gate="slow"), request(2), request(3)))

    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await servable.arrived["1"].wait()
            for number in ("0", "2", "3"):
                await servable.ended[number].wait()
            servable.gates["slow"].set()

    ((replies, status),) = got
    assert (numbers(replies), status) == ([0, 1, 2, 3], "OK")
    assert [each.infer_response.id for each in replies] == ["0", "1", "2", "3"]
    assert servable.done[-1] == "1"


async def test_only_so_many_requests_of_a_stream_are_under_way(served: Served) -> None:
    """A hundred requests are answered, and never more than sixteen at once."""
    replies, status = await stream_of(served, *(request(number) for number in range(100)))

    assert (numbers(replies), status) == ([*range(100)], "OK")
    assert 1 < served.servable.most_under_way <= 16


async def test_an_error_is_a_message_and_the_stream_goes_on(served: Served) -> None:
    """Whose request it was is in the message: of the model, of the data plane, and of a name that is unknown."""
    replies, status = await stream_of(
        served, request(0), request(1, fail="it broke"), request(2, model="nothing"), request(3)
    )

    assert status == "OK"
    assert [each.error_message for each in replies] == [
        "",
        "it broke",
        "Mediapipe graph definition with requested name is not found",
        "",
    ]
    assert [each.infer_response.id for each in replies] == ["0", "1", "2", "3"]
    assert numbers([replies[0], replies[3]]) == [0, 3]


@pytest.mark.parametrize(("wanted", "marked"), [(True, [True, True]), (False, [None, None])])
async def test_the_last_answer_to_a_request_is_marked_where_it_asks_for_that(
    served: Served, *, wanted: bool, marked: list[bool | None]
) -> None:
    """Each request has one answer, which is its last one, errors too; without the parameter nothing is said."""
    options: dict[str, Any] = {"triton_enable_empty_final_response": wanted}
    replies, _ = await stream_of(served, request(0, **options), request(1, fail="it broke", **options))

    parameters = [each.infer_response.parameters for each in replies]
    found = [
        each["triton_final_response"].bool_param if "triton_final_response" in each else None for each in parameters
    ]
    assert found == marked


async def test_a_malformed_message_ends_the_stream_behind_what_was_asked_before(served: Served) -> None:
    """Requests that were read are answered first."""
    replies, status = await stream_of(served, request(0), request(1), b"\xff\xff\xff")

    assert (numbers(replies), status) == ([0, 1], "INVALID_ARGUMENT")


async def test_requests_of_a_client_that_leaves_are_cancelled(served: Served) -> None:
    """Those that are under way end with their stream."""

    def work(channel: grpc.Channel) -> None:
        caller = Caller(channel)
        caller.send(request(0))
        next(caller.replies)
        caller.send(request(1, block=True))
        trio.from_thread.run(served.servable.blocked.wait)
        caller.replies.cancel()
        caller.send()

    with trio.fail_after(WAIT_SECONDS):
        await with_channel(served.address, work)
        await served.servable.cancelled.wait()


# Sequences, as Triton's example of them has it


@pytest.fixture
async def sequences(tmp_path: Path) -> AsyncIterator[BothDoors]:
    """Serve a model that sums up what a sequence has brought."""
    base = ir.save(ir.accumulator(), tmp_path, "sums")
    async with serving_both([ModelSpec(name="sums", base_path=base, stateful=True, plugin_config=EXACT)]) as both:
        yield both


def drive(client: Any, module: Any, steps: list[tuple[int | str, float, bool, bool]]) -> list[Any]:
    """Send all steps over one stream before any answer is read; gives results or errors."""
    answers: SimpleQueue[Any] = SimpleQueue()
    client.start_stream(callback=lambda result, error: answers.put(error or result))
    for number, (identity, value, start, end) in enumerate(steps):
        given = module.InferInput("x", [1, 2], "FP32")
        given.set_data_from_numpy(np.full((1, 2), value, np.float32))
        client.async_stream_infer(
            "sums", [given], request_id=str(number), sequence_id=identity, sequence_start=start, sequence_end=end
        )
    try:
        return [answers.get(timeout=WAIT_SECONDS) for _ in steps]
    except Empty:
        pytest.fail("not every step was answered")
    finally:
        client.stop_stream()


@pytest.mark.parametrize("identities", [(7, 8), ("0f8fad5b-d9cb-469f-a165-70867728950e", "größe"), (9, "nine")])
async def test_sequences_go_on_over_a_stream(sequences: BothDoors, identities: tuple[int | str, int | str]) -> None:
    """Two sequences are interleaved on one stream; ids may be texts, which answers give back as they were."""
    one, two = identities
    steps = [
        (one, 1.0, True, False),
        (two, 100.0, True, False),
        (one, 2.0, False, False),
        (two, 200.0, False, False),
        (one, 3.0, False, True),
        (two, 300.0, False, True),
    ]

    results = await sequences.with_triton("grpc", lambda client, module: drive(client, module, steps))

    assert [float(each.as_numpy("y")[0, 0]) for each in results] == [1, 100, 3, 300, 6, 600]
    assert [each.get_response().id for each in results] == [str(number) for number in range(6)]
    told = [each.as_numpy("sequence_id")[0] for each in results]
    assert [each.decode() if isinstance(each, bytes) else int(each) for each in told] == [one, two] * 3


async def test_a_step_that_fails_leaves_the_sequence_and_the_stream(sequences: BothDoors) -> None:
    """A start of what goes on already is refused in its place; the sequence goes on."""
    steps: list[tuple[int | str, float, bool, bool]] = [
        (5, 1.0, True, False),
        (5, 1.0, True, False),
        (5, 1.0, False, True),
    ]

    first, second, third = await sequences.with_triton("grpc", lambda client, module: drive(client, module, steps))

    assert "Sequence with provided ID already exists" in str(second)
    assert [float(each.as_numpy("y")[0, 0]) for each in (first, third)] == [1, 2]


@pytest.mark.parametrize(
    ("identity", "found"),
    [
        ("12", [12]),
        (12, [12]),
        ("twelve", [b"twelve"]),
        ("-1", [b"-1"]),
        ("18446744073709551616", [b"18446744073709551616"]),
    ],
)
async def test_a_text_of_digits_is_a_number_and_any_other_text_an_id(
    sequences: BothDoors, identity: int | str, found: list[Any]
) -> None:
    """The list of live sequences has texts as they were given."""

    def work(client: Any, module: Any) -> Any:
        given = module.InferInput("x", [1, 2], "FP32")
        given.set_data_from_numpy(np.ones((1, 2), np.float32))
        return client.infer("sums", [given], sequence_id=identity, sequence_start=True).as_numpy("sequence_id").tolist()

    from ovmstrio.api.doors import KSERVE_GRPC

    assert await sequences.with_triton("grpc", work) == found
    (alive,) = sequences.plane.sequences("sums", "", KSERVE_GRPC)
    assert alive.id == (found[0].decode() if isinstance(found[0], bytes) else found[0])


async def test_an_id_has_a_bound(sequences: BothDoors) -> None:
    """More than 256 characters are refused."""
    from tritonclient.utils import InferenceServerException

    def work(client: Any, module: Any) -> None:
        given = module.InferInput("x", [1, 2], "FP32")
        given.set_data_from_numpy(np.ones((1, 2), np.float32))
        client.infer("sums", [given], sequence_id="x" * 257, sequence_start=True)

    with pytest.raises(InferenceServerException, match="a text of at most 256 characters"):
        await sequences.with_triton("grpc", work)
