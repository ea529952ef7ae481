"""Which process has a sequence, where a server has several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

import numpy as np

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.tensor import RawTensor, Tensor
from ovmstrio.core.texts import utf8

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["owner_of", "read_outputs", "tell_outputs"]

_ID_BYTES: Final = 8


def owner_of(identity: int | str, processes: int) -> int:
    """Tell which of so many processes has a sequence; the same whichever is asked, and whenever."""
    data = utf8(identity) if isinstance(identity, str) else identity.to_bytes(_ID_BYTES, "little")
    return crc32(data) % processes


def tell_outputs(outputs: Sequence[Tensor | RawTensor]) -> list[list[Any]]:
    """Make plain data of a model's outputs."""
    return [[each.name, each.datatype_name, each.array] for each in outputs if isinstance(each, Tensor)]


def read_outputs(told: Sequence[Sequence[Any]]) -> list[Tensor | RawTensor]:
    """Make outputs of what :func:`tell_outputs` gave."""
    return [Tensor(name, BY_NAME[datatype], np.asarray(array)) for name, datatype, array in told]
