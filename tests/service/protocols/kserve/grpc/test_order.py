from __future__ import annotations

import gzip
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import h2.events
import numpy as np
import pytest
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.request import InferRequest
from ovmstrio.encoding.messages import METHOD, REQUEST, message_class
from ovmstrio.models.loading import load_model
from ovmstrio.models.sequences import SequenceManagers
from ovmstrio.protocols import grpc_codec
from ovmstrio.protocols.kserve.grpc_messages import decode_request
from tests.service.protocols.kserve.grpc.servers import (
    INFER,
    STREAM,
    Serving,
    open_peer,
    serving_grpc,
    streaming_server,
)
from tests.support import ir
from tests.support.loops import COINS, scheduled
from tests.support.op_pipelines import EchoExecutor, serving_pipeline
from tests.support.servables import EXACT
from tests.support.stub_registry import GRAPH
from tests.support.waits import until_async
from tests.unit.protocols.tensorflow.calls import array_of, predict_request, tensor
from tests.unit.transport.grpc.bytes_client import message
from tests.unit.transport.grpc.peers import Peer

_FRAME = 16_384
_TENSORFLOW = "/tensorflow.serving.PredictionService/Predict"


def _infer(number: int, value: float, *, start: bool = False) -> bytes:
    parameters = {"sequence_id": {"int64_param": number}, "sequence_start": {"bool_param": start}}
    given = [{"name": "x", "datatype": "FP32", "shape": [1, 2]}]
    raw = np.full((1, 2), value, "<f4").tobytes()
    request = message_class("inference.ModelInferRequest")
    message = request(model_name="m", parameters=parameters, inputs=given, raw_input_contents=[raw])
    return bytes(message.SerializeToString())


def _infer_answer(data: bytes) -> float:
    answer = message_class("inference.ModelInferResponse").FromString(data)
    return float(np.frombuffer(answer.raw_output_contents[0], "<f4")[0])


def _predict(number: int, value: float, *, start: bool = False) -> bytes:
    inputs = {
        "x": tensor("DT_FLOAT", (1, 2), float_val=[value, value]),
        "sequence_id": tensor("DT_UINT64", (1,), uint64_val=[number]),
        "sequence_control_input": tensor("DT_UINT32", (1,), uint32_val=[int(start)]),
    }
    return bytes(predict_request("m", inputs).SerializeToString())


def _predict_answer(data: bytes) -> float:
    answer = message_class("tensorflow.serving.PredictResponse").FromString(data)
    return float(array_of(answer.outputs["y"], "<f4")[0][0])


INTERFACES = {"KServe": (INFER, _infer, _infer_answer), "TensorFlow": (_TENSORFLOW, _predict, _predict_answer)}


@asynccontextmanager
async def connected(folder: Path, **limits: int) -> AsyncIterator[Peer]:
    base = ir.save(ir.accumulator(), folder, "m")
    spec = ModelSpec(name="m", base_path=base, plugin_config=EXACT, stateful=True, **limits)
    load = partial(load_model, managers=SequenceManagers())
    async with serving_grpc(load, [spec]) as serving, open_peer(serving.address) as peer:
        yield peer


def _send_compressed(peer: Peer, body: bytes) -> int:
    stream_id = peer.queue(INFER, None, ("grpc-encoding", "gzip"), end=False)
    framed = b"\1" + message(gzip.compress(body))[1:]
    for begin in range(0, len(framed), _FRAME):
        peer.h2.send_data(stream_id, framed[begin : begin + _FRAME], end_stream=begin + _FRAME >= len(framed))
    return stream_id


async def _answers(peer: Peer, calls: list[int], read: Callable[[bytes], float]) -> list[float]:
    for each in calls:
        await peer.wait_for(h2.events.StreamEnded, each)
        trailers = await peer.trailers(each)
        assert trailers["grpc-status"] == "0", trailers
    return [read(peer.body(each)[5:]) for each in calls]


@pytest.mark.parametrize("coin", COINS)
@pytest.mark.parametrize("interface", INTERFACES)
async def test_sequence_steps_of_one_read_run_in_order(tmp_path: Path, interface: str, coin: str) -> None:
    path, write, read = INTERFACES[interface]
    async with connected(tmp_path) as peer:
        with scheduled(coin):
            for turn in range(5):
                sent = [(number, 2.0**step, step == 0) for step in range(10) for number in (1, 2, 3)]
                calls = [peer.queue(path, write(10 * turn + n, value, start=start)) for n, value, start in sent]
                await peer.flush()
                sums = await _answers(peer, calls, read)
                assert sums == [2.0 * value - 1 for _, value, _ in sent]


@pytest.mark.parametrize("coin", COINS)
@pytest.mark.parametrize("most", [1, 3])
async def test_queued_sequence_steps_run_in_order(tmp_path: Path, most: int, coin: str) -> None:
    async with connected(tmp_path, max_concurrency=most, max_queue=50) as peer:
        with scheduled(coin):
            sent = [(number, 2.0**step, step == 0) for step in range(10) for number in (1, 2)]
            calls = [peer.queue(INFER, _infer(n, value, start=start)) for n, value, start in sent]
            await peer.flush()
            assert await _answers(peer, calls, _infer_answer) == [2.0 * value - 1 for _, value, _ in sent]


@pytest.mark.parametrize("coin", COINS)
async def test_later_steps_wait_for_a_step_that_is_inflated_in_a_thread(tmp_path: Path, coin: str) -> None:
    unknown = b"\xfa\x7d" + _varint(40_000) + Random(1).randbytes(40_000)
    async with connected(tmp_path) as peer:
        with scheduled(coin):
            calls = []
            for step in range(10):
                body = _infer(1, 2.0**step, start=not step)
                is_large = step in {0, 4}
                calls.append(_send_compressed(peer, body + unknown) if is_large else peer.queue(INFER, body))
            await peer.flush()
            sums = await _answers(peer, calls, _infer_answer)
    assert sums == [2.0 ** (step + 1) - 1 for step in range(10)]


def _varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])


@pytest.mark.parametrize("coin", COINS)
async def test_the_order_of_steps_is_that_of_their_last_bytes(tmp_path: Path, coin: str) -> None:
    async with connected(tmp_path) as peer:
        with scheduled(coin):
            random = Random(coin)
            (started,) = [peer.queue(INFER, _infer(1, 0, start=True))]
            await peer.flush()
            await _answers(peer, [started], _infer_answer)
            bodies = {}
            for step in range(8):
                stream_id = peer.queue(INFER, None, end=False)
                body = message(_infer(1, 2.0**step))
                cut = random.randrange(len(body))
                peer.h2.send_data(stream_id, body[:cut])
                bodies[stream_id] = (2.0**step, body[cut:])
            await peer.flush()
            order = list(bodies)
            random.shuffle(order)
            for stream_id in order:
                peer.h2.send_data(stream_id, bodies[stream_id][1])
            await peer.flush()
            for stream_id in order:
                peer.h2.end_stream(stream_id)
            await peer.flush()
            sums = await _answers(peer, order, _infer_answer)
    assert sums == np.cumsum([bodies[each][0] for each in order]).tolist()


async def test_failed_and_reset_steps_do_not_delay_later_ones(tmp_path: Path) -> None:
    async with connected(tmp_path) as peer:
        bad = [peer.queue(INFER, b"\xff\xff garbage"), peer.queue(INFER, _infer(77, 1))]
        bad.append(peer.queue(INFER, _infer(1, 1).replace(b"\n\x01m", b"\n\x01n")))
        reset = peer.queue(INFER, _infer(5, 1, start=True))
        peer.h2.reset_stream(reset)
        calls = [peer.queue(INFER, _infer(1, 1, start=not step)) for step in range(3)]
        await peer.flush()
        assert await _answers(peer, calls, _infer_answer) == [1, 2, 3]
        assert [(await peer.trailers(each))["grpc-status"] for each in bad] == ["3", "5", "5"]
        again: Any = [peer.queue(INFER, _infer(1, 1)) for _ in range(3)]
        await peer.flush()
        assert await _answers(peer, again, _infer_answer) == [4, 5, 6]


NUMBERS = list(range(20))


def _paddle(number: int) -> bytes:
    return bytes(REQUEST(key=["x"], value=[str(number)], name="uci").SerializeToString())


def _pipeline_infer(number: int) -> bytes:
    given = [{"name": "x", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [str(number).encode()]}}]
    request = message_class("inference.ModelInferRequest")
    return bytes(request(model_name="uci", inputs=given).SerializeToString())


PIPELINE_INTERFACES = {"Paddle Serving": (METHOD, _paddle), "KServe": (INFER, _pipeline_infer)}


@pytest.mark.parametrize("coin", COINS)
@pytest.mark.parametrize("limits", [{}, {"max_concurrency": 1, "max_queue": 50}, {"max_concurrency": 3}], ids=str)
@pytest.mark.parametrize("interface", PIPELINE_INTERFACES)
async def test_pipeline_requests_of_one_read_run_in_order(interface: str, limits: dict[str, Any], coin: str) -> None:
    path, write = PIPELINE_INTERFACES[interface]
    executor = EchoExecutor()
    async with serving_pipeline(executor, **limits) as running, open_peer(running.grpc[0]) as peer:
        with scheduled(coin):
            calls = [peer.queue(path, write(number)) for number in NUMBERS]
            await peer.flush()
            for each in calls:
                await peer.wait_for(h2.events.StreamEnded, each)
        assert [(await peer.trailers(each))["grpc-status"] for each in calls] == ["0"] * len(calls)
    assert [int(request.values[0]) for request in executor.requests] == NUMBERS


async def test_failed_and_reset_pipeline_requests_do_not_delay_later_ones() -> None:
    executor = EchoExecutor()
    async with serving_pipeline(executor) as running, open_peer(running.grpc[0]) as peer:
        bad = [peer.queue(METHOD, b"\xff\xff"), peer.queue(METHOD, REQUEST(name="nope").SerializeToString())]
        peer.h2.reset_stream(peer.queue(METHOD, _paddle(99)))
        calls = [peer.queue(METHOD, _paddle(number)) for number in NUMBERS]
        await peer.flush()
        for each in (*bad, *calls):
            await peer.wait_for(h2.events.StreamEnded, each)
        assert [(await peer.trailers(each))["grpc-status"] for each in bad] == ["3", "0"]
    assert [int(request.values[0]) for request in executor.requests if request.values != ["99"]] == NUMBERS


_PREDICT = "/tensorflow.serving.PredictionService/Predict"
_QUEUED = 'ovmstrio_queued_requests{name="echo"} 1.0'
_GARBAGE = b"\xff\xff\xff\xff"


def _echo(name: str = "echo", **parameters: object) -> bytes:
    given = {key: {"string_param": str(value)} for key, value in parameters.items()}
    request = message_class("inference.ModelInferRequest")
    return bytes(request(model_name=name, id=str(parameters.get("id", "")), parameters=given).SerializeToString())


def _echo_predict() -> bytes:
    spec = {"name": "echo", "version": {"value": 2}}
    return bytes(message_class("tensorflow.serving.PredictRequest")(model_spec=spec).SerializeToString())


async def _check_all_places_free(serving: Serving, peer: Peer) -> None:
    assert _QUEUED not in serving.metrics
    last = peer.queue(INFER, _echo())
    await peer.flush()
    assert (await peer.trailers(last))["grpc-status"] == "0"


@pytest.mark.parametrize(("path", "body"), [(INFER, _echo()), (_PREDICT, _echo_predict())])
async def test_a_call_beyond_the_queue_is_refused_undecoded_and_other_calls_are_answered(
    serving: Serving, path: str, body: bytes
) -> None:
    await serving.apply(max_concurrency=1, max_queue=0)
    async with open_peer(serving.address) as peer:
        peer.queue(INFER, _echo(block=1))
        await peer.flush()
        await serving.wait(serving.servable.blocked)
        refused = peer.queue(path, body + _GARBAGE)
        await peer.flush()
        trailers = await peer.trailers(refused)
        assert trailers["grpc-status"] == "8"
        assert "1 calls under way and 0 waiting, and may have 1 (max_concurrency)" in trailers["grpc-message"]
        assert (trailers["grpc-retry-pushback-ms"], trailers["retry-after"]) == ("1000", "1")
        metadata = peer.queue("/inference.GRPCInferenceService/ModelMetadata", b"\x0a\x04echo")
        unknown = peer.queue(INFER, _echo("none"))
        await peer.flush()
        assert (await peer.trailers(metadata))["grpc-status"] == "0"
        assert (await peer.trailers(unknown))["grpc-status"] == "5"


@pytest.mark.parametrize(("path", "body"), [(INFER, _echo()), (_PREDICT, _echo_predict())])
async def test_a_service_without_limits_refuses_calls_after_deadlines_have_passed(
    serving: Serving, path: str, body: bytes
) -> None:
    async with open_peer(serving.address) as peer:
        first = peer.queue(INFER, _echo())
        await peer.flush()
        assert (await peer.trailers(first))["grpc-status"] == "0"
        for _ in range(10):
            late = peer.queue(INFER, _echo(block=1), ("grpc-timeout", "50m"))
            await peer.flush()
            assert (await peer.trailers(late))["grpc-status"] == "4"
        for _ in range(8):
            serving.servable.blocked = trio.Event()
            peer.queue(INFER, _echo(block=1), ("grpc-timeout", "1H"))
            await peer.flush()
            await serving.wait(serving.servable.blocked)
        refused = peer.queue(path, body + _GARBAGE, ("grpc-timeout", "50m"))
        await peer.flush()
        trailers = await peer.trailers(refused)
        assert trailers["grpc-status"] == "8"
        assert trailers["grpc-message"].startswith('"echo" is overloaded: 8 calls are under way')
        assert (trailers["grpc-retry-pushback-ms"], trailers["retry-after"]) == ("1000", "1")


async def test_queued_calls_leave_with_their_deadline_or_reset_and_keep_their_order(serving: Serving) -> None:
    await serving.apply(max_concurrency=1, max_queue=4)
    async with open_peer(serving.address) as peer:
        first = peer.queue(INFER, _echo(block=1))
        late = peer.queue(INFER, _echo(id="late"), ("grpc-timeout", "50m"))
        reset = peer.queue(INFER, _echo(id="reset"))
        waiting = [peer.queue(INFER, _echo(id=name)) for name in ("a", "b")]
        await peer.flush()
        assert (await peer.trailers(late))["grpc-status"] == "4"
        peer.h2.reset_stream(reset)
        peer.h2.reset_stream(first)
        await peer.flush()
        for each in waiting:
            assert (await peer.trailers(each))["grpc-status"] == "0"
        assert [request.id for request in serving.servable.requests] == ["", "a", "b"]
        await _check_all_places_free(serving, peer)


async def test_a_repeated_name_takes_the_place_of_the_last_one(serving: Serving) -> None:
    await serving.apply(max_concurrency=1, max_queue=0)
    async with open_peer(serving.address) as peer:
        peer.queue(INFER, _echo(block=1))
        twice = peer.queue(INFER, b"\x0a\x04none" + _echo())
        await peer.flush()
        assert (await peer.trailers(twice))["grpc-status"] == "8"


async def test_a_stream_beyond_the_queue_is_refused_undecoded(tmp_path: Path) -> None:
    async with streaming_server(tmp_path) as serving:
        await serving.apply(max_concurrency=1, max_queue=0)
        async with open_peer(serving.address) as peer:
            first = peer.queue(STREAM, _echo(GRAPH, hold=1))
            await peer.flush()
            await serving.wait(serving.servable.holding)
            refused = peer.queue(STREAM, _echo(GRAPH) + _GARBAGE)
            await peer.flush()
            trailers = await peer.trailers(refused)
            assert trailers["grpc-status"] == "8"
            assert "1 calls under way and 0 waiting" in trailers["grpc-message"]
            serving.servable.release()
            assert (await peer.trailers(first))["grpc-status"] == "0"
            wrong = peer.queue(STREAM, _echo(GRAPH) + _GARBAGE)
            await peer.flush()
            assert (await peer.trailers(wrong))["grpc-status"] == "3"
        (counted,) = (line for line in serving.metrics.splitlines() if 'code="Overloaded"' in line)
        assert 'method="ModelInferStream"' in counted
        assert 'ovmstrio_rejected_requests_total{name="graph",reason="queue_full"} 1.0' in serving.metrics


async def test_requests_of_a_stream_to_a_model_are_queued_undecoded(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    await serving.apply(max_concurrency=1, max_queue=1)
    read: list[str] = []

    def spy(data: bytes) -> InferRequest:
        request = decode_request(data)
        read.append(request.id)
        return request

    monkeypatch.setitem(grpc_codec._DECODERS, InferRequest, spy)  # noqa: SLF001 - decoding is not observable otherwise
    async with open_peer(serving.address) as peer:
        holder = peer.queue(INFER, _echo(block=1))
        await peer.flush()
        await serving.wait(serving.servable.blocked)
        waiting = peer.queue(STREAM, _echo(id="waits"))
        await peer.flush()
        await until_async(lambda: _QUEUED in serving.metrics)
        assert read == []
        refused = peer.queue(STREAM, _echo(id="refused"))
        await peer.flush()
        assert (await peer.trailers(refused))["grpc-status"] == "0"
        assert read == ["refused"]
        peer.h2.reset_stream(holder)
        await peer.flush()
        assert (await peer.trailers(waiting))["grpc-status"] == "0"
        assert read == ["refused", "waits"]
        await _check_all_places_free(serving, peer)
