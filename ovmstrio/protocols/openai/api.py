"""What endpoints of OpenAI's API are made over, and how each reads its body and finds its service."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ovmstrio.core.callers import Need
from ovmstrio.core.errors import InvalidField, MalformedJson, ServiceMissing
from ovmstrio.encoding.json_reader import JsonLimitExceeded, JsonSyntaxError, parse_json, parse_strictly
from ovmstrio.protocols.openai.fields import type_of
from ovmstrio.serving.calls import call_generative
from ovmstrio.serving.interfaces import OPENAI_REST
from ovmstrio.serving.ovms_errors import inflated_body
from ovmstrio.transport.http.router import rule
from ovmstrio.util.truncation import cut

if TYPE_CHECKING:
    from ovmstrio.core.generation import Task
    from ovmstrio.core.http import HttpRequest
    from ovmstrio.protocols.openai.errors import ErrorForm
    from ovmstrio.serving.calls import ObservedCall
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.http.router import Rule, View

__all__ = ["PREFIXES", "Body", "OpenAIApi", "model_of", "read_document"]

PREFIXES: Final = ("/v3", "/v1", "/v3/v1")
"""Where the API is: OVMS's path, OpenAI's, and one that OVMS has had in between."""

_MOST_NAMES: Final = 8
_NAME_CHARACTERS: Final = 80
_MAX_MODEL_CHARACTERS: Final = 1024


class Body(NamedTuple):
    """A JSON body that names a model; ``size`` is how many bytes it has, its encoding undone."""

    document: dict[str, Any]
    model: str
    size: int = 0


@dataclass(frozen=True, slots=True)
class OpenAIApi:
    """The API over one data plane.

    Attributes:
        plane: what is served.
        max_body_bytes: of what a body may have once its encoding is undone.
        form: of errors.
    """

    plane: DataPlane
    max_body_bytes: int
    form: ErrorForm

    def rules(
        self, path: str, method: str, view: View, *, has_tasks: bool = False, prefixes: tuple[str, ...] = PREFIXES
    ) -> list[Rule]:
        """Make the rules of one path, such as ``/chat/completions``, below all prefixes or those given.

        With ``has_tasks`` a request's view has a nursery, for answers that are streams.  All of them ask for an API
        key, where there is one.
        """
        options: dict[str, Any] = {"is_hot": True, "has_tasks": has_tasks, "refuse": self.form.refuse}
        options["need"] = Need.GENERATE
        return [rule(prefix + path, method, view, **options) for prefix in prefixes]

    async def body(self, request: HttpRequest) -> Body:
        """Read a JSON body.

        Raises:
            MalformedJson: it is not JSON, or no object.
            InvalidField: it names no model.
            PayloadTooLarge: it is too large once its encoding is undone.

        Cancellation: while its encoding is undone, and between slices of a large body.
        """
        data = await inflated_body(request, self.max_body_bytes)
        document = await read_document(data)
        return Body(document, model_of(document), len(data))

    async def call(
        self, request: HttpRequest, name: str, task: Task | None, *, is_stream: bool = False
    ) -> ObservedCall:
        """Lease the service that a request's body names; the call ends with the block of what is given.

        Args:
            request: the request.
            name: of the service.
            task: what it must do; None where services of several tasks will do.
            is_stream: whether it is answered with events.

        Raises:
            ServiceMissing: nothing is called so; what could be called is said.
            NotSupported: what is called so does other things.
            ServerError: as ``DataPlane.call``.

        Ownership and Cancellation: as ``DataPlane.call``.
        """
        method = "Stream" if is_stream else "Unary"
        sent_id = request.header("x-request-id") or ""
        call = partial(call_generative, self.plane, name, task, OPENAI_REST, method, is_stream=is_stream)
        try:
            return await call(request_id=sent_id, received=len(request.body))
        except ServiceMissing:
            raise self.missing(name) from None

    def missing(self, name: str) -> ServiceMissing:
        """Refuse a name that nothing has."""
        known = sorted(self.plane.statuses())
        more = f" and {len(known) - _MOST_NAMES} more" if len(known) > _MOST_NAMES else ""
        names = ", ".join(cut(each, _NAME_CHARACTERS) for each in known[:_MOST_NAMES])
        there = f"there are: {names}{more}" if known else "there is none"
        return ServiceMissing(f"The model `{cut(name, _NAME_CHARACTERS)}` does not exist; {there}")


async def read_document(body: bytes) -> dict[str, Any]:
    """Read a JSON object, in a worker thread if the body is large.

    Raises:
        MalformedJson: the body is not JSON, no object, or too deep.
        InvalidField: the body exceeds a limit.

    Cancellation: between slices of a large body; not a checkpoint for small bodies.
    """
    try:
        document = await parse_json(body, parse=parse_strictly)
    except JsonSyntaxError as error:
        raise MalformedJson(f"Cannot parse JSON body: {error}") from None
    except JsonLimitExceeded as error:
        raise InvalidField(f"JSON body: {error}") from None
    if not isinstance(document, dict):
        raise MalformedJson(f"JSON body must be an object: got {type_of(document)}")
    return document


def model_of(document: dict[str, Any]) -> str:
    """Give the model that a body names.

    Raises:
        InvalidField: there is none, or it is too long for a name.
    """
    model = document.get("model")
    if model is None:
        raise InvalidField("model field is missing in JSON body", field="model", code="missing_required_parameter")
    if not isinstance(model, str):
        raise InvalidField("model field is not a string", field="model", got=type_of(model))
    if len(model) > _MAX_MODEL_CHARACTERS:
        message = f"model field: expected at most {_MAX_MODEL_CHARACTERS} characters"
        raise InvalidField(message, field="model", got=str(len(model)))
    return model
