"""Client and AsyncClient against a real server: the same calls over both protocols, on asyncio and trio."""

from __future__ import annotations

import inspect
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    closing,
    contextmanager,
    suppress,
)
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import openvino as ov
import pytest

from ovmstrio import errors
from ovmstrio.client import AsyncClient, ChatUsage, Client, StreamRequest, Unreachable
from ovmstrio.core.tensor import to_bf16
from ovmstrio.testing import LocalServer, serving
from tests.service.client.test_kserve_clients import _grpc_server, _reply, _rest_server
from tests.support import ir
from tests.support.plain_http import chat_server
from tests.support.ports import refusing_port
from tests.support.waits import WAIT_SECONDS

MODELS: dict[str, ov.Model] = {
    "dummy": ir.dummy(),
    "strings": ir.string_passthrough(),
    "state": ir.accumulator(),
    **{name: ir.passthrough(name) for name in ("FP16", "BF16", "FP64", "INT8", "INT64", "UINT16", "BOOL")},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    root: Path = tmp_path_factory.mktemp("models")
    exact = {"plugin_config": {"INFERENCE_PRECISION_HINT": "f32"}}
    entries = [
        {"config": {"name": name, "base_path": str(ir.save(model, root, name)), "stateful": name == "state", **exact}}
        for name, model in MODELS.items()
    ]
    config = root / "config.json"
    config.write_text(json.dumps({"model_config_list": entries}))
    with serving(config) as running:
        yield running


@pytest.fixture(params=["sync", "asyncio", "trio"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["gRPC", "REST"])
def url(server: LocalServer, request: pytest.FixtureRequest) -> str:
    return server.rest if request.param == "REST" else server.grpc


async def value(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


async def replies(stream: Any) -> list[Any]:
    if not isinstance(stream, AbstractAsyncContextManager):
        return list(stream)
    async with stream as found:
        return [each async for each in found]


@asynccontextmanager
async def entered(manager: Any) -> AsyncIterator[Any]:
    if isinstance(manager, AbstractContextManager):
        with manager as found:
            yield found
    else:
        async with manager as found:
            yield found


def run(backend: str, url: str, body: Callable[[Any], Awaitable[None]], **options: Any) -> None:
    """Run a body with a client of that kind; the methods of the blocking one return values, not awaitables."""

    async def main() -> None:
        with anyio.fail_after(WAIT_SECONDS):
            if backend == "sync":
                with Client(url, **options) as client:
                    await body(client)
            else:
                async with AsyncClient(url, **options) as client:
                    await body(client)

    anyio.run(main, backend="asyncio" if backend == "sync" else backend)


def test_arrays_of_every_kind_come_back(backend: str, url: str) -> None:
    async def body(client: Any) -> None:
        for name in ("FP16", "FP64", "INT8", "INT64", "UINT16", "BOOL"):
            model = await value(client.metadata(name))
            assert [each.datatype for each in model.inputs] == [name]
            array = (np.arange(6).reshape(2, 3) % 2).astype({"BOOL": bool}.get(name, _numpy(name)))
            result = await value(client.infer(name, {"x": array}))
            assert result["y"].dtype == array.dtype
            assert result["y"].tolist() == array.tolist()
            transposed = np.asfortranarray(array)
            assert (await value(client.infer(name, {"x": transposed})))["y"].tolist() == array.tolist()
        numbers = np.array([[1.5, -2, 3.14159], [0, 1e30, -1e-20]], np.float32)
        result = await value(client.infer("BF16", {"x": numbers}, datatypes={"x": "BF16"}))
        assert result["y"].dtype == np.float32
        assert to_bf16(result["y"]).tolist() == to_bf16(numbers).tolist()

    run(backend, url, body)


def _numpy(name: str) -> str:
    return name.replace("FP", "float").replace("UINT", "uint").replace("INT", "int").lower()


def test_texts_and_lists_are_sent_as_their_arrays(backend: str, url: str) -> None:
    async def body(client: Any) -> None:
        texts = await value(client.infer("strings", {"strings": ["a", "über", ""]}))
        assert list(texts["strings"]) == [b"a", "über".encode(), b""]
        numbers = await value(client.infer("dummy", {"b": [[1] * 10]}, datatypes={"b": "FP32"}))
        assert numbers["a"].tolist() == [[2.0] * 10]
        assert (numbers.model, numbers.version) in {("dummy", "1"), ("", "")}

    run(backend, url, body)


def test_results_have_the_requested_outputs_and_id(backend: str, url: str) -> None:
    async def body(client: Any) -> None:
        result = await value(
            client.infer("dummy", {"b": np.zeros((1, 10), np.float32)}, outputs=["a"], request_id="mine", version="1")
        )
        assert (list(result), result.id, result.model, result.version) == (["a"], "mine", "dummy", "1")
        with pytest.raises(ValueError, match="read-only"):
            result["a"][0] = 1

    run(backend, url, body)


def test_errors_have_the_class_of_the_server(backend: str, url: str) -> None:
    async def body(client: Any) -> None:
        zeros = np.zeros((1, 10), np.float32)
        calls: list[tuple[type[Exception], Callable[[], Any]]] = [
            (errors.NotFound, lambda: client.infer("missing", {"b": zeros})),
            (errors.NotFound, lambda: client.metadata("missing")),
            (errors.InvalidRequest, lambda: client.infer("dummy", {"b": zeros[0]})),
            (errors.InvalidRequest, lambda: client.infer("dummy", {"b": zeros.astype(complex)})),
            (errors.InvalidRequest, lambda: client.infer("dummy", {"b": zeros}, datatypes={"b": "INT32"})),
            (errors.InvalidRequest, lambda: client.infer("dummy", {"b": zeros}, datatypes={"b": "FP31"})),
        ]
        for cls, call in calls:
            with pytest.raises(cls):
                await value(call())
        assert (await value(client.infer("dummy", {"b": zeros})))["a"].tolist() == [[1.0] * 10]

    run(backend, url, body)


def test_the_server_describes_itself_and_its_models(backend: str, url: str) -> None:
    async def body(client: Any) -> None:
        assert "binary_tensor_data" in (await value(client.server_metadata())).extensions
        assert {each.name for each in await value(client.models())} == MODELS.keys()
        assert (await value(client.server_ready())).ready
        assert await value(client.server_live())
        assert (await value(client.model_ready("dummy"))).ready

    run(backend, url, body)


def test_a_sequence_starts_and_ends_with_its_block(backend: str, url: str, server: LocalServer) -> None:
    def alive() -> list[int]:
        with server.client(rest=True) as other:
            return [each.id for each in other.sequences("state")]

    async def body(client: Any) -> None:
        one = np.ones((1, 2), np.float32)
        async with entered(client.sequence("state")) as sequence:
            sums = [(await value(sequence.infer({"x": one * step})))["y"].tolist() for step in (1, 2, 3)]
            assert sums == [[[1.0, 1.0]], [[3.0, 3.0]], [[6.0, 6.0]]]
            assert alive() == [sequence.id]
        assert alive() == []
        async with entered(client.sequence("state", 77)) as sequence:
            await value(sequence.infer({"x": one}))
            last = await value(sequence.infer({"x": one}, end=True))
            assert (sequence.id, last["y"].tolist(), alive()) == (77, [[2.0, 2.0]], [])
            with pytest.raises(errors.InvalidRequest, match="sequence 77 has ended"):
                await value(sequence.infer({"x": one}))

    run(backend, url, body)


def test_a_failed_block_ends_its_sequence(backend: str, url: str, server: LocalServer) -> None:
    async def body(client: Any) -> None:
        one = np.ones((1, 2), np.float32)
        for wrong in (np.ones((2, 2, 2), np.float32), None):
            with pytest.raises((errors.InvalidRequest, ZeroDivisionError)):  # noqa: PT012 - the block is tested
                async with entered(client.sequence("state")) as sequence:
                    await value(sequence.infer({"x": one}))
                    if wrong is None:
                        raise ZeroDivisionError
                    await value(sequence.infer({"x": wrong}))
        with pytest.raises(errors.InvalidRequest, match="not stateful"):
            async with entered(client.sequence("dummy")) as sequence:
                await value(sequence.infer({"b": np.zeros((1, 10), np.float32)}))

    run(backend, url, body)
    with server.client(rest=True) as other:
        assert other.sequences("state") == []


@pytest.mark.parametrize("is_processed", [True, False])
def test_a_sequence_whose_first_answer_is_lost_is_ended(
    backend: str, url: str, server: LocalServer, is_processed: bool
) -> None:
    async def body(client: Any) -> None:
        infer, calls = client.infer, []

        async def lost(*arguments: Any, **options: Any) -> Any:
            if is_processed:
                await value(infer(*arguments, **options))
            raise Unreachable("lost")

        def lossy(*arguments: Any, **options: Any) -> Any:
            calls.append(options["parameters"])
            if len(calls) > 1:
                return infer(*arguments, **options)
            if backend != "sync":
                return lost(*arguments, **options)
            if is_processed:
                infer(*arguments, **options)
            raise Unreachable("lost")

        client.infer = lossy
        async with entered(client.sequence("state")) as sequence:
            with pytest.raises(Unreachable):
                await value(sequence.infer({"x": np.ones((1, 2), np.float32)}))
        assert len(calls) == 2

    run(backend, url, body)
    with server.client(rest=True) as other:
        assert other.sequences("state") == []


def test_administration_is_one_api(backend: str, server: LocalServer) -> None:
    async def over_rest(client: Any) -> None:
        assert await value(client.reload_config()) is False
        assert "ovms_requests_success" in await value(client.metrics(["ovms_requests_success"]))
        with pytest.raises(errors.ServerError):
            await value(client.load("missing"))

    async def over_grpc(client: Any) -> None:
        for call in (client.reload_config, client.metrics):
            with pytest.raises(errors.NotSupported, match="use REST"):
                await value(call())
        with pytest.raises(errors.ServerError):
            await value(client.unload("missing"))

    run(backend, server.rest, over_rest)
    run(backend, server.grpc, over_grpc)


def test_an_address_without_a_server_is_unreachable(backend: str) -> None:
    async def body(client: Any) -> None:
        with pytest.raises(Unreachable, match="no server answers"):
            await value(client.models())

    with refusing_port() as port:
        for scheme in ("grpc", "http"):
            run(backend, f"{scheme}://127.0.0.1:{port}", body, retries=1)


def test_a_stream_sends_requests_one_by_one_and_ends(backend: str) -> None:
    def behaviour(requests: Iterator[Any], _: Any) -> Iterator[Any]:
        for request in requests:
            yield _reply(request.id, request.raw_input_contents[0], datatype="FP32")

    def requests() -> Iterator[StreamRequest]:
        for number in range(20):
            yield StreamRequest({"x": np.full(100_000, number, np.float32)}, id=str(number))

    async def body(client: Any) -> None:
        found = await replies(client.stream("graph", requests()))
        assert [(each.outputs[0].name, len(each.outputs[0].data)) for each in found] == [
            (str(number), 400_000) for number in range(20)
        ]

    with _grpc_server(behaviour) as url:
        run(backend, url, body)


def test_a_failing_request_ends_its_stream(backend: str) -> None:
    def requests() -> Iterator[StreamRequest]:
        yield StreamRequest({})
        raise FileNotFoundError("mine")

    async def body(client: Any) -> None:
        with pytest.raises(FileNotFoundError, match="mine"):
            await replies(client.stream("graph", requests()))

    with _grpc_server(lambda requests, _: (_reply("a", b"") for _ in requests)) as url:
        run(backend, url, body)


@pytest.mark.parametrize("kind", ["asyncio", "trio"])
def test_the_end_of_a_block_cancels_its_stream(kind: str) -> None:
    cancelled = threading.Event()

    def behaviour(requests: Iterator[Any], context: Any) -> Iterator[Any]:
        context.add_callback(cancelled.set)
        next(requests)
        while True:
            yield _reply("out", b"x")

    async def body(client: AsyncClient) -> None:
        async with client.stream("graph", [StreamRequest({})]) as found:
            async for reply in found:
                assert reply["out"].tolist() == [120]
                break

    with _grpc_server(behaviour) as url:
        run(kind, url, body)
        assert cancelled.wait(WAIT_SECONDS)


def test_a_stream_over_rest_has_events(backend: str) -> None:
    async def body(client: Any) -> None:
        found = await replies(client.stream("graph", [StreamRequest({"text": b"hi", "n": [1, 2]})]))
        assert [each["out"].tolist() for each in found] == ["a", [1, 2]]

    with _rest_server(b'data: {"out":"a"}\n\n', b'data: {"out":[1,2]}\n\n') as (url, asked):
        run(backend, url, body)
    assert asked == [("/v2/models/graph/generate_stream", {"text": "hi", "n": [1, 2]})]


REFUSAL = b'HTTP/1.1 413 Content Too Large\r\nConnection: close\r\nContent-Length: 15\r\n\r\n{"error":"big"}'


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [(REFUSAL, errors.PayloadTooLarge, "big"), (b"", Unreachable, "no server answers REST")],
)
def test_a_stream_whose_request_is_not_read_has_the_answer(
    backend: str, answer: bytes, error: type[Exception], text: str
) -> None:
    if backend == "asyncio":
        # Its transport may read nothing more after a failed write.
        error, text = errors.ServerError, "."

    async def body(client: Any) -> None:
        large = "x" * 2**24
        for stream in (
            client.chat_stream("chat", [{"role": "user", "content": large}]),
            client.stream("graph", [StreamRequest({"text": large.encode()})]),
        ):
            with pytest.raises(error, match=text):
                await replies(stream)

    with _closing_server(answer) as url:
        run(backend, url, body, retries=0)


@contextmanager
def _closing_server(answer: bytes) -> Iterator[str]:
    """Answer each connection after its first bytes, and close it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    with listener.accept()[0] as connection:
                        connection.recv(1000)
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_blocking_stream_without_time_raises_the_error_of_a_deadline() -> None:
    with _closing_server(b"") as url, Client(url) as client, pytest.raises(errors.DeadlineExceeded):
        list(client.chat_stream("chat", [], timeout=0))


def test_a_chat_is_answered_at_once_or_in_deltas(backend: str) -> None:
    question = [{"role": "user", "content": "Hi"}]

    async def body(client: Any) -> None:
        deltas = await replies(client.chat_stream("chat", question, temperature=0))
        assert "".join(each.text for each in deltas) == "Hello"
        assert [each.usage for each in deltas if each.usage] == [ChatUsage(7, 2)]

    with chat_server() as running:
        running.deltas = [{"content": "Hel"}, {"content": "lo"}]
        run(backend, running.url.removesuffix("/v3"), body)
        assert running.asked[0]["messages"] == question
        assert running.asked[0]["temperature"] == 0


def test_a_complete_chat_has_text_and_usage(backend: str) -> None:
    answer = {
        "choices": [{"message": {"content": "Hello"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3},
    }

    async def body(client: Any) -> None:
        found = await value(client.chat("chat", [{"role": "user", "content": "Hi"}], max_tokens=5))
        assert (found.text, found.finish, found.usage) == ("Hello", "stop", ChatUsage(7, 3))

    with _rest_server(json.dumps(answer).encode()) as (url, asked):
        run(backend, url, body)
    assert asked[0][1] == {"model": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}


def test_many_calls_run_at_once(url: str) -> None:
    async def body(client: AsyncClient) -> None:
        async def call(number: int) -> None:
            array = np.full((1, 10), number, np.float32)
            assert (await client.infer("dummy", {"b": array}))["a"].tolist() == [[number + 1.0] * 10]

        async with anyio.create_task_group() as tasks:
            for number in range(300):
                tasks.start_soon(call, number)

    for backend in ("asyncio", "trio"):
        run(backend, url, body, max_connections=8)


def test_a_closed_stream_of_the_blocking_client_leaves_the_client_usable(url: str) -> None:
    with Client(url) as client:
        if url.startswith("grpc"):
            with closing(client.stream("missing", [StreamRequest({})])) as found, pytest.raises(errors.ServerError):
                next(found)
        assert client.server_live()
