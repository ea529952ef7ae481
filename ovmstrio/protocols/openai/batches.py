"""OpenAI endpoints ``/batches``: requests of a file, answered by the functions of their endpoints with low priority.

::

    ID.json                 document
    ID.lock                 exists until the batch has ended; locked by the worker that runs it
    ID.cancel               exists if the batch is to be cancelled
    ID.output, ID.errors    answers so far, one a line

A batch that no worker runs continues with the next request of its caller for batches, and without authentication when
the server starts.
"""

from __future__ import annotations

import fcntl
import re
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4

import orjson
import structlog
import trio

from ovmstrio.auth.revocable_streams import cancel_on_revocation
from ovmstrio.core.callers import current_caller
from ovmstrio.core.errors import (
    CallerLimited,
    ErrorList,
    InvalidField,
    InvalidRequest,
    NotFound,
    NotReady,
    Overloaded,
    ServerError,
)
from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
from ovmstrio.protocols.openai.api import PREFIXES, caller_key, page_of, read_document
from ovmstrio.protocols.openai.fields import Fields, shown
from ovmstrio.protocols.openai.files import in_storage, open_file
from ovmstrio.protocols.openai.raw_http_routes import answer_raw_request
from ovmstrio.serving.ovms_errors import decompressed_body
from ovmstrio.transport.http.responses import json_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from ovmstrio.protocols.openai.api import OpenAIApi
    from ovmstrio.protocols.openai.background import BackgroundTasks
    from ovmstrio.protocols.openai.files import FileStorage
    from ovmstrio.transport.http.router import Route, Rule

log = structlog.get_logger(__name__)

_PATHS: Final = ("/chat/completions", "/completions", "/embeddings", "/responses", "/rerank", "/score")
_WINDOW: Final = re.compile(r"([1-9][0-9]{0,3})(m|h|d)")
_WINDOW_SECONDS: Final = {"m": 60, "h": 3600, "d": 86_400}
_MAX_REQUESTS: Final = 50_000
_MAX_METADATA: Final = 16
_MAX_ERRORS: Final = 100
_CONCURRENT_REQUESTS: Final = 8
_CONCURRENT_BATCHES: Final = 4  # whose requests are in memory
_MAX_UNFINISHED: Final = 100
_RETRY_BATCH_SECONDS: Final = 60.0
_SAVE_SECONDS: Final = 1.0
_CHECK_SECONDS: Final = 30.0  # interval of checks of the storage's limits, which visit all files
_BUSY_SECONDS: Final = 0.1  # pause of all but one request of a batch while a model has other requests
_RETRIED: Final = frozenset({429, 503})
_RETRY_SECONDS: Final = 1.0
_MAX_RETRY_SECONDS: Final = 60.0
_OK: Final = range(200, 300)
_ENDED: Final = frozenset({"failed", "completed", "expired", "cancelled"})


class _Line(NamedTuple):
    """One request of a batch."""

    custom_id: str
    path: str
    body: Mapping[str, Any]


@dataclass
class _Batch:
    """A batch that runs in this worker."""

    owner: str
    document: dict[str, Any]
    output: IO[bytes]
    errors: IO[bytes]
    left: dict[str, _Line] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    cancel: trio.CancelScope = field(default_factory=trio.CancelScope)
    saved: float = 0.0
    checked: float = 0.0

    @property
    def id(self) -> str:
        identity: str = self.document["id"]
        return identity


# ----------------------------------------------------------------------
# Input
# ----------------------------------------------------------------------


class _InvalidBatch(Exception):
    def __init__(self, errors: Sequence[Mapping[str, Any]]) -> None:
        super().__init__()
        self.errors = errors


def _problem(code: str, message: str, line: int | None = None, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": line}


def _read_lines(path: Path, endpoint: str) -> list[_Line]:
    """Read the requests of a file; raises _InvalidBatch with all problems."""
    lines: list[_Line] = []
    problems: list[dict[str, Any]] = []
    seen: set[str] = set()
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise _InvalidBatch([_problem("missing_file", "the input file was deleted")]) from None
    for number, text in enumerate(data.splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = _read_line(text, endpoint)
        except InvalidField as error:
            problems.append(_problem("invalid_request", error.message, number, error.field or None))
            continue
        if line.custom_id in seen:
            message = f"custom_id {shown(line.custom_id)} is not unique"
            problems.append(_problem("duplicate_custom_id", message, number, "custom_id"))
        seen.add(line.custom_id)
        lines.append(line)
        if len(problems) >= _MAX_ERRORS or len(lines) > _MAX_REQUESTS:
            break
    if len(lines) > _MAX_REQUESTS:
        problems = [_problem("too_many_requests", f"expected at most {_MAX_REQUESTS} requests")]
    if not lines and not problems:
        problems = [_problem("empty_file", "the input file has no requests")]
    if problems:
        raise _InvalidBatch(problems)
    return lines


def _read_line(text: bytes, endpoint: str) -> _Line:
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidField(f"the line is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidField("the line is no JSON object")
    custom_id, url, body = (document.get(name) for name in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise InvalidField("custom_id is missing", field="custom_id")
    if document.get("method", "POST") != "POST":
        raise InvalidField("method should be POST", field="method", got=shown(document["method"]))
    if url != endpoint:
        raise InvalidField(f"url should be the endpoint of the batch, {endpoint}", field="url", got=shown(url))
    if not isinstance(body, dict):
        raise InvalidField("body is not an object", field="body")
    for name in ("stream", "background"):
        if body.get(name):
            raise InvalidField(f"{name} is not possible in a batch", field=f"body.{name}")
    return _Line(custom_id, endpoint, body)


def _answered(path: Path) -> set[str]:
    """Return the custom ids of the answers so far; an incomplete last line is removed."""
    found = set()
    with path.open("a+b") as file:
        file.seek(0)
        end = 0
        for line in file:
            if line.endswith(b"\n"):
                end += len(line)
                found.add(orjson.loads(line)["custom_id"])
        file.truncate(end)
    return found


def _write_result(line: _Line, answer: HttpAnswer) -> bytes:
    try:
        body = orjson.loads(answer.content)
    except orjson.JSONDecodeError:
        body = answer.content.decode(errors="replace")
    response = {"status_code": answer.status, "request_id": uuid4().hex, "body": body}
    return _write(line.custom_id, response, None)


def _write(custom_id: str, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> bytes:
    row = {"id": f"batch_req_{uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return orjson.dumps(row) + b"\n"


# ----------------------------------------------------------------------
# Runner
# ----------------------------------------------------------------------


class BatchRunner:
    """Runs the batches of one worker.

    Args:
        api: the API, whose model limits and errors apply.
        storage: folder of files and batches.
        background: runs the batches.
        rules: routes of the endpoints.
    """

    def __init__(
        self, api: OpenAIApi, storage: FileStorage, background: BackgroundTasks, rules: Sequence[Rule]
    ) -> None:
        self.storage = storage
        self._api = api
        self._background = background
        self._routes = _routes_of(rules)
        self._running: dict[str, _Batch | None] = {}
        self._requests = trio.CapacityLimiter(_CONCURRENT_REQUESTS)
        self._turns = trio.CapacityLimiter(_CONCURRENT_BATCHES)
        self._own: Counter[str] = Counter()
        background.on_open(self._resume_open)

    @property
    def endpoints(self) -> list[str]:
        """Paths of requests."""
        return list(self._routes)

    async def _resume_open(self) -> None:
        try:
            await self.resume("", HttpRequest("POST", "/"))
        except ServerError as error:
            log.error("batches not resumed", reason=error.message)  # noqa: TRY400 - an expected error

    async def resume(self, owner: str, request: HttpRequest) -> None:
        """Start the batches of a caller that no worker runs."""
        for identity in await in_storage(self.unfinished, owner):
            if identity not in self._running:
                await self.start(owner, identity, request)

    def unfinished(self, owner: str) -> list[str]:
        """Return the ids of a caller's batches that have not ended; blocks."""
        return [path.stem for path in self.storage.folder(owner, "batch").glob("*.lock")]

    async def start(self, owner: str, identity: str, request: HttpRequest) -> None:
        """Run a batch in the background, unless another worker runs it."""
        self._running[identity] = None
        try:
            await self._background.start(partial(self._run, owner, identity, request), is_counted=False)
        except BaseException:
            self._running.pop(identity, None)
            raise

    def cancel_now(self, identity: str) -> None:
        """Cancel a batch if this worker runs it."""
        batch = self._running.get(identity)
        if batch is not None:
            batch.cancel.cancel()

    async def _run(
        self, owner: str, identity: str, request: HttpRequest, *, task_status: trio.TaskStatus[None]
    ) -> None:
        task_status.started()
        path = self.storage.path(owner, identity, ".lock")
        try:
            with await in_storage(open_file, path, "ab") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return
                await self._api.plane.registry.wait_loaded()
                await self._run_locked(owner, identity, request)
        except NotFound:
            path.unlink(missing_ok=True)
        except ServerError as error:
            log.error("batch failed", batch=identity, reason=error.message)  # noqa: TRY400 - an expected error
        finally:
            self._running.pop(identity, None)

    async def _run_locked(self, owner: str, identity: str, request: HttpRequest) -> None:
        document = await in_storage(self.storage.read, owner, identity, "batch")
        if document["status"] not in _ENDED:
            paths = [self.storage.path(owner, identity, suffix) for suffix in _RESULTS]
            done = [await in_storage(_answered, path) for path in paths]
            with (
                await in_storage(open_file, paths[0], "ab") as answers,
                await in_storage(open_file, paths[1], "ab") as failures,
            ):
                batch = self._running[identity] = _Batch(owner, document, answers, failures)
                batch.counts.update(completed=len(done[0]), failed=len(done[1]))
                if not await self._takes_turn(batch):
                    await self._end(batch, "cancelled")
                else:
                    try:
                        await self._answer_all(batch, done[0] | done[1], request)
                    finally:
                        self._turns.release_on_behalf_of(identity)
        await in_storage(self._clean, owner, identity)

    async def _takes_turn(self, batch: _Batch) -> bool:
        """Wait until the batch may run; return False if it is cancelled before."""
        path = self.storage.path(batch.owner, batch.id, ".cancel")
        while not await in_storage(path.exists):
            with trio.move_on_after(_SAVE_SECONDS):
                await self._turns.acquire_on_behalf_of(batch.id)
                return True
        return False

    def _clean(self, owner: str, identity: str) -> None:
        for suffix in (*_RESULTS, ".cancel", ".lock"):
            self.storage.path(owner, identity, suffix).unlink(missing_ok=True)

    async def _answer_all(self, batch: _Batch, done: set[str], request: HttpRequest) -> None:
        document = batch.document
        source = self.storage.path(batch.owner, document["input_file_id"], ".data")
        try:
            lines = await in_storage(_read_lines, source, document["endpoint"])
        except _InvalidBatch as error:
            await self._end(batch, "failed", error.errors)
            return
        batch.counts["total"] = len(lines)
        batch.left = {line.custom_id: line for line in lines if line.custom_id not in done}
        await self._save(batch, status="in_progress")
        status, problems = "completed", []
        seconds = max(0.0, document["expires_at"] - time.time())
        try:
            with cancel_on_revocation(request.peer, request.headers), trio.move_on_after(seconds) as until:
                with batch.cancel:
                    await self._answer_lines(batch)
                if batch.cancel.cancelled_caught:
                    status = "cancelled"
            if until.cancelled_caught:
                status = "expired"
        except ServerError as error:
            status, problems = "failed", [_problem("stopped", error.message)]
        await self._end(batch, status, problems)

    async def _answer_lines(self, batch: _Batch) -> None:
        pending = deque(batch.left.values())
        failures: list[ServerError] = []
        async with trio.open_nursery() as nursery:

            async def attempt(work: Callable[[], Awaitable[None]]) -> None:
                try:
                    await work()
                except ServerError as error:
                    failures.append(error)
                    nursery.cancel_scope.cancel()

            nursery.start_soon(attempt, partial(self._watch, batch))
            async with trio.open_nursery() as requests:
                for number in range(min(_CONCURRENT_REQUESTS, len(batch.left))):
                    work = partial(self._answer_some, batch, pending, nursery, waits=number > 0)
                    requests.start_soon(attempt, work)
            nursery.cancel_scope.cancel()
        if failures:
            raise failures[0]

    async def _watch(self, batch: _Batch) -> None:
        """Cancel a batch whose cancellation another worker has recorded."""
        path = self.storage.path(batch.owner, batch.id, ".cancel")
        while not await in_storage(path.exists):  # noqa: ASYNC110 - another process changes the folder
            await trio.sleep(_SAVE_SECONDS)
        batch.cancel.cancel()

    async def _answer_some(self, batch: _Batch, pending: deque[_Line], tasks: trio.Nursery, *, waits: bool) -> None:
        while pending:
            model = str(pending[0].body.get("model"))
            if waits and self._is_busy(model):
                await trio.sleep(_BUSY_SECONDS)
                continue
            line = pending.popleft()
            async with self._requests:
                self._own[model] += 1
                try:
                    answer = await self._answer(line, tasks)
                finally:
                    self._own[model] -= 1
            # A cancellation between these steps would repeat the request.
            with trio.CancelScope(shield=True):
                is_good = answer.status in _OK
                await in_storage(_append, batch.output if is_good else batch.errors, _write_result(line, answer))
                del batch.left[line.custom_id]
                batch.counts["completed" if is_good else "failed"] += 1
                now = time.monotonic()
                if now - batch.saved > _SAVE_SECONDS:
                    await self._save(batch)
                if now - batch.checked > _CHECK_SECONDS:
                    batch.checked = now
                    await in_storage(self.storage.check_room, 0, 0)

    def _is_busy(self, model: str) -> bool:
        """Return whether a model has requests of others in this worker."""
        try:
            service = self._api.plane.registry.peek(model)
        except ServerError:
            return False
        requests: int = getattr(service, "open_requests", 0)
        return requests > self._own[model]

    async def _answer(self, line: _Line, tasks: trio.Nursery) -> HttpAnswer:
        """Return the answer of the endpoint; repeat the request while the server is overloaded or the model loads."""
        route = self._routes[line.path]
        request = HttpRequest("POST", line.path, body=orjson.dumps(line.body), tasks=tasks, target=line.path)
        seconds = _RETRY_SECONDS
        while True:
            answer = await _answer_once(route, request)
            if answer.status not in _RETRIED:
                return answer
            advised = dict(answer.headers).get("retry-after", "")
            await trio.sleep(max(seconds, float(advised) if advised.isdecimal() else 0))
            seconds = min(2 * seconds, _MAX_RETRY_SECONDS)

    async def _save(self, batch: _Batch, **fields: Any) -> None:
        """Write the document with the counts and some new fields; a new status has the time of its beginning."""
        batch.saved = time.monotonic()
        document = batch.document
        if fields.get("status", document["status"]) != document["status"]:
            document[f"{fields['status']}_at"] = int(time.time())
        document |= fields
        document["request_counts"] = {name: batch.counts[name] for name in _COUNTS}
        await in_storage(self.storage.write, batch.owner, document, self._expires(document))

    def _expires(self, document: Mapping[str, Any]) -> float:
        return float(document["created_at"] + self.storage.limits.max_seconds)

    async def _end(self, batch: _Batch, status: str, errors: Sequence[Mapping[str, Any]] = ()) -> None:
        """End a batch: write the files of answers and errors, and the final document."""
        with trio.CancelScope(shield=True):
            if status == "expired":
                await in_storage(_write_expired, batch)
            if status in _TRANSITIONS:
                await self._save(batch, status=_TRANSITIONS[status])
            fields: dict[str, Any] = {}
            for suffix, name, count in zip(_RESULTS, ("output", "error"), ("completed", "failed"), strict=True):
                if not batch.counts[count]:
                    continue
                path = self.storage.path(batch.owner, batch.id, suffix)
                add = partial(self.storage.add_file, seconds=None, purpose="batch_output")
                try:
                    made = await in_storage(add, batch.owner, f"{batch.id}_{name}.jsonl", path)
                except InvalidRequest as error:
                    status, errors = "failed", [_problem("storage_full", error.message)]
                    continue
                fields[f"{name}_file_id"] = made["id"]
            if errors:
                fields["errors"] = {"object": "list", "data": list(errors)}
            await self._save(batch, status=status, **fields)


_RESULTS: Final = (".output", ".errors")
_COUNTS: Final = ("total", "completed", "failed")
_TRANSITIONS: Final = {"completed": "finalizing", "cancelled": "cancelling"}


def _write_expired(batch: _Batch) -> None:
    error = {"code": "batch_expired", "message": "This request was not answered before the batch expired."}
    for line in batch.left.values():
        _append(batch.errors, _write(line.custom_id, None, error))
        batch.counts["failed"] += 1


def _append(file: IO[bytes], data: bytes) -> None:
    file.write(data)
    file.flush()


async def _answer_once(route: Route, request: HttpRequest) -> HttpAnswer:
    """Answer a request as its route, within the limits of the caller."""
    caller = current_caller.get()
    try:
        if caller is not None:
            caller.enter()
        try:
            return await route.view(request)
        finally:
            if caller is not None:
                caller.leave()
    except CallerLimited as error:
        return route.refuse(error)
    except Exception as error:  # an error of one request must not affect others
        if not isinstance(error, ServerError):
            log.exception("batch request failed", path=request.path)
        return route.refuse(error)


def _routes_of(rules: Sequence[Rule]) -> dict[str, Route]:
    """Return the routes of the paths that batches may have."""
    found: dict[str, Route] = {}
    for path in (prefix + path for path in _PATHS for prefix in PREFIXES):
        for each in rules:
            if "POST" in each.methods and each.match(path):
                found.setdefault(path, each.route._replace(path=path))
    return found


# ----------------------------------------------------------------------
# Endpoint
# ----------------------------------------------------------------------

_KNOWN: Final = frozenset({"input_file_id", "endpoint", "completion_window", "metadata"})


def _read_batch(document: Mapping[str, Any], endpoints: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a new batch."""
    errors = ErrorList()
    fields = Fields(document, errors)
    for name in ("input_file_id", "endpoint", "completion_window"):
        if fields.get(name) is None:
            fields.refuse(name, f"{name} is missing", code="missing_required_parameter")
    endpoint = fields.name_text("endpoint")
    if endpoint is not None and endpoint not in endpoints:
        fields.refuse("endpoint", f"endpoint: expected one of {', '.join(_PATHS)} below /v1", got=shown(endpoint))
    window = fields.name_text("completion_window")
    match = _WINDOW.fullmatch(window or "")
    if window is not None and match is None:
        fields.refuse("completion_window", "completion_window: expected a time such as 24h", got=shown(window))
    metadata = fields.mapping("metadata")
    if metadata is not None and len(metadata) > _MAX_METADATA:
        fields.refuse("metadata", f"metadata: expected at most {_MAX_METADATA} keys", got=str(len(metadata)))
    for name in sorted(fields.names() - _KNOWN):
        fields.refuse(name, f"Unknown parameter: {shown(name)}", code="unknown_parameter")
    source = fields.name_text("input_file_id")
    errors.raise_if_any()
    seconds = 0 if match is None else int(match[1]) * _WINDOW_SECONDS[match[2]]
    now = int(time.time())
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    return {
        "id": f"batch_{uuid4().hex}",
        "object": "batch",
        "endpoint": endpoint,
        "errors": None,
        "input_file_id": source,
        "completion_window": window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + seconds,
        **{f"{name}_at": None for name in times},
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": metadata,
    }


class _BatchRoutes:
    def __init__(self, api: OpenAIApi, runner: BatchRunner) -> None:
        self._api = api
        self._runner = runner
        self._storage = runner.storage

    async def create(self, request: HttpRequest) -> HttpAnswer:
        data = await decompressed_body(request, self._api.max_body_bytes)
        document = _read_batch(await read_document(data), self._runner.endpoints)
        owner = caller_key()
        try:
            await in_storage(self._storage.read, owner, document["input_file_id"], "file")
        except NotFound as error:
            raise InvalidField(error.message, field="input_file_id") from None
        await in_storage(self._add, owner, document)
        await self._runner.start(owner, document["id"], request)
        return json_response(document)

    def _add(self, owner: str, document: Mapping[str, Any]) -> None:
        unfinished = len(self._runner.unfinished(owner))
        if unfinished >= _MAX_UNFINISHED:
            message = f"{unfinished} batches are unfinished, as many as may; try again later"
            raise Overloaded(message, retry_after_seconds=_RETRY_BATCH_SECONDS)
        self._storage.check_room()
        self._storage.write(owner, document, document["created_at"] + self._storage.limits.max_seconds)
        self._storage.path(owner, document["id"], ".lock").touch()

    async def every(self, request: HttpRequest) -> HttpAnswer:
        owner = caller_key()
        await self._runner.resume(owner, request)
        found = await in_storage(self._storage.documents, owner, "batch")
        return json_response(page_of(await in_storage(self._shown, owner, found), request.query))

    async def one(self, request: HttpRequest, batch: str) -> HttpAnswer:
        owner = caller_key()
        await self._runner.resume(owner, request)
        found = await in_storage(self._storage.read, owner, batch, "batch")
        return json_response((await in_storage(self._shown, owner, [found]))[0])

    def _shown(self, owner: str, documents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {**each, "status": "cancelling"}
            if each["status"] not in _ENDED and self._storage.path(owner, each["id"], ".cancel").exists()
            else each
            for each in documents
        ]

    async def cancel(self, request: HttpRequest, batch: str) -> HttpAnswer:
        owner = caller_key()
        found = await in_storage(self._storage.read, owner, batch, "batch")
        if found["status"] in _ENDED:
            raise InvalidField(f"Cannot cancel a batch with status {found['status']!r}.")
        await in_storage(self._storage.path(owner, batch, ".cancel").touch)
        self._runner.cancel_now(batch)
        with suppress(NotReady):
            await self._runner.resume(owner, request)
        return json_response({**found, "status": "cancelling", "cancelling_at": int(time.time())})


def refused_rules(api: OpenAIApi) -> list[Rule]:
    """Return the routes of a server without a file storage, which only graphs that accept raw requests may answer."""

    async def refuse(request: HttpRequest) -> HttpAnswer:
        answered = await answer_raw_request(api, request, request.path.rpartition("/")[2])
        if answered is not None:
            return answered
        raise InvalidField(
            f"{request.path}: this server stores no files; start it with --file-store", code="unsupported"
        )

    paths = [(path, method) for path in ("/files", "/batches") for method in ("GET", "POST")]
    return [rule for path, method in paths for rule in api.rules(path, method, refuse, has_tasks=True)]


def batch_rules(api: OpenAIApi, runner: BatchRunner) -> list[Rule]:
    """Return the routes."""
    routes = _BatchRoutes(api, runner)
    return [
        *api.rules("/batches", "POST", routes.create),
        *api.rules("/batches", "GET", routes.every),
        *api.rules("/batches/<batch>", "GET", routes.one),
        *api.rules("/batches/<batch>/cancel", "POST", routes.cancel),
    ]
