"""The paths of the repository extension: the index, and loads and unloads by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from ovmstrio.api.kserve.repository_index import repository_index
from ovmstrio.api.kserve.repository_requests import control_of, load_parameters, unload_parameters
from ovmstrio.api.kserve.rest.infer_request import read_document
from ovmstrio.core.callers import Need
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.http import HttpAnswer
from ovmstrio.util.json_reader import AT_ONCE_BYTES, LONG_STRINGS
from ovmstrio.wire.http.answers import json_answer
from ovmstrio.wire.http.router import rule

if TYPE_CHECKING:
    from ovmstrio.api.admin.changes import Changes
    from ovmstrio.core.http import HttpRequest
    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.wire.http.router import Rule

__all__ = ["repository_rules"]


def repository_rules(plane: DataPlane, changes: Changes) -> list[Rule]:
    """Make the rules over one data plane."""

    async def index(request: HttpRequest) -> HttpAnswer:
        only_ready = (await _read(request)).get("ready") is True
        return json_answer(_index(plane, only_ready=only_ready))

    async def models(_: HttpRequest) -> HttpAnswer:
        return json_answer({"models": _index(plane, only_ready=False)})

    async def load(request: HttpRequest, model: str) -> HttpAnswer:
        with changes.requested("load", request, model=model):
            config, files = await _load_parameters(request)
            await control_of(plane).load(model, config, files)
        return HttpAnswer(200)

    async def unload(request: HttpRequest, model: str) -> HttpAnswer:
        with changes.requested("unload", request, model=model):
            await control_of(plane).unload(model, with_callees=unload_parameters(await _parameters(request)))
        return HttpAnswer(200)

    return [
        rule("/v2/models", "GET", models, is_hot=True, need=Need.READ),
        rule("/v2/repository/index", "POST", index, is_hot=True, need=Need.READ),
        rule("/v2/repository/models/<model>/load", "POST", load),
        rule("/v2/repository/models/<model>/unload", "POST", unload),
    ]


async def _read(request: HttpRequest) -> dict[str, Any]:
    return await read_document(request.body, LONG_STRINGS) if request.body else {}


async def _load_parameters(request: HttpRequest) -> tuple[str | None, dict[str, bytes]]:
    given = await _parameters(request)
    if len(request.body) <= AT_ONCE_BYTES:
        return load_parameters(given)
    # Decoding a large file takes long.
    return await trio.to_thread.run_sync(load_parameters, given)


async def _parameters(request: HttpRequest) -> dict[str, Any]:
    given = (await _read(request)).get("parameters", {})
    if not isinstance(given, dict):
        raise InvalidRequest("parameters: expected an object")
    return given


def _index(plane: DataPlane, *, only_ready: bool) -> list[dict[str, str]]:
    # OVMS's benchmark client takes an entry for exactly three values.
    return [
        {"name": e.name, "version": e.version, "state": e.state} | ({"reason": e.reason} if e.reason else {})
        for e in repository_index(plane, only_ready=only_ready)
    ]
