"""The paths by which clients register regions of shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ovmstrio.api.kserve.rest.infer_request import read_document
from ovmstrio.api.kserve.shared_memory import NO_CUDA
from ovmstrio.core.callers import Need
from ovmstrio.core.errors import InvalidRequest, NotSupported
from ovmstrio.core.http import HttpAnswer
from ovmstrio.core.texts import shown
from ovmstrio.dataplane.whole_changes import register_region, unregister_region
from ovmstrio.wire.http.answers import json_answer
from ovmstrio.wire.http.router import rule

if TYPE_CHECKING:
    from ovmstrio.api.admin.changes import Changes
    from ovmstrio.core.http import HttpRequest
    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.wire.http.router import Rule

__all__ = ["shared_memory_rules"]

_SYSTEM = "/v2/systemsharedmemory"
_CUDA = "/v2/cudasharedmemory"


def shared_memory_rules(plane: DataPlane, changes: Changes) -> list[Rule]:
    """Make the rules over one data plane."""

    async def status(_: HttpRequest, region: str = "") -> HttpAnswer:
        return json_answer(
            [
                {"name": each.name, "key": each.key, "offset": each.offset, "byte_size": each.byte_size}
                for each in plane.regions.listed(region)
            ]
        )

    async def register(request: HttpRequest, region: str) -> HttpAnswer:
        with changes.requested("shared memory registered", request, region=region):
            asked = await read_document(request.body)
            key = asked.get("key")
            if not isinstance(key, str):
                raise InvalidRequest('key: expected the name of a shared memory object such as "/my_region"')
            await register_region(plane, region, key, _number(asked, "offset", 0), _number(asked, "byte_size"))
        return HttpAnswer(200)

    async def unregister(request: HttpRequest, region: str = "") -> HttpAnswer:
        with changes.requested("shared memory unregistered", request, region=region):
            await unregister_region(plane, region)
        return HttpAnswer(200)

    return [
        *(rule(f"{_SYSTEM}{path}/status", "GET", status, need=Need.READ) for path in ("", "/region/<region>")),
        rule(f"{_SYSTEM}/region/<region>/register", "POST", register),
        *(rule(f"{_SYSTEM}{path}/unregister", "POST", unregister) for path in ("", "/region/<region>")),
        *_cuda_rules(),
    ]


def _cuda_rules() -> list[Rule]:
    async def status(_: HttpRequest, region: str = "") -> HttpAnswer:  # noqa: ARG001 - there are none
        return json_answer([])

    async def register(_: HttpRequest, region: str) -> HttpAnswer:  # noqa: ARG001 - whichever it is
        raise NotSupported(NO_CUDA)

    async def unregister(_: HttpRequest, region: str = "") -> HttpAnswer:  # noqa: ARG001 - there are none
        return HttpAnswer(200)

    return [
        *(rule(f"{_CUDA}{path}/status", "GET", status, need=Need.READ) for path in ("", "/region/<region>")),
        rule(f"{_CUDA}/region/<region>/register", "POST", register),
        *(rule(f"{_CUDA}{path}/unregister", "POST", unregister) for path in ("", "/region/<region>")),
    ]


def _number(asked: dict[str, Any], key: str, otherwise: int | None = None) -> int:
    value = asked.get(key, otherwise)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{key}: expected a whole number of bytes, got {shown(value, 40)}")
    return value
