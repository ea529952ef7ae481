from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Final

import pytest

from ovmstrio.core.callers import Caller, Permission, Scopes, current_caller
from ovmstrio.core.errors import MissingScope, PermissionDenied, Unauthenticated
from ovmstrio.core.request import InferRequest
from ovmstrio.serving.authorization import OPERATION_SCOPES, AuthorizingDataPlane, guard_operations
from ovmstrio.serving.data_plane import DataPlane
from ovmstrio.serving.interfaces import KSERVE_GRPC
from tests.support.stub_registry import load_scripted, registry_of

PUBLIC: Final = {
    *(
        "is_live",
        "is_shutting_down",
        "readiness",
        "wait_change",
        "statuses",
        "has_limits",
        "has_service",
        "call_admitted",
    ),
    *("begin_serving", "begin_drain", "announce", "render_metrics", "count_unreadable_call", "count_refused_caller"),
    "count_rejected",
}
ARGUMENTS: Final[dict[str, tuple[Any, ...]]] = {
    "model_ready": ("shop", "", KSERVE_GRPC),
    "model_status": ("shop", 0, KSERVE_GRPC),
    "model_metadata": ("shop", "", KSERVE_GRPC),
    "sequences": ("shop", "", KSERVE_GRPC),
    "describe": ("shop", "", KSERVE_GRPC),
    "statistics": ("shop", "", KSERVE_GRPC),
    "takes_streams": ("shop",),
    "admit": ("shop", "", KSERVE_GRPC),
    "infer": (InferRequest("shop", ""), KSERVE_GRPC),
    "open_stream": (InferRequest("shop", ""), KSERVE_GRPC),
    "call": ("shop", KSERVE_GRPC, "Unary"),
    "reload_config": (),
}


@pytest.fixture
def plane() -> DataPlane:
    return AuthorizingDataPlane(registry_of(load_scripted))


@pytest.fixture(autouse=True)
def _no_caller() -> Iterator[None]:
    token = current_caller.set(None)
    yield
    current_caller.reset(token)


def _operations() -> set[str]:
    return {name for name, _ in inspect.getmembers(DataPlane) if not name.startswith("_")}


def test_every_operation_of_the_data_plane_has_a_required_scope_or_is_public() -> None:
    assert _operations() == OPERATION_SCOPES.keys()
    assert {name for name, scope in OPERATION_SCOPES.items() if scope is Permission.NOTHING} == PUBLIC
    assert OPERATION_SCOPES.keys() - PUBLIC == ARGUMENTS.keys()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_operation_is_refused_when_it_is_called_without_its_scope(plane: DataPlane, name: str) -> None:
    with pytest.raises(Unauthenticated):
        getattr(plane, name)(*ARGUMENTS[name])
    current_caller.set(Caller("other", "key", Scopes.parse(["infer:other", "metrics"])))
    with pytest.raises(MissingScope, match=r"'other' lacks the scope (infer:shop|read|admin)"):
        getattr(plane, name)(*ARGUMENTS[name])


def test_statistics_of_all_services_require_the_read_scope(plane: DataPlane) -> None:
    current_caller.set(Caller("shop", "key", Scopes.parse(["infer:*"])))
    with pytest.raises(MissingScope, match="lacks the scope read"):
        plane.statistics("", "", KSERVE_GRPC)
    current_caller.set(Caller("reader", "key", Scopes.parse(["read"])))
    assert plane.statistics("", "", KSERVE_GRPC) == []


def test_a_service_cannot_be_named_in_a_way_that_avoids_the_check(plane: DataPlane) -> None:
    current_caller.set(Caller("other", "key", Scopes.parse(["infer:other"])))
    with pytest.raises(TypeError):
        plane.model_ready(name="shop", version="", api_interface=KSERVE_GRPC)


@pytest.mark.parametrize("missing", sorted(OPERATION_SCOPES))
def test_an_operation_without_a_scope_is_denied_to_every_caller(missing: str) -> None:
    class GuardedPlane(DataPlane):
        def statuses(self) -> Any:
            return {}

    guard_operations(GuardedPlane, {name: scope for name, scope in OPERATION_SCOPES.items() if name != missing})
    current_caller.set(Caller("boss", "key", Scopes.parse(["infer:*", "read", "admin", "metrics"])))
    with pytest.raises(PermissionDenied, match=f"no required scope is stated for {missing}"):
        getattr(GuardedPlane.__new__(GuardedPlane), missing)
