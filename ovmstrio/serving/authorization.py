"""Authorization of data plane operations: the required scope of each operation, and a data plane that checks it.

Front ends check a request's scope before its body is read.  The service name is usually in the body, so the data plane
checks again once the name is known, before the look-up: a caller without the scope cannot tell whether a service
exists.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.callers import MISSING_SCOPE_REASON, Permission, check_current_caller, current_caller
from ovmstrio.core.errors import MissingScope, PermissionDenied
from ovmstrio.core.events import CallObserver
from ovmstrio.serving.data_plane import DataPlane

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from ovmstrio.core.events import ApiInterface, CallEvent
    from ovmstrio.core.request import InferRequest, InferResponse
    from ovmstrio.serving.records import VersionStatus


class CallerRecorder(CallObserver):
    """Call observer that records the caller's name in each event; must be the first observer."""

    def call_started(self, event: CallEvent) -> None:
        """Record the caller."""
        caller = current_caller.get()
        if caller is not None:
            event.caller = caller.name

    def call_finished(self, event: CallEvent) -> None:
        """Record the caller of a query, which has no start event."""
        if not event.caller:
            self.call_started(event)


def _statistics_scope(name: str, *_: Any) -> Permission:
    return Permission.ABOUT if name else Permission.READ


def _call_scope(*_: Any, is_free: bool = False, **_options: Any) -> Permission:
    # The front end has checked the scope of a free call.
    return Permission.NOTHING if is_free else Permission.INFER


OPERATION_SCOPES: Final[Mapping[str, Permission | Callable[..., Permission]]] = {
    # Health, which is public
    "is_live": Permission.NOTHING,
    "is_shutting_down": Permission.NOTHING,
    "readiness": Permission.NOTHING,
    "wait_change": Permission.NOTHING,
    # Queries
    "statuses": Permission.NOTHING,  # Restricted to the services that the caller may see
    "has_service": Permission.NOTHING,  # The path's scope is checked next
    "model_ready": Permission.ABOUT,
    "model_status": Permission.ABOUT,
    "model_metadata": Permission.ABOUT,
    "sequences": Permission.ABOUT,
    "describe": Permission.ABOUT,
    "statistics": _statistics_scope,
    # Calls
    "has_limits": Permission.NOTHING,
    "takes_streams": Permission.INFER,
    "admit": Permission.INFER,
    "call_admitted": Permission.NOTHING,  # Uses ``admit``
    "infer": Permission.INFER,
    "open_stream": Permission.INFER,
    "call": _call_scope,
    # Administration
    "reload_config": Permission.ADMIN,
    # The server itself, without a caller; front ends check the scope of ``/metrics``
    "begin_serving": Permission.NOTHING,
    "begin_drain": Permission.NOTHING,
    "announce": Permission.NOTHING,
    "render_metrics": Permission.NOTHING,
    "count_unreadable_call": Permission.NOTHING,
    "count_refused_caller": Permission.NOTHING,
    "count_rejected": Permission.NOTHING,
}
"""Required scope by public operation of the data plane, or a function that returns it for the operation's arguments.

The first argument of an operation that requires a scope is the service's name or the inference request, except for
``ADMIN``.  An operation without a row is denied to every caller.
"""


class AuthorizingDataPlane(DataPlane):
    """Data plane that checks :data:`OPERATION_SCOPES`; raises also ``Unauthenticated`` and ``MissingScope``."""

    def statuses(self) -> dict[str, list[VersionStatus]]:
        """Return the states of services visible to the caller; all of them for unauthenticated health checks."""
        every, caller = super().statuses(), current_caller.get()
        if caller is None or caller.scopes.read or caller.scopes.admin:
            return every
        return {name: versions for name, versions in every.items() if caller.may_infer(name)}

    def infer(
        self,
        request: InferRequest,
        api_interface: ApiInterface,
        render: Callable[[InferResponse], tuple[Any, int]] | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Check the caller as for every operation; written out, because forwarded arguments cost a third more."""
        caller = current_caller.get()
        if caller is None or not caller.may_infer(request.model_name):
            _check(self, Permission.INFER, request.model_name)
        return _unchecked_infer(self, request, api_interface, render)


_unchecked_infer: Final[Callable[..., Coroutine[Any, Any, Any]]] = DataPlane.infer


def _guard(operation: Callable[..., Any], scope: Permission | Callable[..., Permission]) -> Callable[..., Any]:
    """Return an operation that checks the caller when it is called, not when it is awaited."""

    @wraps(operation)
    def check_service(plane: DataPlane, target: Any, *arguments: Any, **options: Any) -> Any:
        name = target if isinstance(target, str) else target.model_name
        _check(plane, scope if isinstance(scope, Permission) else scope(target, *arguments, **options), name)
        return operation(plane, target, *arguments, **options)

    @wraps(operation)
    def check_admin(plane: DataPlane, *arguments: Any, **options: Any) -> Any:
        _check(plane, Permission.ADMIN)
        return operation(plane, *arguments, **options)

    return check_admin if scope is Permission.ADMIN else check_service


def _check(plane: DataPlane, need: Permission, service: str = "") -> None:
    """Check the caller's scope; count refusals."""
    try:
        if need is not Permission.NOTHING:
            check_current_caller(need, service)
    except MissingScope:
        plane.count_refused_caller(MISSING_SCOPE_REASON)
        raise


def guard_operations(guarded: type[DataPlane], scopes: Mapping[str, Permission | Callable[..., Permission]]) -> None:
    """Make a class check the scopes of the data plane's public operations, except for those that it defines itself.

    Operations without a scope are denied.
    """
    for name, operation in vars(DataPlane).items():
        scope = scopes.get(name)
        if scope is None and not name.startswith("_"):
            setattr(guarded, name, _deny(name))
        elif scope is not None and scope is not Permission.NOTHING and name not in vars(guarded):
            setattr(guarded, name, _guard(operation, scope))


def _deny(name: str) -> property:
    def deny(_: DataPlane) -> Any:
        raise PermissionDenied(f"data plane: no required scope is stated for {name}")

    return property(deny)


guard_operations(AuthorizingDataPlane, OPERATION_SCOPES)
