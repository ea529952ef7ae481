"""The outputs that a call asks for by name: only those are answered, in that order, whatever is served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.request import SEQUENCE_ID
from ovmstrio.dataplane.classification import check_classes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ovmstrio.core.request import InferResponse, RequestedOutput
    from ovmstrio.core.tensor import TensorSpec

__all__ = ["check_outputs", "keep_outputs"]


def check_outputs(wanted: Sequence[RequestedOutput], known: Sequence[TensorSpec]) -> None:
    """Refuse names that a servable has not, before it is called: the call may change the state of a sequence.

    ``known`` is empty where it is not known what will be answered.

    Raises:
        InvalidRequest: a name is unknown, and all that are known are listed; or a number of classes is none.
    """
    check_classes(wanted)
    if known:
        _refuse_strangers(wanted, [*(spec.name for spec in known), SEQUENCE_ID])


def keep_outputs(response: InferResponse, wanted: Sequence[RequestedOutput]) -> None:
    """Leave in an answer what was asked for, in that order; a sequence's id stays, for its client goes on with it.

    Raises:
        InvalidRequest: something that was asked for is not in the answer.
    """
    given = {tensor.name: tensor for tensor in response.outputs}
    _refuse_strangers(wanted, given)
    names = dict.fromkeys(output.name for output in wanted)
    if SEQUENCE_ID in given:
        names[SEQUENCE_ID] = None
    response.outputs = [given[name] for name in names]


def _refuse_strangers(wanted: Sequence[RequestedOutput], known: Iterable[str]) -> None:
    known = [*known]
    strangers = [output.name for output in wanted if output.name not in known]
    if strangers:
        names = ", ".join(name for name in known if name != SEQUENCE_ID)
        raise InvalidRequest(
            f"requested outputs: expected some of {names or 'none'}, "
            f"got {', '.join(name[:80] for name in strangers[:10])}"
        )
