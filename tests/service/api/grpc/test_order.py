"""Requests of one sequence that come together over one connection run in the order in which they have come."""

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
from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.protocol.descriptors import message_class
from ovmstrio.runtimes.models.load_model import load_model
from ovmstrio.runtimes.models.sequences import SequenceManagers
from ovmstrio.server.grpc_front_end import GrpcFrontEnd
from tests.support import ir
from tests.support.scheduling import COINS, scheduled
from tests.support.servables import EXACT
from tests.support.stub_registry import registry_of
from tests.unit.wire.grpc.bytes_client import message, request_headers
from tests.unit.wire.grpc.peers import Peer

_KSERVE = "/inference.GRPCInferenceService/ModelInfer"
_FRAME = 16_384
_TENSORFLOW = "/tensorflow.serving.PredictionService/Predict"


@asynccontextmanager
async def connected(folder: Path, **limits: int) -> AsyncIterator[Peer]:
    """Serve an accumulator, and connect to it."""
    managers = SequenceManagers()
    registry = registry_of(partial(load_model, managers=managers), poll_seconds=0)
    base = ir.save(ir.accumulator(), folder, "m")
    async with trio.open_nursery() as nursery:
        await nursery.start(registry.run)
        await registry.apply([ModelSpec(name="m", base_path=base, plugin_config=EXACT, stateful=True, **limits)])
        plane = DataPlane(registry)
        (address,) = await nursery.start(GrpcFrontEnd(plane, ["127.0.0.1:0"]).serve)
        plane.begin_serving()
        host, _, port = address.rpartition(":")
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            yield await Peer(stream).start()
        nursery.cancel_scope.cancel()


def _infer(number: int, value: float, *, start: bool = False) -> bytes:
    parameters = {"sequence_id": {"int64_param": number}, "sequence_start": {"bool_param": start}}
    given = [{"name": "x", "datatype": "FP32", "shape": [1, 2]}]
    raw = np.full((1, 2), value, "<f4").tobytes()
    request = message_class("inference.ModelInferRequest")
    written: bytes = request(
        model_name="m", parameters=parameters, inputs=given, raw_input_contents=[raw]
    ).SerializeToString()
    return written


def _infer_answer(data: bytes) -> float:
    answer = message_class("inference.ModelInferResponse").FromString(data)
    return float(np.frombuffer(answer.raw_output_contents[0], "<f4")[0])


def _predict(number: int, value: float, *, start: bool = False) -> bytes:
    one = {"dim": [{"size": 1}]}
    inputs = {
        "x": {"dtype": 1, "tensor_shape": {"dim": [{"size": 1}, {"size": 2}]}, "float_val": [value, value]},
        "sequence_id": {"dtype": 23, "tensor_shape": one, "uint64_val": [number]},
        "sequence_control_input": {"dtype": 22, "tensor_shape": one, "uint32_val": [int(start)]},
    }
    request = message_class("tensorflow.serving.PredictRequest")
    written: bytes = request(model_spec={"name": "m"}, inputs=inputs).SerializeToString()
    return written


def _predict_answer(data: bytes) -> float:
    answer = message_class("tensorflow.serving.PredictResponse").FromString(data)
    return float(np.frombuffer(answer.outputs["y"].tensor_content, "<f4")[0])


DOORS = {
    "KServe": (_KSERVE, _infer, _infer_answer),
    "TensorFlow": (_TENSORFLOW, _predict, _predict_answer),
}


def _send(peer: Peer, path: str, body: bytes, *, compressed: bool = False) -> int:
    """Put one call into what is sent next."""
    stream_id = int(peer.h2.get_next_available_stream_id())
    extra = [("grpc-encoding", "gzip")] if compressed else []
    peer.h2.send_headers(stream_id, request_headers(path, *extra))
    framed = b"\1" + message(gzip.compress(body))[1:] if compressed else message(body)
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
@pytest.mark.parametrize("door", DOORS)
async def test_calls_of_one_read_run_in_their_order(tmp_path: Path, door: str, coin: str) -> None:
    """Ten steps of three sequences each in one packet: each sum is that of the steps before, whatever trio does."""
    path, write, read = DOORS[door]
    async with connected(tmp_path) as peer:
        with scheduled(coin):
            for turn in range(5):
                sent = [(number, 2.0**step, step == 0) for step in range(10) for number in (1, 2, 3)]
                calls = [_send(peer, path, write(10 * turn + n, value, start=start)) for n, value, start in sent]
                await peer.flush()
                sums = await _answers(peer, calls, read)
                assert sums == [2.0 * value - 1 for _, value, _ in sent]


@pytest.mark.parametrize("coin", COINS)
@pytest.mark.parametrize("most", [1, 3])
async def test_queues_keep_the_order(tmp_path: Path, most: int, coin: str) -> None:
    """Where few calls may be under way at once, the others wait in the order in which they have come."""
    async with connected(tmp_path, max_concurrency=most, max_queue=50) as peer:
        with scheduled(coin):
            sent = [(number, 2.0**step, step == 0) for step in range(10) for number in (1, 2)]
            calls = [_send(peer, _KSERVE, _infer(n, value, start=start)) for n, value, start in sent]
            await peer.flush()
            assert await _answers(peer, calls, _infer_answer) == [2.0 * value - 1 for _, value, _ in sent]


@pytest.mark.parametrize("coin", COINS)
async def test_a_step_that_takes_time_to_decode_keeps_its_place(tmp_path: Path, coin: str) -> None:
    """A large compressed one is inflated in a thread; smaller ones behind it wait for it, calls of others do not."""
    unknown = b"\xfa\x7d" + _varint(40_000) + Random(1).randbytes(40_000)
    async with connected(tmp_path) as peer:
        with scheduled(coin):
            calls = []
            for step in range(10):
                body = _infer(1, 2.0**step, start=not step)
                compressed = step in {0, 4}
                calls.append(_send(peer, _KSERVE, body + unknown * compressed, compressed=compressed))
            await peer.flush()
            sums = await _answers(peer, calls, _infer_answer)
    assert sums == [2.0 ** (step + 1) - 1 for step in range(10)]


def _varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])


@pytest.mark.parametrize("coin", COINS)
async def test_the_last_byte_of_a_message_decides(tmp_path: Path, coin: str) -> None:
    """A call that was begun first, and is whole last, is the last; cut wherever it may be."""
    async with connected(tmp_path) as peer:
        with scheduled(coin):
            random = Random(coin)
            (started,) = [_send(peer, _KSERVE, _infer(1, 0, start=True))]
            await peer.flush()
            await _answers(peer, [started], _infer_answer)
            bodies = {}
            for step in range(8):
                stream_id = int(peer.h2.get_next_available_stream_id())
                peer.h2.send_headers(stream_id, request_headers(_KSERVE))
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


async def test_a_call_that_fails_holds_up_nobody(tmp_path: Path) -> None:
    """Calls that are reset, garbage, of models that there are not, or wrong: those behind them are answered."""
    async with connected(tmp_path) as peer:
        bad = [_send(peer, _KSERVE, b"\xff\xff garbage"), _send(peer, _KSERVE, _infer(77, 1))]
        bad.append(_send(peer, _KSERVE, _infer(1, 1).replace(b"\n\x01m", b"\n\x01n")))
        reset = _send(peer, _KSERVE, _infer(5, 1, start=True))
        peer.h2.reset_stream(reset)
        calls = [_send(peer, _KSERVE, _infer(1, 1, start=not step)) for step in range(3)]
        await peer.flush()
        assert await _answers(peer, calls, _infer_answer) == [1, 2, 3]
        assert [(await peer.trailers(each))["grpc-status"] for each in bad] == ["3", "5", "5"]
        again: Any = [_send(peer, _KSERVE, _infer(1, 1)) for _ in range(3)]
        await peer.flush()
        assert await _answers(peer, again, _infer_answer) == [4, 5, 6]
