"""Requests that differ from an earlier one in the values of their tensor alone, read without parsing them again.

A client asks for the same model again and again: all that it sends but the tensor's elements stays the same, byte by
byte.  Of two messages of one size that begin alike, up to and with the size of their last field, a parser makes the
same but for that field.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ovmstrio.core.request import InferInput, InferRequest, RequestedOutput
from ovmstrio.protocol.split_messages import encode_varint, split_raw_contents

if TYPE_CHECKING:
    from ovmstrio.core.request import Buffer

__all__ = ["PlainRequests"]

_MOST_SIZES: Final = 256
_MOST_HEAD_BYTES: Final = 1_024


@dataclass(slots=True)
class _Known:
    """A request of some size: how it begins, and what that means; ``missed`` counts others of that size."""

    begin: bytes
    request: InferRequest
    missed: int = 0


class PlainRequests:
    """Remembers one request of each size, of those with one raw tensor and no parameters.

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
        begin = known.begin
        if not data.startswith(begin):
            known.missed += 1
            return None
        same = known.request
        given = same.inputs[0]
        return InferRequest(
            same.model_name,
            same.model_version,
            same.id,
            {},
            [InferInput(given.name, given.datatype, given.shape)],
            [RequestedOutput(output.name) for output in same.outputs] if same.outputs else [],
            [data[len(begin) :]],
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
        begin = self._begin_of(data, request.raw_inputs[0] or b"")
        if begin and len(begin) <= _MOST_HEAD_BYTES:
            if known is None and len(self._by_size) >= _MOST_SIZES:
                self._by_size.clear()
            kept = InferRequest(request.model_name, request.model_version, request.id)
            kept.inputs, kept.outputs = [*request.inputs], [*request.outputs]
            self._by_size[len(data)] = _Known(begin, kept, 0 if known is None else known.missed)

    def _begin_of(self, data: bytes, raw: Buffer) -> bytes:
        """Give all that stands before the raw contents if these come last, else nothing."""
        head, _ = split_raw_contents(data, self._raw_tag, self._message)
        begin = head + bytes((self._raw_tag,)) + encode_varint(len(raw))
        return begin if len(begin) + len(raw) == len(data) and data.startswith(begin) else b""


def _is_plain(request: InferRequest) -> bool:
    if len(request.inputs) != 1 or len(request.raw_inputs) != 1 or request.parameters:
        return False
    (given,) = request.inputs
    return (
        given.contents is None
        and not given.parameters
        and not any(output.parameters for output in request.outputs)
        and request.raw_inputs[0] is not None
    )
