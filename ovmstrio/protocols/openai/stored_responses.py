"""Stored and background responses of the Responses API: the store of one worker, and its routes.

::

    POST /responses ─> previous conversation + input ─> answer ─> stored by its caller
                         └─ background: a task that outlives the request
    GET, DELETE /responses/{id}, /input_items, /cancel ─> the worker that a hash of the id selects

The store is in memory.  Each caller sees its own responses only; at the limits, the oldest response of the caller that
uses most is dropped.
"""

from __future__ import annotations

import re
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qs
from uuid import uuid4

import orjson
import structlog
import trio

from ovmstrio.auth.revocable_streams import cancel_on_revocation
from ovmstrio.core.errors import InvalidField, NotFound, NotSupported, Overloaded, ServerError
from ovmstrio.core.generation import PromptTokenizer, Task
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.models.sequences.requests import owner_index
from ovmstrio.protocols.openai.api import DONE, caller_key, page_of, query_number
from ovmstrio.protocols.openai.fields import shown, type_of
from ovmstrio.protocols.openai.known_fields import RESPONSES
from ovmstrio.protocols.openai.raw_http_routes import accepts_raw_requests, answer_raw_request
from ovmstrio.protocols.openai.responses import RESPONSE_PREFIX, Responses, item_id
from ovmstrio.protocols.openai.text_endpoint import TextEventStream, answer_text, is_stream, parse_off_loop
from ovmstrio.transport.http.responses import JSON_TYPE, json_response, request_deadline
from ovmstrio.transport.http.sse import stream_events
from ovmstrio.util.truncation import cut

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.core.worker_peers import WorkerPeers
    from ovmstrio.protocols.openai.api import Body, OpenAIApi
    from ovmstrio.protocols.openai.background import BackgroundTasks
    from ovmstrio.protocols.openai.responses import ResponseStream
    from ovmstrio.transport.http.router import Rule
    from ovmstrio.transport.http.sse import EventSink

log = structlog.get_logger(__name__)

_RPC: Final = "stored response"
_MAX_BACKGROUND: Final = 256
_PREVIOUS: Final = "previous_response_id"
_BACKGROUND: Final = "background"
_POLL_SECONDS: Final = 20.0  # longest wait for events of a response of another worker
_OVERHEAD_BYTES: Final = 1024


# ----------------------------------------------------------------------
# Store
# ----------------------------------------------------------------------


class StoreLimits(NamedTuple):
    """Limits of the responses that one worker stores; 0 bytes for no store."""

    max_bytes: int = 64 * 2**20
    max_seconds: float = 86_400.0


@dataclass
class StoredResponse:
    """One response, with its input items and the items of the conversation before them as JSON lists.

    Attributes:
        stream: writer of a response that still runs in the background.
        events: events of a response that streams in the background; None for no events.
        scope: cancels a running response.
    """

    id: str
    caller: str
    items: bytes
    before: bytes
    created: float
    document: bytes = b""
    stream: ResponseStream | None = None
    events: list[bytes] | None = None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    changed: trio.Event = field(default_factory=trio.Event)
    event_bytes: int = 0
    counted_bytes: int = 0
    is_deleted: bool = False

    @property
    def size(self) -> int:
        """Size in bytes."""
        return len(self.items) + len(self.before) + len(self.document) + self.event_bytes + _OVERHEAD_BYTES

    def read(self) -> bytes:
        """Return the document, also of a running response."""
        return self.document if self.stream is None else json_response(self.stream.document).content

    async def send(self, data: bytes) -> None:
        """Take events of a background response."""
        if self.events is not None:
            self.events += [block + b"\n\n" for block in data.split(b"\n\n") if block.startswith(b"event:")]
            self.event_bytes += len(data)
        self.notify()
        await trio.lowlevel.checkpoint()

    def notify(self) -> None:
        """Wake the readers of events."""
        self.changed.set()
        self.changed = trio.Event()

    @property
    def is_running(self) -> bool:
        """True if the response runs in the background."""
        return self.stream is not None


class ResponseStore:
    """Responses of one worker, and access to those of the other workers.

    Args:
        limits: limits of this worker.
        peers: the other workers; None for a single one.
    """

    def __init__(self, limits: StoreLimits, peers: WorkerPeers | None = None) -> None:
        self.limits = limits
        self.running = 0
        self._peers = peers
        self._responses: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._sizes: Counter[str] = Counter()
        if peers is not None:
            peers.register_handler(_RPC, self._answer)

    def new_id(self) -> str:
        """Return an id whose hash selects this worker."""
        while True:
            made = f"{RESPONSE_PREFIX}{uuid4().hex}"
            if self._owner(made) is None:
                return made

    def _owner(self, identity: str) -> int | None:
        peers = self._peers
        if peers is None:
            return None
        row = owner_index(identity, len(peers.others) + 1)
        return None if row == peers.row else row

    def add(self, stored: StoredResponse) -> None:
        """Add a response, or count the new size of a stored one; drop others at the limit."""
        if stored.is_deleted:
            return
        self._responses.setdefault(stored.caller, OrderedDict())[stored.id] = stored
        self._sizes[stored.caller] += stored.size - stored.counted_bytes
        stored.counted_bytes = stored.size
        if stored.size > self.limits.max_bytes and not stored.is_running:
            self._drop(stored)
        self._drop_expired()
        while self._sizes.total() > self.limits.max_bytes:
            ((caller, _),) = self._sizes.most_common(1)
            dropped = next((each for each in self._responses[caller].values() if not each.is_running), None)
            if dropped is None:
                return
            self._drop(dropped)

    def _drop_expired(self) -> None:
        oldest = time.time() - self.limits.max_seconds
        for mine in list(self._responses.values()):
            while mine and (first := next(iter(mine.values()))).created < oldest and not first.is_running:
                self._drop(first)

    def _drop(self, stored: StoredResponse) -> None:
        mine = self._responses[stored.caller]
        del mine[stored.id]
        stored.is_deleted = True
        self._sizes[stored.caller] -= stored.counted_bytes
        if not mine:
            del self._responses[stored.caller], self._sizes[stored.caller]

    async def ask(self, operation: str, identity: str, *arguments: Any) -> Any:
        """Run an operation on a response of the current caller, on the worker that stores it.

        Raises:
            NotFound: the caller has no such response.
            WorkerRestarting: the worker is restarting.
            ServerError: the operation is not possible.
        """
        caller, row = caller_key(), self._owner(identity)
        if row is None or self._peers is None:
            return await self._answer(operation, caller, identity, *arguments)
        return await self._peers.call(row, _RPC, operation, caller, identity, *arguments)

    async def _answer(self, operation: str, caller: str, identity: str, *arguments: Any) -> Any:
        self._drop_expired()
        mine = self._responses.get(caller)
        stored = None if mine is None else mine.get(identity)
        if stored is None:
            raise NotFound(f"Response with id {shown(identity)} not found.")
        await trio.lowlevel.checkpoint()
        match operation:
            case "read":
                return stored.read()
            case "items":
                return stored.items
            case "conversation":
                return self._conversation(stored)
            case "own items":
                return [stored.items, *([] if stored.is_running else [stored.document])]
            case "delete":
                self._drop(stored)
                stored.scope.cancel()
                return None
            case "cancel":
                return await self._cancel(stored)
        return await self._events(stored, *arguments)

    @staticmethod
    def _conversation(stored: StoredResponse) -> list[bytes]:
        if stored.is_running:
            message = f"{_PREVIOUS}: the response {shown(stored.id)} is not complete"
            raise InvalidField(message, field=_PREVIOUS)
        return [stored.before, stored.items, orjson.dumps(orjson.loads(stored.document)["output"])]

    @staticmethod
    async def _cancel(stored: StoredResponse) -> bytes:
        if stored.is_running:
            stored.scope.cancel()
        while stored.is_running:
            await stored.changed.wait()
        if not orjson.loads(stored.document)[_BACKGROUND]:
            raise InvalidField("Cannot cancel a synchronous response.")
        return stored.document

    @staticmethod
    async def _events(stored: StoredResponse, begin: int) -> list[Any]:
        """Return the events from a sequence number on, waiting for the first one, and whether they are the last."""
        if stored.events is None:
            message = "stream is only possible for responses that were created with background and stream"
            raise InvalidField(message, field="stream")
        with trio.move_on_after(_POLL_SECONDS):
            while stored.is_running and len(stored.events) <= begin:
                await stored.changed.wait()
        return [b"".join(stored.events[begin:]), len(stored.events), not stored.is_running]


@dataclass
class _Slot:
    """Place of one response; see :class:`ovmstrio.protocols.openai.responses.ResponseSlot`.

    ``store`` is None if the response is not stored.
    """

    head: Mapping[str, Any]
    stored: StoredResponse
    store: ResponseStore | None

    def save(self, document: Mapping[str, Any]) -> None:
        stored = self.stored
        # Readers of events run after the last events are added, because no task runs between.
        stored.document, stored.stream = json_response(document).content, None
        if self.store is not None:
            self.store.add(stored)
        stored.notify()


class _JoinedInput(NamedTuple):
    """Body with the conversation before its input; that conversation and the own input as JSON lists to be stored."""

    document: dict[str, Any]
    before: bytes
    items: bytes


def _join_input(
    document: dict[str, Any],
    parts: Sequence[bytes],
    references: Sequence[_Reference],
    referenced: Sequence[bytes],
    response: str,
    *,
    is_stored: bool,
) -> _JoinedInput:
    """Put the conversation in ``parts`` before the input of a body, and items of responses in place of references."""
    given = document.get("input")
    earlier = [item for part in parts for item in orjson.loads(part)]
    items = _items_of(given)
    if references:
        items = _replace_references(items, references, referenced)
    if (earlier or references) and isinstance(given, str | list | None):
        document = {**document, "input": [*earlier, *items]}
    if not is_stored:
        return _JoinedInput(document, b"", b"")
    try:
        own = [_with_id(item, response, number) for number, item in enumerate(items)]
        return _JoinedInput(document, json_response(earlier).content, json_response(own).content)
    except RecursionError:
        raise InvalidField("input is nested too deeply", field="input") from None


def _with_id(item: Any, response: str, number: int) -> Any:
    """Return an input item with an id, and text as a list of parts, as clients expect."""
    if not isinstance(item, dict):
        return item
    made = {"type": "message", **item, "id": item.get("id") or item_id("item", response, number)}
    content = made.get("content")
    if isinstance(content, str):
        kind = "output_text" if made.get("role") == "assistant" else "input_text"
        made["content"] = [{"type": kind, "text": content}]
    return made


def _items_of(given: Any) -> list[Any]:
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return given if isinstance(given, list) else []


# Items of stored responses, which an input names by their ids

_REFERENCE: Final = "item_reference"
_ITEM_ID: Final = re.compile(r"[a-z]+_([0-9a-f]{32})[0-9a-f]{4,}")


class _Reference(NamedTuple):
    """Input item that names an item of a stored response; ``place`` is its position in the input."""

    place: int
    id: str

    @property
    def field(self) -> str:
        """Path of the id in the body."""
        return f"input[{self.place}].id"

    @property
    def response(self) -> str:
        """Id of the response that has the item; raises InvalidField if the id is not one of this server."""
        match = _ITEM_ID.fullmatch(self.id)
        if match is None:
            raise self.not_found()
        return f"{RESPONSE_PREFIX}{match[1]}"

    def not_found(self) -> InvalidField:
        message = f"Item with id {shown(self.id)} not found; send the item itself, or store the response that has it"
        return InvalidField(message, field=self.field)


def _references_of(given: Any) -> list[_Reference]:
    """Return the references of an input; an item that has nothing but an id is one, too."""
    return [
        _Reference(place, item["id"])
        for place, item in enumerate(given if isinstance(given, list) else ())
        if isinstance(item, dict) and isinstance(item.get("id"), str)
        if item.get("type") == _REFERENCE or (item.get("type") is None and item.keys() <= {"id", "type"})
    ]


def _replace_references(
    items: Sequence[Any], references: Sequence[_Reference], referenced: Sequence[bytes]
) -> list[Any]:
    """Return the input items with the items that they refer to.

    ``referenced`` are lists of input items and complete responses.
    """
    found: dict[str, Any] = {}
    for part in map(orjson.loads, referenced):
        listed = part["output"] if isinstance(part, dict) else part
        found |= {item["id"]: item for item in listed if isinstance(item, dict) and isinstance(item.get("id"), str)}
    made = list(items)
    for each in references:
        if each.id not in found:
            raise each.not_found()
        made[each.place] = found[each.id]
    return made


# ----------------------------------------------------------------------
# Routes
# ----------------------------------------------------------------------


class _ResponseRoutes:
    def __init__(self, api: OpenAIApi, store: ResponseStore, background: BackgroundTasks) -> None:
        self._api = api
        self._store = store
        self._background = background

    async def create(self, request: HttpRequest) -> HttpAnswer:
        api = self._api
        body = await api.body(request, RESPONSES)
        if accepts_raw_requests(api.plane, body.model):
            answered = await answer_raw_request(api, request, "responses")
            if answered is not None:
                return answered
        slot, body = await self._open_slot(body)
        endpoint = Responses(slot)
        if not slot.head[_BACKGROUND]:
            return await answer_text(api, endpoint, request, body)
        stored = slot.stored
        if self._store.running >= _MAX_BACKGROUND:
            raise Overloaded(f"{self._store.running} responses run in the background, as many as may; try again later")
        run = partial(self._generate, request, body, endpoint, slot)
        first: bytes = await self._background.start(run)
        if is_stream(body):
            return await self._stream(request, stored.id, 0)
        return HttpAnswer(200, JSON_TYPE, first)

    async def _open_slot(self, body: Body) -> tuple[_Slot, Body]:
        """Return the place of the response, and the body with the previous conversation."""
        document = body.document
        for name in ("store", _BACKGROUND):
            if not isinstance(document.get(name), bool | None):
                message = f"{name} accepts values true or false"
                raise InvalidField(message, field=name, got=type_of(document[name]))
        previous = document.get(_PREVIOUS)
        if not isinstance(previous, str | None):
            raise InvalidField(f"{_PREVIOUS} is not a string", field=_PREVIOUS, got=type_of(previous))
        has_store = self._store.limits.max_bytes > 0
        references = _references_of(document.get("input"))
        wanted = next((name for name in ("store", _BACKGROUND, _PREVIOUS) if document.get(name)), "")
        wanted = wanted or (_REFERENCE if references else "")
        if wanted and not has_store:
            message = f"{wanted} is not supported: this server stores no responses (--response-store-bytes is 0)"
            field = "input" if wanted == _REFERENCE else wanted
            raise InvalidField(message, field=field, code="unsupported_parameter")
        is_stored, is_background = has_store and document.get("store") is not False, bool(document.get(_BACKGROUND))
        if is_background and not is_stored:
            raise InvalidField(f"{_BACKGROUND} requires store", field=_BACKGROUND)
        parts = await self._previous(previous) if previous else []
        referenced = await self._referenced(references)
        body = body._replace(size=body.size + sum(map(len, (*parts, *referenced))))
        identity = self._store.new_id()
        join = partial(_join_input, document, parts, references, referenced, identity, is_stored=is_stored)
        joined = await parse_off_loop(join, body)
        stored = StoredResponse(identity, caller_key(), joined.items, joined.before, time.time())
        if is_background and is_stream(body):
            stored.events = []
        head = {"id": identity, _PREVIOUS: previous, "store": is_stored, _BACKGROUND: is_background}
        slot = _Slot(head, stored, self._store if is_stored else None)
        return slot, body._replace(document=joined.document)

    async def _previous(self, identity: str) -> list[bytes]:
        try:
            parts: list[bytes] = await self._store.ask("conversation", identity)
        except NotFound:
            message = f"Previous response with id {shown(identity)} not found."
            raise InvalidField(message, field=_PREVIOUS, code="previous_response_not_found") from None
        return parts

    async def _referenced(self, references: Sequence[_Reference]) -> list[bytes]:
        """Return the items of the responses that have the referenced ones."""
        found: dict[str, list[bytes]] = {}
        named: set[str] = set()
        for each in references:
            if each.id in named:
                # Copies of a large item could fill the memory.
                message = f"Duplicate item found with id {shown(each.id)}; remove one of them"
                raise InvalidField(message, field=each.field)
            named.add(each.id)
            if (response := each.response) not in found:
                try:
                    found[response] = await self._store.ask("own items", response)
                except NotFound:
                    raise each.not_found() from None
        return [part for parts in found.values() for part in parts]

    async def _generate(
        self,
        request: HttpRequest,
        body: Body,
        endpoint: Responses,
        slot: _Slot,
        *,
        task_status: trio.TaskStatus[bytes],
    ) -> None:
        """Generate a response in the background; reports its start once the body is parsed."""
        stored = slot.stored
        generating = TextEventStream(self._api, endpoint, request, body)

        async def begin() -> None:
            stream = endpoint.stream
            assert stream is not None  # noqa: S101 - made before
            stored.stream = stream
            self._store.add(stored)
            await stored.send(stream.queued())
            task_status.started(stored.read())

        generating.on_parsed = begin
        self._store.running += 1
        try:
            with stored.scope, cancel_on_revocation(request.peer, request.headers):
                await generating.stream(stored)
        except Exception as error:
            if not stored.is_running:
                raise
            if not isinstance(error, ServerError):
                log.exception("background response failed", response=stored.id)
            await stored.send(generating.fail(error))
        finally:
            self._store.running -= 1
            if stored.stream is not None:
                stored.stream.cancel()
            stored.notify()

    async def read(self, request: HttpRequest, response: str) -> HttpAnswer:
        query = parse_qs(request.query)
        if query.get("stream") != ["true"]:
            return HttpAnswer(200, JSON_TYPE, await self._store.ask("read", response))
        last = query_number(query, "starting_after", -1, range(-1, 2**31))
        return await self._stream(request, response, last + 1)

    async def _stream(self, request: HttpRequest, response: str, begin: int) -> HttpAnswer:
        send, seconds = partial(self._send_events, response, begin), self._api.keep_alive_seconds
        return await stream_events(request, send, self._api.form.event, keep_alive_seconds=seconds)

    async def _send_events(self, response: str, begin: int, events: EventSink) -> None:
        is_over = False
        while not is_over:
            data, begin, is_over = await self._store.ask("events", response, begin)
            if data:
                await events.send(data)
        await events.send(DONE)

    async def delete(self, _: HttpRequest, response: str) -> HttpAnswer:
        await self._store.ask("delete", response)
        return json_response({"id": response, "object": "response", "deleted": True})

    async def cancel(self, _: HttpRequest, response: str) -> HttpAnswer:
        return HttpAnswer(200, JSON_TYPE, await self._store.ask("cancel", response))

    async def count_tokens(self, request: HttpRequest) -> HttpAnswer:
        """Return the number of prompt tokens of a body, without an answer."""
        body = await self._api.body(request, RESPONSES)
        slot, body = await self._open_slot(body)
        deadline = request_deadline(request)
        with await self._api.call(request, body.model, Task.TEXT_GENERATION) as call:
            service: Any = call.service
            if not isinstance(service, PromptTokenizer):
                raise NotSupported(f'the service "{cut(body.model, 80)}" has no tokenizer')
            read = partial(Responses(slot).read, body.document, service.limits, is_stream=False, deadline=deadline)
            parsed = await parse_off_loop(read, body)
            # The endpoint makes no other prompts.
            conversation: Any = parsed.requests[0].prompt
            count = len(await service.tokenize_conversation(conversation))
            answer = json_response({"object": "response.input_tokens", "input_tokens": count})
            call.event.sent = len(answer.content)
        return answer

    async def input_items(self, request: HttpRequest, response: str) -> HttpAnswer:
        items = orjson.loads(await self._store.ask("items", response))
        return json_response(page_of(items, request.query))


def response_rules(api: OpenAIApi, store: ResponseStore, background: BackgroundTasks) -> list[Rule]:
    """Return the routes."""
    routes = _ResponseRoutes(api, store, background)
    return [
        *api.rules("/responses", "POST", routes.create, has_tasks=True),
        *api.rules("/responses/input_tokens", "POST", routes.count_tokens),
        *api.rules("/responses/<response>", "GET", routes.read, has_tasks=True),
        *api.rules("/responses/<response>", "DELETE", routes.delete),
        *api.rules("/responses/<response>/cancel", "POST", routes.cancel),
        *api.rules("/responses/<response>/input_items", "GET", routes.input_items),
    ]
