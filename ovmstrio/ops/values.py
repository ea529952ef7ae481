"""Values of Op pipelines: requests, responses, tensors, error codes, and their protobuf messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import structlog

from ovmstrio.encoding.messages import RESPONSE
from ovmstrio.util.truncation import text_of


class CustomExceptionCode(Enum):
    """Error codes in ``err_no``."""

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
    """Base of services' enumerations of product error codes."""


class CustomException(Exception):
    """Raised by a hook to fail its request with a code.

    Args:
        exceptionCode: member of :class:`CustomExceptionCode`, or a number.
        errorMsg: error text.
        isSendToUser: send the text to the client; the code is always sent.
    """

    def __init__(
        self,
        exceptionCode: CustomExceptionCode | int,  # noqa: N803 - services pass it by name
        errorMsg: str,  # noqa: N803 - the same
        isSendToUser: bool = False,  # noqa: FBT002, N803 - the same
    ) -> None:
        super().__init__(errorMsg)
        self.code = code_number(exceptionCode)
        self.message = str(errorMsg)
        self.is_sent_to_user = bool(isSendToUser)


def code_number(code: Any) -> int:
    """Return the number of a code: a number, an enumeration member, or a 1-tuple of either; TypeError or ValueError."""
    value = code.value if isinstance(code, Enum) else code
    if isinstance(value, tuple) and len(value) == 1:
        (value,) = value
    return int(value)


@dataclass(slots=True)
class PipelineTensor:
    """Tensor in wire form; ``elem_type`` selects the field with the elements."""

    name: str = ""
    elem_type: int = 0
    shape: list[int] = field(default_factory=list)
    lod: list[int] = field(default_factory=list)
    int64_data: list[int] = field(default_factory=list)
    float_data: list[float] = field(default_factory=list)
    int_data: list[int] = field(default_factory=list)
    float64_data: list[float] = field(default_factory=list)
    uint32_data: list[int] = field(default_factory=list)
    bool_data: list[bool] = field(default_factory=list)
    str_data: list[str] = field(default_factory=list)
    byte_data: bytes = b""


class _NamedFields:
    __slots__ = ()

    keys: list[str]
    values: list[str]

    @property
    def key(self) -> list[str]:
        return self.keys

    @property
    def value(self) -> list[str]:
        return self.values


@dataclass(slots=True)
class PipelineRequest(_NamedFields):
    """Pipeline request; ``keeps_arrays`` requests response tensors as arrays instead of element lists."""

    keys: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    tensors: list[PipelineTensor] = field(default_factory=list)
    name: str = ""
    method: str = ""
    logid: int = 0
    clientip: str = ""
    keeps_arrays: bool = False

    @property
    def log_id(self) -> int:
        """The client's number of the request."""
        return self.logid


@dataclass(slots=True)
class PipelineResponse(_NamedFields):
    """Pipeline response; ``is_overload`` marks a request rejected because too many wait."""

    err_no: int = 0
    err_msg: str = ""
    keys: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    tensors: list[PipelineTensor] = field(default_factory=list)
    is_overload: bool = False


class ChannelDataType(Enum):
    """Content of a :class:`ChannelData`: a dict of any values, arrays only, or an error."""

    DICT = 0
    CHANNEL_NPDATA = 1
    ERROR = 2


# Cached, because ``.value`` of an enumeration member is a slow property.
_DICT: Final = ChannelDataType.DICT.value
ARRAYS: Final = ChannelDataType.CHANNEL_NPDATA.value
"""Type of data with arrays only."""


@dataclass(slots=True)
class ChannelData:
    """Input of a ResponseOp: the last Op's output or an error.  Codes 0 and None mean no error."""

    datatype: int = _DICT
    npdata: Mapping[str, Any] | None = None
    dictdata: Mapping[str, Any] | None = None
    id: int = 0
    log_id: int = 0
    error_code: int = 0
    error_info: str = ""
    prod_error_code: int | None = None
    prod_error_info: str = ""
    client_need_profile: bool = False
    profile_data_set: set[str] = field(default_factory=set)
    keeps_arrays: bool = False

    @property
    def data_id(self) -> int:
        """The server's number of the request."""
        return self.id

    def parse(self) -> dict[str, Any]:
        """Return the output as a dict; empty for an error."""
        if self.datatype == ARRAYS:
            return dict(self.npdata or {})
        if self.datatype == _DICT:
            return dict(self.dictdata or {})
        return {}


# Protobuf messages

log = structlog.get_logger(__name__)

LISTS: Final = (
    "int64_data",
    "float_data",
    "int_data",
    "float64_data",
    "uint32_data",
    "bool_data",
    "str_data",
    "shape",
    "lod",
)
"""Repeated fields of a tensor; complex numbers are not supported."""

SCALARS: Final = ("byte_data", "elem_type", "name")


def request_from_message(message: Any) -> PipelineRequest:
    """Convert a request message."""
    return PipelineRequest(
        keys=list(message.key),
        values=list(message.value),
        tensors=[tensor_from_message(tensor) for tensor in message.tensors],
        name=message.name,
        method=message.method,
        logid=message.logid,
        clientip=message.clientip,
    )


def tensor_from_message(message: Any) -> PipelineTensor:
    """Convert a tensor message."""
    fields: dict[str, Any] = {name: list(getattr(message, name)) for name in LISTS}
    fields |= {name: getattr(message, name) for name in SCALARS}
    return PipelineTensor(**fields)


def response_to_message(response: PipelineResponse) -> Any:
    """Convert a response to a message; invalid field values become error 8000."""
    try:
        message = RESPONSE(err_no=response.err_no, err_msg=response.err_msg, key=response.keys, value=response.values)
        for tensor in response.tensors:
            add_tensor(message, tensor)
    except (TypeError, ValueError) as error:
        log.error("response not packed", reason=text_of(error))  # noqa: TRY400 - the caller gets the error
        return RESPONSE(
            err_no=CustomExceptionCode.RPC_PACKAGE_ERROR.value, err_msg=f"rpc package error: {text_of(error)}"
        )
    return message


def add_tensor(message: Any, tensor: PipelineTensor) -> None:
    """Append a tensor to a message; TypeError or ValueError for fields that cannot hold their value."""
    added = message.tensors.add()
    for name in SCALARS:
        setattr(added, name, getattr(tensor, name))
    for name in LISTS:
        getattr(added, name).extend(getattr(tensor, name))
