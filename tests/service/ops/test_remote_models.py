from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError, DeadlineExceeded, InvalidRequest, ModelFailure, NotFound
from ovmstrio.encoding.messages import message_class
from ovmstrio.encoding.status_errors import Unreachable
from ovmstrio.ext.ops import Op
from ovmstrio.models.loading import load_model
from ovmstrio.ops.executor import open_executor
from ovmstrio.ops.predictor.factory import PipelinePredictor, PredictorFactory
from ovmstrio.ops.predictor.protocol import FeedMismatch, FeedTypeError, Predictor
from ovmstrio.ops.settings import OpSettings
from ovmstrio.telemetry.spans import RecordedSpan, UnrecordedSpan
from tests.service.protocols.kserve.grpc.servers import serving_grpc
from tests.support import ir
from tests.support.op_pipelines import EchoExecutor, serving_pipeline
from tests.support.ops import asking, settings, single
from tests.support.paddle_files import write_prototxt
from tests.support.waits import WAIT_SECONDS

PACKAGE = "baidu.paddle_serving.pipeline_serving"
ROW = np.arange(10, dtype=np.float64).reshape(1, 10)
NOBODY = "127.0.0.1:1"


async def remote(*endpoints: str, **settings: Any) -> Predictor:
    values = {"name": "dummy", "client_type": "kserve", "server_endpoints": endpoints} | settings
    return await PredictorFactory(is_thread_op=True)(OpSettings(**values), 0)


@asynccontextmanager
async def remote_pipeline(
    answer: Callable[..., Any], *, packs: bool = False, **settings: Any
) -> AsyncIterator[Predictor]:
    """Serve a pipeline, a function from request and context to response, and yield its predictor."""
    with served(answer) as endpoint:
        predictor = await remote(endpoint, client_type="pipeline_grpc", **settings)
        assert isinstance(predictor, PipelinePredictor)
        predictor.packs_tensors = packs
        yield predictor
        predictor.close()


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    """Serve a model that adds one to ``b`` and gives ``a``, and one of strings, as long as the test lasts."""
    models = {"dummy": ir.dummy(), "strings": ir.string_passthrough()}
    specs = [ModelSpec(name=name, base_path=ir.save(model, tmp_path, name)) for name, model in models.items()]
    async with serving_grpc(load_model, specs) as serving:
        yield serving.address


@pytest.fixture
def described(tmp_path: Path) -> str:
    write_prototxt(tmp_path, {"b": "feed"}, {"a": "sum"}, shape=10)
    return str(tmp_path)


@contextmanager
def served(answer: Callable[..., Any]) -> Iterator[str]:
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        handler = grpc.unary_unary_rpc_method_handler(
            answer,
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


def echo(request: Any, context: Any = None) -> Any:
    return message_class(f"{PACKAGE}.Response")(key=request.key, value=request.value, tensors=request.tensors)


@pytest.mark.parametrize("kind", ["kserve", "grpc"])
async def test_a_described_model_has_its_aliases(address: str, described: str, kind: str) -> None:
    predictor = await remote(address, client_type=kind, client_config=described)
    assert (list(predictor.feed_names), list(predictor.fetch_names)) == (["feed"], ["sum"])
    predictor.check({"feed": ROW})
    answer = await predictor.predict({"feed": ROW, "feed.lod": np.array([0, 1])})
    single = await predictor.predict({"feed": ROW[0]}, ["sum"], batch=False)
    predictor.close()
    assert list(answer) == list(single) == ["sum"]
    np.testing.assert_array_equal(answer["sum"], ROW + 1)
    np.testing.assert_array_equal(single["sum"], ROW + 1)


@pytest.mark.parametrize(
    ("name", "feed", "output"),
    [
        ("dummy", {"b": ROW.astype(np.float32)}, (ROW + 1).tolist()),
        ("strings", {"strings": ["one", "zwölf"]}, [b"one", "zwölf".encode()]),
    ],
)
async def test_a_model_without_a_description_has_the_names_of_its_server(
    address: str, name: str, feed: dict[str, Any], output: list[Any]
) -> None:
    predictor = await remote(address, name="op", model_name=name)
    (fetched,) = (await predictor.predict(feed)).values()
    predictor.close()
    assert fetched.tolist() == output


async def test_wrong_feeds_of_a_described_model_are_not_sent(described: str) -> None:
    predictor = await remote(NOBODY, client_config=described)
    for feed, error in (({"b": ROW}, FeedMismatch), ({"feed": 3}, FeedTypeError)):
        with pytest.raises(error):
            predictor.check(feed)
        with pytest.raises(error):
            await predictor.predict(feed)
    with pytest.raises(FeedMismatch, match=r"unknown \['b'\]"):
        await predictor.predict({"feed": ROW}, ["b"])
    predictor.close()


@pytest.mark.parametrize(("model", "error"), [("dummy", InvalidRequest), ("missing", NotFound)])
async def test_errors_of_the_server_keep_their_class(address: str, model: str, error: type[Exception]) -> None:
    predictor = await remote(address, model_name=model)
    with pytest.raises(error):
        await predictor.predict({"b": ROW})
    predictor.close()


async def test_calls_go_to_the_endpoints_that_answer(address: str) -> None:
    predictor = await remote(NOBODY, address)
    for _ in range(3):
        assert list(await predictor.predict({"b": ROW.astype(np.float32)})) == ["a"]
    predictor.close()

    alone = await remote(NOBODY)
    with pytest.raises(Unreachable, match=NOBODY):
        await alone.predict({"b": ROW.astype(np.float32)})
    alone.close()


async def test_a_pipeline_of_texts() -> None:
    async with remote_pipeline(echo) as predictor:
        answer = await predictor.predict({"x": np.arange(2000), "name": "a", "list": [1, 2]})
        some = await predictor.predict({"x": np.ones(1, np.float32), "y": "b"}, ["x"])
    (printed,) = answer.pop("x")
    assert printed.startswith("array([   0,    1,")
    assert printed.count(",") == 1999
    assert answer == {"name": ["a"], "list": ["[1, 2]"]}
    assert some == {"x": ["array([1.], dtype=float32)"]}


async def test_a_pipeline_of_tensors() -> None:
    async with remote_pipeline(echo, packs=True) as predictor:
        answer = await predictor.predict({"x": ROW, "n": np.array([3], np.int64), "name": "a"})
        with pytest.raises(FeedTypeError, match="complex128"):
            await predictor.predict({"x": np.array([1j])})
    np.testing.assert_array_equal(answer["x"], ROW)
    assert (answer["n"].dtype, answer["n"].tolist(), answer["name"]) == (np.int64, [3], "a")


@pytest.mark.parametrize(("packs", "expected"), [(False, "['array([1])']"), (True, "array([1])")])
async def test_an_op_calls_another_pipeline_with_text_or_tensors(packs: bool, expected: str) -> None:
    class Caller(Op):
        def preprocess(self, input_dicts: Any, data_id: int = 0, log_id: int = 0) -> Any:
            return {"x": np.array([1])}

        def process(self, feed_batch: Any, typical_logid: int = 0) -> Any:
            (answer,) = [self.client.predict(feed=one, log_id=typical_logid) for one in feed_batch]
            return {"x": repr(answer["x"])}

    graph = single(Caller)
    graph.ops["op"].set_pack_tensor_format(packs)
    with served(echo) as endpoint:
        calling = {"op": OpSettings("op", server_endpoints=(endpoint,), client_type="pipeline_grpc")}
        make = PredictorFactory(is_thread_op=True)
        async with open_executor(graph, settings(ops=calling), make_predictor=make) as executor:
            response = await executor.infer(asking())
    assert (response.err_no, response.values) == (0, [expected])


async def test_an_error_of_a_pipeline_is_raised() -> None:
    failed = message_class(f"{PACKAGE}.Response")(err_no=5000, err_msg="no feed")
    async with remote_pipeline(lambda *_: failed) as predictor:
        with pytest.raises(ModelFailure, match="error 5000: no feed"):
            await predictor.predict({"x": "1"})


async def test_an_output_that_a_pipeline_does_not_return_is_an_error() -> None:
    async with remote_pipeline(echo, fetch_list=("y",)) as predictor:
        with pytest.raises(FeedMismatch, match=r"unknown \['y'\]\. Outputs are \['x'\]"):
            await predictor.predict({"x": "1"})


async def test_a_call_has_a_span_and_propagates_its_trace() -> None:
    received: list[str] = []
    ended: list[RecordedSpan] = []

    class Sink:
        def span_ended(self, span: RecordedSpan) -> None:
            ended.append(span)

    def note(request: Any, context: Any) -> Any:
        received.append(dict(context.invocation_metadata())["traceparent"])
        return echo(request)

    with served(note) as pipeline:
        predictor = await remote(pipeline, client_type="pipeline_grpc")
        op = RecordedSpan("op", [Sink()], 7)
        with op.as_current():
            assert await predictor.predict({"x": "1"}) == {"x": ["1"]}
        with UnrecordedSpan(8).as_current():
            await predictor.predict({"x": "1"})
        predictor.close()
    (span,) = ended
    assert (span.name, span.kind, span.parent) == (f"call {PACKAGE}.PipelineService/inference", "client", op.number)
    assert (span.attributes["rpc.system.name"], span.attributes["server.address"]) == ("grpc", pipeline)
    assert received[0] == f"00-{7:032x}-{span.span_id}-01"
    assert (received[1][:35], received[1][-2:]) == (f"00-{8:032x}", "00")


@pytest.mark.parametrize(("packs", "expected"), [(False, [repr(ROW)]), (True, ROW.tolist())], ids=["texts", "tensors"])
async def test_a_pipeline_of_this_server(packs: bool, expected: list[Any]) -> None:
    async with serving_pipeline(EchoExecutor(as_tensors=packs)) as served_here:
        predictor = await remote(served_here.grpc[0], client_type="pipeline_grpc", fetch_list=("x",))
        assert isinstance(predictor, PipelinePredictor)
        predictor.packs_tensors = packs
        answer = await predictor.predict({"x": ROW, "y": ROW + 1})
        predictor.close()
    assert list(answer) == ["x"]
    assert np.asarray(answer["x"]).tolist() == expected


async def test_calls_end_at_their_timeout_and_when_cancelled() -> None:
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
        ({"fetch_list": ("other",)}, r"op\.dummy\.fetch_list: .*unknown \['other'\]"),
    ],
)
async def test_settings_that_cannot_be_served_end_the_start(
    described: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await remote(NOBODY, **{"client_config": described} | settings)
