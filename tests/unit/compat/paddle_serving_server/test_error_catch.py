from __future__ import annotations

from typing import Any

import pytest

from paddle_serving_server.pipeline.error_catch import (
    CustomException,
    CustomExceptionCode,
    ErrorCatch,
    ParamChecker,
    ParamVerify,
)


@ErrorCatch
def _divide(a: int, b: int, log_id: int = 0) -> float:
    if b < 0:
        raise CustomException(CustomExceptionCode.INPUT_PARAMS_ERROR, "b is negative", b == -1)
    return a / b


def _given_back(a: Any, b: Any = 1, c: Any = 1) -> Any:
    return b


_given_back.__annotations__ = {"a": int, "b": (int, str), "c": lambda value: value > 0, "return": (int, str)}
_checked = ParamChecker(_given_back)


def test_errors_become_responses() -> None:
    """The result comes with an empty response, an error as its code and text, hidden unless it may be told."""
    assert _divide(4, 2)[0] == 2
    assert _divide(4, 2)[1].err_no == 0
    result, response = _divide(1, 0, log_id=7)
    assert (result, response.err_no) == (None, 10000)
    assert response.err_msg.startswith("Log_id: 7  Raise_msg: division by zero  ClassName: _divide")
    assert _divide(1, -1)[1].err_no == 5000
    assert "b is negative" in _divide(1, -1)[1].err_msg
    assert "b is negative" not in _divide(1, -2)[1].err_msg


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(("x",), "['a']"), ((1, 1.5), "['b']"), ((1, 1, 0), "['c']")],
    ids=["type", "types", "judge"],
)
def test_arguments_are_checked(arguments: Any, text: str) -> None:
    """An argument that its annotation does not allow is named with code 5000."""
    assert _checked(1, "x") == "x"
    with pytest.raises(CustomException) as raised:
        _checked(*arguments)
    assert (raised.value.code, raised.value.message) == (5000, f"invalid arg list: {text}")


def test_judges_of_values(tmp_path: Any) -> None:
    """Whole numbers between bounds, and files that exist."""
    assert ParamVerify.int_check(5, 1, 10)
    assert not ParamVerify.int_check(11, 1, 10)
    assert not ParamVerify.int_check("5")
    assert ParamVerify.file_check(str(tmp_path))
    assert not ParamVerify.file_check(str(tmp_path / "nope"))
