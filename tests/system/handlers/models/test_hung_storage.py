"""A store that takes connections and answers nothing."""

from __future__ import annotations

import gc
import socket
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trio
from trio.testing import MockClock

from ovmstrio.core.errors import Overloaded, StorageFailure, UserCodeError
from ovmstrio.runtimes.handlers.building import Supplies
from ovmstrio.runtimes.handlers.handler import LoadedHandler
from ovmstrio.runtimes.handlers.models.fetching import MAX_WAITING, StorageThreads
from ovmstrio.runtimes.handlers.models.library import LibraryOptions
from ovmstrio.runtimes.handlers.models.opening import ProjectModels, open_models
from ovmstrio.runtimes.handlers.models.sources import Copy, CopyMaker
from ovmstrio.runtimes.handlers.models.storage import open_storage
from ovmstrio.runtimes.handlers.models.tree import ModelKey, StoredFile, VersionFiles
from ovmstrio.runtimes.handlers.project import open_handler
from tests.support.model_projects import CountingStorage, Loads, library_over, models_in, next_look, write_model
from tests.support.projects import make_project
from tests.support.s3 import Bucket, s3_server
from tests.support.waits import WAIT_SECONDS, until_async

_CODE = """
from pathlib import Path

class Handler:
    def __init__(self, model_client):
        self.client = model_client

    def load_model(self, model_path):
        return Path(model_path, "model.txt").read_text()

    def handle_post(self, payload):
        return self.client.get_model(payload)

    async def handle_get(self, payload):
        return await self.client.aget_model(payload)
"""


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Collect the connections that the library of a store leaves when its attempt is cancelled."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


class _Relay:
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
        try:
            async for data in source:
                if self.hangs:
                    self.kept += 1
                    await trio.sleep_forever()
                await target.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        both.cancel()


@asynccontextmanager
async def _relay(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[_Relay]:
    """Stand between the bucket's server and those whom the environment leads there."""
    relay = _Relay(bucket.environment["AWS_ENDPOINT_URL"])
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, relay.serve, 0)
        port = listeners[0].socket.getsockname()[1]
        for name, value in {**bucket.environment, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}.items():
            monkeypatch.setenv(name, value)
        yield relay
        nursery.cancel_scope.cancel()


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    """Give a bucket with two models."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with s3_server("models") as made:
        for name in "ab":
            made.put(f"up/{name}/1/model.txt", name)
        yield made


@asynccontextmanager
async def _served(tmp_path: Path, seconds: float) -> AsyncIterator[tuple[LoadedHandler, ProjectModels]]:
    section = {"dir": "s3://models/up", "cache_size": 2, "disk_cache_size": 2, "storage_timeout_seconds": seconds}
    project = make_project(tmp_path, _CODE, threads_per_process=1, multi_model_reloading=section)
    async with (
        open_models(project, options=LibraryOptions(root=tmp_path / "down")) as opened,
        open_handler(project, Supplies(opened.clients)) as handler,
    ):
        yield handler, opened


@pytest.mark.parametrize("verb", ["handle_post", "handle_get"])
async def test_models_that_are_here_are_given_while_the_store_hangs(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """A project of one thread answers for them; who asks for another model is told so in time, and later gets it."""
    failed = trio.Event()

    async def ask_in_vain() -> None:
        with pytest.raises(UserCodeError) as told:
            await handler.call(verb, payload="b")
        assert "nothing" in told.value.detail
        failed.set()

    with trio.fail_after(WAIT_SECONDS):
        async with _relay(bucket, monkeypatch) as relay, _served(tmp_path, 1.0) as (handler, _):
            assert await handler.call(verb, payload="a") == "a"
            relay.hangs = True
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask_in_vain)
                await until_async(lambda: relay.kept)
                for _ in range(20):
                    assert await handler.call(verb, payload="a") == "a"
                assert not failed.is_set()
                await failed.wait()
            relay.hangs = False
            assert await handler.call(verb, payload="b") == "b"


def test_every_attempt_has_a_deadline(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing and fetching from a server that never answers end, with what they waited for."""
    with _silent_server() as endpoint:
        for name, value in {**bucket.environment, "AWS_ENDPOINT_URL": endpoint}.items():
            monkeypatch.setenv(name, value)
        storage = open_storage("s3://models/up", stall_seconds=0.2)
        with pytest.raises(StorageFailure, match=r"s3://models/up cannot be listed: nothing has come for 0.4 s"):
            storage.list_files("s3://models/up")
        with pytest.raises(StorageFailure, match=r"models/up/a cannot be downloaded: nothing has come for 0.2 s"):
            storage.fetch(StoredFile("a", "models/up/a", 1, "", 0), tmp_path / "a", lambda: None)


@contextmanager
def _silent_server() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


class _StuckStorage(CountingStorage):
    def __init__(self, stuck: str) -> None:
        super().__init__()
        self.let_go = threading.Event()
        self.begun = 0
        self.stuck = stuck

    def fetch(self, file: StoredFile, target: Path, moved: object) -> None:
        if self.stuck in file.location:
            self.begun += 1
            assert self.let_go.wait(WAIT_SECONDS)
        super().fetch(file, target, lambda: None)


async def test_the_old_version_serves_while_a_new_one_comes(tmp_path: Path, mock_clock: MockClock) -> None:
    """Who asks first waits for the new one; the others get what is in memory, by its number or as the latest."""
    write_model(tmp_path, "old", "up", "a", "1")
    storage = _StuckStorage("/2/")
    async with library_over(models_in(tmp_path / "up", 2, 2), tmp_path / "down", Loads(), storage) as library:
        assert library.client.get_model("a").text == "old"
        write_model(tmp_path, "new", "up", "a", "2")
        await next_look(library, mock_clock)
        given: list[str] = []

        async def ask() -> None:
            given.append((await library.client.aget_model("a")).text)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await until_async(lambda: storage.begun == 1)
            assert [library.client.get_model("a", asked).text for asked in ("latest", 1)] == ["old", "old"]
            storage.let_go.set()
        assert given == ["new"]
        assert library.client.get_model("a").text == "new"


async def test_a_change_in_place_keeps_nobody_waiting_but_the_first(tmp_path: Path, mock_clock: MockClock) -> None:
    """The model as it was is given while its new files come."""
    write_model(tmp_path, "old", "up", "a")
    storage = _StuckStorage("nothing")
    async with library_over(models_in(tmp_path / "up", 2, 2), tmp_path / "down", Loads(), storage) as library:
        assert library.client.get_model("a").text == "old"
        write_model(tmp_path, "newer", "up", "a")
        storage.stuck = "/a/"
        await next_look(library, mock_clock)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(library.client.aget_model, "a")
            await until_async(lambda: storage.begun == 1)
            assert library.client.get_model("a").text == "old"
            storage.let_go.set()
        assert library.client.get_model("a").text == "newer"


class _StuckMaker(CopyMaker):
    def __init__(self, root: Path) -> None:
        super().__init__(root, [])
        self.let_go = threading.Event()
        self.begun = 0
        self.removed: list[Copy] = []

    def make(self, key: ModelKey, version: VersionFiles, moved: object = None) -> Copy:
        self.begun += 1
        assert self.let_go.wait(WAIT_SECONDS)
        return Copy(key, "", Path())

    def remove(self, copy: Copy) -> None:
        self.removed.append(copy)


@asynccontextmanager
async def _threads(maker: CopyMaker, count: int, seconds: float) -> AsyncIterator[StorageThreads]:
    threads = StorageThreads(maker, count, seconds)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(threads.run)
        yield threads
        nursery.cancel_scope.cancel()


_VERSION = VersionFiles(())


async def test_a_storage_that_keeps_its_thread_keeps_no_caller(tmp_path: Path) -> None:
    """Who waits is told in time, in the thread and in the queue before it; what comes too late is removed."""
    maker = _StuckMaker(tmp_path)
    async with _threads(maker, 1, 0.1) as threads:
        with pytest.raises(StorageFailure, match=r"a:1: nothing came from its storage for 0.1 s"):
            await trio.to_thread.run_sync(threads.fetch, ModelKey("a", "1"), _VERSION)
        with pytest.raises(StorageFailure, match=r"b:1: the storage threads stood still for 0.1 s"):
            await trio.to_thread.run_sync(threads.fetch, ModelKey("b", "1"), _VERSION)
        maker.let_go.set()
        await until_async(lambda: [copy.key.name for copy in maker.removed] == ["a"])
        copy = await trio.to_thread.run_sync(threads.fetch, ModelKey("c", "1"), _VERSION)
        assert copy.key.name == "c"
        assert maker.begun == 2


async def test_so_many_may_wait(tmp_path: Path) -> None:
    """One more is refused at once; those who wait when the models are closed are told so."""
    maker, failures = _StuckMaker(tmp_path), list[str]()
    refusals = list[str]()
    limiter = trio.CapacityLimiter(MAX_WAITING + 1)
    threads: StorageThreads

    def fetch(number: int) -> None:
        try:
            threads.fetch(ModelKey("m", str(number)), _VERSION)
        except StorageFailure as error:
            failures.append(str(error))
        except Overloaded as error:
            refusals.append(str(error))

    async def fetch_in_thread(number: int) -> None:
        await trio.to_thread.run_sync(fetch, number, limiter=limiter)

    async with trio.open_nursery() as nursery:
        async with _threads(maker, 2, 30) as threads:
            for number in range(MAX_WAITING + 1):
                nursery.start_soon(fetch_in_thread, number)
            await until_async(lambda: len(refusals) == 1)
            assert f"cannot be fetched now: {MAX_WAITING} calls wait" in refusals[0]
        maker.let_go.set()
    assert failures == ["the models are about to be closed"] * MAX_WAITING
    with pytest.raises(StorageFailure, match="about to be closed"):
        threads.fetch(ModelKey("n", "1"), _VERSION)


async def test_a_call_that_waits_for_a_storage_lends_its_thread(tmp_path: Path) -> None:
    """So does one that waits for another call to load the same model."""
    for name in "ab":
        write_model(tmp_path, name, "up", name)
    storage = _StuckStorage("/b/")
    section = {"dir": "up", "cache_size": 2, "disk_cache_size": 2}
    project = make_project(tmp_path, _CODE, threads_per_process=1, multi_model_reloading=section)
    options = LibraryOptions(root=tmp_path / "down", open_storage=storage.open)
    given: list[str] = []

    async def ask(name: str) -> None:
        given.append(await handler.call("handle_post", payload=name))

    async with (
        open_models(project, options=options) as opened,
        open_handler(project, Supplies(opened.clients)) as handler,
        trio.open_nursery() as nursery,
    ):
        with trio.fail_after(WAIT_SECONDS):
            for _ in range(3):
                nursery.start_soon(ask, "b")
            await until_async(lambda: storage.begun == 1)
            await ask("a")
            assert given == ["a"]
            storage.let_go.set()
            await until_async(lambda: given == ["a", "b", "b", "b"])
    assert storage.fetched == [str(tmp_path / "up" / name / "model.txt") for name in "ab"]
