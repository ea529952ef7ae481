"""Requests whose tensors stand behind their JSON, of which the JSON has come before: it is not parsed again.

A client asks for the same model again and again, and all that changes is what stands behind the document::

    {"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","parameters":{"binary_data_size":8}}]} | 8 bytes
    └────────────────────────────────────────── head ────────────────────────────────────────┘   └─ tail ─┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ovmstrio.core.request import InferInput, InferRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.core.request import Buffer, ParameterValue, RequestedOutput

__all__ = ["MOST_HEAD_BYTES", "KnownHeads"]

MOST_HEAD_BYTES: Final = 1_024
_MOST_KNOWN: Final = 256
_SIZE: Final = "binary_data_size"


class _Input(NamedTuple):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: Mapping[str, ParameterValue]
    size: int


class _Known(NamedTuple):
    """What a head means, and how many bytes its inputs have together."""

    id: str
    parameters: Mapping[str, ParameterValue]
    inputs: Sequence[_Input]
    outputs: Sequence[RequestedOutput]
    size: int


class KnownHeads:
    """Remembers heads that say of each input how many bytes it has behind them.

    Attributes:
        missed: how many were read since one was known; where all are others, ever fewer are kept.
    """

    __slots__ = ("_known", "missed")

    def __init__(self) -> None:
        self._known: dict[bytes, _Known] = {}
        self.missed = 0

    def read(self, model: str, version: str, head: bytes, tail: memoryview) -> InferRequest | None:
        """Read a request whose head is known; None for any other, right or wrong."""
        known = self._known.get(head)
        if known is None or known.size > len(tail):
            return None
        self.missed = 0
        inputs: list[InferInput] = []
        raws: list[Buffer | None] = []
        at = 0
        for name, datatype, shape, parameters, size in known.inputs:
            inputs.append(InferInput(name, datatype, shape, None, {**parameters}))
            raws.append(tail[at : at + size])
            at += size
        return InferRequest(model, version, known.id, {**known.parameters}, inputs, [*known.outputs], raws)

    def note(self, head: bytes, request: InferRequest) -> None:
        """Remember what a head was read as, if that is not for the bytes behind it to say."""
        self.missed += 1
        if self.missed & (self.missed - 1) or not request.inputs or len(request.raw_inputs) != len(request.inputs):
            return
        inputs = []
        for given, raw in zip(request.inputs, request.raw_inputs, strict=True):
            if raw is None or _SIZE not in given.parameters:
                return
            inputs.append(_Input(given.name, given.datatype, given.shape, {**given.parameters}, len(raw)))
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        size = sum(each.size for each in inputs)
        self._known[head] = _Known(request.id, {**request.parameters}, inputs, tuple(request.outputs), size)
