"""Answers of pipelines that tell of a failure, as observers of their calls see them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.core.events import note_failure
from ovmstrio.runtimes.ops.values import CustomExceptionCode

if TYPE_CHECKING:
    from ovmstrio.runtimes.ops.values import PipelineResponse

__all__ = ["note_answer"]


def note_answer(response: PipelineResponse) -> None:
    """Note in the event of the running call that its answer tells of a failure, if it does."""
    if response.err_no and not response.is_overload:
        note_failure(response.err_msg, code=_code_of(response.err_no))


def _code_of(number: int) -> str:
    """Name an error; those that services define themselves have one name together."""
    try:
        return CustomExceptionCode(number).name
    except ValueError:
        return CustomExceptionCode.PRODUCT_ERROR.name
