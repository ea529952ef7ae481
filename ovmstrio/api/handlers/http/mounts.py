"""Handlers beside models and graphs: each at ``/{name}``, and what it tells of its models at ``/{name}/info``."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from quart import Blueprint, Response, request

from ovmstrio.api.handlers.http.info import info_answer
from ovmstrio.api.handlers.http.quart_answers import respond, sent_headers
from ovmstrio.api.handlers.http.service import HandlerService, HeldStream, refusal, text_to_send
from ovmstrio.config.specs import HandlerSpec
from ovmstrio.core.errors import ServerError
from ovmstrio.runtimes.handlers.handler_servable import HandlerServable

if TYPE_CHECKING:
    from ovmstrio.api.handlers.http.service import HandlerAnswer
    from ovmstrio.core.servable import Servable
    from ovmstrio.registry import Registry
    from ovmstrio.runtimes.handlers.http.answers import Headers

__all__ = ["HandlerMounts", "make_blueprint"]

_INFO: Final = ("GET", "info")


class HandlerMounts:
    """The handlers of a server, by the names that they are at; they come and go while it serves.

    Args:
        registry: has them.
        shows_details: whether callers may see what a handler's code raised.
    """

    def __init__(self, registry: Registry, *, shows_details: bool = False) -> None:
        self._registry = registry
        self._shows_details = shows_details
        self._names: frozenset[str] = frozenset()
        self._services: dict[str, tuple[HandlerServable, HandlerService]] = {}
        registry.subscribe(lambda _: self._look())

    def _look(self) -> None:
        self._names = self._registry.names_of(HandlerSpec.kind)
        self._services = {name: known for name, known in self._services.items() if name in self._names}

    def __bool__(self) -> bool:
        return bool(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    async def answer(self, name: str, verb: str, headers: Headers, query: str, body: bytes) -> HandlerAnswer:
        """Answer a request as :meth:`HandlerService.answer`, by the handler that is loaded now."""
        with ExitStack() as held:
            try:
                servable = held.enter_context(await self._registry.lease(name)).servable
            except ServerError as error:
                return refusal(error)
            service = self._service(name, servable)
            if service is None:
                return text_to_send(404, f"{name} is called over gRPC")
            answer = await service.answer(verb, headers, query, body)
            if not isinstance(answer.body, bytes):
                answer.body = HeldStream(answer.body, held.pop_all().close)
        return answer

    async def info(self, name: str) -> HandlerAnswer:
        """Tell of a handler's models.

        Cancellation: as :func:`info_answer`.
        """
        try:
            lease = await self._registry.lease(name)
        except ServerError as error:
            return refusal(error)
        with lease:
            servable = lease.servable
            return await info_answer(servable.models.info if isinstance(servable, HandlerServable) else dict)

    def _service(self, name: str, servable: Servable) -> HandlerService | None:
        known = self._services.get(name)
        if known is not None and known[0] is servable:
            return known[1]
        if not isinstance(servable, HandlerServable) or servable.grpc is not None:
            return None
        service = HandlerService(servable.handler, servable.limit, shows_details=self._shows_details)
        self._services[name] = servable, service
        return service


def make_blueprint(mounts: HandlerMounts) -> Blueprint:
    """Make the routes of handlers; a name that is no handler's is left to the other routes."""
    blueprint = Blueprint("handlers", __name__)

    async def handler() -> Response | None:
        verb = request.method
        name, _, rest = request.path[1:].partition("/")
        if name in mounts and (verb, rest) == _INFO:
            return respond(await mounts.info(name))
        name = request.path[1:]
        if name not in mounts:
            return None
        body: Any = await request.get_data()
        query = request.query_string.decode("latin-1")
        return respond(await mounts.answer(name, verb, sent_headers(), query, body))

    blueprint.before_app_request(handler)
    return blueprint
