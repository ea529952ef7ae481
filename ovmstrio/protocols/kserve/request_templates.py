"""Cache of inference requests without their tensors: most clients send the same request with other tensors.

::

    bytes ─ key ─> template ─ layout: where the tensors are ─> InferRequest

Three forms of a request use it: JSON, a JSON head before binary tensors, and protobuf.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeGuard, TypeVar

import orjson

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.request import Contents, InferInput, InferRequest, RequestedOutput
from ovmstrio.core.tensor import BY_NAME
from ovmstrio.encoding.protobuf_wire import encode_varint, split_raw_contents

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.core.request import Buffer, ParameterValue

MAX_HEAD_BYTES: Final = 1_024
"""Most bytes of a cached request without its tensors."""
_MAX_TEMPLATES: Final = 256

_Key = TypeVar("_Key")
_Layout = TypeVar("_Layout")


@dataclass(slots=True)
class _Template(Generic[_Layout]):
    """Request without its tensors; ``missed`` counts messages with its key and another meaning."""

    layout: _Layout
    model: str
    version: str
    id: str
    parameters: Mapping[str, ParameterValue]
    inputs: Sequence[tuple[str, str, tuple[int, ...], Mapping[str, ParameterValue]]]
    outputs: Sequence[RequestedOutput]
    missed: int = 0

    def request(self, model: str, version: str, raws: list[Buffer | None]) -> InferRequest:
        """Create a request with raw tensors that shares only its outputs with others."""
        inputs = []
        for name, datatype, shape, parameters in self.inputs:
            inputs.append(InferInput(name, datatype, shape, None, {**parameters} if parameters else {}))
        return InferRequest(model, version, self.id, {**self.parameters}, inputs, [*self.outputs], raws)


class RequestTemplateCache(Generic[_Key, _Layout]):
    """Bounded cache of templates; as consecutive misses grow, fewer and fewer requests become templates.

    ``missed`` is the number of misses since the last hit.
    """

    __slots__ = ("_templates", "missed")

    def __init__(self) -> None:
        self._templates: dict[_Key, _Template[_Layout]] = {}
        self.missed = 0

    def _is_due(self) -> bool:
        """Count a miss; return whether its request may become a template."""
        self.missed += 1
        return not self.missed & (self.missed - 1)

    def _store(self, key: _Key, layout: _Layout, request: InferRequest, missed: int = 0) -> None:
        if key not in self._templates and len(self._templates) >= _MAX_TEMPLATES:
            self._templates.clear()
        self._templates[key] = _Template(
            layout,
            request.model_name,
            request.model_version,
            request.id,
            {**request.parameters},
            [(given.name, given.datatype, given.shape, {**given.parameters}) for given in request.inputs],
            [RequestedOutput(output.name, {**output.parameters}) for output in request.outputs],
            missed,
        )


# JSON with a single flat tensor

_DATA_KEY: Final = b'"data":'
MAX_DIM: Final = 2**31 - 1  # Maximum size of a dimension

NUMBER_TYPES: Final[frozenset[type]] = frozenset({int, float})
ELEMENT_TYPES: Final[Mapping[str, frozenset[type]]] = {
    "bool_contents": frozenset({bool}),
    "int_contents": frozenset({int}),
    "int64_contents": frozenset({int}),
    "uint_contents": frozenset({int}),
    "uint64_contents": frozenset({int}),
    "fp32_contents": NUMBER_TYPES,
    "fp64_contents": NUMBER_TYPES,
    "bytes_contents": frozenset({str}),
}
"""JSON element types by the gRPC field that carries the elements."""

_FIELDS: Final = {name: (row.contents_field, ELEMENT_TYPES[row.contents_field]) for name, row in BY_NAME.items()}
_MEMBERS: Final = 4  # Number of members of an input with only name, shape, datatype and data


def are_dims(shape: Any) -> TypeGuard[list[int]]:
    """Return whether a JSON value is a list of dimensions."""
    return type(shape) is list and all(type(size) is int and 0 <= size <= MAX_DIM for size in shape)


def read_plain_request(model: str, version: str, document: dict[str, Any]) -> InferRequest | None:
    """Parse a document with flat data lists and without parameters; None for any other document."""
    given, wanted, id_ = document.get("inputs"), document.get("outputs"), document.get("id", "")
    if type(given) is not list or type(id_) is not str or "parameters" in document:
        return None
    inputs = []
    for each in given:
        read = _plain_input(each)
        if read is None:
            return None
        inputs.append(read)
    if wanted is None:
        return None if "outputs" in document else InferRequest(model, version, id_, {}, inputs)
    if type(wanted) is not list:
        return None
    outputs = []
    for each in wanted:
        if type(each) is not dict or len(each) != 1 or type(name := each.get("name")) is not str:
            return None
        outputs.append(RequestedOutput(name))
    return InferRequest(model, version, id_, {}, inputs, outputs)


def _plain_input(given: Any) -> InferInput | None:
    if type(given) is not dict or len(given) != _MEMBERS:
        return None
    name, shape, datatype, data = given.get("name"), given.get("shape"), given.get("datatype"), given.get("data")
    if type(name) is not str or type(datatype) is not str:
        return None
    if type(shape) is not list or type(data) is not list or not data:
        return None
    for size in shape:
        if type(size) is not int or not 0 <= size <= MAX_DIM:
            return None
    field = _FIELDS.get(datatype)
    if field is None or not field[1].issuperset(map(type, data)):
        return None
    return InferInput(name, datatype, tuple(shape), Contents(field[0], data, is_checked=True))


class _Numbers(NamedTuple):
    """Layout of a JSON document: text from the data key to the first number, and text after the last number."""

    begin: bytes
    end: bytes
    field: str
    types: frozenset[type]


class JsonTemplates(RequestTemplateCache[bytes, _Numbers]):
    """Documents with a single flat tensor and no parameters, by the text before the data."""

    __slots__ = ()

    def read(self, model: str, version: str, body: bytes) -> InferRequest | None:
        """Return the request of a cached document with other numbers; None otherwise."""
        at = body.find(_DATA_KEY, 0, MAX_HEAD_BYTES)
        known = self._templates.get(body[:at]) if at > 0 else None
        if known is None:
            return None
        begin, end, field, types = known.layout
        if not (body.startswith(begin, at) and body.endswith(end)):
            return None
        try:
            values = orjson.loads(body[at + len(begin) : -len(end)])
        except orjson.JSONDecodeError:
            return None
        if type(values) is not list or not values or not types.issuperset(map(type, values)):
            return None
        self.missed = 0
        name, datatype, shape, _ = known.inputs[0]
        given = InferInput(name, datatype, shape, Contents(field, values, is_checked=True), {})
        return InferRequest(model, version, known.id, {}, [given], [*known.outputs], [])

    def note(self, body: bytes, request: InferRequest) -> None:
        """Store a document whose bracketed numbers are only the tensor's elements."""
        if not self._is_due() or len(request.inputs) != 1:
            return
        at = body.find(_DATA_KEY, 0, MAX_HEAD_BYTES)
        first, last = body.find(b"[", at), body.find(b"]", at)
        end = body[last + 1 :]
        if not 0 < at < first < last or first + len(end) > MAX_HEAD_BYTES:
            return
        if _is_data_only_change(body[:first], body[first + 1 : last], end, request):
            layout = _Numbers(body[at:first], end, *_FIELDS[request.inputs[0].datatype])
            self._store(body[:at], layout, request)


def _is_data_only_change(begin: bytes, numbers: bytes, end: bytes, request: InferRequest) -> bool:
    """Return whether repeating the numbers changes only the tensor's elements."""
    try:
        document = orjson.loads(b"%b[%b,%b]%b" % (begin, numbers, numbers, end))
    except orjson.JSONDecodeError:
        return False
    other = read_plain_request(request.model_name, request.model_version, document)
    if other is None or other.inputs[0].contents is None or request.inputs[0].contents is None:
        return False
    values = request.inputs[0].contents.values
    if other.inputs[0].contents.values != [*values, *values]:
        return False
    other.inputs[0].contents.values = values
    return other == request


# JSON head before binary tensors


class BinaryTemplates(RequestTemplateCache[bytes, "tuple[int, Sequence[int]]"]):
    """JSON heads that give the size of every binary input, by their bytes; a layout is the total and the sizes."""

    __slots__ = ()

    def read(self, model: str, version: str, head: bytes, tail: memoryview) -> InferRequest | None:
        """Return the request of a cached head with its binary tensors; None otherwise."""
        known = self._templates.get(head)
        if known is None or known.layout[0] > len(tail):
            return None
        self.missed = at = 0
        raws: list[Buffer | None] = []
        for size in known.layout[1]:
            raws.append(tail[at : at + size])
            at += size
        return known.request(model, version, raws)

    def note(self, head: bytes, request: InferRequest) -> None:
        """Store a head, unless its meaning depends on the binary part."""
        if not self._is_due() or not request.inputs or len(request.raw_inputs) != len(request.inputs):
            return
        if all("binary_data_size" in given.parameters for given in request.inputs):
            sizes = [len(raw) for raw in request.raw_inputs if raw is not None]
            if len(sizes) == len(request.inputs):
                self._store(head, (sum(sizes), sizes), request)


@dataclass(frozen=True, slots=True)
class RestTemplates:
    """Templates of the two forms of REST requests."""

    json: JsonTemplates
    binary: BinaryTemplates

    @classmethod
    def empty(cls) -> RestTemplates:
        """Return caches without templates."""
        return cls(JsonTemplates(), BinaryTemplates())


# Protobuf


class _RawTensors(NamedTuple):
    """Layout of a message: its begin, and the size of each raw content with the bytes that follow."""

    begin: bytes
    raws: Sequence[tuple[int, bytes]]


class ProtobufTemplates(RequestTemplateCache[int, _RawTensors]):
    """Messages of type ``message`` with raw tensors (field ``raw_tag``) or shared memory, one by size."""

    __slots__ = ("_message", "_raw_tag")

    def __init__(self, raw_tag: int, message: str) -> None:
        super().__init__()
        self._raw_tag = raw_tag
        self._message = message

    def read(self, data: bytes) -> InferRequest | None:
        """Return the request of a message that matches the template of its size; None otherwise."""
        known = self._templates.get(len(data))
        if known is None:
            return None
        begin, layout = known.layout
        if not data.startswith(begin):
            known.missed += 1
            return None
        raws: list[Buffer | None] = []
        at = len(begin)
        for size, following in layout:
            end = at + size
            raws.append(data[at:end])
            if following and not data.startswith(following, end):
                known.missed += 1
                return None
            at = end + len(following)
        request = known.request(known.model, known.version, raws)
        request.received = len(data)
        if known.outputs:
            request.outputs = [RequestedOutput(output.name, {**output.parameters}) for output in known.outputs]
        return request

    def note(self, data: bytes, request: InferRequest) -> None:
        """Store a template; while templates of a size keep missing, fewer and fewer messages are examined."""
        known = self._templates.get(len(data))
        missed = 0 if known is None else known.missed
        if missed & (missed - 1) or not _is_plain(request):
            return
        layout = self._layout(data)
        if layout is not None and len(layout.begin) <= MAX_HEAD_BYTES:
            self._store(len(data), layout, request, missed)

    def _layout(self, data: bytes) -> _RawTensors | None:
        """Return the layout of a message; None unless the raw contents come last."""
        try:
            head, found = split_raw_contents(data, self._raw_tag, self._message)
        except (IndexError, InvalidRequest):
            # The message has unknown groups, which the parser skips: parse such messages every time.
            return None
        raws = [raw for raw in found if raw is not None]
        prefixes = [bytes((self._raw_tag,)) + encode_varint(len(raw)) for raw in raws]
        pieces = [head, *(piece for pair in zip(prefixes, raws, strict=True) for piece in pair)]
        if b"".join(pieces) != data:
            return None
        following = [*prefixes[1:], b""]
        return _RawTensors(
            b"".join((head, *prefixes[:1])),
            tuple((len(raw), after) for raw, after in zip(raws, following[: len(raws)], strict=True)),
        )


def _is_plain(request: InferRequest) -> bool:
    raws = request.raw_inputs
    if not request.inputs or (raws and len(raws) != len(request.inputs)):
        return False
    return all(given.contents is None for given in request.inputs) and all(raw is not None for raw in raws)
