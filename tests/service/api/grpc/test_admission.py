"""Over gRPC a call that is one too many is refused before its message is read, and one that has to wait waits so."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from ovmstrio.api import grpc_codec
from ovmstrio.api.admitted_calls import first_text
from ovmstrio.api.doors import KSERVE_GRPC
from ovmstrio.api.kserve.grpc.request_decoding import decode_request
from ovmstrio.config.specs import GraphSpec, ModelSpec
from ovmstrio.core.errors import Overloaded
from ovmstrio.core.request import InferRequest
from ovmstrio.protocol.descriptors import message_class
from tests.service.api.grpc.conftest import Serving
from tests.service.api.grpc.streams import STREAM, Streaming, open_peer, streaming_server
from tests.support.streaming_servables import GRAPH
from tests.support.waits import WAIT_SECONDS
from tests.unit.wire.grpc.bytes_client import message, request_headers
from tests.unit.wire.grpc.peers import Peer

_KSERVE = "/inference.GRPCInferenceService/ModelInfer"
_TENSORFLOW = "/tensorflow.serving.PredictionService/Predict"
_QUEUED = 'ovmstrio_queued_requests{name="echo"} 1.0'
_GARBAGE = b"\xff\xff\xff\xff"


async def _limit(serving: Serving, most: int, queue: int) -> None:
    limits = {"max_concurrency": most, "max_queue": queue}
    await serving.registry.apply([serving.spec.model_copy(update=limits)])


def _send(peer: Peer, body: bytes, path: str = _KSERVE, *extra: tuple[str, str]) -> int:
    stream_id = int(peer.h2.get_next_available_stream_id())
    peer.h2.send_headers(stream_id, request_headers(path, *extra))
    peer.h2.send_data(stream_id, message(body), end_stream=True)
    return stream_id


def _infer(name: str = "echo", **parameters: object) -> bytes:
    given = {key: {"string_param": str(value)} for key, value in parameters.items()}
    written: bytes = message_class("inference.ModelInferRequest")(
        model_name=name, id=str(parameters.get("id", "")), parameters=given
    ).SerializeToString()
    return written


def _predict() -> bytes:
    written: bytes = message_class("tensorflow.serving.PredictRequest")(
        model_spec={"name": "echo", "version": {"value": 2}}
    ).SerializeToString()
    return written


async def _peer(serving: Serving) -> Peer:
    host, _, port = serving.address.rpartition(":")
    return await Peer(await trio.open_tcp_stream(host, int(port))).start()


async def _check_all_places_free(serving: Serving, peer: Peer) -> None:
    """Check that no call waits, and that a call is answered though the service has one place."""
    assert _QUEUED not in serving.metrics
    last = _send(peer, _infer())
    await peer.flush()
    with trio.fail_after(60):
        assert (await peer.trailers(last))["grpc-status"] == "0"


@pytest.mark.parametrize(("path", "body"), [(_KSERVE, _infer()), (_TENSORFLOW, _predict())])
async def test_a_call_beyond_the_queue_is_refused_unread(serving: Serving, path: str, body: bytes) -> None:
    """What follows the name is not looked at; the trailers say when to come again, as clients read it."""
    await _limit(serving, 1, 0)
    peer = await _peer(serving)
    async with peer.stream:
        _send(peer, _infer(block=1))
        await peer.flush()
        with trio.fail_after(WAIT_SECONDS):
            await serving.servable.blocked.wait()
        refused = _send(peer, body + _GARBAGE, path)
        await peer.flush()
        trailers = await peer.trailers(refused)
        assert trailers["grpc-status"] == "8"
        assert "1 calls under way and 0 waiting, and may have 1 (max_concurrency)" in trailers["grpc-message"]
        assert (trailers["grpc-retry-pushback-ms"], trailers["retry-after"]) == ("1000", "1")
        metadata = _send(peer, b"\x0a\x04echo", "/inference.GRPCInferenceService/ModelMetadata")
        unknown = _send(peer, _infer("none"))
        await peer.flush()
        assert (await peer.trailers(metadata))["grpc-status"] == "0"
        assert (await peer.trailers(unknown))["grpc-status"] == "5"


async def test_who_waits_leaves_with_its_deadline_and_its_client(serving: Serving) -> None:
    """Of four that wait one has no more time and one is reset; the others are answered in their order."""
    await _limit(serving, 1, 4)
    peer = await _peer(serving)
    async with peer.stream:
        first = _send(peer, _infer(block=1))
        late = _send(peer, _infer(id="late"), _KSERVE, ("grpc-timeout", "50m"))
        reset = _send(peer, _infer(id="reset"))
        waiting = [_send(peer, _infer(id=name)) for name in ("a", "b")]
        await peer.flush()
        assert (await peer.trailers(late))["grpc-status"] == "4"
        peer.h2.reset_stream(reset)
        peer.h2.reset_stream(first)
        await peer.flush()
        for each in waiting:
            assert (await peer.trailers(each))["grpc-status"] == "0"
        assert [request.id for request in serving.servable.requests] == ["", "a", "b"]
        await _check_all_places_free(serving, peer)


async def test_a_name_that_is_said_twice_counts_as_it_is_read(serving: Serving) -> None:
    """The place of the service that is called is taken, whatever a message says first."""
    await _limit(serving, 1, 0)
    peer = await _peer(serving)
    async with peer.stream:
        _send(peer, _infer(block=1))
        twice = _send(peer, b"\x0a\x04none" + _infer())
        await peer.flush()
        assert (await peer.trailers(twice))["grpc-status"] == "8"


async def _limit_streams(serving: Streaming, repository: Path, queue: int) -> None:
    base, limits = repository / GRAPH, {"max_concurrency": 1, "max_queue": queue}
    graph = GraphSpec(name=GRAPH, base_path=base, graph_path=base / "graph.pbtxt", **limits)
    await serving.registry.apply([graph, ModelSpec(name="echo", base_path=repository / "echo", **limits)])


async def test_a_stream_has_one_place_while_it_is_open(tmp_path: Path) -> None:
    """However many requests it has; when it ends the next one may be opened."""
    async with streaming_server(tmp_path) as serving:
        await _limit_streams(serving, tmp_path, 0)
        plane = serving.plane
        door = KSERVE_GRPC
        for _ in range(2):
            async with plane.open_stream(InferRequest(GRAPH), door) as stream:
                await stream.send(InferRequest(GRAPH))
                with pytest.raises(Overloaded):
                    async with plane.open_stream(InferRequest(GRAPH), door):
                        pass
                stream.end()
                async for _ in stream:
                    pass
        async with plane.open_stream(InferRequest(GRAPH), door) as stream:
            stream.end()


async def test_a_stream_beyond_the_queue_is_refused_before_its_first_message_is_read(tmp_path: Path) -> None:
    """What follows the name is not looked at; once the first stream has ended, it is what is wrong."""
    async with streaming_server(tmp_path) as serving:
        await _limit_streams(serving, tmp_path, 0)
        async with open_peer(serving.address) as peer:
            first = _send(peer, _infer(GRAPH, hold=1), STREAM)
            await peer.flush()
            await serving.wait(serving.servable.holding)
            refused = _send(peer, _infer(GRAPH) + _GARBAGE, STREAM)
            await peer.flush()
            trailers = await peer.trailers(refused)
            assert trailers["grpc-status"] == "8"
            assert "1 calls under way and 0 waiting" in trailers["grpc-message"]
            serving.servable.release()
            assert (await peer.trailers(first))["grpc-status"] == "0"
            wrong = _send(peer, _infer(GRAPH) + _GARBAGE, STREAM)
            await peer.flush()
            assert (await peer.trailers(wrong))["grpc-status"] == "3"
        (counted,) = (line for line in serving.metrics.splitlines() if 'code="Overloaded"' in line)
        assert 'method="ModelInferStream"' in counted
        assert 'ovmstrio_refused_requests_total{name="graph"} 1.0' in serving.metrics


async def test_requests_of_a_stream_to_a_model_wait_unread(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a place of its own, and is decoded when it has one; one that is refused is told which it is."""
    await _limit(serving, 1, 1)
    read: list[str] = []

    def spy(data: bytes) -> InferRequest:
        request = decode_request(data)
        read.append(request.id)
        return request

    monkeypatch.setitem(grpc_codec._DECODERS, InferRequest, spy)  # noqa: SLF001 - decoding shows nowhere else
    peer = await _peer(serving)
    async with peer.stream:
        holder = _send(peer, _infer(block=1))
        await peer.flush()
        with trio.fail_after(WAIT_SECONDS):
            await serving.servable.blocked.wait()
        waiting = _send(peer, _infer(id="waits"), STREAM)
        await peer.flush()
        with trio.fail_after(10):
            while _QUEUED not in serving.metrics:
                await trio.lowlevel.checkpoint()
        assert read == []
        refused = _send(peer, _infer(id="refused"), STREAM)
        await peer.flush()
        assert (await peer.trailers(refused))["grpc-status"] == "0"
        assert read == ["refused"]
        peer.h2.reset_stream(holder)
        await peer.flush()
        assert (await peer.trailers(waiting))["grpc-status"] == "0"
        assert read == ["refused", "waits"]
        await _check_all_places_free(serving, peer)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"\x0a\x04echo\x12\x011", b"echo"),
        (b"\x0a\x00", b""),
        (b"", b""),
        (b"\x0a", b""),
        (b"\x12\x04echo", b""),
        (b"\x0a\x80\x01" + b"n" * 200, b"n" * 128),
        (b"\x0a\xff\xff\xff\xff\xff", b""),
        (b"\x0a\xff\x7f" + b"n" * 20_000, b""),
    ],
)
def test_the_name_is_found_where_it_is_first(data: bytes, found: bytes) -> None:
    """Anything else is left to the parser."""
    assert first_text(data) == found
