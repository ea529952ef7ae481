"""vLLM's endpoints ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.callers import Permission
from ovmstrio.core.errors import ErrorList, InvalidField, ModelFailure, NotFound
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.protocols.openai.api import read_document
from ovmstrio.protocols.openai.fields import Fields
from ovmstrio.protocols.openai.models import parent_of, parents
from ovmstrio.serving.broadcast_changes import server_model_control
from ovmstrio.serving.ovms_errors import decompressed_body
from ovmstrio.util.truncation import cut

if TYPE_CHECKING:
    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.protocols.admin.changes import AdminChanges
    from ovmstrio.protocols.openai.api import OpenAIApi
    from ovmstrio.transport.http.router import Rule

_PREFIXES: Final = ("/v1",)
_TEXT_TYPE: Final = (("content-type", "text/plain; charset=utf-8"),)


def lora_adapter_rules(api: OpenAIApi, changes: AdminChanges) -> list[Rule]:
    """Return the routes, for callers with the scope ``admin``."""

    async def load(request: HttpRequest) -> HttpAnswer:
        given = await _document(api, request)
        with changes.requested("load", request, model=cut(str(given.get("lora_name")), 80)):
            _check(given, ("lora_name", "lora_path"), ("parent", "load_inplace"))
            name = given["lora_name"]
            control = server_model_control(api.plane)
            if parent_of(api.plane, name) and not given.get("load_inplace"):
                message = f"The lora adapter '{cut(name, 80)}' has already been loaded."
                raise InvalidField(message, field="lora_name")
            parent = given.get("parent") or _only_parent(api)
            try:
                await control.load(name, json.dumps({"parent": parent, "path": given["lora_path"]}))
            except ModelFailure as error:
                # Clients repeat requests that fail with 5xx.
                raise InvalidField(error.message, field="lora_path") from error
        return _answer(name, "added")

    async def unload(request: HttpRequest) -> HttpAnswer:
        given = await _document(api, request)
        with changes.requested("unload", request, model=cut(str(given.get("lora_name")), 80)):
            _check(given, ("lora_name",), ("lora_int_id",))
            name = given["lora_name"]
            control = server_model_control(api.plane)
            if not parent_of(api.plane, name):
                raise NotFound(f"The lora adapter '{cut(name, 80)}' cannot be found.")
            await control.unload(name)
        return _answer(name, "removed")

    views = {"/load_lora_adapter": load, "/unload_lora_adapter": unload}
    return [
        rule
        for path, view in views.items()
        for rule in api.rules(path, "POST", view, prefixes=_PREFIXES, need=Permission.ADMIN)
    ]


async def _document(api: OpenAIApi, request: HttpRequest) -> dict[str, Any]:
    return await read_document(await decompressed_body(request, api.max_body_bytes))


def _check(document: dict[str, Any], needed: tuple[str, ...], further: tuple[str, ...]) -> None:
    errors = ErrorList()
    fields = Fields(document, errors)
    for name in needed:
        if not fields.name_text(name):
            fields.refuse(name, f"{name}: expected a text that is not empty", code="missing_required_parameter")
    for name in sorted(fields.names() - {*needed, *further}):
        fields.refuse(name, f"Unknown parameter: {name!r:.80}", code="unknown_parameter")
    fields.name_text("parent")
    fields.flag("load_inplace")
    errors.raise_if_any()


def _only_parent(api: OpenAIApi) -> str:
    names = parents(api.plane)
    if len(names) == 1:
        return names[0]
    found = ", ".join(cut(each, 80) for each in names[:5]) or "none"
    raise InvalidField(f"parent: expected the name of a model, as several may have adapters: {found}", field="parent")


def _answer(name: str, change: str) -> HttpAnswer:
    return HttpAnswer(200, _TEXT_TYPE, f"Success: LoRA adapter '{name}' {change} successfully.".encode())
