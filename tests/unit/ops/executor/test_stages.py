from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import trio

from ovmstrio.ext.ops import CustomException, CustomExceptionCode, Op, PipelineRequest, PipelineResponse, ProductErrCode
from ovmstrio.ops.executor import open_executor
from ovmstrio.ops.predictor.protocol import FeedMismatch
from ovmstrio.ops.settings import OpSettings
from tests.support.ops import Model, asking, op_class, settings, single, text_graph, with_model


async def infer_once(
    op: type[Op], request: PipelineRequest | None = None, model: Model | None = None, **values: Any
) -> PipelineResponse:
    """Open a pipeline of one Op, with a model if one is given, and send it one request."""
    ops = with_model(**values) if model is not None else {"op": OpSettings("op", **values)}
    make = None if model is None else model.make
    async with open_executor(single(op), settings(ops=ops), make_predictor=make) as executor:
        return await executor.infer(request or asking(logid=7))


# Signatures


class _Async(Op):
    async def init_op(self) -> None:
        await trio.lowlevel.checkpoint()
        self.prefix = "p"

    async def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        await trio.lowlevel.checkpoint()
        return {"x": self.prefix + input_dicts["@DAGExecutor"]["x"] + "1"}

    async def process(self, feed_batch: Any, typical_logid: int = 0) -> Any:
        await trio.lowlevel.checkpoint()
        return {"x": feed_batch[0]["x"] + "2"}

    async def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        await trio.lowlevel.checkpoint()
        return {"x": fetch_data["x"] + "3"}


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        pytest.param(
            op_class(
                preprocess=lambda _, inputs: {"x": inputs["@DAGExecutor"]["x"] + "1"},
                process=lambda _, feeds: {"x": feeds[0]["x"] + "2"},
                postprocess=lambda _, inputs, fetched: {"x": fetched["x"] + "3"},
            ),
            "x123",
            id="plain values",
        ),
        pytest.param(
            op_class(
                preprocess=lambda _, inputs, data_id, log_id: ({"x": f"1:{log_id}"}, False, None, ""),
                process=lambda _, feeds, typical_logid: ({"x": feeds[0]["x"] + "2"}, 0, ""),
                postprocess=lambda _, inputs, fetched, data_id, log_id: ({"x": f"{fetched['x']}3:{log_id}"}, None, ""),
            ),
            "1:723:7",
            id="ids and tuples",
        ),
        pytest.param(
            op_class(
                preprocess=lambda _, inputs, **ids: {"x": f"{sorted(ids)} {ids['log_id']}"},
                postprocess=lambda _, inputs, fetched, *, log_id: {"x": f"{fetched['x']} {log_id}"},
            ),
            "['data_id', 'log_id'] 7 7",
            id="ids by keyword",
        ),
        pytest.param(
            op_class(
                preprocess=lambda _, inputs, logid: {"x": f"{logid}"},
                postprocess=lambda _, *args: {"x": f"{args[1]['x']} {len(args)} {args[-1]}"},
            ),
            "7 4 7",
            id="one id, and any arguments",
        ),
        pytest.param(_Async, "px123", id="on the loop"),
        pytest.param(Op, "x", id="default hooks"),
    ],
)
async def test_hooks_may_have_any_of_their_signatures(op: type[Op], expected: str) -> None:
    response = await infer_once(op)
    assert (response.err_no, response.err_msg, response.values) == (0, "", [expected])


# Models


def _feeds(_: Op, inputs: Mapping[str, Any]) -> Any:
    """Return a list of feeds for ``a;b``, a skipped feed for ``skip``, and an empty list for an empty text."""
    text = inputs["@DAGExecutor"]["x"]
    if text.startswith("skip"):
        return {"x": np.asarray([[-1.0]])}, True, None, ""
    feeds = [{"x": np.asarray([[float(one)]])} for one in text.split(";") if one]
    return (feeds[0] if len(feeds) == 1 else feeds), False, None, ""


def _text_of(_: Op, inputs: Any, fetched: Any) -> Any:
    parts = fetched if isinstance(fetched, list) else [fetched]
    return {"x": ";".join(f"{min(one)}={one[min(one)].item():g}" for one in parts)}


FEEDING = op_class(preprocess=_feeds, postprocess=_text_of)


@pytest.mark.parametrize("limit", [-1, 5000])
@pytest.mark.parametrize(
    ("text", "expected", "calls"),
    [("1", "y=2", 1), ("skip", "x=-1", 0), ("1;2;3", "y=2;y=3;y=4", 3), ("", "", 0)],
    ids=["dict", "skipped", "list", "empty list"],
)
async def test_a_model_runs_once_for_each_feed(text: str, expected: str, calls: int, limit: int) -> None:
    model = Model()
    response = await infer_once(FEEDING, asking(text), model, timeout=limit)
    assert (response.err_no, response.err_msg, response.values) == (0, "", [expected])
    assert len(model.calls) == calls
    assert model.is_closed


@pytest.mark.parametrize(
    ("model", "expected"),
    [(None, "0 False NoneType None op said"), (Model(), "0 True ModelClient ('y',) op said")],
    ids=["without a model", "with a model"],
)
async def test_workers_set_the_attributes_that_hooks_read(model: Model | None, expected: str) -> None:
    def attributes(op: Any, inputs: Any) -> Any:
        client = type(op.client).__name__
        text = f"{op.concurrency_idx} {op.with_serving} {client} {op._fetch_names} {op._log('said')}"  # noqa: SLF001 - services read both attributes
        return {"x": text}, True, None, ""

    values: dict[str, Any] = {} if model is None else {"fetch_list": ("y",)}
    assert (await infer_once(op_class(preprocess=attributes), model=model, **values)).values == [expected]


@pytest.mark.parametrize(
    ("feed", "expected"),
    [
        ([{"x": np.array([1.0])}, {"x": np.array([2.0, 3.0])}], "[2.0, 3.0, 4.0]"),
        ([{"x": np.array([1.0])}], "[2.0]"),
        ({"x": np.array([1.0])}, "[2.0]"),
    ],
    ids=["several feeds", "one feed", "dict"],
)
async def test_a_client_takes_one_feed_or_several(feed: Any, expected: str) -> None:
    def process(op: Op, _: Any) -> Any:
        with ThreadPoolExecutor(1) as own_threads:
            return own_threads.submit(op.client.predict, feed, "y", log_id=3).result()

    def show(_: Op, inputs: Any, fetched: Any) -> Any:
        return {"x": str(fetched["y"].tolist())}

    response = await infer_once(op_class(process=process, postprocess=show), model=Model())
    assert (response.err_no, response.values) == (0, [expected])


async def _infer(op: Op, inputs: Any, fetched: Any, data_id: int = 0) -> Any:
    return await op.infer(fetched)


@pytest.mark.parametrize(
    "op",
    [op_class(process=lambda op, feeds: Op.process(op, [{"x": feeds[0]["x"]}])), op_class(postprocess=_infer)],
    ids=["process of the base class", "infer"],
)
async def test_a_hook_that_runs_a_missing_model_fails(op: type[Op]) -> None:
    response = await infer_once(op)
    assert response.err_no == CustomExceptionCode.NOT_IMPLEMENTED.value
    assert "op has no model to run" in response.err_msg


# Failures


class _Product(ProductErrCode):
    SORRY = 100001
    TUPLE = (100002,)


class _Stop(BaseException):
    pass


_RAISED: dict[str, BaseException] = {
    "raise": RuntimeError("it's: broken"),
    "exit": SystemExit(3),
    "stop": _Stop("stopped"),
    "shown": CustomException(CustomExceptionCode.CONF_ERROR, "bad file: secret", True),
    "hidden": CustomException(CustomExceptionCode.CONF_ERROR, "secret"),
    "number": CustomException(4242, "secret"),
}


def _misbehave(hook: str, text: str, passed_on: Any) -> Any:
    """Raise or return what a text such as ``preprocess raise`` names, if it names this hook."""
    where, _, how = text.partition(" ")
    if where != hook:
        return passed_on
    if how in _RAISED:
        raise _RAISED[how]
    empty: tuple[Any, ...] = ({}, False) if hook == "preprocess" else ({},)
    returned = {
        "product": (*empty, 60, "no such thing"),
        "enum": (*empty, _Product.SORRY, "sorry"),
        "tuple": (*empty, _Product.TUPLE, "sorry"),
        "text": (*empty, "60", "sorry"),
        "word": (*empty, "sixty", "sorry"),
        "object": (*empty, object(), "sorry"),
        "short": ({}, None),
        "none": None,
        "int": 5,
    }
    return returned[how]


MISBEHAVING = op_class(
    preprocess=lambda _, inputs: _misbehave("preprocess", inputs["@DAGExecutor"]["x"], dict(inputs["@DAGExecutor"])),
    process=lambda _, feeds: _misbehave("process", feeds[0]["x"], feeds[0]),
    postprocess=lambda _, inputs, fetched: _misbehave("postprocess", fetched["x"], fetched),
)


class _AsyncMisbehaving(Op):
    async def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        return _misbehave("preprocess", input_dicts["@DAGExecutor"]["x"], dict(input_dicts["@DAGExecutor"]))

    async def process(self, feed_batch: Any, typical_logid: int = 0) -> Any:
        return feed_batch[0]

    async def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        return _misbehave("postprocess", fetch_data["x"], fetch_data)


HIDDEN = "the message is in the log of the server"


@pytest.mark.parametrize("op", [MISBEHAVING, _AsyncMisbehaving], ids=["in a thread", "on the loop"])
@pytest.mark.parametrize("hook", ["preprocess", "postprocess"])
@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("raise", 10000, "its: broken"),
        ("exit", 10000, "3"),
        ("stop", 10000, "stopped"),
        ("shown", 4000, "bad file"),
        ("hidden", 4000, HIDDEN),
        ("number", 4242, HIDDEN),
    ],
)
async def test_an_exception_of_a_hook_is_the_answer(op: type[Op], hook: str, how: str, code: int, text: str) -> None:
    response = await infer_once(op, asking(f"{hook} {how}", logid=7))
    where = f"ClassName: Op._run_{hook}.<locals>.{hook}_help  FunctionName: {hook}_help"
    assert (response.err_no, response.err_msg) == (code, f"Log_id: 7  Raise_msg: {text}  {where}")
    assert (response.keys, response.values) == ([], [])


@pytest.mark.parametrize("hook", ["preprocess", "postprocess"])
@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("product", 60, "no such thing"),
        ("enum", 100001, "sorry"),
        ("tuple", 100002, "sorry"),
        ("text", 60, "sorry"),
        ("word", 7000, "error codes of products are numbers, got str"),
        ("object", 7000, "error codes of products are numbers, got object"),
    ],
)
async def test_a_product_code_of_a_hook_is_the_answer(hook: str, how: str, code: int, text: str) -> None:
    response = await infer_once(MISBEHAVING, asking(f"{hook} {how}", logid=7))
    assert (response.err_no, response.err_msg, response.values) == (code, text, [])


@pytest.mark.parametrize(
    ("how", "code", "part"),
    [
        ("preprocess short", 10000, "not enough values to unpack (expected 4, got 2)"),
        ("preprocess int", 7000, "preprocess should return a dict, a list of dicts or 4 values, got int"),
        ("postprocess short", 10000, "not enough values to unpack (expected 3, got 2)"),
        ("postprocess none", 7000, "[op] postprocess should return dict, got NoneType"),
        ("process raise", 10000, "[op] failed to predict. Log_id: 7  Raise_msg: it's: broken. Please check"),
        ("process exit", 10000, "[op] failed to predict. Log_id: 7  Raise_msg: 3. Please check"),
        ("process shown", 4000, "[op] failed to predict. bad file: secret. Please check"),
        ("process hidden", 4000, f"[op] failed to predict. {HIDDEN}. Please check"),
        ("process product", 60, "[op] failed to predict. no such thing. Please check"),
        ("process enum", 100001, "[op] failed to predict. sorry. Please check"),
        ("process short", 10000, "process should return a dict, got tuple"),
        ("process none", 10000, "process should return a dict, got NoneType"),
    ],
)
async def test_a_wrong_result_of_a_hook_is_an_error(how: str, code: int, part: str) -> None:
    response = await infer_once(MISBEHAVING, asking(how, logid=7))
    assert response.err_no == code
    assert part in response.err_msg


@pytest.mark.parametrize("code", [0, None, CustomExceptionCode.OK])
async def test_process_may_return_the_code_of_no_error(code: Any) -> None:
    response = await infer_once(op_class(process=lambda _, feeds: (feeds[0], code, "")), asking("fine"))
    assert (response.err_no, response.values) == (0, ["fine"])


async def test_later_ops_do_not_run_after_an_error() -> None:
    started: list[str] = []

    def refuse(op: Op, inputs: Any) -> Any:
        started.append(op.name)
        return {}, False, 51, "no"

    graph = text_graph("a<@", "b<a", "c<b", make=op_class(preprocess=refuse))
    async with open_executor(graph, settings()) as executor:
        assert (await executor.infer(asking())).err_no == 51
    assert started == ["a"]


@pytest.mark.parametrize(
    ("late", "dag_retry", "code", "seconds", "attempts"),
    [(0, 1, 0, 0.0, 1), (2, 1, 0, 1.0, 3), (9, 1, 6000, 1.5, 3), (4, 2, 0, 2.0, 5), (9, 2, 6000, 3.0, 6)],
)
async def test_process_has_a_limited_number_of_attempts(
    autojump_clock: trio.testing.MockClock, late: int, dag_retry: int, code: int, seconds: float, attempts: int
) -> None:
    started = []

    async def process(_: Op, feeds: Any) -> Any:
        started.append(1)
        if len(started) <= int(feeds[0]["x"]):
            await trio.sleep(100)
        return feeds[0]

    pipeline = settings(retry=dag_retry, ops={"op": OpSettings("op", timeout=500, retry=3)})
    async with open_executor(single(op_class(process=process)), pipeline) as executor:
        begin = trio.current_time()
        response = await executor.infer(asking(str(late)))
        assert trio.current_time() - begin == pytest.approx(seconds)
        assert (response.err_no, len(started)) == (code, attempts)
        if code:
            assert response.err_msg == (
                "[op] failed to predict. 3 attempts of 0.5 s each: exceeded retry count. "
                "Please check the input dict and checkout PipelineServingLogs/pipeline.log for more details."
            )
        assert (await executor.infer(asking("0"))).values == ["0"]


async def test_a_feed_that_the_model_refuses_is_5000(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: Model, feed: Mapping[str, Any]) -> None:
        raise FeedMismatch("expected the feed x, y, got x")

    monkeypatch.setattr(Model, "check", refuse)
    response = await infer_once(Op, model=Model())
    assert response.err_no == 5000
    assert response.err_msg == (
        "[op] failed to predict. Log_id: 7  Raise_msg: invalid arg list: expected the feed x, y, got x. "
        "Please check the input dict and checkout PipelineServingLogs/pipeline.log for more details."
    )
