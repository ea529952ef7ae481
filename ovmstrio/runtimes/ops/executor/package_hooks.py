"""The two ends of a pipeline: from a request to the first Ops' input, and from the last output to the answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import structlog
import trio

from ovmstrio.core.line_streams import running_code_of
from ovmstrio.core.texts import text_of
from ovmstrio.runtimes.ops.executor import op_failures as failures
from ovmstrio.runtimes.ops.executor.op_failures import OpFailure
from ovmstrio.runtimes.ops.graph import OpGraph
from ovmstrio.runtimes.ops.observing.figures import names_of_code
from ovmstrio.runtimes.ops.op import RequestOp, ResponseOp
from ovmstrio.runtimes.ops.tensors import ArrayTensor, as_response, unpack
from ovmstrio.runtimes.ops.values import (
    ChannelData,
    ChannelDataType,
    CustomExceptionCode,
    PipelineRequest,
    PipelineResponse,
)
from ovmstrio.work.threads.worker_threads import WorkerThreads
from ovmstrio.work.user_code.calls import call_in_thread, is_async
from ovmstrio.work.user_code.loop_calls import LoopCalls

__all__ = ["PACK_SECONDS", "PROFILE_KEY", "PackageHooks", "failed", "without_profile"]

PROFILE_KEY: Final = "pipeline.profile"
"""The key by which a request asks for its timeline, and under which it gets it."""

PACK_SECONDS: Final = 1.0
"""How long a pack hook gets at least, for a request whose time is over too."""

_HOOKS: Final = "hooks of the RequestOp or the ResponseOp"

_MOST_ELEMENTS_HERE: Final = 4096
"""How many numbers are read or printed on the loop at most."""

_MOST_BYTES_HERE: Final = 1 << 20
"""How many bytes of arrays are copied on the loop at most."""

log = structlog.get_logger(__name__)


def failed(data_id: int, log_id: int, failure: OpFailure) -> ChannelData:
    """Give a failure as a ResponseOp gets it."""
    data = ChannelData(ChannelDataType.ERROR.value, id=data_id, log_id=log_id)
    if failure.is_product:
        data.error_code = CustomExceptionCode.PRODUCT_ERROR.value
        data.prod_error_code, data.prod_error_info = failure.code, failure.info
    else:
        data.error_code, data.error_info = failure.code, failure.info
    return data


def without_profile(request: PipelineRequest) -> tuple[PipelineRequest, bool]:
    """Give a request without the key that asks for its timeline, and whether it does."""
    if PROFILE_KEY not in request.keys:
        return request, False
    position = request.keys.index(PROFILE_KEY)
    keys, values = list(request.keys), list(request.values)
    del keys[position]
    is_wanted = position < len(values) and values.pop(position) == "1"
    return replace(request, keys=keys, values=values), is_wanted


class PackageHooks:
    """Calls the hooks of the RequestOp and the ResponseOp.

    They run in threads if a service overrides them, or if there is much to read or to print.

    Args:
        graph: has both.
        threads: how many threads there may be, and how many calls on the loop that do not end.
        nursery: hosts hooks on the loop.

    Attributes:
        threads: where they run, which somebody has to host.
    """

    def __init__(self, graph: OpGraph, threads: int, nursery: trio.Nursery) -> None:
        self._request, self._response = graph.request, graph.response
        refusal = failures.refusal(threads / 2, _HOOKS)
        self.threads = WorkerThreads(threads, is_strict=True, refusal=refusal)
        self._calls = LoopCalls(nursery, failures.closed, failures.refusal(threads, _HOOKS))
        self._unpacks_here = _is_plain(graph.request.unpack_request_package, RequestOp.unpack_request_package)
        self._packs_here = _is_plain(graph.response.pack_response_package, ResponseOp.pack_response_package)
        self._packing: set[trio.CancelScope] = set()
        self._is_hurried = False

    def unpack_here(self, request: PipelineRequest) -> tuple[dict[str, Any], int] | None:
        """Give the same as :meth:`unpack` if it takes next to no time, None if it may take some.

        Raises:
            OpFailure: as there.
        """
        if not self._unpacks_here:
            return None
        try:
            if request.tensors and not _is_little(request):
                return None
            return unpack(request), request.logid
        except Exception as error:  # whatever the request holds
            raise _unreadable(error) from error

    async def unpack(self, request: PipelineRequest) -> tuple[dict[str, Any], int]:
        """Give the first Ops' input, and the client's number of the request.

        Raises:
            OpFailure: the request cannot be read, or the service refuses it.

        Cancellation: where the hook waits; at once if it is in a thread, which goes on.
        """
        try:
            returned = await self._call(self._request.unpack_request_package, request)
            data, log_id, code, info = _four(returned, request)
        except Exception as error:  # the border of user code
            raise (_unreadable if self._unpacks_here else _package_error)(error) from error
        if code is not None:
            raise failures.of_product(code, info)
        return data, log_id

    def pack_here(self, data: ChannelData) -> PipelineResponse | None:
        """Make the answer if that takes next to no time, None if it may take some."""
        if not self._packs_here:
            return None
        try:
            if data.npdata and _elements(data) > _MOST_ELEMENTS_HERE:
                return None
            return as_response(self._response.pack_response_package(data))
        except Exception as error:  # noqa: BLE001 - whatever the output holds
            return _failed_response(_package_error(error))

    async def pack(self, data: ChannelData, deadline: float) -> PipelineResponse:
        """Make the answer.

        Cancellation: as :meth:`unpack`.
        """
        soon = trio.current_time() + PACK_SECONDS
        scope = trio.CancelScope(deadline=soon if self._is_hurried else max(deadline, soon))
        self._packing.add(scope)
        try:
            with scope:
                return await self._packed(data)
        finally:
            self._packing.discard(scope)
        return _failed_response(failures.out_of_time())

    async def _packed(self, data: ChannelData) -> PipelineResponse:
        try:
            return as_response(await self._call(self._response.pack_response_package, data))
        except Exception as error:  # noqa: BLE001 - the border of user code
            return _failed_response(_package_error(error))

    def hurry(self) -> None:
        """Give every pack hook no more than the least time from now on."""
        self._is_hurried = True
        soon = trio.current_time() + PACK_SECONDS
        for scope in self._packing:
            scope.deadline = min(scope.deadline, soon)

    async def _call(self, hook: Callable[[Any], Any], argument: Any) -> Any:
        with running_code_of(names_of_code(getattr(getattr(hook, "__self__", None), "name", ""))):
            if is_async(hook):
                return await self._calls.call(hook, argument)
            return await call_in_thread(self.threads, hook, argument)


def _is_plain(hook: Any, default: Callable[..., Any]) -> bool:
    """Tell whether a hook is the one that the Op would have if no service overrode it."""
    return getattr(hook, "__func__", None) is default


def _is_little(request: PipelineRequest) -> bool:
    """Tell whether a request's tensors are read soon; arrays are at most copied."""
    arrays = sum(one.array.nbytes for one in request.tensors if isinstance(one, ArrayTensor))
    others = sum(math.prod(one.shape) for one in request.tensors if not isinstance(one, ArrayTensor))
    return arrays <= _MOST_BYTES_HERE and others <= _MOST_ELEMENTS_HERE


def _elements(data: ChannelData) -> int:
    """Tell how many numbers an output has."""
    values = (data.npdata or {}).values()
    return sum(value.size for value in values if isinstance(value, np.ndarray))


def _four(returned: Any, request: PipelineRequest) -> tuple[dict[str, Any], int, Any, Any]:
    """Give what ``unpack_request_package`` returned as the tuple that it may leave out.

    Raises:
        TypeError, ValueError: it is not what it may return.
    """
    if isinstance(returned, dict):
        return returned, request.logid, None, ""
    data, log_id, code, info = returned
    if code is None and not isinstance(data, dict):
        raise TypeError(f"unpack_request_package should return dict, got {type(data).__name__}")
    return data, 0 if log_id is None else int(log_id), code, info


def _package_error(error: BaseException) -> OpFailure:
    cause = failures.cause_of(error)
    log.error("request or answer cannot be packed", exc_info=cause)
    return _failure_of(cause)


def _unreadable(error: BaseException) -> OpFailure:
    """Make the failure of a request that no code of the user has read: where it was noticed is of no use to anybody."""
    return _failure_of(failures.cause_of(error))


def _failure_of(cause: BaseException) -> OpFailure:
    return OpFailure(CustomExceptionCode.RPC_PACKAGE_ERROR.value, f"rpc package error: {text_of(cause)}")


def _failed_response(failure: OpFailure) -> PipelineResponse:
    return PipelineResponse(err_no=failure.code, err_msg=failure.info)
