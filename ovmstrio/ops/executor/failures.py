"""Op failures: the error codes and texts of failed requests.

Codes and texts are those of Paddle Serving.
"""

from __future__ import annotations

from ovmstrio.core.errors import ServerError, error_type
from ovmstrio.isolation.thread_pool import RefusalCheck
from ovmstrio.isolation.user_code import UserCodeRaisedError
from ovmstrio.ops.messages import CustomException, CustomExceptionCode, code_number
from ovmstrio.ops.predictor.protocol import FeedMismatch, FeedTypeError
from ovmstrio.util.truncation import MOST_CHARACTERS, cut, text_of

_HIDDEN = "the message is in the log of the server"


class OpFailure(Exception):
    """Failure of a request with an error code, which the service chose if ``is_product``, and text.

    ``is_overload`` marks a request rejected because too many wait.  ``user_type`` is the type of the exception of user
    code that caused the failure, or empty.
    """

    user_type: str = ""

    def __init__(self, code: int, info: str, *, is_product: bool = False, is_overload: bool = False) -> None:
        info = cut(info, 2 * MOST_CHARACTERS)
        super().__init__(code, info)
        self.code = code
        self.info = info
        self.is_product = is_product
        self.is_overload = is_overload


def abandoned_call_limit(limit: float, what: str) -> RefusalCheck:
    """Return a function that rejects calls while ``limit`` abandoned calls still run."""
    return lambda left: TimeoutError(f"{left} {what} do not end") if left >= limit else None


def product_failure(code: object, info: object) -> OpFailure:
    """Return the failure for an error code that a hook returned."""
    try:
        return OpFailure(code_number(code), cut(str(info)), is_product=True)
    except (TypeError, ValueError):
        text = f"error codes of products are numbers, got {type(code).__name__}"
        return OpFailure(CustomExceptionCode.TYPE_ERROR.value, text)


def cause_of(raised: BaseException) -> BaseException:
    """Return the exception that user code raised."""
    return raised.error if isinstance(raised, UserCodeRaisedError) else raised


def hook_failure(raised: BaseException, log_id: int, stage: str) -> OpFailure:
    """Return the failure for an exception of ``preprocess`` or ``postprocess``."""
    return _with_type(_hook_failure(cause_of(raised), log_id, stage), raised)


def _with_type(failure: OpFailure, raised: BaseException) -> OpFailure:
    failure.user_type = error_type(cause_of(raised))
    return failure


def _hook_failure(error: BaseException, log_id: int, stage: str) -> OpFailure:
    if isinstance(error, CustomException):
        text = cut(error.message.split(":", 1)[0]) if error.is_sent_to_user else _HIDDEN
        return OpFailure(error.code, _framed(text, log_id, stage))
    return OpFailure(CustomExceptionCode.UNKNOW.value, _framed(text_of(error).replace("'", ""), log_id, stage))


def _framed(text: str, log_id: int, stage: str) -> str:
    function = f"{stage}_help"
    return (
        f"Log_id: {log_id}  Raise_msg: {text}  ClassName: Op._run_{stage}.<locals>.{function}  FunctionName: {function}"
    )


def package_failure(raised: BaseException) -> OpFailure:
    """Return the failure for an exception of a hook that unpacks a request or packs a response."""
    error = cause_of(raised)
    code, text = CustomExceptionCode.RPC_PACKAGE_ERROR.value, text_of(error)
    if isinstance(error, CustomException):
        code, text = error.code, cut(error.message) if error.is_sent_to_user else _HIDDEN
    return OpFailure(code, f"rpc package error: {text}")


def process_failure(op: str, raised: BaseException, log_id: int) -> OpFailure:
    """Return the failure for an exception of the feed check or the model."""
    return _with_type(_process_failure(op, cause_of(raised), log_id), raised)


def _process_failure(op: str, error: BaseException, log_id: int) -> OpFailure:
    if isinstance(error, CustomException):
        return OpFailure(error.code, _failed(op, cut(error.message) if error.is_sent_to_user else _HIDDEN))
    if isinstance(error, FeedMismatch):
        text = _failed(op, f"Log_id: {log_id}  Raise_msg: invalid arg list: {error.message}")
        return OpFailure(CustomExceptionCode.INPUT_PARAMS_ERROR.value, text)
    if isinstance(error, FeedTypeError):
        return OpFailure(CustomExceptionCode.TYPE_ERROR.value, _failed(op, error.message))
    text = error.message if isinstance(error, ServerError) else text_of(error) or type(error).__name__
    return OpFailure(CustomExceptionCode.UNKNOW.value, _failed(op, f"Log_id: {log_id}  Raise_msg: {text}"))


def _failed(op: str, text: str) -> str:
    return (
        f"[{op}] failed to predict. {text}. Please check the input dict and checkout "
        "PipelineServingLogs/pipeline.log for more details."
    )


def returned_failure(op: str, code: int, info: object) -> OpFailure:
    """Return the failure for an error code that ``process`` returned."""
    return OpFailure(code, _failed(op, cut(str(info))))


def timeout_failure(op: str, attempts: int, seconds: float) -> OpFailure:
    """Return the failure of a sample whose ``process`` timed out in every attempt."""
    text = f"{attempts} attempts of {seconds:g} s each: exceeded retry count"
    return OpFailure(CustomExceptionCode.TIMEOUT.value, _failed(op, text))


def unexpected_failure(op: str, error: Exception) -> OpFailure:
    """Return the failure for an unexpected exception outside of hooks."""
    return OpFailure(CustomExceptionCode.UNKNOW.value, f"[{op}] {type(error).__name__}: {text_of(error)}")


def closed_failure() -> OpFailure:
    """Return the failure of a request that the shutdown of the pipeline ended."""
    return OpFailure(CustomExceptionCode.CLOSED_ERROR.value, "dag closed.")


def deadline_failure() -> OpFailure:
    """Return the failure of a request whose deadline passed."""
    return OpFailure(CustomExceptionCode.TIMEOUT.value, "the deadline passed before the request was answered")


def worker_exited_failure(op: str, reason: str) -> OpFailure:
    """Return the failure of a sample whose worker process exited."""
    return OpFailure(
        CustomExceptionCode.UNKNOW.value, f"[{op}] the worker process {reason} while it worked on the request"
    )
