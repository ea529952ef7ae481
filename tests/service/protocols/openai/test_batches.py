"""Files and batches, with OpenAI's client."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final

import openai
import pytest
import trio

from ovmstrio.core.errors import Overloaded
from ovmstrio.core.generation import Finish, GenerationChunk
from ovmstrio.protocols.openai.files import FileLimits, FileStorage
from tests.service.protocols.openai.servers import CHAT, WORDS, serve_openai, service_of
from tests.service.protocols.openai.test_stored_responses import SCOPES, with_client
from tests.support.callers import gate_of
from tests.support.waits import WAIT_SECONDS, until_async
from tests.unit.protocols.servers import Serving

CHATS: Final = "/v1/chat/completions"
ENDED: Final = {"failed", "completed", "expired", "cancelled"}


@pytest.fixture
async def storing(tmp_path: Path) -> AsyncIterator[Serving]:
    async with serve_openai(tmp_path, front_end={"files": FileLimits(tmp_path / "store")}) as server:
        yield server


def line(custom_id: str, text: str = "one two", *, url: str = CHATS, **body: Any) -> dict[str, Any]:
    sent = {"model": CHAT, "messages": [{"role": "user", "content": text}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": sent}


def upload(client: Any, lines: Iterable[dict[str, Any]], **more: Any) -> Any:
    data = "\n".join(map(json.dumps, lines)).encode()
    return client.files.create(file=("in.jsonl", data), purpose="batch", **more)


def create(client: Any, lines: Iterable[dict[str, Any]], endpoint: str = CHATS, window: str = "24h") -> Any:
    source = upload(client, lines)
    return client.batches.create(
        input_file_id=source.id, endpoint=endpoint, completion_window=window, metadata={"a": "b"}
    )


async def ended(serving: Serving, identity: str, key: str = "none") -> Any:
    def wait(client: Any) -> Any:
        limit = time.monotonic() + WAIT_SECONDS
        while (batch := client.batches.retrieve(identity)).status not in ENDED:
            assert time.monotonic() < limit
        return batch

    return await with_client(serving, wait, key)


async def rows(serving: Serving, file: str | None, key: str = "none") -> dict[str, Any]:
    def read(client: Any) -> dict[str, Any]:
        read = [json.loads(each) for each in client.files.content(file).text.splitlines()]
        assert all(each["id"].startswith("batch_req_") for each in read)
        return {each["custom_id"]: each for each in read}

    return await with_client(serving, read, key)


async def test_files_are_stored_listed_read_and_deleted(storing: Serving) -> None:
    def use(client: Any) -> None:
        expiry = {"anchor": "created_at", "seconds": 3600}
        first, second = upload(client, [line("a")]), upload(client, [line("b")], expires_after=expiry)
        assert (first.filename, first.purpose, first.status, first.object) == ("in.jsonl", "batch", "processed", "file")
        assert second.expires_at - second.created_at == 3600
        assert client.files.content(first.id).content == json.dumps(line("a")).encode()
        assert first.bytes == len(client.files.content(first.id).content)
        assert client.files.retrieve(first.id) == first
        listed = client.files.list(order="asc", limit=1)
        assert [each.id for each in listed] == sorted((first.id, second.id), key=lambda each: each != listed.data[0].id)
        assert client.files.delete(first.id).deleted
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError, match="No such object"):
                call(first.id)

    await with_client(storing, use)


async def test_only_ids_of_files_are_looked_up(storing: Serving) -> None:
    for identity in ("file-..%2F..%2Fetc", "file-1", "batch_" + "0" * 32):
        for suffix in ("", "/content"):
            assert (await storing.get(f"/v1/files/{identity}{suffix}")).status_code in {400, 404}


async def test_a_batch_has_the_answers_of_its_requests(storing: Serving) -> None:
    lines = [line("a", "one two"), line("b", "three"), line("c", temperature=9), line("d", model="none")]
    made = await with_client(storing, partial(create, lines=lines))
    assert (made.status, made.endpoint, made.metadata) == ("validating", CHATS, {"a": "b"})
    batch = await ended(storing, made.id)
    assert (batch.status, batch.errors, batch.completed_at is not None) == ("completed", None, True)
    assert batch.request_counts.model_dump() == {"total": 4, "completed": 2, "failed": 2}
    answers = await rows(storing, batch.output_file_id)
    texts = {name: row["response"]["body"]["choices"][0]["message"]["content"] for name, row in answers.items()}
    assert texts == {"a": "one two", "b": "three"}
    assert {row["response"]["status_code"] for row in answers.values()} == {200}
    failures = await rows(storing, batch.error_file_id)
    assert (failures["c"]["response"]["status_code"], failures["d"]["response"]["status_code"]) == (400, 404)
    assert failures["c"]["response"]["body"]["error"]["param"] == "temperature"
    listed = await with_client(storing, lambda client: [each.id for each in client.batches.list()])
    assert listed == [made.id]


async def test_batches_of_other_endpoints_are_answered(storing: Serving) -> None:
    bodies = {
        "/v1/embeddings": {"model": WORDS, "input": "a"},
        "/v1/completions": {"model": CHAT, "prompt": "a b"},
        "/v1/responses": {"model": CHAT, "input": "a b", "store": False},
    }
    for url, body in bodies.items():
        lines = [{"custom_id": "a", "method": "POST", "url": url, "body": body}]
        made = await with_client(storing, partial(create, lines=lines, endpoint=url))
        batch = await ended(storing, made.id)
        answers = await rows(storing, batch.output_file_id)
        assert answers["a"]["response"]["status_code"] == 200
        assert answers["a"]["response"]["body"]["usage"]


INVALID: Final[list[tuple[list[dict[str, Any]], str, int | None]]] = [
    ([], "has no requests", None),
    ([line("a"), line("a")], "custom_id 'a' is not unique", 2),
    ([line("a", url="/v1/embeddings")], "url should be the endpoint of the batch", 1),
    ([line("a", stream=True)], "stream is not possible in a batch", 1),
    ([line("")], "custom_id is missing", 1),
    ([{"custom_id": "a", "method": "GET", "url": CHATS, "body": {}}], "method should be POST", 1),
    ([{"custom_id": "a", "method": "POST", "url": CHATS}], "body is not an object", 1),
]


async def test_an_invalid_input_file_fails_the_batch(storing: Serving) -> None:
    for lines, message, number in INVALID:
        made = await with_client(storing, partial(create, lines=lines))
        batch = await ended(storing, made.id)
        assert batch.status == "failed"
        (error,) = batch.errors.data
        assert message in error.message
        assert error.line == number
    assert not service_of(storing).requests


async def test_files_and_batches_are_no_ids_of_each_other(storing: Serving) -> None:
    made = await with_client(storing, partial(create, lines=[line("a")]))

    def use(client: Any) -> None:
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
        for call in (client.batches.retrieve, client.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                call(made.input_file_id)
        with pytest.raises(openai.BadRequestError, match="No such object"):
            client.batches.create(input_file_id=made.id, endpoint=CHATS, completion_window="24h")

    await with_client(storing, use)
    assert (await ended(storing, made.id)).status == "completed"


async def test_invalid_batches_and_files_are_refused(storing: Serving) -> None:
    def use(client: Any) -> None:
        source = upload(client, [line("a")]).id
        valid = {"input_file_id": source, "endpoint": CHATS, "completion_window": "24h"}
        for field, value in (
            *(("input_file_id", "file-x"), ("endpoint", "/v1/models"), ("completion_window", "soon")),
            *(("metadata", 5), ("extra_body", {"priority": 5})),
        ):
            with pytest.raises(openai.BadRequestError):
                client.batches.create(**{**valid, field: value})
        with pytest.raises(openai.BadRequestError, match="purpose: expected batch"):
            client.files.create(file=b"a", purpose="assistants")
        with pytest.raises(openai.NotFoundError):
            client.batches.retrieve("batch_" + "0" * 32)

    await with_client(storing, use)


async def test_a_request_is_repeated_while_the_server_is_overloaded(storing: Serving) -> None:
    service = service_of(storing)
    service.refusal = Overloaded("the queue is full")
    made = await with_client(storing, partial(create, lines=[line("a")]))
    with trio.fail_after(WAIT_SECONDS):
        await service.arrived.wait()
    service.refusal = None
    assert (await ended(storing, made.id)).request_counts.completed == 1
    assert len(service.requests) > 1


async def test_a_batch_runs_one_request_at_a_time_beside_other_requests(storing: Serving) -> None:
    service, go_on = service_of(storing), trio.Event()
    most = 0

    def script(request: Any) -> Any:
        nonlocal most
        if "interactive" in str(request.prompt):
            yield go_on
        else:
            most = max(most, service.running)
        yield GenerationChunk(text="done", finish=Finish.STOP)

    service.script = script
    body = {"model": CHAT, "messages": [{"role": "user", "content": "interactive"}]}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(storing.post, CHATS, json=body))
        with trio.fail_after(WAIT_SECONDS):
            await service.waiting.wait()
        made = await with_client(storing, partial(create, lines=[line(str(number)) for number in range(20)]))
        batch = await ended(storing, made.id)
        assert (batch.request_counts.completed, most) == (20, 2)
        go_on.set()


async def test_a_cancelled_batch_keeps_its_answers(storing: Serving) -> None:
    def script(request: Any) -> Any:
        if "wait" in str(request.prompt):
            yield trio.Event()
        yield GenerationChunk(text="done", finish=Finish.STOP)

    service_of(storing).script = script
    made = await with_client(storing, partial(create, lines=[line("a"), line("b", "wait")]))
    with trio.fail_after(WAIT_SECONDS):
        await service_of(storing).waiting.wait()
    cancelling = await with_client(storing, lambda client: client.batches.cancel(made.id))
    assert cancelling.status == "cancelling"
    batch = await ended(storing, made.id)
    assert (batch.status, batch.request_counts.completed) == ("cancelled", 1)
    assert list(await rows(storing, batch.output_file_id)) == ["a"]
    with pytest.raises(openai.BadRequestError, match="'cancelled'"):
        await with_client(storing, lambda client: client.batches.cancel(made.id))


async def _interrupt_batch(folder: Path, limits: FileLimits) -> Any:
    """Stop a server that has answered the first of two requests of a batch."""

    def script(request: Any) -> Any:
        yield trio.Event() if "wait" in str(request.prompt) else GenerationChunk(text="first", finish=Finish.STOP)

    async with serve_openai(folder, front_end={"files": limits}) as serving:
        service_of(serving).script = script
        made = await with_client(serving, partial(create, lines=[line("a"), line("b", "wait")]))
        with trio.fail_after(WAIT_SECONDS):
            await service_of(serving).waiting.wait()
        await until_async(lambda: any(each.stat().st_size for each in limits.folder.glob("*/batches/*.output")))
    return made


async def test_a_batch_continues_after_a_restart(tmp_path: Path) -> None:
    limits = FileLimits(tmp_path / "store")
    made = await _interrupt_batch(tmp_path, limits)
    async with serve_openai(tmp_path, front_end={"files": limits}) as serving:
        batch = await ended(serving, made.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 2)
        answers = await rows(serving, batch.output_file_id)
    texts = {name: row["response"]["body"]["choices"][0]["message"]["content"] for name, row in answers.items()}
    assert texts == {"a": "first", "b": "wait"}
    assert not list(limits.folder.glob("*/batches/*.lock"))


async def test_an_expired_batch_names_the_requests_without_an_answer(tmp_path: Path) -> None:
    limits = FileLimits(tmp_path / "store")
    made = await _interrupt_batch(tmp_path, limits)
    storage = FileStorage(limits)
    document = storage.read("", made.id, "batch")
    assert document["expires_at"] - document["created_at"] == 86_400
    storage.write("", document | {"expires_at": document["created_at"] - 1}, time.time() + 3600)
    async with serve_openai(tmp_path, front_end={"files": limits}) as serving:
        batch = await ended(serving, made.id)
        assert (batch.status, batch.expired_at is not None) == ("expired", True)
        assert list(await rows(serving, batch.output_file_id)) == ["a"]
        failures = await rows(serving, batch.error_file_id)
    assert (failures["b"]["error"]["code"], failures["b"]["response"]) == ("batch_expired", None)


async def test_files_and_batches_belong_to_their_caller(tmp_path: Path) -> None:
    options: dict[str, Any] = {"gate": gate_of(SCOPES), "files": FileLimits(tmp_path / "store")}
    async with serve_openai(tmp_path, front_end=options) as serving:
        made = await with_client(serving, partial(create, lines=[line("a")]), "ann")
        batch = await ended(serving, made.id, "ann")
        assert list(await rows(serving, batch.output_file_id, "ann")) == ["a"]

        def use(client: Any) -> None:
            for call in (client.batches.retrieve, client.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    call(made.id)
            for file in (made.input_file_id, batch.output_file_id):
                for call in (client.files.retrieve, client.files.content, client.files.delete):
                    with pytest.raises(openai.NotFoundError):
                        call(file)
            assert (list(client.files.list()), list(client.batches.list())) == ([], [])
            with pytest.raises(openai.BadRequestError, match="No such object"):
                client.batches.create(input_file_id=made.input_file_id, endpoint=CHATS, completion_window="24h")

        await with_client(serving, use, "bob")


@pytest.mark.parametrize("limit", [{"max_bytes": 500}, {"max_files": 2}])
async def test_a_full_storage_refuses_files_until_some_are_deleted(tmp_path: Path, limit: dict[str, Any]) -> None:
    limits = FileLimits(tmp_path / "store", **limit)
    async with serve_openai(tmp_path, front_end={"files": limits}) as serving:

        def use(client: Any) -> None:
            first = upload(client, [line("a")])
            upload(client, []) if "max_files" in limit else None
            with pytest.raises(openai.BadRequestError, match="--file-store-"):
                upload(client, [line("a")])
            client.files.delete(first.id)
            upload(client, [line("a")])

        await with_client(serving, use)


async def test_expired_files_are_removed(tmp_path: Path) -> None:
    limits = FileLimits(tmp_path / "store", max_files=1, max_seconds=-1)
    async with serve_openai(tmp_path, front_end={"files": limits}) as serving:

        def use(client: Any) -> None:
            first = upload(client, [line("a")])
            with pytest.raises(openai.NotFoundError):
                client.files.retrieve(first.id)
            upload(client, [line("b")])

        await with_client(serving, use)
    assert len(list((tmp_path / "store").glob("*/files/*.data"))) == 1


async def test_a_server_without_a_folder_says_which_option_is_missing(serving: Serving) -> None:
    def use(client: Any) -> None:
        with pytest.raises(openai.BadRequestError, match="--file-store"):
            upload(client, [line("a")])
        with pytest.raises(openai.BadRequestError, match="--file-store"):
            client.batches.list()

    await with_client(serving, use)
