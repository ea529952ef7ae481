from __future__ import annotations

import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import trio
from trio.testing import MockClock

from cortex_internal.lib.exceptions import UserRuntimeException
from ovmstrio.core.errors import StorageFailure, UserCodeError
from ovmstrio.handlers.handler_loading import HandlerDependencies, LoadedHandler, open_handler
from ovmstrio.handlers.models.library import LibraryOptions, ModelLibrary, open_library, open_models
from ovmstrio.handlers.models.model_cache import WatchOptions, lease_models
from ovmstrio.stores.open_storage import open_storage
from ovmstrio.stores.storage import StoredFile, ignore_progress
from tests.support.model_projects import TEXT_MODELS, Loads, library_over, models_in, next_look, paths_below
from tests.support.ports import free_ports
from tests.support.projects import make_project
from tests.support.s3 import Bucket, s3_server
from tests.support.waits import WAIT_SECONDS, until_async

pytest.importorskip("s3fs")
pytest.importorskip("moto")


@pytest.fixture(scope="module")
def server() -> Iterator[Bucket]:
    with s3_server("models") as bucket:
        yield bucket


@pytest.fixture
def bucket(server: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with server.configured(monkeypatch):
        yield server


def test_a_prefix_lists_only_its_own_files(bucket: Bucket) -> None:
    for key in ("m/text/1/a", "m/text/1/b/c", "m/text/", "m/text/../b", "m/text-gen/1/x", "m/textual"):
        bucket.put(key, "12345")
    storage = open_storage("s3://models/m/text/")
    for location in ("s3://models/m/text", "s3://models/m/text/"):
        files = {file.path: file for file in storage.list_files(location)}
        assert set(files) == {"1/a", "1/b/c"}
        assert files["1/a"].size == 5
        assert files["1/a"].modified > 1e9
    assert storage.list_files("s3://models/nothing/here") == []
    assert [file.path for file in storage.list_files("s3://models/m/textual")] == [""]


def test_a_file_has_another_mark_after_a_change(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("m/a", "first")
    storage = open_storage("s3://models/m")
    (before,) = storage.list_files("s3://models/m")
    storage.fetch(before, tmp_path / "a", ignore_progress)
    assert (tmp_path / "a").read_text() == "first"
    bucket.put("m/a", "other")
    (after,) = storage.list_files("s3://models/m")
    assert before.mark != after.mark


def test_without_credentials_a_bucket_is_read_anonymously(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    bucket.put("m/a", "first")
    assert [file.path for file in open_storage("s3://models/m").list_files("s3://models/m")] == ["a"]


def test_unreadable_files_and_buckets_are_errors(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bucket.put("m/a", "first")
    storage = open_storage("s3://models/m")
    with pytest.raises(StorageFailure, match="s3://absent/m cannot be listed"):
        storage.list_files("s3://absent/m")
    (file,) = storage.list_files("s3://models/m")
    bucket.remove("m")
    with pytest.raises(StorageFailure, match="models/m/a cannot be downloaded"):
        storage.fetch(file, tmp_path / "a", ignore_progress)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageFailure, match="cannot be listed"):
        open_storage("s3://models/m").list_files("s3://models/m")


async def test_changes_of_a_bucket_are_served(bucket: Bucket, tmp_path: Path, mock_clock: MockClock) -> None:
    for key in ("up/a/1/model.txt", "up/a/10/model.txt", "up/b-c/model.txt"):
        bucket.put(key, key)
    async with library_over(models_in("s3://models/up"), tmp_path, Loads()) as library:
        get = library.client.get_model
        texts = [get("a").text, get("a", 1).text, get("b-c").text]
        assert texts == ["up/a/10/model.txt", "up/a/1/model.txt", "up/b-c/model.txt"]
        bucket.put("up/a/11/model.txt", "eleven")
        bucket.put("up/a/10/model.txt", "changed")
        bucket.remove("up/a/1/")
        bucket.remove("up/b-c")
        await next_look(library, mock_clock)
        assert [get("a").text, get("a", 10).text] == ["eleven", "changed"]
        assert library.client.metadata["a"]["versions"] == ["11", "10"]
        assert list(library.client.metadata) == ["a"]


@pytest.mark.slow
async def test_models_serve_while_their_server_is_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    options = LibraryOptions(WatchOptions(interval_seconds=0.1), tmp_path)

    @contextmanager
    def serving(text: str) -> Iterator[None]:
        with s3_server("models", port) as bucket:
            for name, value in bucket.environment.items():
                monkeypatch.setenv(name, value)
            bucket.put("up/a/1/model.txt", text)
            yield

    async def wait_for(*, is_stale: bool) -> None:
        while library.is_stale is not is_stale:
            await library.watcher.wait_check()

    async with AsyncExitStack() as stack:
        with serving("before"):
            spec = models_in("s3://models/up")
            library = await stack.enter_async_context(open_library(spec, load_model=Loads(), options=options))
            assert library.client.get_model("a").text == "before"
        with trio.fail_after(60):
            await wait_for(is_stale=True)
            assert library.client.get_model("a").text == "before"
            with serving("after"):
                await wait_for(is_stale=False)
                assert library.client.get_model("a").text == "after"


# A server that takes connections and answers nothing


class _Relay:
    """TCP relay to a server that holds data while it ``hangs``."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        assert parts.hostname is not None
        assert parts.port is not None
        self.hangs = False
        self.kept = 0
        self._address = (parts.hostname, parts.port)

    async def serve(self, stream: trio.SocketStream) -> None:
        async with stream, await trio.open_tcp_stream(*self._address) as server, trio.open_nursery() as nursery:
            nursery.start_soon(self._pass, stream, server, nursery.cancel_scope)
            nursery.start_soon(self._pass, server, stream, nursery.cancel_scope)

    async def _pass(self, source: trio.SocketStream, target: trio.SocketStream, both: trio.CancelScope) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for data in source:
                if self.hangs:
                    self.kept += 1
                    await trio.sleep_forever()
                await target.send_all(data)
        both.cancel()


@asynccontextmanager
async def _handler(tmp_path: Path) -> AsyncIterator[LoadedHandler]:
    section = {"dir": "s3://models/up", "cache_size": 2, "disk_cache_size": 2, "storage_timeout_seconds": 1.0}
    project = make_project(tmp_path, TEXT_MODELS, threads_per_process=1, multi_model_reloading=section)
    async with (
        open_models(project, options=LibraryOptions(root=tmp_path / "down")) as opened,
        open_handler(project, HandlerDependencies(opened.clients)) as handler,
    ):
        yield handler


@pytest.mark.parametrize("verb", ["handle_post", "handle_put"])
async def test_loaded_models_are_served_while_the_server_hangs(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    for name in "ab":
        bucket.put(f"up/{name}/1/model.txt", name)
    failed = trio.Event()

    async def expect_failure() -> None:
        with pytest.raises(UserCodeError) as caught:
            await handler.call(verb, payload="b")
        assert "no data" in caught.value.detail
        failed.set()

    relay = _Relay(bucket.environment["AWS_ENDPOINT_URL"])
    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as connections:
            listeners = await connections.start(trio.serve_tcp, relay.serve, 0)
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}")
            async with _handler(tmp_path) as handler:
                assert await handler.call(verb, payload="a") == "a"
                relay.hangs = True
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(expect_failure)
                    await until_async(lambda: relay.kept)
                    for _ in range(20):
                        assert await handler.call(verb, payload="a") == "a"
                    assert not failed.is_set()
                    await failed.wait()
                relay.hangs = False
                assert await handler.call(verb, payload="b") == "b"
            connections.cancel_scope.cancel()


def test_every_attempt_has_a_deadline(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        storage = open_storage("s3://models/up", stall_seconds=0.2)
        with pytest.raises(StorageFailure, match=r"s3://models/up cannot be listed: no data for 0.4 s"):
            storage.list_files("s3://models/up")
        with pytest.raises(StorageFailure, match=r"models/up/a cannot be downloaded: no data for 0.2 s"):
            storage.fetch(StoredFile("a", "models/up/a", 1, "", 0), tmp_path / "a", ignore_progress)


# A soak

_STABLE = "abcd"
_ABSENT = ("was not found", "wasn't found", "all of them were removed", "does not exist")


class _Clients:
    def __init__(self) -> None:
        self.calls = Counter[str]()
        self.failed: list[str] = []
        self._limiter = trio.CapacityLimiter(16)

    async def run(self, library: ModelLibrary, seed: int) -> None:
        def call() -> None:
            with lease_models():
                model = library.client.get_model(name)
                assert (model.folder / "model.txt").read_text() == model.text

        choice = random.Random(seed)
        while True:
            name = choice.choice([*_STABLE, "guest"])
            try:
                await trio.to_thread.run_sync(call, limiter=self._limiter)
            except UserRuntimeException as error:
                if name != "guest" or not any(text in str(error) for text in _ABSENT):
                    self.failed.append(str(error))
            self.calls[name] += 1
            await trio.sleep(0.01)


def _change(bucket: Bucket, round_: int) -> None:
    bucket.put(f"up/{_STABLE[round_ % 4]}/1/model.txt", f"{round_} " * 1000)
    bucket.put(f"up/{_STABLE[(round_ + 1) % 4]}/{round_ + 2}/model.txt", f"{round_} " * 1000)
    if round_ >= 4:
        bucket.remove(f"up/{_STABLE[(round_ + 1) % 4]}/{round_ - 2}/")
    if round_ % 2:
        bucket.put("up/guest/1/model.txt", "guest")
    else:
        bucket.remove("up/guest/")


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(), (2, 3)])
async def test_no_call_fails_while_a_bucket_changes(bucket: Bucket, tmp_path: Path, sizes: tuple[int, ...]) -> None:
    clients, resident = _Clients(), list[int]()
    for name in _STABLE:
        bucket.put(f"up/{name}/1/model.txt", name)
    options = LibraryOptions(WatchOptions(interval_seconds=0.1), tmp_path)
    async with open_library(models_in("s3://models/up", *sizes), load_model=Loads(), options=options) as library:
        async with trio.open_nursery() as nursery:
            for seed in range(50):
                nursery.start_soon(clients.run, library, seed)
            end, round_ = trio.current_time() + 8.0, 0
            while trio.current_time() < end:
                await trio.to_thread.run_sync(_change, bucket, round_)
                await trio.sleep(0.2)
                resident.append(psutil.Process().memory_info().rss)
                round_ += 1
            nursery.cancel_scope.cancel()
        await library.watcher.wait_check()
        assert clients.failed == []
        assert clients.calls.total() > 500
        assert max(resident[-5:]) - max(resident[: len(resident) // 2]) < 20e6
        memory, disk = library.cache.counts()
        assert memory <= (sizes[0] if sizes else disk)
        # Models that no call has used since they changed keep the files that they were loaded from.
        wanted = set(library.cache.copies().values()) | {each.copy for each in library.cache._loaded.values()}  # noqa: SLF001 - files of loaded models are not observable otherwise
        kept = {copy.folder for copy in wanted}
        while await trio.to_thread.run_sync(paths_below, tmp_path, "*/*/*/*") != kept:
            await trio.lowlevel.checkpoint()
