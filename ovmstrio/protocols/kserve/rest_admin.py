"""HTTP routes of the repository, trace, logging and shared-memory extensions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from ovmstrio.core.callers import Permission
from ovmstrio.core.errors import InvalidRequest, NotSupported
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.encoding.json_reader import AT_ONCE_BYTES, LONG_STRINGS
from ovmstrio.protocols.kserve.extensions import (
    NO_CUDA,
    TRACE_SETTINGS,
    change_log_settings,
    check_trace_settings,
    load_parameters,
    log_settings,
    repository_index,
    unload_parameters,
)
from ovmstrio.protocols.kserve.rest_requests import read_document
from ovmstrio.serving.broadcast_changes import register_region, server_model_control, unregister_region
from ovmstrio.transport.http.responses import json_response
from ovmstrio.transport.http.router import rule
from ovmstrio.util.truncation import shown

if TYPE_CHECKING:
    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.protocols.admin.changes import AdminChanges
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.http.router import Rule

# Repository extension


def repository_rules(plane: DataPlane, changes: AdminChanges) -> list[Rule]:
    """Return the routes of the repository extension."""

    async def index(request: HttpRequest) -> HttpAnswer:
        only_ready = (await _read(request)).get("ready") is True
        return json_response(_index(plane, only_ready=only_ready))

    async def models(_: HttpRequest) -> HttpAnswer:
        return json_response({"models": _index(plane, only_ready=False)})

    async def load(request: HttpRequest, model: str) -> HttpAnswer:
        with changes.requested("load", request, model=model):
            config, files = await _load_parameters(request)
            await server_model_control(plane).load(model, config, files)
        return HttpAnswer(200)

    async def unload(request: HttpRequest, model: str) -> HttpAnswer:
        with changes.requested("unload", request, model=model):
            await server_model_control(plane).unload(model, with_callees=unload_parameters(await _parameters(request)))
        return HttpAnswer(200)

    return [
        rule("/v2/models", "GET", models, is_hot=True, need=Permission.READ),
        rule("/v2/repository/index", "POST", index, is_hot=True, need=Permission.READ),
        rule("/v2/repository/models/<model>/load", "POST", load, need=Permission.ADMIN),
        rule("/v2/repository/models/<model>/unload", "POST", unload, need=Permission.ADMIN),
    ]


async def _read(request: HttpRequest) -> dict[str, Any]:
    return await read_document(request.body, LONG_STRINGS) if request.body else {}


async def _load_parameters(request: HttpRequest) -> tuple[str | None, dict[str, bytes]]:
    given = await _parameters(request)
    if len(request.body) <= AT_ONCE_BYTES:
        return load_parameters(given)
    # Decoding large files blocks too long for the event loop.
    return await trio.to_thread.run_sync(load_parameters, given)


async def _parameters(request: HttpRequest) -> dict[str, Any]:
    given = (await _read(request)).get("parameters")
    if given is not None and not isinstance(given, dict):
        raise InvalidRequest("parameters: expected an object")
    return {name: value for name, value in (given or {}).items() if value is not None}


def _index(plane: DataPlane, *, only_ready: bool) -> list[dict[str, str]]:
    # OVMS's benchmark client requires exactly three values per entry.
    return [
        {"name": e.name, "version": e.version, "state": e.state} | ({"reason": e.reason} if e.reason else {})
        for e in repository_index(plane, only_ready=only_ready)
    ]


# Trace and logging extensions

_TRACES = ("/v2/trace/setting", "/v2/models/<model>/trace/setting")


def observation_rules(changes: AdminChanges) -> list[Rule]:
    """Return the routes of the trace and logging extensions."""

    async def traces(_: HttpRequest, model: str = "") -> HttpAnswer:  # noqa: ARG001 - the same for all
        return json_response(TRACE_SETTINGS)

    async def set_traces(request: HttpRequest, model: str = "") -> HttpAnswer:  # noqa: ARG001 - the same for all
        settings = await read_document(request.body) if request.body else {}
        if settings:
            level = settings.get("trace_level")
            check_trace_settings(list(settings), level if isinstance(level, list) else [str(level)])
        return json_response(TRACE_SETTINGS)

    async def logs(_: HttpRequest) -> HttpAnswer:
        return json_response(log_settings())

    async def set_logs(request: HttpRequest) -> HttpAnswer:
        with changes.requested("log settings", request):
            if request.body:
                change_log_settings(await read_document(request.body))
        return json_response(log_settings())

    return [
        *(rule(path, "GET", traces, need=Permission.READ) for path in _TRACES),
        *(rule(path, "POST", set_traces, need=Permission.READ) for path in _TRACES),
        rule("/v2/logging", "GET", logs, need=Permission.READ),
        rule("/v2/logging", "POST", set_logs, need=Permission.ADMIN),
    ]


# Shared-memory extensions

_SYSTEM = "/v2/systemsharedmemory"
_CUDA = "/v2/cudasharedmemory"


def shared_memory_rules(plane: DataPlane, changes: AdminChanges) -> list[Rule]:
    """Return the routes of the shared-memory extensions."""

    async def status(_: HttpRequest, region: str = "") -> HttpAnswer:
        return json_response(
            [
                {"name": each.name, "key": each.key, "offset": each.offset, "byte_size": each.byte_size}
                for each in plane.regions.listed(region)
            ]
        )

    async def register(request: HttpRequest, region: str) -> HttpAnswer:
        with changes.requested("shared memory registered", request, region=region):
            document = await read_document(request.body)
            key = document.get("key")
            if not isinstance(key, str):
                raise InvalidRequest('key: expected the name of a shared memory object such as "/my_region"')
            await register_region(plane, region, key, _number(document, "offset", 0), _number(document, "byte_size"))
        return HttpAnswer(200)

    async def unregister(request: HttpRequest, region: str = "") -> HttpAnswer:
        with changes.requested("shared memory unregistered", request, region=region):
            await unregister_region(plane, region)
        return HttpAnswer(200)

    return [
        *(rule(f"{_SYSTEM}{path}/status", "GET", status, need=Permission.READ) for path in ("", "/region/<region>")),
        rule(f"{_SYSTEM}/region/<region>/register", "POST", register, need=Permission.ADMIN),
        *(
            rule(f"{_SYSTEM}{path}/unregister", "POST", unregister, need=Permission.ADMIN)
            for path in ("", "/region/<region>")
        ),
        *_cuda_rules(),
    ]


def _cuda_rules() -> list[Rule]:
    async def status(_: HttpRequest, region: str = "") -> HttpAnswer:  # noqa: ARG001 - the same for all
        return json_response([])

    async def register(_: HttpRequest, region: str) -> HttpAnswer:  # noqa: ARG001 - the same for all
        raise NotSupported(NO_CUDA)

    async def unregister(_: HttpRequest, region: str = "") -> HttpAnswer:  # noqa: ARG001 - the same for all
        return HttpAnswer(200)

    return [
        *(rule(f"{_CUDA}{path}/status", "GET", status, need=Permission.READ) for path in ("", "/region/<region>")),
        rule(f"{_CUDA}/region/<region>/register", "POST", register, need=Permission.ADMIN),
        *(
            rule(f"{_CUDA}{path}/unregister", "POST", unregister, need=Permission.ADMIN)
            for path in ("", "/region/<region>")
        ),
    ]


def _number(document: dict[str, Any], key: str, default: int | None = None) -> int:
    value = default if document.get(key) is None else document[key]
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{key}: expected an integer number of bytes, got {shown(value, 40)}")
    return value
