"""The numbers of Paddle Serving's errors, and the exception by which user code picks one."""

from __future__ import annotations

from enum import Enum
from typing import Any

__all__ = ["CustomException", "CustomExceptionCode", "ProductErrCode", "product_number"]


class CustomExceptionCode(Enum):
    """What ``err_no`` of an answer says."""

    OK = 0
    PRODUCT_ERROR = 50
    NOT_IMPLEMENTED = 3000
    CLOSED_ERROR = 3001
    NO_SERVICE = 3002
    INIT_ERROR = 3003
    CONF_ERROR = 4000
    INPUT_PARAMS_ERROR = 5000
    TIMEOUT = 6000
    TYPE_ERROR = 7000
    RPC_PACKAGE_ERROR = 8000
    CLIENT_ERROR = 9000
    UNKNOW = 10000


class ProductErrCode(Enum):
    """An empty enumeration: services subclass it with the codes of their product."""


class CustomException(Exception):
    """Raised by a hook to answer its request with a code.

    Args:
        exceptionCode: the code, a member of :class:`CustomExceptionCode` or a number.
        errorMsg: what went wrong.
        isSendToUser: whether the caller is told the message; the code it gets in any case.
    """

    def __init__(
        self,
        exceptionCode: CustomExceptionCode | int,  # noqa: N803 - what services pass by name
        errorMsg: str,  # noqa: N803 - the same
        isSendToUser: bool = False,  # noqa: FBT002, N803 - the same
    ) -> None:
        super().__init__(errorMsg)
        self.code = product_number(exceptionCode)
        self.message = str(errorMsg)
        self.is_sent_to_user = bool(isSendToUser)


def product_number(code: Any) -> int:
    """Give the number of a code: a number, a member of an enumeration, or either in a tuple of one.

    Raises:
        TypeError: it is nothing of the kind.
        ValueError: the same.
    """
    value = code.value if isinstance(code, Enum) else code
    if isinstance(value, tuple) and len(value) == 1:
        (value,) = value
    return int(value)
