"""Models and pipelines of other servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError, DeadlineExceeded, InvalidRequest, ModelFailure, NotFound
from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.observability.tracing.spans import QuietSpan, RecordedSpan
from ovmstrio.protocol.descriptors import message_class
from ovmstrio.protocol.status_errors import Unreachable
from ovmstrio.runtimes.models.load_model import load_model
from ovmstrio.runtimes.ops.config.op_settings import OpSettings
from ovmstrio.runtimes.ops.predictor.kserve import PipelinePredictor
from ovmstrio.runtimes.ops.predictor.make import PredictorMaker
from ovmstrio.runtimes.ops.predictor.protocol import FeedMismatch, FeedTypeError, Predictor
from ovmstrio.server.grpc_front_end import GrpcFrontEnd
from tests.support import ir
from tests.support.op_pipelines import EchoExecutor, serving_pipeline
from tests.support.paddle_files import write_prototxt
from tests.support.stub_registry import registry_of
from tests.support.waits import WAIT_SECONDS

PACKAGE = "baidu.paddle_serving.pipeline_serving"
ROW = np.arange(10, dtype=np.float64).reshape(1, 10)
NOBODY = "127.0.0.1:1"


async def remote(*endpoints: str, **settings: Any) -> Predictor:
    """Make the predictor of an Op whose model is elsewhere."""
    return await PredictorMaker(is_thread_op=True)(
        OpSettings(**{"name": "dummy", "client_type": "kserve", "server_endpoints": endpoints} | settings), 0
    )


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    """Serve a model that adds one to ``b`` and gives ``a``, and one of strings, as long as the test lasts."""
    models = {"dummy": ir.dummy(), "strings": ir.string_passthrough()}
    specs = [ModelSpec(name=name, base_path=ir.save(model, tmp_path, name)) for name, model in models.items()]
    registry = registry_of(load_model, poll_seconds=0)
    front_end = GrpcFrontEnd(DataPlane(registry), ["127.0.0.1:0"])
    async with trio.open_nursery() as nursery:
        await nursery.start(registry.run)
        assert not (await registry.apply(specs)).failures
        yield (await nursery.start(front_end.serve))[0]
        nursery.cancel_scope.cancel()


@pytest.fixture
def described(tmp_path: Path) -> str:
    """Describe that model with aliases."""
    write_prototxt(tmp_path, {"b": "feed"}, {"a": "sum"}, shape=10)
    return str(tmp_path)


@contextmanager
def served(answer: Callable[..., Any], *, takes_context: bool = False) -> Iterator[str]:
    """Serve a pipeline: a function from request to response."""
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        handler = grpc.unary_unary_rpc_method_handler(
            lambda request, context: answer(request, context) if takes_context else answer(request),
            request_deserializer=message_class(f"{PACKAGE}.Request").FromString,
            response_serializer=message_class(f"{PACKAGE}.Response").SerializeToString,
        )
        methods = {"inference": handler}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(f"{PACKAGE}.PipelineService", methods)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


def echo(request: Any) -> Any:
    """Answer what was asked."""
    return message_class(f"{PACKAGE}.Response")(key=request.key, value=request.value, tensors=request.tensors)


@pytest.mark.parametrize("kind", ["kserve", "grpc"])
async def test_kserve_with_a_description(address: str, described: str, kind: str) -> None:
    """Aliases and types are those of the description, whatever the server calls them."""
    predictor = await remote(address, client_type=kind, client_config=described)

    assert (list(predictor.feed_names), list(predictor.fetch_names)) == (["feed"], ["sum"])
    predictor.check({"feed": ROW})
    answer = await predictor.predict({"feed": ROW, "feed.lod": np.array([0, 1])})
    single = await predictor.predict({"feed": ROW[0]}, ["sum"], batch=False)
    predictor.close()

    assert list(answer) == list(single) == ["sum"]
    np.testing.assert_array_equal(answer["sum"], ROW + 1)
    np.testing.assert_array_equal(single["sum"], ROW + 1)


async def test_kserve_without_a_description(address: str) -> None:
    """Names and types are those of the server; everything is fetched."""
    predictor = await remote(address, name="op", model_name="dummy")

    answer = await predictor.predict({"b": ROW.astype(np.float32)})
    predictor.close()

    assert list(answer) == ["a"]
    np.testing.assert_array_equal(answer["a"], ROW + 1)


async def test_kserve_takes_texts(address: str) -> None:
    """Lists of texts travel as strings."""
    predictor = await remote(address, name="strings")

    answer = await predictor.predict({"strings": ["one", "zwölf"]})
    predictor.close()

    assert [text.decode() for text in next(iter(answer.values()))] == ["one", "zwölf"]


async def test_kserve_refuses_before_it_sends(described: str) -> None:
    """With a description, names and kinds are checked here."""
    predictor = await remote(NOBODY, client_config=described)
    for feed, error in (({"b": ROW}, FeedMismatch), ({"feed": 3}, FeedTypeError)):
        with pytest.raises(error):
            predictor.check(feed)
        with pytest.raises(error):
            await predictor.predict(feed)
    with pytest.raises(FeedMismatch, match=r"unknown \['b'\]"):
        await predictor.predict({"feed": ROW}, ["b"])
    predictor.close()


async def test_kserve_tells_what_the_server_said(address: str) -> None:
    """Errors of the server come as the classes that it raised."""
    predictor = await remote(address)
    with pytest.raises(InvalidRequest):
        await predictor.predict({"b": ROW})
    predictor.close()
    missing = await remote(address, model_name="missing")
    with pytest.raises(NotFound):
        await missing.predict({"b": ROW})
    missing.close()


async def test_an_endpoint_that_is_gone_is_passed_over(address: str) -> None:
    """As long as one endpoint answers, every call succeeds; with none, all are named."""
    predictor = await remote(NOBODY, address)
    for _ in range(3):
        assert list(await predictor.predict({"b": ROW.astype(np.float32)})) == ["a"]
    predictor.close()

    alone = await remote(NOBODY)
    with pytest.raises(Unreachable, match=NOBODY):
        await alone.predict({"b": ROW.astype(np.float32)})
    alone.close()


async def test_pipeline_of_texts() -> None:
    """Arrays are sent as numpy prints them, texts as they are; each value comes back as a list of one."""
    with served(echo) as pipeline:
        predictor = await remote(pipeline, client_type="pipeline_grpc")
        answer = await predictor.predict({"x": np.arange(2000), "name": "a", "list": [1, 2]})
        some = await predictor.predict({"x": np.ones(1, np.float32), "y": "b"}, ["x"])
        predictor.close()

    (printed,) = answer.pop("x")
    assert printed.startswith("array([   0,    1,")
    assert printed.count(",") == 1999
    assert answer == {"name": ["a"], "list": ["[1, 2]"]}
    assert some == {"x": ["array([1.], dtype=float32)"]}


async def test_a_call_is_a_part_of_the_ops_span_and_the_other_server_is_told_of_it() -> None:
    """Of one that is not recorded, too: then the other need not record it either."""
    heard: list[str] = []
    ended: list[RecordedSpan] = []

    class Sink:
        def span_ended(self, span: RecordedSpan) -> None:
            ended.append(span)

    def note(request: Any, context: Any) -> Any:
        heard.append(dict(context.invocation_metadata())["traceparent"])
        return echo(request)

    with served(note, takes_context=True) as pipeline:
        predictor = await remote(pipeline, client_type="pipeline_grpc")
        op = RecordedSpan("op", [Sink()], 7)
        with op.as_current():
            assert await predictor.predict({"x": "1"}) == {"x": ["1"]}
        with QuietSpan(8).as_current():
            await predictor.predict({"x": "1"})
        predictor.close()
    (span,) = ended
    assert (span.name, span.kind, span.parent) == (f"call {PACKAGE}.PipelineService/inference", "client", op.number)
    assert (span.attributes["rpc.system.name"], span.attributes["server.address"]) == ("grpc", pipeline)
    assert heard[0] == f"00-{7:032x}-{span.span_id}-01"
    assert (heard[1][:35], heard[1][-2:]) == (f"00-{8:032x}", "00")


async def test_pipeline_of_our_own() -> None:
    """A pipeline that we serve gives texts to one that asks with texts, and tensors to one that asks with tensors."""
    for packs in (False, True):
        async with serving_pipeline(EchoExecutor(as_tensors=packs)) as served_here:
            predictor = await remote(served_here.grpc[0], client_type="pipeline_grpc", fetch_list=("x",))
            assert isinstance(predictor, PipelinePredictor)
            predictor.packs_tensors = packs
            answer = await predictor.predict({"x": ROW, "y": ROW + 1})
            predictor.close()
        assert list(answer) == ["x"]
        if packs:
            np.testing.assert_array_equal(answer["x"], ROW)
        else:
            assert answer == {"x": [repr(ROW)]}


async def test_pipeline_of_tensors() -> None:
    """With tensors, arrays come back as arrays and texts as texts."""
    with served(echo) as pipeline:
        predictor = await remote(pipeline, client_type="pipeline_grpc")
        assert isinstance(predictor, PipelinePredictor)
        predictor.packs_tensors = True
        answer = await predictor.predict({"x": ROW, "n": np.array([3], np.int64), "name": "a"})
        with pytest.raises(FeedTypeError, match="complex128"):
            await predictor.predict({"x": np.array([1j])})
        predictor.close()

    np.testing.assert_array_equal(answer["x"], ROW)
    assert (answer["n"].dtype, answer["n"].tolist(), answer["name"]) == (np.int64, [3], "a")


async def test_pipeline_errors() -> None:
    """An error of the other pipeline, and what it does not give, are told."""
    failed = message_class(f"{PACKAGE}.Response")(err_no=5000, err_msg="no feed")
    with served(lambda _: failed) as pipeline:
        predictor = await remote(pipeline, client_type="pipeline_grpc")
        with pytest.raises(ModelFailure, match="error 5000: no feed"):
            await predictor.predict({"x": "1"})
        predictor.close()
    with served(echo) as pipeline:
        predictor = await remote(pipeline, client_type="pipeline_grpc", fetch_list=("y",))
        with pytest.raises(FeedMismatch, match=r"unknown \['y'\]\. The model gives \['x'\]"):
            await predictor.predict({"x": "1"})
        predictor.close()


async def test_calls_end_in_time_and_when_cancelled() -> None:
    """A server that does not answer is given up after the Op's timeout, and at once when nobody wants the answer."""
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    with listener.socket:
        silent = f"127.0.0.1:{listener.socket.getsockname()[1]}"
        predictor = await remote(silent, client_type="pipeline_grpc", timeout=200)
        with pytest.raises((DeadlineExceeded, Unreachable), match=silent):
            await predictor.predict({"x": "1"})
        patient = await remote(silent, client_type="pipeline_grpc")
        with trio.fail_after(WAIT_SECONDS), trio.move_on_after(0.05) as scope:
            await patient.predict({"x": "1"})
        assert scope.cancelled_caught
        for each in (predictor, patient):
            each.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"client_type": "brpc"}, r"op\.dummy\.client_type: .*found brpc.*write client_type: kserve"),
        ({"client_type": None}, "client_type: .*expected kserve"),
        ({"use_encryption_model": True}, "encrypted models are not supported.*decrypt the model"),
        ({"client_config": "/nowhere"}, "no such file or folder .*found /nowhere"),
    ],
)
async def test_refuses_at_the_start(settings: dict[str, Any], message: str) -> None:
    """What only Paddle's own clients can do ends the start, with the way out."""
    with pytest.raises(ConfigError, match=message):
        await remote(NOBODY, **settings)


async def test_unknown_fetch_is_refused_at_the_start(described: str) -> None:
    """With a description, a wrong fetch list ends the start."""
    with pytest.raises(ConfigError, match=r"op\.dummy\.fetch_list: .*unknown \['other'\]"):
        await remote(NOBODY, client_config=described, fetch_list=("other",))
