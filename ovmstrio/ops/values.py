"""What goes into a pipeline, what comes out of it, and what its ResponseOp gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import structlog

from ovmstrio.encoding.messages import RESPONSE
from ovmstrio.util.truncation import text_of

__all__ = [
    "ARRAYS",
    "ChannelData",
    "ChannelDataType",
    "CustomException",
    "CustomExceptionCode",
    "PipelineRequest",
    "PipelineResponse",
    "PipelineTensor",
    "ProductErrCode",
    "add_tensor",
    "from_message",
    "product_number",
    "tensor_from_message",
    "to_message",
]

# ----------------------------------------------------------------------
# What goes into a pipeline, what comes out of it, and what its ResponseOp gets
# ----------------------------------------------------------------------


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


@dataclass(slots=True)
class PipelineTensor:
    """A tensor as the wire has it: the field that holds the elements follows from ``elem_type``."""

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
    """Keys and values go by the names of the message's fields, too."""

    __slots__ = ()

    keys: list[str]
    values: list[str]

    @property
    def key(self) -> list[str]:
        """The keys, by the name of the message's field."""
        return self.keys

    @property
    def value(self) -> list[str]:
        """The values, by the name of the message's field."""
        return self.values


@dataclass(slots=True)
class PipelineRequest(_NamedFields):
    """One request; ``key``, ``value`` and ``log_id`` are other names that services use.

    ``keeps_arrays`` asks for tensors of the answer as arrays: whoever asks has no use for their elements one by one.
    """

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
    """One answer; a pack hook may fill ``key`` and ``value`` as it would those of the message.

    ``is_overload`` tells transports that the request was refused because too many wait.
    """

    err_no: int = 0
    err_msg: str = ""
    keys: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    tensors: list[PipelineTensor] = field(default_factory=list)
    is_overload: bool = False


class ChannelDataType(Enum):
    """What a :class:`ChannelData` carries: anything, arrays alone, or an error."""

    DICT = 0
    CHANNEL_NPDATA = 1
    ERROR = 2


# An enumeration's values take calls to look up.
_ANYTHING: Final = ChannelDataType.DICT.value
ARRAYS: Final = ChannelDataType.CHANNEL_NPDATA.value
"""The type of data that are arrays alone."""


@dataclass(slots=True)
class ChannelData:
    """What a ResponseOp packs: the last Op's output or an error.  Codes are numbers, 0 and None are no error.

    ``keeps_arrays`` is the request's.
    """

    datatype: int = _ANYTHING
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
        """Give the output as a dict, an empty one for an error."""
        if self.datatype == ARRAYS:
            return dict(self.npdata or {})
        if self.datatype == _ANYTHING:
            return dict(self.dictdata or {})
        return {}


# ----------------------------------------------------------------------
# The protobuf messages of pipelines to and from the values of ``ovmstrio.ops.values``
# ----------------------------------------------------------------------

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
"""Repeated fields of a tensor that have a place in its value; complex numbers have none."""

SCALARS: Final = ("byte_data", "elem_type", "name")


def from_message(message: Any) -> PipelineRequest:
    """Read a request."""
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
    """Read a tensor."""
    fields: dict[str, Any] = {name: list(getattr(message, name)) for name in LISTS}
    fields |= {name: getattr(message, name) for name in SCALARS}
    return PipelineTensor(**fields)


def to_message(response: PipelineResponse) -> Any:
    """Write an answer; one that a service filled with what it cannot hold becomes error 8000."""
    try:
        message = RESPONSE(err_no=response.err_no, err_msg=response.err_msg, key=response.keys, value=response.values)
        for tensor in response.tensors:
            add_tensor(message, tensor)
    except (TypeError, ValueError) as error:
        log.error("answer cannot be packed", reason=text_of(error))  # noqa: TRY400 - the caller is told
        return RESPONSE(
            err_no=CustomExceptionCode.RPC_PACKAGE_ERROR.value, err_msg=f"rpc package error: {text_of(error)}"
        )
    return message


def add_tensor(message: Any, tensor: PipelineTensor) -> None:
    """Write a tensor behind those of a request or an answer.

    Raises:
        TypeError: a field cannot hold what it is to hold.
        ValueError: as above, for numbers that are too large.
    """
    added = message.tensors.add()
    for name in SCALARS:
        setattr(added, name, getattr(tensor, name))
    for name in LISTS:
        getattr(added, name).extend(getattr(tensor, name))
