"""What hooks take and give, whichever of their signatures they have, and what comes of it when they go wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import trio

from ovmstrio.ops import (
    CustomException,
    CustomExceptionCode,
    Op,
    PipelineRequest,
    PipelineResponse,
    ProductErrCode,
    RequestOp,
    ResponseOp,
)
from ovmstrio.runtimes.ops.config.op_settings import OpSettings
from ovmstrio.runtimes.ops.executor import open_executor
from ovmstrio.runtimes.ops.graph import build
from ovmstrio.runtimes.ops.predictor.protocol import FeedMismatch
from ovmstrio.runtimes.ops.tensors import from_array
from tests.support.ops import Model, TextOp, asking, settings, single, text_graph, with_model


async def asked(
    op: type[Op], request: PipelineRequest | None = None, model: Model | None = None, **values: Any
) -> PipelineResponse:
    """Open a pipeline of one Op for one request; with a model it has one."""
    ops = with_model(**values) if model is not None else {"op": OpSettings("op", **values)}
    make = None if model is None else model.make
    async with open_executor(single(op), settings(ops=ops), make_predictor=make) as executor:
        return await executor.infer(request or asking(logid=7))


# Signatures


class Short(Op):
    def preprocess(self, input_dicts: Any) -> Any:  # type: ignore[override] # the older signature
        return {"x": input_dicts["@DAGExecutor"]["x"] + "1"}

    def process(self, feed_batch: Any) -> Any:  # type: ignore[override] # the older signature
        return {"x": feed_batch[0]["x"] + "2"}

    def postprocess(self, input_dicts: Any, fetch_dict: Any) -> Any:  # type: ignore[override] # the older signature
        return {"x": fetch_dict["x"] + "3"}


class Full(Op):
    def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        return {"x": f"{input_dicts['@DAGExecutor']['x']}1:{log_id}"}, False, None, ""

    def process(self, feed_batch: Any, typical_logid: int = 0) -> Any:
        return {"x": feed_batch[0]["x"] + "2"}, 0, ""

    def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        return {"x": f"{fetch_data['x']}3:{log_id}"}, None, ""


class Keywords(Op):
    def preprocess(self, input_dicts: Any, **kwargs: Any) -> Any:  # type: ignore[override] # what services write
        return {"x": f"{sorted(kwargs)} {kwargs['log_id']}"}

    def postprocess(self, input_dicts: Any, fetch_data: Any, *, log_id: int) -> Any:  # type: ignore[override] # as above
        return {"x": f"{fetch_data['x']} {log_id}"}


class OneNumber(Op):
    def preprocess(self, input_dicts: Any, logid: int) -> Any:  # type: ignore[override] # what services write
        return {"x": f"{logid}"}

    def postprocess(self, *everything: Any) -> Any:
        return {"x": f"{everything[1]['x']} {len(everything)} {everything[-1]}"}


class Async(Op):
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
        (Short, "x123"),
        (Full, "x1:723:7"),
        (Keywords, "['data_id', 'log_id'] 7 7"),
        (OneNumber, "7 4 7"),
        (Async, "px123"),
        (Op, "x"),
    ],
)
async def test_hooks_may_have_any_of_their_signatures(op: type[Op], expected: str) -> None:
    """Numbers may be left out or taken by name, returns may be plain, and hooks may be on the loop."""
    response = await asked(op)
    assert (response.err_no, response.err_msg, response.values) == (0, "", [expected])


# Models


class Feeding(Op):
    def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        text = input_dicts["@DAGExecutor"]["x"]
        if text.startswith("skip"):
            return {"x": np.asarray([[-1.0]])}, True, None, ""
        feeds = [{"x": np.asarray([[float(one)]])} for one in text.split(";") if one]
        return (feeds[0] if len(feeds) == 1 else feeds), False, None, ""

    def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        parts = fetch_data if isinstance(fetch_data, list) else [fetch_data]
        return {"x": ";".join(f"{min(one)}={one[min(one)].item():g}" for one in parts)}


@pytest.mark.parametrize("limit", [-1, 5000])
@pytest.mark.parametrize(
    ("text", "expected", "calls"),
    [("1", "y=2", 1), ("skip", "x=-1", 0), ("1;2;3", "y=2;y=3;y=4", 3), ("", "", 0)],
    ids=["dict", "skipped", "list", "empty list"],
)
async def test_a_model_gets_dicts_and_lists(text: str, expected: str, calls: int, limit: int) -> None:
    """A list is run one by one and given back in order, with and without a limit; what is skipped is not run."""
    model = Model()
    response = await asked(Feeding, asking(text), model, timeout=limit)
    assert (response.err_no, response.err_msg, response.values) == (0, "", [expected])
    assert len(model.calls) == calls
    assert model.is_closed


async def test_an_op_without_a_model_leaves_process_out() -> None:
    """``postprocess`` gets what ``preprocess`` gave."""
    assert (await asked(Feeding, asking("1"))).values == ["x=1"]


class Attributes(Op):
    def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        has = type(self.client).__name__
        return {"x": f"{self.concurrency_idx} {self.with_serving} {has} {self._fetch_names} {self._log('said')}"}


async def test_copies_have_the_attributes_that_services_read() -> None:
    """The worker's number, the model and what is fetched of it."""
    ops = with_model(fetch_list=("y",))
    async with open_executor(single(Attributes), settings(ops=ops), make_predictor=Model().make) as executor:
        response = await executor.infer(asking())
    # The model's answer to a text is an error, after the text was made.
    assert response.err_no == 10000
    assert (await asked(Attributes)).values == ["0 False NoneType None op said"]


# Failures


class Sorry(ProductErrCode):
    SORRY = 100001
    TUPLE = (100002,)


class Stop(BaseException):
    """Something that is no usual error."""


class Wrong(Op):
    def wrong(self, hook: str, text: str) -> Any:
        where, _, how = text.partition(" ")
        if where != hook:
            return None
        deeds: dict[str, Any] = {
            "raise": RuntimeError("it's: broken"),
            "exit": SystemExit(3),
            "stop": Stop("stopped"),
            "told": CustomException(CustomExceptionCode.CONF_ERROR, "bad file: secret", True),
            "hidden": CustomException(CustomExceptionCode.CONF_ERROR, "secret"),
            "number": CustomException(4242, "secret"),
        }
        if how in deeds:
            raise deeds[how]
        empty: tuple[Any, ...] = ({}, False) if hook == "preprocess" else ({},)
        returns: dict[str, Any] = {
            "product": (*empty, 60, "no such thing"),
            "enum": (*empty, Sorry.SORRY, "sorry"),
            "tuple": (*empty, Sorry.TUPLE, "sorry"),
            "text": (*empty, "60", "sorry"),
            "no code": (*empty, object(), "sorry"),
            "short": ({}, None),
            "none": None,
            "number given": 5,
        }
        return (returns[how],)

    def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        (one,) = input_dicts.values()
        wrong = self.wrong("preprocess", one["x"])
        return wrong[0] if wrong else dict(one)

    def process(self, feed_batch: Any, typical_logid: int = 0) -> Any:
        wrong = self.wrong("process", feed_batch[0]["x"])
        return wrong[0] if wrong else feed_batch[0]

    def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        wrong = self.wrong("postprocess", fetch_data["x"])
        return wrong[0] if wrong else fetch_data


class AsyncWrong(Wrong):
    async def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        return Wrong.preprocess(self, input_dicts)

    async def process(self, feed_batch: Any, typical_logid: int = 0) -> Any:
        return Wrong.process(self, feed_batch)

    async def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        return Wrong.postprocess(self, input_dicts, fetch_data)


def framed(text: str, hook: str) -> str:
    """Give the text of an error in a hook."""
    where = f"ClassName: Op._run_{hook}.<locals>.{hook}_help  FunctionName: {hook}_help"
    return f"Log_id: 7  Raise_msg: {text}  {where}"


HIDDEN = "the message is in the log of the server"


@pytest.mark.parametrize("op", [Wrong, AsyncWrong])
@pytest.mark.parametrize("hook", ["preprocess", "postprocess"])
@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("raise", 10000, "its: broken"),
        ("exit", 10000, "3"),
        ("stop", 10000, "stopped"),
        ("told", 4000, "bad file"),
        ("hidden", 4000, HIDDEN),
        ("number", 4242, HIDDEN),
    ],
)
async def test_hooks_that_raise(op: type[Op], hook: str, how: str, code: int, text: str) -> None:
    """The answer has the code, the client's number and the text, or that it is hidden."""
    response = await asked(op, asking(f"{hook} {how}", logid=7))
    assert (response.err_no, response.err_msg) == (code, framed(text, hook))
    assert (response.keys, response.values) == ([], [])


@pytest.mark.parametrize("hook", ["preprocess", "postprocess"])
@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("product", 60, "no such thing"),
        ("enum", 100001, "sorry"),
        ("tuple", 100002, "sorry"),
        ("text", 60, "sorry"),
        ("no code", 7000, "error codes of products are numbers, got object"),
    ],
)
async def test_codes_of_products(hook: str, how: str, code: int, text: str) -> None:
    """The answer has the product's own code and text, be it a number or a member of an enumeration."""
    response = await asked(Wrong, asking(f"{hook} {how}", logid=7))
    assert (response.err_no, response.err_msg, response.values) == (code, text, [])


@pytest.mark.parametrize(
    ("how", "code", "part"),
    [
        ("preprocess short", 10000, "not enough values to unpack (expected 4, got 2)"),
        ("preprocess number given", 7000, "preprocess should return a dict, a list of dicts or 4 values, got int"),
        ("postprocess short", 10000, "not enough values to unpack (expected 3, got 2)"),
        ("postprocess none", 7000, "[op] postprocess should return dict, got NoneType"),
        ("process raise", 10000, "[op] failed to predict. Log_id: 7  Raise_msg: it's: broken. Please check"),
        ("process exit", 10000, "[op] failed to predict. Log_id: 7  Raise_msg: 3. Please check"),
        ("process told", 4000, "[op] failed to predict. bad file: secret. Please check"),
        ("process hidden", 4000, f"[op] failed to predict. {HIDDEN}. Please check"),
        ("process product", 60, "[op] failed to predict. no such thing. Please check"),
        ("process short", 10000, "process should return a dict, got tuple"),
        ("process none", 10000, "process should return a dict, got NoneType"),
    ],
)
async def test_returns_that_are_wrong(how: str, code: int, part: str) -> None:
    """The answer tells what a hook may give and what it gave."""
    response = await asked(Wrong, asking(how, logid=7))
    assert response.err_no == code
    assert part in response.err_msg


async def test_later_ops_do_not_run_after_an_error() -> None:
    """An error of the first Op is the answer, whatever comes after it."""
    ran = []

    class Later(TextOp):
        async def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
            ran.append(self.name)
            return {}, False, 51, "no" if self.name == "b" else "not reached"

    async with open_executor(text_graph("a<@", "b<a", "c<b", make=Later), settings()) as executor:
        assert (await executor.infer(asking())).err_no == 51
    assert ran == ["a"]


# Time


class Slow(Op):
    attempts = 0

    async def process(self, feed_batch: Any, typical_logid: int = 0) -> Any:
        Slow.attempts += 1
        if Slow.attempts <= int(feed_batch[0]["x"]):
            await trio.sleep(100)
        return feed_batch[0]


@pytest.mark.parametrize(
    ("late", "dag_retry", "code", "seconds", "attempts"),
    [(0, 1, 0, 0.0, 1), (2, 1, 0, 1.0, 3), (9, 1, 6000, 1.5, 3), (4, 2, 0, 2.0, 5), (9, 2, 6000, 3.0, 6)],
)
async def test_process_is_attempted_as_often_as_it_may_be(
    autojump_clock: trio.testing.MockClock, late: int, dag_retry: int, code: int, seconds: float, attempts: int
) -> None:
    """Each attempt has its limit, the whole pipeline is run again if it is set so, and the server stays fit."""
    Slow.attempts = 0
    ops = {"op": OpSettings("op", timeout=500, retry=3)}
    async with open_executor(single(Slow), settings(retry=dag_retry, ops=ops)) as executor:
        begin = trio.current_time()
        response = await executor.infer(asking(str(late)))
        assert trio.current_time() - begin == pytest.approx(seconds)
        assert (response.err_no, Slow.attempts) == (code, attempts)
        if code:
            assert response.err_msg == (
                "[op] failed to predict. 3 attempts of 0.5 s each: exceeded retry count. "
                "Please check the input dict and checkout PipelineServingLogs/pipeline.log for more details."
            )
        assert (await executor.infer(asking("0"))).values == ["0"]


class Uncopyable(TextOp):
    async def process(self, feed_batch: Any, typical_logid: int = 0) -> Any:
        await trio.sleep(100)


async def test_an_input_that_cannot_be_copied_for_another_attempt_is_an_error() -> None:
    """The answer says so, instead of none."""

    class Locked(RequestOp):
        def unpack_request_package(self, request: PipelineRequest) -> Any:
            return {"x": (one for one in "abc")}

    graph = build(ResponseOp(input_ops=Op(name="op", input_ops=Locked())))
    async with open_executor(graph, settings(retry=2)) as executor:
        response = await executor.infer(asking())
    assert response.err_no == 10000
    assert "cannot be copied" in response.err_msg


class Picky(Model):
    def check(self, feed: Mapping[str, Any]) -> None:
        raise FeedMismatch("expected the feed x, y, got x")


async def test_a_feed_that_is_not_the_models_is_5000() -> None:
    """The text tells what was expected and what came."""
    response = await asked(Op, model=Picky())
    assert response.err_no == 5000
    assert response.err_msg == (
        "[op] failed to predict. Log_id: 7  Raise_msg: invalid arg list: expected the feed x, y, got x. "
        "Please check the input dict and checkout PipelineServingLogs/pipeline.log for more details."
    )


# Ends


@pytest.mark.parametrize(("code", "number"), [(60, 60), (Sorry.SORRY, 100001), (Sorry.TUPLE, 100002)])
async def test_a_request_op_may_refuse_with_a_code_of_the_product(code: Any, number: int) -> None:
    """No Op runs then, and the answer has the code and the text."""
    ran = []

    class Refusing(RequestOp):
        def unpack_request_package(self, request: PipelineRequest) -> Any:
            return {}, request.logid, code, "no such user"

    class Noting(Op):
        def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
            ran.append(data_id)

    graph = build(ResponseOp(input_ops=Noting(name="op", input_ops=Refusing())))
    async with open_executor(graph, settings()) as executor:
        response = await executor.infer(asking())
    assert (response.err_no, response.err_msg, response.values, ran) == (number, "no such user", [], [])


class Checking(RequestOp):
    def init_op(self) -> None:
        self.separator = ","

    def unpack_request_package(self, request: PipelineRequest) -> Any:
        if request.method != "predict":
            return {}, request.log_id, Sorry.SORRY, f"no method {request.method}"
        if not request.value:
            raise ValueError("nothing to read")
        values = [float(one) for one in request.value[0].split(self.separator)]
        return {"words": np.asarray([values])}, request.log_id, None, ""


class Printing(ResponseOp):
    def pack_response_package(self, channeldata: Any) -> Any:
        response = PipelineResponse()
        response.err_no = channeldata.error_code
        if response.err_no:
            response.err_msg = f"{channeldata.error_info}{channeldata.prod_error_info}"
            return response
        response.key.append("sum")
        response.value.append(repr(channeldata.parse()["words"].sum()))
        return response


async def test_ends_may_be_overridden() -> None:
    """The RequestOp makes what the first Op gets or refuses it, the ResponseOp makes the answer, of errors too."""
    graph = build(Printing(input_ops=Op(name="op", input_ops=Checking())))
    async with open_executor(graph, settings()) as executor:
        response = await executor.infer(PipelineRequest(keys=["w"], values=["1,2,4"], method="predict"))
        assert (response.err_no, response.keys, len(response.values)) == (0, ["sum"], 1)
        assert "7.0" in response.values[0]
        response = await executor.infer(PipelineRequest(method="other"))
        assert (response.err_no, response.err_msg) == (50, "no method other")
        response = await executor.infer(PipelineRequest(method="predict"))
        assert (response.err_no, response.err_msg) == (8000, "rpc package error: nothing to read")


class AsyncEnds(RequestOp):
    async def init_op(self) -> None:
        self.ready = "ready"

    async def unpack_request_package(self, request: PipelineRequest) -> Any:
        await trio.lowlevel.checkpoint()
        return {"x": self.ready}


class Broken(ResponseOp):
    async def pack_response_package(self, channeldata: Any) -> Any:
        return "text"


async def test_ends_may_be_on_the_loop_and_may_fail() -> None:
    """``init_op`` is awaited at the start; what is no answer becomes 8000."""
    async with open_executor(build(ResponseOp(input_ops=Op(input_ops=AsyncEnds()))), settings()) as executor:
        assert (await executor.infer(asking())).values == ["ready"]
    async with open_executor(build(Broken(input_ops=Op(input_ops=RequestOp()))), settings()) as executor:
        response = await executor.infer(asking())
    assert response.err_no == 8000
    assert response.err_msg.startswith("rpc package error: 'str' object has no attribute")


async def test_fewer_values_than_keys_are_8000() -> None:
    """The default RequestOp tells what is missing; surplus values are left alone."""
    response = await asked(Op, PipelineRequest(keys=["x", "y"], values=["1"]))
    assert (response.err_no, response.err_msg) == (8000, "rpc package error: 2 keys, but only 1 values")
    assert (await asked(Op, PipelineRequest(keys=["x"], values=["1", "2"]))).values == ["1"]


class Giving(Op):
    given: Any = None

    def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        return self.given


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"y": np.asarray([[1, 2], [3, 4]])}, (0, "", ["array([[1, 2],\n       [3, 4]])"])),
        ({"y": np.asarray([0.5], np.float32)}, (0, "", ["array([0.5], dtype=float32)"])),
        ({"y": ["a", "b"]}, (0, "", ["['a', 'b']"])),
        ({"y": "text"}, (0, "", ["text"])),
        ({"y": 5}, (7000, "@DAGExecutor fetch var type must be str(<class 'int'>).", [])),
        ({"y": []}, (7000, "@DAGExecutor fetch var type must be str(<class 'list'>).", [])),
        ({}, (0, "", [])),
    ],
    ids=["array", "float32", "texts", "text", "number", "empty list", "nothing"],
)
async def test_what_the_last_op_may_give(given: Any, expected: tuple[int, str, list[str]]) -> None:
    """Arrays and lists of texts are printed, texts are themselves, all else is 7000."""
    op = type("Given", (Giving,), {"given": given})
    response = await asked(op)
    assert (response.err_no, response.err_msg, response.values) == expected


async def test_arrays_may_be_answered_as_tensors() -> None:
    """``set_pack_format`` makes it so."""
    end = ResponseOp(input_ops=Op(name="op", input_ops=RequestOp()))
    end.set_pack_format(True)
    async with open_executor(build(end), settings()) as executor:
        tensor = from_array("x", np.asarray([[1.5, 2.5]], np.float32))
        response = await executor.infer(PipelineRequest(tensors=[tensor]))
    assert response.tensors == [tensor]
    assert response.keys == []
