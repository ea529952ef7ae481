from __future__ import annotations

from pathlib import Path

import pytest

from ovmstrio.api import grpc_codec
from ovmstrio.api.kserve.grpc.request_decoding import decode_request
from ovmstrio.core.request import InferRequest
from ovmstrio.protocol.descriptors import message_class
from tests.service.api.grpc.servers import INFER, STREAM, Serving, open_peer, streaming_server
from tests.support.streaming_servables import GRAPH
from tests.support.waits import until_async
from tests.unit.wire.grpc.peers import Peer

_TENSORFLOW = "/tensorflow.serving.PredictionService/Predict"
_QUEUED = 'ovmstrio_queued_requests{name="echo"} 1.0'
_GARBAGE = b"\xff\xff\xff\xff"


def _infer(name: str = "echo", **parameters: object) -> bytes:
    given = {key: {"string_param": str(value)} for key, value in parameters.items()}
    request = message_class("inference.ModelInferRequest")
    return bytes(request(model_name=name, id=str(parameters.get("id", "")), parameters=given).SerializeToString())


def _predict() -> bytes:
    spec = {"name": "echo", "version": {"value": 2}}
    return bytes(message_class("tensorflow.serving.PredictRequest")(model_spec=spec).SerializeToString())


async def _check_all_places_free(serving: Serving, peer: Peer) -> None:
    assert _QUEUED not in serving.metrics
    last = peer.queue(INFER, _infer())
    await peer.flush()
    assert (await peer.trailers(last))["grpc-status"] == "0"


@pytest.mark.parametrize(("path", "body"), [(INFER, _infer()), (_TENSORFLOW, _predict())])
async def test_a_call_beyond_the_queue_is_refused_undecoded_and_other_calls_are_answered(
    serving: Serving, path: str, body: bytes
) -> None:
    await serving.apply(max_concurrency=1, max_queue=0)
    async with open_peer(serving.address) as peer:
        peer.queue(INFER, _infer(block=1))
        await peer.flush()
        await serving.wait(serving.servable.blocked)
        refused = peer.queue(path, body + _GARBAGE)
        await peer.flush()
        trailers = await peer.trailers(refused)
        assert trailers["grpc-status"] == "8"
        assert "1 calls under way and 0 waiting, and may have 1 (max_concurrency)" in trailers["grpc-message"]
        assert (trailers["grpc-retry-pushback-ms"], trailers["retry-after"]) == ("1000", "1")
        metadata = peer.queue("/inference.GRPCInferenceService/ModelMetadata", b"\x0a\x04echo")
        unknown = peer.queue(INFER, _infer("none"))
        await peer.flush()
        assert (await peer.trailers(metadata))["grpc-status"] == "0"
        assert (await peer.trailers(unknown))["grpc-status"] == "5"


async def test_queued_calls_leave_with_their_deadline_or_reset_and_keep_their_order(serving: Serving) -> None:
    await serving.apply(max_concurrency=1, max_queue=4)
    async with open_peer(serving.address) as peer:
        first = peer.queue(INFER, _infer(block=1))
        late = peer.queue(INFER, _infer(id="late"), ("grpc-timeout", "50m"))
        reset = peer.queue(INFER, _infer(id="reset"))
        waiting = [peer.queue(INFER, _infer(id=name)) for name in ("a", "b")]
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
        peer.queue(INFER, _infer(block=1))
        twice = peer.queue(INFER, b"\x0a\x04none" + _infer())
        await peer.flush()
        assert (await peer.trailers(twice))["grpc-status"] == "8"


async def test_a_stream_beyond_the_queue_is_refused_undecoded(tmp_path: Path) -> None:
    async with streaming_server(tmp_path) as serving:
        await serving.apply(max_concurrency=1, max_queue=0)
        async with open_peer(serving.address) as peer:
            first = peer.queue(STREAM, _infer(GRAPH, hold=1))
            await peer.flush()
            await serving.wait(serving.servable.holding)
            refused = peer.queue(STREAM, _infer(GRAPH) + _GARBAGE)
            await peer.flush()
            trailers = await peer.trailers(refused)
            assert trailers["grpc-status"] == "8"
            assert "1 calls under way and 0 waiting" in trailers["grpc-message"]
            serving.servable.release()
            assert (await peer.trailers(first))["grpc-status"] == "0"
            wrong = peer.queue(STREAM, _infer(GRAPH) + _GARBAGE)
            await peer.flush()
            assert (await peer.trailers(wrong))["grpc-status"] == "3"
        (counted,) = (line for line in serving.metrics.splitlines() if 'code="Overloaded"' in line)
        assert 'method="ModelInferStream"' in counted
        assert 'ovmstrio_refused_requests_total{name="graph"} 1.0' in serving.metrics


async def test_requests_of_a_stream_to_a_model_are_queued_undecoded(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    await serving.apply(max_concurrency=1, max_queue=1)
    read: list[str] = []

    def spy(data: bytes) -> InferRequest:
        request = decode_request(data)
        read.append(request.id)
        return request

    monkeypatch.setitem(grpc_codec._DECODERS, InferRequest, spy)  # noqa: SLF001 - decoding shows nowhere else
    async with open_peer(serving.address) as peer:
        holder = peer.queue(INFER, _infer(block=1))
        await peer.flush()
        await serving.wait(serving.servable.blocked)
        waiting = peer.queue(STREAM, _infer(id="waits"))
        await peer.flush()
        await until_async(lambda: _QUEUED in serving.metrics)
        assert read == []
        refused = peer.queue(STREAM, _infer(id="refused"))
        await peer.flush()
        assert (await peer.trailers(refused))["grpc-status"] == "0"
        assert read == ["refused"]
        peer.h2.reset_stream(holder)
        await peer.flush()
        assert (await peer.trailers(waiting))["grpc-status"] == "0"
        assert read == ["refused", "waits"]
        await _check_all_places_free(serving, peer)
