"""Requests, responses, tensors and error codes of Op pipelines, with conversion to protobuf messages and arrays."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

import numpy as np
import structlog

from ovmstrio.encoding.messages import RESPONSE
from ovmstrio.util.truncation import text_of

# ----------------------------------------------------------------------
# Requests, responses and tensors
# ----------------------------------------------------------------------


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


USUAL_METHOD: Final = "prediction"
"""Method in the URLs of most clients; the interpreter has one object for all literals of this text."""


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

    def __post_init__(self) -> None:
        # Scripts check `request.method is not "prediction"`, as in Paddle Serving's documentation: by identity.
        if self.method == USUAL_METHOD:
            self.method = USUAL_METHOD

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
    """Input of a ResponseOp: the last Op's output or an error.  Codes 0 and None mean no error.

    Attributes:
        data_id: the server's number of the request.
    """

    datatype: int = _DICT
    npdata: Mapping[str, Any] | None = None
    dictdata: Mapping[str, Any] | None = None
    data_id: int = 0
    log_id: int = 0
    error_code: int = 0
    error_info: str = ""
    prod_error_code: int | None = None
    prod_error_info: str = ""
    client_need_profile: bool = False
    profile_data_set: set[str] = field(default_factory=set)
    keeps_arrays: bool = False

    @property
    def id(self) -> int:
        """``data_id``."""
        return self.data_id

    def parse(self) -> dict[str, Any]:
        """Return the output as a dict; empty for an error."""
        if self.datatype == ARRAYS:
            return dict(self.npdata or {})
        if self.datatype == _DICT:
            return dict(self.dictdata or {})
        return {}

    @staticmethod
    def check_dictdata(dictdata: Any) -> tuple[int, str | None]:
        """Return 0 and None if the value is a dict or a list of dicts, otherwise 7000 and a text."""
        for one in dictdata if isinstance(dictdata, list) else [dictdata]:
            if not isinstance(one, dict):
                return _type_error(f"expected a dict, got {type(one).__name__}")
        return CustomExceptionCode.OK.value, None

    @staticmethod
    def check_npdata(npdata: Any) -> tuple[int, str | None]:
        """Return 0 and None if all values of a feed, or of a list of feeds, can be fed, otherwise 7000 and a text."""
        code, info = ChannelData.check_dictdata(npdata)
        if info is not None:
            return code, info
        for one in npdata if isinstance(npdata, list) else [npdata]:
            for name, value in one.items():
                if not holds_arrays({name: value}):
                    return _type_error(f"{name!r}: expected numpy.ndarray or list[str], got {type(value).__name__}")
        return CustomExceptionCode.OK.value, None

    @staticmethod
    def check_batch_npdata(batch: Any) -> tuple[int, str | None]:
        """Return the first problem of :meth:`check_npdata` in a batch of feeds, otherwise 0 and None."""
        return next((found for found in map(ChannelData.check_npdata, batch) if found[0]), (0, None))


def _type_error(text: str) -> tuple[int, str]:
    return CustomExceptionCode.TYPE_ERROR.value, f"Failed to check data: {text}."


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


# ----------------------------------------------------------------------
# Arrays: pickled ones are never loaded
# ----------------------------------------------------------------------

Ndarray = np.ndarray[Any, Any]

LOD_SUFFIX: Final = ".lod"
"""Suffix of the name of a tensor's row offsets."""


class _Kind(NamedTuple):
    dtype: str
    field: str


_KINDS: Final = {
    0: _Kind("int64", "int64_data"),
    1: _Kind("float32", "float_data"),
    2: _Kind("int32", "int_data"),
    3: _Kind("float64", "float64_data"),
    4: _Kind("int16", "int_data"),
    5: _Kind("float16", "float_data"),
    6: _Kind("uint16", "uint32_data"),
    7: _Kind("uint8", "uint32_data"),
    8: _Kind("int8", "int_data"),
    9: _Kind("bool", "bool_data"),
}
STRINGS: Final = 12
NPY: Final = 13
_TYPE_NUMBERS: Final = {np.dtype(kind.dtype): number for number, kind in _KINDS.items()}


class ArrayTensor(PipelineTensor):
    """Tensor over an immutable array of type ``elem_type``, which creates the wire fields on demand."""

    __slots__ = ("array",)

    def __init__(self, name: str, array: Ndarray, elem_type: int = NPY, lod: list[int] | None = None) -> None:
        self.name = name
        self.array = array
        self.elem_type = elem_type
        self.shape = list(array.shape)
        self.lod = lod or []

    def __getattr__(self, name: str) -> Any:
        kind = _KINDS.get(self.elem_type)
        value: Any
        if name == "byte_data":
            value = b"" if kind is not None else _npy_bytes(self.array)
        elif name.endswith("_data"):
            value = self.array.reshape(-1).tolist() if kind is not None and kind.field == name else []
        else:
            raise AttributeError(name)
        setattr(self, name, value)
        return value


def _npy_bytes(array: Ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def unpack_request(request: PipelineRequest) -> dict[str, Any]:
    """Return a request's values and tensors by name; surplus values are ignored; ValueError if malformed."""
    if len(request.values) < len(request.keys):
        raise ValueError(f"{len(request.keys)} keys, but only {len(request.values)} values")
    inputs: dict[str, Any] = dict(zip(request.keys, request.values, strict=False))
    for tensor in request.tensors:
        inputs[tensor.name], offsets = unpack_tensor(tensor)
        if offsets is not None:
            inputs[tensor.name + LOD_SUFFIX] = offsets
    return inputs


def unpack_tensor(tensor: PipelineTensor) -> tuple[Any, Ndarray | None]:
    """Return the content of a tensor and its row offsets, None without; raises as :func:`to_array`."""
    return to_array(tensor), _offsets(tensor.lod) if tensor.lod else None


def _offsets(lod: list[int]) -> Ndarray:
    """Return row offsets in the form that hooks receive: two rows, or one row for an odd number."""
    offsets = np.array(lod, np.int32)
    return offsets if len(lod) % 2 else offsets.reshape(2, -1)


def to_array(tensor: PipelineTensor) -> Any:
    """Return the content of a tensor, a writable array or a string; ValueError if malformed or of unknown type."""
    if isinstance(tensor, ArrayTensor):
        array = tensor.array
        return array if array.flags.writeable else array.copy()
    if tensor.elem_type == STRINGS:
        return "".join(tensor.str_data)
    if tensor.elem_type == NPY:
        return np.load(io.BytesIO(tensor.byte_data), allow_pickle=False)
    kind = _KINDS.get(tensor.elem_type)
    if kind is None:
        raise ValueError(f"tensor {tensor.name} has elem_type {tensor.elem_type}, which is not supported")
    data = getattr(tensor, kind.field)
    if len(data) != math.prod(tensor.shape):
        shape = list(tensor.shape)
        raise ValueError(f"tensor {tensor.name} of shape {shape} has {len(data)} elements in {kind.field}")
    try:
        return np.array(data, kind.dtype).reshape(tuple(tensor.shape))
    except OverflowError as error:
        raise ValueError(f"tensor {tensor.name}: elements do not fit {kind.dtype}: {error}") from error


def from_array(name: str, value: Any, lod: Any = None, *, keep_array: bool = False) -> PipelineTensor:
    """Return a tensor of an array, with ``keep_array`` over a copy of it, or of strings; raises ValueError."""
    offsets = [] if lod is None else np.asarray(lod).reshape(-1).tolist()
    if isinstance(value, list):
        return PipelineTensor(name=name, elem_type=STRINGS, shape=[len(value)], lod=offsets, str_data=list(value))
    number = _TYPE_NUMBERS.get(value.dtype.newbyteorder("="))
    if number is None:
        raise ValueError(f"{name}: dtype {value.dtype} is not supported by tensors")
    if keep_array:
        return ArrayTensor(name, np.array(value), number, offsets)
    tensor = PipelineTensor(name=name, elem_type=number, shape=list(value.shape), lod=offsets)
    setattr(tensor, _KINDS[number].field, value.reshape(-1).tolist())
    return tensor


def holds_arrays(output: Mapping[str, Any]) -> bool:
    """Return whether every value is an array or a non-empty list of strings."""
    for value in output.values():
        if not isinstance(value, np.ndarray) and not (isinstance(value, list) and _are_strings(value)):
            return False
    return True


def _are_strings(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(one, str) for one in values)


def pack_response(data: ChannelData, *, as_tensors: bool = False) -> PipelineResponse:
    """Return the response: arrays as full numpy text or as tensors, strings unchanged."""
    response = PipelineResponse(err_no=data.error_code, err_msg=data.error_info)
    if data.prod_error_code is not None:
        response.err_no, response.err_msg = code_number(data.prod_error_code), data.prod_error_info
    if response.err_no:
        return response
    output = data.parse()
    if data.datatype == ARRAYS:
        if as_tensors:
            _pack_tensors(response, output, keep_array=data.keeps_arrays)
        else:
            _pack_printed(response, output)
    else:
        _pack_texts(response, output)
    return response


def _pack_printed(response: PipelineResponse, output: Mapping[str, Any]) -> None:
    with np.printoptions(threshold=sys.maxsize, legacy="1.25"):
        for name, value in output.items():
            response.keys.append(name)
            response.values.append(repr(value))


def _pack_tensors(response: PipelineResponse, output: Mapping[str, Any], *, keep_array: bool) -> None:
    for name, value in output.items():
        owner = name.removesuffix(LOD_SUFFIX)
        if owner == name or owner not in output:
            response.tensors.append(from_array(name, value, output.get(name + LOD_SUFFIX), keep_array=keep_array))


def _pack_texts(response: PipelineResponse, output: Mapping[str, Any]) -> None:
    for name, value in output.items():
        if not isinstance(value, str):
            response.err_no = CustomExceptionCode.TYPE_ERROR.value
            response.err_msg = f"@DAGExecutor fetch var type must be str({type(value)})."
            return
        response.keys.append(name)
        response.values.append(value)


def to_response(packed: Any) -> PipelineResponse:
    """Return a pack hook's result, any object with the message's fields, as response; raises if a field is wrong."""
    if isinstance(packed, PipelineResponse):
        response = packed
    else:
        response = PipelineResponse(packed.err_no, packed.err_msg, list(packed.key), list(packed.value))
        response.tensors = list(packed.tensors)
    if type(response.err_no) is not int:
        response.err_no = code_number(response.err_no)
    for text in (response.err_msg, *response.keys, *response.values):
        if not isinstance(text, str):
            raise TypeError(f"keys, values and err_msg of an answer must be str, got {type(text).__name__}")
    return response
