from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ovmstrio.core.errors import ConfigError
from ovmstrio.ops import (
    CustomException,
    CustomExceptionCode,
    Op,
    PipelineRequest,
    ProductErrCode,
    RequestOp,
    ResponseOp,
)
from ovmstrio.runtimes.ops.config.op_settings import OpSettings
from ovmstrio.runtimes.ops.config.overrides import settings_of
from ovmstrio.runtimes.ops.executor import open_executor
from ovmstrio.runtimes.ops.executor.op_instance import Hook
from ovmstrio.runtimes.ops.graph import build
from ovmstrio.runtimes.ops.values import product_number
from tests.support.ops import asking, settings


def test_what_is_not_given_is_left_to_the_settings() -> None:
    """The constructor stores, makes up a name, and asks for shapes."""
    op = Op()
    assert op.name.startswith("Op")
    assert op.name != Op().name
    assert (op.concurrency, op.timeout, op.retry, op.batch_size, op.auto_batching_timeout) == (
        None,
        None,
        0,
        None,
        None,
    )
    assert (op.concurrency_idx, op.client, op.with_serving, op.dynamic_shape_info) == (None, None, False, {})
    assert op.get_input_ops() == op.get_jump_to_ops() == []


class Shaped(Op):
    def set_dynamic_shape_info(self) -> None:
        self.dynamic_shape_info = {"min_input_shape": {"x": [1, 3]}}


def test_shapes_are_asked_for_by_the_constructor() -> None:
    """They are kept."""
    assert Shaped(name="op").dynamic_shape_info == {"min_input_shape": {"x": [1, 3]}}


def test_arguments_go_before_the_file_and_the_file_before_the_defaults() -> None:
    """For every setting, ``retry`` too."""
    file = settings(
        ops={"op": OpSettings("op", concurrency=2, timeout=20, retry=3, batch_size=4, auto_batching_timeout=5)}
    )
    given = settings_of(Op("op", concurrency=9, retry=8, batch_size=7), file)
    assert (given.concurrency, given.timeout, given.retry, given.batch_size, given.auto_batching_timeout) == (
        9,
        20,
        8,
        7,
        5,
    )
    none = settings_of(Op("other"), file)
    assert (none.concurrency, none.timeout, none.retry, none.batch_size, none.auto_batching_timeout) == (
        1,
        -1,
        1,
        1,
        -1,
    )


def test_settings_may_be_given_as_a_mapping() -> None:
    """What the constructor was given stays."""
    op = Op("op", concurrency=9, fetch_list=["a"])
    op.init_from_dict({"concurrency": 1, "timeout": 5, "retry": 2, "server_endpoints": ["here"], "fetch_list": ["b"]})
    assert (op.concurrency, op.timeout, op.retry, op.server_endpoints, op.fetch_list) == (9, 5, 2, ["here"], ["a"])


def test_inputs_may_be_set_later() -> None:
    """One or several, and so may be the targets of jumps."""
    read, a, b = RequestOp(), Op(name="a"), Op(name="b")
    b.set_input_ops(a)
    a.set_input_ops([read])
    b.set_jump_to_ops(a)
    assert (a.get_input_ops(), b.get_input_ops(), b.get_jump_to_ops()) == ([read], [a], [a])
    assert list(build(ResponseOp(input_ops=[b])).ops) == ["a", "b"]
    with pytest.raises(ConfigError, match=r"jump_to_ops of b .*found str"):
        b.set_jump_to_ops(["a"])  # type: ignore[list-item] # the mistake that is tested


class Code(ProductErrCode):
    ONE = 60
    TUPLE = (61,)


@pytest.mark.parametrize(("code", "number"), [(60, 60), ("60", 60), (Code.ONE, 60), (Code.TUPLE, 61), ((62,), 62)])
def test_codes_are_numbers_or_members(code: Any, number: int) -> None:
    """A tuple of one is what a comma too many makes of them."""
    assert product_number(code) == number


@pytest.mark.parametrize("code", [None, "sixty", (1, 2), object()])
def test_other_codes_are_refused(code: Any) -> None:
    """With an error of the language's own."""
    with pytest.raises((TypeError, ValueError)):
        product_number(code)


def test_exceptions_have_their_code_and_hide_their_message_unless_told() -> None:
    """Codes may be numbers."""
    hidden, told = CustomException(7, "why"), CustomException(CustomExceptionCode.CONF_ERROR, "why", True)
    assert (hidden.code, hidden.message, hidden.is_sent_to_user) == (7, "why", False)
    assert (told.code, str(told), told.is_sent_to_user) == (4000, "why", True)


class Numbered(Op):
    def preprocess(self) -> Any:  # type: ignore[override] # the mistake that is tested
        """Take nothing."""

    def postprocess(self, input_dicts: Any, fetch_data: Any, log_id: int, *, mode: str = "a") -> Any:  # type: ignore[override] # as above
        return log_id, mode


def test_hooks_are_looked_at_once() -> None:
    """Those that cannot be called are refused with what they should take, others get what they ask for by name."""
    op = Numbered(name="op")
    with pytest.raises(
        ConfigError, match=r"preprocess of Op op cannot be called .*numbers may be left out, found preprocess\(self\)"
    ):
        Hook("op", op.preprocess, 1, Op.preprocess)
    hook = Hook("op", op.postprocess, 2, Op.postprocess)
    assert hook.call({}, {}, 1, 2) == (2, "a")
    assert (hook.is_default, hook.is_async) == (False, False)
    assert Hook("op", op.process, 1, Op.process).is_default


class Delegating(Op):
    def process(self, feed_batch: Any, typical_logid: int = 0) -> Any:
        return super().process([{"x": feed_batch[0]["x"]}], typical_logid)


class Asking(Op):
    async def postprocess(
        self, input_dicts: Mapping[str, Any], fetch_data: Any, data_id: int = 0, log_id: int = 0
    ) -> Any:
        return await self.infer(fetch_data)


async def test_a_model_that_is_not_there_is_an_error() -> None:
    """Whether a hook asks for it by the base class, or by ``infer``."""
    for make in (Delegating, Asking):
        graph = build(ResponseOp(input_ops=make(name="op", input_ops=RequestOp())))
        async with open_executor(graph, settings()) as executor:
            response = await executor.infer(asking())
        assert response.err_no == CustomExceptionCode.NOT_IMPLEMENTED.value
        assert "op has no model to run" in response.err_msg


def test_requests_have_the_names_of_the_message_too() -> None:
    """Services use either."""
    request = PipelineRequest(keys=["a"], values=["1"], logid=4)
    assert (request.key, request.value, request.log_id) == (["a"], ["1"], 4)
