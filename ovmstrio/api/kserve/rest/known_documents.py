"""Documents that differ from an earlier one in the numbers of their tensor alone: nothing else is parsed again.

A client asks for the same model again and again, and all that it sends but the tensor's elements stays the same::

    {"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data": [0.5,-1] }],"outputs":[{"name":"y"}]}
    └───────────────────── begin ──────────────────────────┘└ key ┘        └─────────── end ───────────┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import orjson

from ovmstrio.api.kserve.rest.known_heads import KnownHeads
from ovmstrio.api.kserve.rest.plain_request import ELEMENT_TYPES, read_plain_request
from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.request import Contents, InferInput, InferRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.request import RequestedOutput

__all__ = ["KnownDocuments"]

_MOST_KNOWN: Final = 256
_MOST_BYTES: Final = 1_024
"""Of a document without its numbers."""
_KEY: Final = b'"data":'


class _Known(NamedTuple):
    """What a document begins with behind the key, what it ends with, and what it means but for the numbers."""

    key: bytes
    end: bytes
    id: str
    name: str
    datatype: str
    shape: tuple[int, ...]
    field: str
    types: frozenset[type]
    outputs: Sequence[RequestedOutput]


class KnownDocuments:
    """Remembers documents of one tensor of flat numbers with nothing said about it.

    Attributes:
        heads: those of documents whose tensors stand behind them.
        missed: how many were read since one was known; where all are others, ever fewer are looked at.
    """

    __slots__ = ("_known", "heads", "missed")

    def __init__(self) -> None:
        self._known: dict[bytes, _Known] = {}
        self.heads = KnownHeads()
        self.missed = 0

    def read(self, model: str, version: str, body: bytes) -> InferRequest | None:
        """Read a document that is known but for its numbers; None for any other, right or wrong."""
        at = body.find(_KEY, 0, _MOST_BYTES)
        known = self._known.get(body[:at]) if at > 0 else None
        if known is None:
            return None
        key, end, id_, name, datatype, shape, field, types, outputs = known
        if not (body.startswith(key, at) and body.endswith(end)):
            return None
        try:
            values = orjson.loads(body[at + len(key) : -len(end)])
        except orjson.JSONDecodeError:
            return None
        if type(values) is not list or not values or not types.issuperset(map(type, values)):
            return None
        self.missed = 0
        given = InferInput(name, datatype, shape, Contents(field, values, is_checked=True), {})
        return InferRequest(model, version, id_, {}, [given], [*outputs], [])

    def note(self, body: bytes, request: InferRequest) -> None:
        """Remember a document by what it was read as, if nothing but the numbers changes where other ones stand."""
        self.missed += 1
        if self.missed & (self.missed - 1) or len(request.inputs) != 1:
            return
        at = body.find(_KEY, 0, _MOST_BYTES)
        first, last = body.find(b"[", at), body.find(b"]", at)
        end = body[last + 1 :]
        if not 0 < at < first < last or first + len(end) > _MOST_BYTES:
            return
        if not _changes_alone(body[:first], body[first + 1 : last], end, request):
            return
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[body[:at]] = _known(body[at:first], end, request)


def _known(key: bytes, end: bytes, request: InferRequest) -> _Known:
    (given,) = request.inputs
    field = BY_NAME[given.datatype].contents_field
    about = given.name, given.datatype, given.shape, field, ELEMENT_TYPES[field]
    return _Known(key, end, request.id, *about, tuple(request.outputs))


def _changes_alone(begin: bytes, numbers: bytes, end: bytes, request: InferRequest) -> bool:
    """Tell whether a document with every number twice means the same but for these, which are the tensor's then."""
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
