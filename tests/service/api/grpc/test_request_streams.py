from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest
import trio
from tritonclient.utils import InferenceServerException

from ovmstrio.api.doors import KSERVE_GRPC
from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.request import InferRequest, InferResponse
from ovmstrio.protocol.descriptors import message_class
from tests.service.api.grpc.servers import Caller, Serving, serving_grpc
from tests.support import ir
from tests.support.both_doors import BothDoors, serving_both
from tests.support.grpc_clients import with_channel
from tests.support.pass_through import PassThrough
from tests.support.servables import EXACT
from tests.support.waits import WAIT_SECONDS

Request = message_class("inference.ModelInferRequest")


class Gated(PassThrough):
    """Answers a request with the parameter ``gate`` when the gate of that name is open."""

    def __init__(self, spec: ModelSpec, version: int) -> None:
        super().__init__(spec, version)
        self.gates: dict[Any, trio.Event] = defaultdict(trio.Event)
        self.arrived: dict[str, trio.Event] = defaultdict(trio.Event)
        self.done: list[str] = []
        self.ended: dict[str, trio.Event] = defaultdict(trio.Event)
        self.under_way = 0
        self.most_under_way = 0

    async def infer(self, request: InferRequest) -> InferResponse:
        """Wait for the gate of the request, if it names one."""
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


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Serving]:
    async def load(spec: ModelSpec, version: int, directory: Path) -> Gated:
        return Gated(spec, version)

    (tmp_path / "echo" / "1").mkdir(parents=True)
    async with serving_grpc(load, [ModelSpec(name="echo", base_path=tmp_path / "echo")]) as server:
        yield server


async def stream_of(served: Serving, *requests: bytes) -> tuple[list[Any], str]:
    """Send requests over one stream; return the replies and the status."""

    def work(channel: grpc.Channel) -> tuple[list[Any], str]:
        caller = Caller(channel)
        caller.send(*requests)
        caller.end()
        return caller.finish()[:2]

    return await with_channel(served.address, work)


def request(number: int, *, model: str = "echo", **parameters: Any) -> bytes:
    message = Request(model_name=model, id=str(number))
    message.inputs.add(name="x", datatype="FP32", shape=[1, 10])
    message.raw_input_contents.append(np.full(10, number, "<f4").tobytes())
    for name, value in parameters.items():
        field = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(message.parameters[name], field, value)
    serialised: bytes = message.SerializeToString()
    return serialised


def numbers(replies: list[Any]) -> list[float]:
    return [float(np.frombuffer(each.infer_response.raw_output_contents[0], "<f4")[0]) for each in replies]


async def test_concurrent_requests_of_a_stream_are_answered_in_order(served: Serving) -> None:
    servable = served.servable
    results: list[Any] = []

    async def ask() -> None:
        results.append(await stream_of(served, request(0), request(1, gate="slow"), request(2), request(3)))

    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await servable.arrived["1"].wait()
            for number in ("0", "2", "3"):
                await servable.ended[number].wait()
            servable.gates["slow"].set()
    ((replies, status),) = results
    assert (numbers(replies), status) == ([0, 1, 2, 3], "OK")
    assert [each.infer_response.id for each in replies] == ["0", "1", "2", "3"]
    assert servable.done[-1] == "1"


async def test_at_most_sixteen_requests_of_a_stream_run_at_once(served: Serving) -> None:
    replies, status = await stream_of(served, *(request(number) for number in range(100)))
    assert (numbers(replies), status) == ([*range(100)], "OK")
    assert 1 < served.servable.most_under_way <= 16


async def test_errors_are_messages_with_the_id_of_their_request(served: Serving) -> None:
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
async def test_the_final_response_is_marked_on_request(
    served: Serving, *, wanted: bool, marked: list[bool | None]
) -> None:
    options: dict[str, Any] = {"triton_enable_empty_final_response": wanted}
    replies, _ = await stream_of(served, request(0, **options), request(1, fail="it broke", **options))
    parameters = [each.infer_response.parameters for each in replies]
    found = [
        each["triton_final_response"].bool_param if "triton_final_response" in each else None for each in parameters
    ]
    assert found == marked


async def test_a_malformed_message_ends_the_stream_after_the_answers_to_earlier_requests(served: Serving) -> None:
    replies, status = await stream_of(served, request(0), request(1), b"\xff\xff\xff")
    assert (numbers(replies), status) == ([0, 1], "INVALID_ARGUMENT")


async def test_requests_of_a_client_that_leaves_are_cancelled(served: Serving) -> None:
    def work(channel: grpc.Channel) -> None:
        caller = Caller(channel)
        caller.send(request(0))
        caller.next()
        caller.send(request(1, block=True))
        trio.from_thread.run(served.servable.blocked.wait)
        caller.call.cancel()
        caller.end()

    await with_channel(served.address, work)
    await served.wait(served.servable.cancelled)


@pytest.fixture
async def sequences(tmp_path: Path) -> AsyncIterator[BothDoors]:
    base = ir.save(ir.accumulator(), tmp_path, "sums")
    async with serving_both([ModelSpec(name="sums", base_path=base, stateful=True, plugin_config=EXACT)]) as both:
        yield both


def drive(client: Any, module: Any, steps: list[tuple[int | str, float, bool, bool]]) -> list[Any]:
    """Send all steps over one stream before an answer is read; return results and errors."""
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
async def test_two_sequences_are_interleaved_on_one_stream(
    sequences: BothDoors, identities: tuple[int | str, int | str]
) -> None:
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
    returned = [each.as_numpy("sequence_id")[0] for each in results]
    assert [each.decode() if isinstance(each, bytes) else int(each) for each in returned] == [one, two] * 3


async def test_a_refused_step_ends_neither_its_sequence_nor_the_stream(sequences: BothDoors) -> None:
    steps: list[tuple[int | str, float, bool, bool]] = [
        (5, 1.0, True, False),
        (5, 1.0, True, False),
        (5, 1.0, False, True),
    ]
    first, second, third = await sequences.with_triton("grpc", lambda client, module: drive(client, module, steps))
    assert "Sequence with provided ID already exists" in str(second)
    assert [float(each.as_numpy("y")[0, 0]) for each in (first, third)] == [1, 2]


async def start_sequence(sequences: BothDoors, identity: int | str) -> Any:
    def work(client: Any, module: Any) -> Any:
        given = module.InferInput("x", [1, 2], "FP32")
        given.set_data_from_numpy(np.ones((1, 2), np.float32))
        return client.infer("sums", [given], sequence_id=identity, sequence_start=True).as_numpy("sequence_id").tolist()

    return await sequences.with_triton("grpc", work)


@pytest.mark.parametrize(
    ("identity", "found"),
    [
        ("12", 12),
        (12, 12),
        ("twelve", b"twelve"),
        ("-1", b"-1"),
        ("18446744073709551616", b"18446744073709551616"),
    ],
)
async def test_texts_of_digits_are_numeric_sequence_ids(
    sequences: BothDoors, identity: int | str, found: int | bytes
) -> None:
    assert await start_sequence(sequences, identity) == [found]
    (alive,) = sequences.plane.sequences("sums", "", KSERVE_GRPC)
    assert alive.id == (found.decode() if isinstance(found, bytes) else found)


async def test_a_sequence_id_has_at_most_256_characters(sequences: BothDoors) -> None:
    with pytest.raises(InferenceServerException, match="a text of at most 256 characters"):
        await start_sequence(sequences, "x" * 257)
