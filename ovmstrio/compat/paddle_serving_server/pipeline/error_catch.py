"""Errors and checks for service scripts."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from ovmstrio.ext.ops import CustomException, CustomExceptionCode, PipelineResponse, ProductErrCode
from ovmstrio.util.truncation import cut, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

__all__ = ["CustomException", "CustomExceptionCode", "ErrorCatch", "ParamChecker", "ParamVerify", "ProductErrCode"]

log = structlog.get_logger(__name__)


def ErrorCatch(function: Callable[..., Any]) -> Callable[..., Any]:  # noqa: N802 - the name that scripts import
    """Decorate a function to return its result and a response with ``err_no`` and ``err_msg`` instead of raising."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> tuple[Any, PipelineResponse]:
        try:
            return function(*args, **kwargs), PipelineResponse()
        except CustomException as error:
            shown = cut(error.message) if error.is_sent_to_user else "the server's log has the details"
            return None, _response(function, error, error.code, shown, kwargs)
        except Exception as error:  # noqa: BLE001 - purpose of the decorator
            return None, _response(function, error, CustomExceptionCode.UNKNOW.value, text_of(error), kwargs)

    return wrapper


def _response(
    function: Callable[..., Any], error: Exception, code: int, shown: str, kwargs: dict[str, Any]
) -> PipelineResponse:
    log_id = kwargs.get("log_id", 0)
    log.error("function failed", function=function.__qualname__, log_id=log_id, exc_info=error)
    where = f"ClassName: {function.__qualname__}  FunctionName: {function.__name__}"
    return PipelineResponse(code, f"Log_id: {log_id}  Raise_msg: {shown}  {where}")


def ParamChecker(function: Callable[..., Any]) -> Callable[..., Any]:  # noqa: N802 - the name that scripts import
    """Decorate a function to check arguments and result by annotations: types, predicates, or several of them."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        wrong = [
            name for name, value in bound.arguments.items() if not _fits(value, signature.parameters[name].annotation)
        ]
        if wrong:
            raise CustomException(CustomExceptionCode.INPUT_PARAMS_ERROR, f"invalid arg list: {wrong}", True)
        result = function(*args, **kwargs)
        if not _fits(result, signature.return_annotation):
            raise CustomException(CustomExceptionCode.INPUT_PARAMS_ERROR, "invalid return type", True)
        return result

    return wrapper


def _fits(value: Any, annotation: Any) -> bool:
    if annotation is inspect.Signature.empty:
        return True
    if isinstance(annotation, tuple | list | set):
        return any(_fits(value, one) for one in annotation)
    if annotation is None or isinstance(annotation, type):
        return value is None if annotation is None else isinstance(value, annotation)
    return bool(annotation(value)) if callable(annotation) else True


class ParamVerify:
    """Predicates for annotations."""

    @staticmethod
    def int_check(c: Any, lower_bound: int | None = None, upper_bound: int | None = None) -> bool:
        """Return whether a value is an integer, within the bounds if both are given."""
        if not isinstance(c, int):
            return False
        return lower_bound is None or upper_bound is None or lower_bound <= c <= upper_bound

    @staticmethod
    def file_check(f: Any) -> bool:
        """Return whether a value is an existing path."""
        return isinstance(f, str) and Path(f).exists()

    @staticmethod
    def check_feed_dict(feed_dict: Any, right_feed_list: Collection[str]) -> bool:
        """Return whether a value is a dict with exactly these keys; keys that contain ``lod`` are ignored."""
        return isinstance(feed_dict, dict) and {key for key in feed_dict if "lod" not in key} == set(right_feed_list)

    @staticmethod
    def check_fetch_list(fetch_list: Any, right_fetch_list: Collection[str]) -> bool:
        """Return whether a value is an empty collection or a list of some of these names."""
        return not len(fetch_list) or (isinstance(fetch_list, list) and set(fetch_list) <= set(right_fetch_list))
