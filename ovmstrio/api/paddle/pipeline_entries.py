"""The pipelines of a server as Paddle Serving's clients know them: chosen by name, and answering whatever happens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import structlog

from ovmstrio.config.specs import OpPipelineSpec
from ovmstrio.core.errors import NotSupported, ServerError
from ovmstrio.core.servable import Service
from ovmstrio.runtimes.ops.values import CustomExceptionCode, PipelineResponse

if TYPE_CHECKING:
    from ovmstrio.dataplane.observed_call import ObservedCall
    from ovmstrio.registry import Registry
    from ovmstrio.runtimes.ops.values import PipelineRequest

__all__ = ["AnsweringService", "PipelineEntries", "answer_of", "wrong_name"]

log = structlog.get_logger(__name__)

_WRONG_NAME = "Failed to inference: Service name error."


@runtime_checkable
class AnsweringService(Service, Protocol):
    """A loaded pipeline; ``name`` is what its configuration calls it."""

    name: str

    async def answer(self, request: PipelineRequest, deadline: float) -> PipelineResponse:
        """Answer one request, whatever comes of it; raises nothing but cancellation."""
        ...


class PipelineEntries:
    """Finds pipelines by the names that requests give.

    Args:
        registry: has them.
        root: the entry that answers nameless requests where there are several; empty for none.
    """

    def __init__(self, registry: Registry, root: str = "") -> None:
        self._registry = registry
        self._root = root

    def find(self, asked: str) -> str | None:
        """Give the entry that has a name, or whose service has it; None if there is none."""
        entries = self._registry.names_of(OpPipelineSpec.kind)
        if asked in entries:
            return asked
        if not asked:
            return self._root if self._root in entries else _only(entries)
        return _only({entry for entry in entries if self._service_name(entry) == asked})

    def _service_name(self, entry: str) -> str:
        try:
            service = self._registry.peek(entry)
        except ServerError:
            return ""
        return service.name if isinstance(service, AnsweringService) else ""


def wrong_name(request: PipelineRequest) -> PipelineResponse:
    """Answer a request that asks for a pipeline that is not there."""
    log.error("service name error", log_id=request.logid, asked=request.name[:80])
    return PipelineResponse(CustomExceptionCode.NO_SERVICE.value, _WRONG_NAME)


async def answer_of(call: ObservedCall, request: PipelineRequest, deadline: float) -> PipelineResponse:
    """Have a pipeline answer a request, and note in the call's event how that ended.

    Raises:
        NotSupported: it is no pipeline any more.

    Cancellation: at any checkpoint; the pipeline gives back what the request held.
    """
    service = call.service
    if not isinstance(service, AnsweringService):
        raise NotSupported(f'"{call.event.name}" is no pipeline of Ops')
    response = await service.answer(request, deadline)
    if response.err_no and not response.is_overload:
        call.event.code = _code_of(response.err_no)
    return response


def _code_of(number: int) -> str:
    """Name an error; those that services define themselves have one name together."""
    try:
        return CustomExceptionCode(number).name
    except ValueError:
        return CustomExceptionCode.PRODUCT_ERROR.name


def _only(names: frozenset[str] | set[str]) -> str | None:
    return next(iter(names)) if len(names) == 1 else None
