"""Base of the OpenAI endpoints: body parsing, service lookup and routes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ovmstrio.core.callers import Permission
from ovmstrio.core.errors import InvalidField, MalformedJson, ServiceMissing
from ovmstrio.encoding.json_reader import JsonLimitExceeded, JsonSyntaxError, parse_json, parse_strictly
from ovmstrio.protocols.openai.fields import type_of
from ovmstrio.serving.generation_calls import lease_generative
from ovmstrio.serving.interfaces import OPENAI_REST
from ovmstrio.serving.ovms_errors import decompressed_body
from ovmstrio.transport.http.router import rule
from ovmstrio.util.truncation import cut

if TYPE_CHECKING:
    from ovmstrio.core.generation import Task
    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.protocols.openai.errors import ErrorFormat
    from ovmstrio.serving.calls import ObservedCall
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.http.router import Rule, View

PREFIXES: Final = ("/v3", "/v1", "/v3/v1")
"""Path prefixes: OVMS's, OpenAI's, and an intermediate one of OVMS."""

_MAX_NAMES: Final = 8
_NAME_CHARACTERS: Final = 80
_MAX_MODEL_CHARACTERS: Final = 1024


class Body(NamedTuple):
    """JSON body that names a model; ``size`` is its decoded size in bytes."""

    document: dict[str, Any]
    model: str
    size: int = 0


@dataclass(frozen=True, slots=True)
class OpenAIApi:
    """OpenAI API over one data plane; ``max_body_bytes`` limits decoded bodies."""

    plane: DataPlane
    max_body_bytes: int
    form: ErrorFormat

    def rules(
        self, path: str, method: str, view: View, *, has_tasks: bool = False, prefixes: tuple[str, ...] = PREFIXES
    ) -> list[Rule]:
        """Return the routes of a path below the prefixes; ``has_tasks`` gives the view a nursery."""
        options: dict[str, Any] = {"is_hot": True, "has_tasks": has_tasks, "refuse": self.form.refuse}
        options["need"] = Permission.GENERATE
        return [rule(prefix + path, method, view, **options) for prefix in prefixes]

    async def body(self, request: HttpRequest) -> Body:
        """Parse a JSON body; raise ``MalformedJson``, ``InvalidField`` (no model) or ``PayloadTooLarge``."""
        data = await decompressed_body(request, self.max_body_bytes)
        document = await read_document(data)
        return Body(document, model_name(document), len(data))

    async def call(
        self, request: HttpRequest, name: str, task: Task | None, *, is_stream: bool = False
    ) -> ObservedCall:
        """Lease the service that a body names, as ``DataPlane.call``.

        Raises:
            ServiceMissing: unknown service; the message lists the known ones.
            NotSupported: the service does not support ``task`` (None: any).
        """
        method = "Stream" if is_stream else "Unary"
        sent_id = request.header("x-request-id") or ""
        call = partial(lease_generative, self.plane, name, task, OPENAI_REST, method, is_stream=is_stream)
        try:
            return await call(request_id=sent_id, received=len(request.body))
        except ServiceMissing:
            raise self.missing(name) from None

    def missing(self, name: str) -> ServiceMissing:
        """Return the error for an unknown service."""
        known = sorted(self.plane.statuses())
        more = f" and {len(known) - _MAX_NAMES} more" if len(known) > _MAX_NAMES else ""
        names = ", ".join(cut(each, _NAME_CHARACTERS) for each in known[:_MAX_NAMES])
        available = f"available: {names}{more}" if known else "no model is loaded"
        return ServiceMissing(f"The model `{cut(name, _NAME_CHARACTERS)}` does not exist; {available}")


async def read_document(body: bytes) -> dict[str, Any]:
    """Parse a JSON object, in a worker thread if it is large; raise ``MalformedJson`` or ``InvalidField``."""
    try:
        document = await parse_json(body, parse=parse_strictly)
    except JsonSyntaxError as error:
        raise MalformedJson(f"Cannot parse JSON body: {error}") from None
    except JsonLimitExceeded as error:
        raise InvalidField(f"JSON body: {error}") from None
    if not isinstance(document, dict):
        raise MalformedJson(f"JSON body must be an object: got {type_of(document)}")
    return document


def model_name(document: dict[str, Any]) -> str:
    """Return the model that a body names; raise ``InvalidField`` if it is missing or invalid."""
    model = document.get("model")
    if model is None:
        raise InvalidField("model field is missing in JSON body", field="model", code="missing_required_parameter")
    if not isinstance(model, str):
        raise InvalidField("model field is not a string", field="model", got=type_of(model))
    if len(model) > _MAX_MODEL_CHARACTERS:
        message = f"model field: expected at most {_MAX_MODEL_CHARACTERS} characters"
        raise InvalidField(message, field="model", got=str(len(model)))
    return model
