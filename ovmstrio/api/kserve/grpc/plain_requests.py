"""Requests that differ from an earlier one in the values of their tensors alone, read without parsing them again.

A client asks for the same model again and again: all that it sends but the tensors' elements stays the same, byte by
byte.  Of two messages of one size that begin alike, up to and with the size of their last fields, a parser makes the
same but for what is in those::

    other fields | tag, size | raw contents | tag, size | raw contents
    └─────── begin ────────┘                └─ between ─┘

One without raw contents, whose tensors lie in shared memory, is known if it is the same in all of its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.request import InferInput, InferRequest, RequestedOutput
from ovmstrio.protocol.split_messages import encode_varint, split_raw_contents

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.request import Buffer

__all__ = ["PlainRequests"]

_MOST_SIZES: Final = 256
_MOST_HEAD_BYTES: Final = 1_024


@dataclass(slots=True)
class _Known:
    """A request of some size: how it begins, and what that means.

    ``raws`` has the size of each of its raw contents, and what stands behind it; ``missed`` counts others of that size.
    """

    begin: bytes
    raws: Sequence[tuple[int, bytes]]
    request: InferRequest
    missed: int = 0

    def tensors(self, data: bytes) -> list[Buffer | None] | None:
        """Give the raw contents of another message of this size; None if it is not such a one."""
        if not data.startswith(self.begin):
            return None
        found: list[Buffer | None] = []
        at = len(self.begin)
        for size, behind in self.raws:
            end = at + size
            found.append(data[at:end])
            if behind and not data.startswith(behind, end):
                return None
            at = end + len(behind)
        return found


class PlainRequests:
    """Remembers one request of each size, of those whose tensors are raw or elsewhere.

    Args:
        raw_tag: what stands before raw contents.
        message: the message's name.
    """

    __slots__ = ("_by_size", "_message", "_raw_tag")

    def __init__(self, raw_tag: int, message: str) -> None:
        self._raw_tag = raw_tag
        self._message = message
        self._by_size: dict[int, _Known] = {}

    def read(self, data: bytes) -> InferRequest | None:
        """Read a message that begins as the last one of its size did; None if it does not."""
        known = self._by_size.get(len(data))
        if known is None:
            return None
        raws = known.tensors(data)
        if raws is None:
            known.missed += 1
            return None
        same = known.request
        return InferRequest(
            same.model_name,
            same.model_version,
            same.id,
            {**same.parameters} if same.parameters else {},
            _copied(same.inputs),
            [RequestedOutput(output.name, {**output.parameters}) for output in same.outputs] if same.outputs else [],
            raws,
            received=len(data),
        )

    def note(self, data: bytes, request: InferRequest) -> None:
        """Remember what a message was read as, if it is one whose like can be known by its beginning.

        Where every message of a size is another one, ever fewer are looked at.
        """
        known = self._by_size.get(len(data))
        if known is not None and known.missed & (known.missed - 1):
            return
        if not _is_plain(request):
            return
        begin, raws = self._parts(data)
        if begin and len(begin) <= _MOST_HEAD_BYTES:
            if known is None and len(self._by_size) >= _MOST_SIZES:
                self._by_size.clear()
            kept = InferRequest(request.model_name, request.model_version, request.id, {**request.parameters})
            kept.inputs = _copied(request.inputs)
            kept.outputs = [RequestedOutput(output.name, {**output.parameters}) for output in request.outputs]
            self._by_size[len(data)] = _Known(begin, raws, kept, 0 if known is None else known.missed)

    def _parts(self, data: bytes) -> tuple[bytes, Sequence[tuple[int, bytes]]]:
        """Give all that stands before the raw contents, and between them; nothing unless these come last."""
        try:
            head, found = split_raw_contents(data, self._raw_tag, self._message)
        except (IndexError, InvalidRequest):
            # The parser passes over groups of fields that it does not know; whoever sends them is read by it each time.
            return b"", ()
        if not found:
            return data, ()
        sizes = [len(raw) for raw in found if raw is not None]
        before = [bytes((self._raw_tag,)) + encode_varint(size) for size in sizes]
        begin = head + before[0]
        pieces = [
            begin,
            *(piece for raw, behind in zip(found, [*before[1:], b""], strict=True) for piece in (raw, behind)),
        ]
        if b"".join(piece for piece in pieces if piece) != data:
            return b"", ()
        return begin, tuple(zip(sizes, [*before[1:], b""], strict=True))


def _copied(inputs: Sequence[InferInput]) -> list[InferInput]:
    return [
        InferInput(given.name, given.datatype, given.shape, None, {**given.parameters} if given.parameters else {})
        for given in inputs
    ]


def _is_plain(request: InferRequest) -> bool:
    raws = request.raw_inputs
    if not request.inputs or (raws and len(raws) != len(request.inputs)):
        return False
    return all(given.contents is None for given in request.inputs) and all(raw is not None for raw in raws)
