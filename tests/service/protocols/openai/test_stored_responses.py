"""Stored and background responses, with OpenAI's client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import openai
import pytest
import trio

from ovmstrio.core.errors import ModelFailure
from ovmstrio.core.generation import Finish, GenerationChunk, ToolCallDelta
from ovmstrio.protocols.openai.stored_responses import StoreLimits
from tests.service.protocols.openai.servers import CHAT, serve_openai, service_of
from tests.support.callers import gate_of
from tests.support.scripted_services import echo
from tests.support.waits import WAIT_SECONDS
from tests.unit.protocols.servers import Serving

ResultT = TypeVar("ResultT")
SCOPES: Final = {"ann": "infer:*", "bob": "infer:*"}


async def with_client(serving: Serving, work: Callable[[Any], ResultT], key: str = "none") -> ResultT:
    def connected() -> ResultT:
        url = f"http://{serving.address}/v1"
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=WAIT_SECONDS) as client:
            return work(client)

    return await trio.to_thread.run_sync(connected)


def create(client: Any, text: str = "one two", **more: Any) -> Any:
    return client.responses.create(model=CHAT, input=text, **more)


async def test_a_stored_response_can_be_read_and_deleted(serving: Serving) -> None:
    def use(client: Any) -> None:
        made = create(client, metadata={"a": "b"})
        read = client.responses.retrieve(made.id)
        assert read.model_dump() == made.model_dump()
        (item,) = client.responses.input_items.list(made.id).data
        assert (item.role, item.content[0].type, item.content[0].text) == ("user", "input_text", "one two")
        client.responses.delete(made.id)
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="not found"):
                call(made.id)

    await with_client(serving, use)


async def test_a_previous_response_is_the_beginning_of_the_conversation(serving: Serving) -> None:
    def use(client: Any) -> list[str]:
        first = create(client, "one", instructions="be short")
        second = create(client, "two", previous_response_id=first.id)
        client.responses.delete(first.id)
        third = create(client, "three", previous_response_id=second.id, stream=False)
        assert third.previous_response_id == second.id
        return [item.content[0].text for item in client.responses.input_items.list(third.id).data]

    assert await with_client(serving, use) == ["three"]
    messages = [(each["role"], each["content"]) for each in service_of(serving).requests[-1].prompt.messages]
    assert messages == [
        *[("user", "one"), ("assistant", "one"), ("user", "two"), ("assistant", "two"), ("user", "three")],
    ]


async def test_tool_calls_and_reasoning_of_a_previous_response_are_in_the_conversation(serving: Serving) -> None:
    call = ToolCallDelta(0, "call_1", "f", '{"a": 1}')
    service_of(serving).script = lambda _: [
        GenerationChunk(reasoning="hm"),
        GenerationChunk(calls=(call,), finish=Finish.TOOL_CALLS),
    ]
    tool: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    output: Any = [{"type": "function_call_output", "call_id": "call_1", "output": "7"}]

    def use(client: Any) -> None:
        first = create(client, tools=[tool])
        client.responses.create(model=CHAT, input=output, previous_response_id=first.id, tools=[tool])

    await with_client(serving, use)
    messages = service_of(serving).requests[-1].prompt.messages
    function = {"name": "f", "arguments": '{"a": 1}'}
    assert messages[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "reasoning": "hm",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }
    assert messages[2] == {"role": "tool", "tool_call_id": "call_1", "content": "7"}


def _reference(item: Any, **more: Any) -> Any:
    return {"type": "item_reference", "id": item.id, **more}


async def test_an_input_may_refer_to_items_of_stored_responses(serving: Serving) -> None:
    call = ToolCallDelta(0, "call_1", "f", '{"a": 1}')
    service_of(serving).script = lambda _: [
        GenerationChunk(reasoning="hm"),
        GenerationChunk(calls=(call,), finish=Finish.TOOL_CALLS),
    ]
    output: Any = {"type": "function_call_output", "call_id": "call_1", "output": "7"}

    def use(client: Any) -> Any:
        first = client.responses.create(model=CHAT, input="one")
        (question,) = client.responses.input_items.list(first.id).data
        items: Any = [_reference(question, type=None), *map(_reference, first.output), output]
        second = client.responses.create(model=CHAT, input=items)
        client.responses.delete(first.id)
        listed = client.responses.input_items.list(second.id, order="asc").data
        assert [each.id for each in listed[:3]] == [each["id"] for each in items[:3]]
        return [each.type for each in listed]

    types = await with_client(serving, use)
    assert types == ["message", "reasoning", "function_call", "function_call_output"]
    asked, called, result = service_of(serving).requests[-1].prompt.messages
    assert (asked["role"], asked["content"], called["reasoning_content"]) == ("user", "one", "hm")
    assert [(each["id"], each["function"]["name"]) for each in called["tool_calls"]] == [("call_1", "f")]
    assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", "call_1", "7")


async def test_items_of_unknown_or_foreign_responses_are_refused(guarded: Serving) -> None:
    def refer(items: Any, client: Any) -> None:
        client.responses.create(model=CHAT, input=list(map(_reference, items)))

    made = await with_client(guarded, create, "ann")
    hidden = await with_client(guarded, partial(create, store=False), "ann")
    (item,), (lost,) = made.output, hidden.output
    for key, items, error in (
        ("bob", (item,), r"Item with id 'msg_\w+' not found"),
        ("ann", (lost,), "not found; send the item itself"),
        ("ann", (item.model_copy(update={"id": f"{item.id}0"}),), "not found"),
        ("ann", (item, item), "Duplicate item found"),
    ):
        with pytest.raises(openai.BadRequestError, match=error):
            await with_client(guarded, partial(refer, items), key)


async def test_a_streamed_response_is_stored_at_its_end(serving: Serving) -> None:
    def use(client: Any) -> None:
        events = list(create(client, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        last = events[-1].response
        assert client.responses.retrieve(last.id).output_text == "one two"

    await with_client(serving, use)


async def test_a_response_that_is_not_stored_is_not_found(serving: Serving) -> None:
    def use(client: Any) -> None:
        made = create(client, store=False)
        assert made.model_dump()["store"] is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError, match="Previous response"):
            create(client, previous_response_id=made.id)

    await with_client(serving, use)


async def test_a_background_response_is_generated_after_its_request(serving: Serving) -> None:
    go_on = trio.Event()
    service_of(serving).script = lambda _: [
        GenerationChunk(text="one"),
        go_on,
        GenerationChunk(text=" two", finish=Finish.STOP),
    ]
    made = await with_client(serving, lambda client: create(client, background=True))
    assert (made.status, made.background, made.output) == ("queued", True, [])
    with trio.fail_after(WAIT_SECONDS):
        await service_of(serving).waiting.wait()

    def retrieve(client: Any) -> Any:
        return client.responses.retrieve(made.id)

    running = await with_client(serving, retrieve)
    assert (running.status, running.output_text) == ("in_progress", "one")
    with pytest.raises(openai.BadRequestError, match="is not complete"):
        await with_client(serving, lambda client: create(client, previous_response_id=made.id))
    go_on.set()
    with trio.fail_after(WAIT_SECONDS):
        while (ended := await with_client(serving, retrieve)).status == "in_progress":
            pass
    assert (ended.status, ended.output_text) == ("completed", "one two")


async def test_a_background_response_can_be_cancelled(serving: Serving) -> None:
    service_of(serving).script = lambda _: [GenerationChunk(text="one"), trio.Event()]
    made = await with_client(serving, lambda client: create(client, background=True))
    with trio.fail_after(WAIT_SECONDS):
        await service_of(serving).waiting.wait()
    for _ in range(2):
        cancelled = await with_client(serving, lambda client: client.responses.cancel(made.id))
        assert (cancelled.status, cancelled.output_text) == ("cancelled", "one")
    with trio.fail_after(WAIT_SECONDS):
        await service_of(serving).left.wait()
    service_of(serving).script = echo
    finished = await with_client(serving, create)
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        await with_client(serving, lambda client: client.responses.cancel(finished.id))


async def test_a_deleted_background_response_ends(serving: Serving) -> None:
    service_of(serving).script = lambda _: [GenerationChunk(text="one"), trio.Event()]
    made = await with_client(serving, lambda client: create(client, background=True))
    with trio.fail_after(WAIT_SECONDS):
        await service_of(serving).waiting.wait()
        await with_client(serving, lambda client: client.responses.delete(made.id))
        await service_of(serving).left.wait()
    with pytest.raises(openai.NotFoundError):
        await with_client(serving, lambda client: client.responses.retrieve(made.id))


async def test_a_failed_background_response_has_the_error(serving: Serving) -> None:
    service_of(serving).script = lambda _: [GenerationChunk(text="one"), ModelFailure("out of luck")]

    def use(client: Any) -> Any:
        made = create(client, background=True, stream=True)
        return list(made)[-1].response

    failed = await with_client(serving, use)
    assert (failed.status, failed.error.message) == ("failed", "out of luck")
    read = await with_client(serving, lambda client: client.responses.retrieve(failed.id))
    assert (read.status, read.error.message, read.output_text) == ("failed", "out of luck", "one")


async def test_the_stream_of_a_background_response_can_be_continued(serving: Serving) -> None:
    def use(client: Any) -> None:
        events = list(create(client, background=True, stream=True))
        kinds = [event.type.removeprefix("response.") for event in events]
        assert kinds[:3] == ["created", "queued", "in_progress"]
        assert kinds[-1] == "completed"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        identity = events[-1].response.id
        for last in (None, 0, 5, len(events) - 1):
            later = client.responses.retrieve(
                identity, stream=True, **({} if last is None else {"starting_after": last})
            )
            begin = 0 if last is None else last + 1
            assert [event.model_dump() for event in later] == [event.model_dump() for event in events[begin:]]
        whole = create(client, background=True)
        with pytest.raises(openai.BadRequestError, match="background and stream"):
            list(client.responses.retrieve(whole.id, stream=True))

    await with_client(serving, use)


async def test_an_invalid_background_request_is_refused_at_once(serving: Serving) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await with_client(serving, lambda client: create(client, background=True, temperature=9))


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Serving]:
    async with serve_openai(tmp_path, front_end={"gate": gate_of(SCOPES)}) as server:
        yield server


def _call(method: str, identity: str, client: Any) -> None:
    getattr(client.responses, method)(identity)


async def test_a_response_belongs_to_its_caller(guarded: Serving) -> None:
    made = await with_client(guarded, create, "ann")
    found = await with_client(guarded, lambda client: client.responses.retrieve(made.id), "ann")
    assert found.output_text == "one two"
    for call in ("retrieve", "delete", "cancel"):
        with pytest.raises(openai.NotFoundError):
            await with_client(guarded, partial(_call, call, made.id), "bob")
    with pytest.raises(openai.BadRequestError):
        await with_client(guarded, lambda client: create(client, previous_response_id=made.id), "bob")
    await with_client(guarded, lambda client: create(client, previous_response_id=made.id), "ann")


async def test_the_oldest_response_of_the_caller_with_most_bytes_is_dropped(tmp_path: Path) -> None:
    options: dict[str, Any] = {"gate": gate_of(SCOPES), "responses": StoreLimits(max_bytes=20_000)}
    async with serve_openai(tmp_path, front_end=options) as serving:
        first = await with_client(serving, create, "bob")
        made = [(await with_client(serving, create, "ann")).id for _ in range(12)]

        def kept(client: Any) -> list[bool]:
            return [client.responses.with_raw_response.retrieve(each).status_code == 200 for each in made[-3:]]

        assert await with_client(serving, kept, "ann") == [True] * 3
        with pytest.raises(openai.NotFoundError):
            await with_client(serving, lambda client: client.responses.retrieve(made[0]), "ann")
        assert (await with_client(serving, lambda client: client.responses.retrieve(first.id), "bob")).id == first.id


async def test_expired_responses_are_dropped(tmp_path: Path) -> None:
    async with serve_openai(tmp_path, front_end={"responses": StoreLimits(max_seconds=-1)}) as serving:
        made = await with_client(serving, create)
        with pytest.raises(openai.NotFoundError):
            await with_client(serving, lambda client: client.responses.retrieve(made.id))


async def test_a_server_without_a_store_refuses_what_needs_one(tmp_path: Path) -> None:
    async with serve_openai(tmp_path, front_end={"responses": StoreLimits(max_bytes=0)}) as serving:
        made = await with_client(serving, create)
        assert made.model_dump()["store"] is False
        reference = {"input": [_reference(made.output[0])]}
        for field in (
            {"store": True},
            {"background": True},
            {"previous_response_id": made.id},
            {"extra_body": reference},
        ):
            with pytest.raises(openai.BadRequestError, match="--response-store-bytes"):
                await with_client(serving, partial(create, **field))
