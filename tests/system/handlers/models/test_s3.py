from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from ovmstrio.core.errors import StorageFailure
from ovmstrio.runtimes.handlers.models.library import LibraryOptions, ModelLibrary, open_library
from ovmstrio.runtimes.handlers.models.storage import open_storage
from ovmstrio.runtimes.handlers.models.watching import WatchOptions
from tests.support.model_projects import Loads, library_over, models_in, next_look, one_model
from tests.support.ports import free_ports
from tests.support.s3 import Bucket, s3_server

pytest.importorskip("s3fs")
pytest.importorskip("moto")


@pytest.fixture(scope="module")
def server() -> Iterator[Bucket]:
    """Give a server for all tests here."""
    with s3_server("models") as bucket:
        yield bucket


@pytest.fixture
def bucket(server: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """Give its bucket, empty, with an environment in which it is found."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.remove("")


def test_a_prefix_lists_its_own_files_only(bucket: Bucket) -> None:
    """Folder markers do not count, and neither do prefixes that begin alike, or lead elsewhere."""
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


def test_a_file_is_fetched_as_it_is(bucket: Bucket, tmp_path: Path) -> None:
    """Its content arrives, and a rewrite of the same size in the same second has another mark."""
    bucket.put("m/a", "first")
    storage = open_storage("s3://models/m")
    (before,) = storage.list_files("s3://models/m")
    storage.fetch(before, tmp_path / "a", lambda: None)
    assert (tmp_path / "a").read_text() == "first"
    bucket.put("m/a", "other")
    (after,) = storage.list_files("s3://models/m")
    assert before.mark != after.mark


def test_without_credentials_a_bucket_is_read_anonymously(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Requests go out unsigned."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    bucket.put("m/a", "first")
    assert [file.path for file in open_storage("s3://models/m").list_files("s3://models/m")] == ["a"]


def test_what_cannot_be_read_is_told(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A bucket that does not exist, a file that has gone, and a server that does not answer."""
    bucket.put("m/a", "first")
    storage = open_storage("s3://models/m")
    with pytest.raises(StorageFailure, match="s3://absent/m cannot be listed"):
        storage.list_files("s3://absent/m")
    (file,) = storage.list_files("s3://models/m")
    bucket.remove("m")
    with pytest.raises(StorageFailure, match="models/m/a cannot be downloaded"):
        storage.fetch(file, tmp_path / "a", lambda: None)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageFailure, match="cannot be listed"):
        open_storage("s3://models/m").list_files("s3://models/m")


async def test_a_bucket_is_followed(bucket: Bucket, tmp_path: Path, mock_clock: MockClock) -> None:
    """Versions are added, changed and removed, and whole models are."""
    for key in ("up/a/1/model.txt", "up/a/10/model.txt", "up/b-c/model.txt"):
        bucket.put(key, key)
    async with library_over(models_in("s3://models/up"), tmp_path, Loads()) as library:
        get = library.client.get_model
        assert [get("a").text, get("a", 1).text, get("b-c").text] == [
            "up/a/10/model.txt",
            "up/a/1/model.txt",
            "up/b-c/model.txt",
        ]
        bucket.put("up/a/11/model.txt", "eleven")
        bucket.put("up/a/10/model.txt", "changed")
        bucket.remove("up/a/1/")
        bucket.remove("up/b-c")
        await next_look(library, mock_clock)
        assert [get("a").text, get("a", 10).text] == ["eleven", "changed"]
        assert library.client.metadata["a"]["versions"] == ["11", "10"]
        assert list(library.client.metadata) == ["a"]


async def test_a_bucket_is_cached(bucket: Bucket, tmp_path: Path) -> None:
    """Models are fetched when they are asked for."""
    for name in "abc":
        bucket.put(f"up/{name}/model.txt", name)
    async with library_over(models_in("s3://models/up/", 1, 2), tmp_path, Loads()) as library:
        for name in "abcab":
            assert (await library.client.aget_model(name)).text == name
            assert library.shelf.counts()[0] == 1


async def test_one_model_may_be_in_a_bucket(bucket: Bucket, tmp_path: Path) -> None:
    """The path is one model's folder, with or without a slash at its end."""
    bucket.put("up/3/model.txt", "three")
    async with library_over(one_model("s3://models/up/"), tmp_path, Loads()) as library:
        assert (await library.client.aget_model()).text == "three"


async def _until(library: ModelLibrary, *, is_stale: bool) -> None:
    while library.is_stale is not is_stale:
        await library.watcher.wait_look()


@pytest.mark.slow
async def test_a_server_may_go_and_come_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Models serve on while it is away, what they have is known to be old, and then what is new is there."""
    (port,) = free_ports(1)
    options = LibraryOptions(WatchOptions(interval_seconds=0.1), tmp_path)

    @contextmanager
    def serving(text: str) -> Iterator[None]:
        with s3_server("models", port) as bucket:
            for name, value in bucket.environment.items():
                monkeypatch.setenv(name, value)
            bucket.put("up/a/1/model.txt", text)
            yield

    async with AsyncExitStack() as stack:
        with serving("before"):
            spec = models_in("s3://models/up")
            library = await stack.enter_async_context(open_library(spec, load_model=Loads(), options=options))
            assert library.client.get_model("a").text == "before"
        with trio.fail_after(60):
            await _until(library, is_stale=True)
            assert library.client.get_model("a").text == "before"
            with serving("after"):
                await _until(library, is_stale=False)
                assert library.client.get_model("a").text == "after"
