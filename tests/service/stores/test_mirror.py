from __future__ import annotations

import io
import shutil
import threading
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ovmstrio.cli import serve
from ovmstrio.cli.main import command_line
from ovmstrio.core.errors import StorageFailure
from ovmstrio.serving.mirrors import update_mirror
from ovmstrio.stores import mirror as mirror_module
from ovmstrio.stores.address import Address, find_address
from ovmstrio.stores.mirror import Mirror, evict
from ovmstrio.stores.open_storage import open_storage
from ovmstrio.stores.storage import LocalStorage, ModelStorage, OnProgress, StoredFile
from tests.support.stores import FileServer, file_server

_SIZE = 3_000_000


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    with file_server() as server:
        monkeypatch.setenv("OVMSTRIO_DOWNLOADS", str(tmp_path / "downloads"))
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def _address(text: str) -> Address:
    address = find_address(text)
    assert address is not None
    return address


# Addresses


@pytest.mark.parametrize("text", ["models/s3", "/s3:/a", "file:///m", "s3:", "azfs://share/m", "ftp://host/m", "c:/m"])
def test_other_texts_are_no_addresses(text: str) -> None:
    assert find_address(text) is None


def test_an_address_survives_as_a_path() -> None:
    for text in ("s3://bucket/a/b", "hf://org/name@main/sub", "https://host/m.onnx?a=b"):
        assert find_address(Path(text)) == find_address(text) == Address(text)


def test_secrets_of_an_address_are_not_shown() -> None:
    address = _address("https://user:word@host/m.onnx?X-Amz-Signature=word")
    assert (str(address), repr(address)) == ("https://host/m.onnx", "https://host/m.onnx")
    assert "word" not in str(address.path)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hf://org/name", ("org/name", "", "")),
        ("hf://org/name@v1/sub/file.gguf", ("org/name", "v1", "sub/file.gguf")),
        ("hf://org/name@refs/pr/3/sub", ("org/name", "refs/pr/3", "sub")),
    ],
)
def test_parts_of_a_hub_address(text: str, parts: tuple[str, str, str]) -> None:
    assert _address(text).hub == parts


# Downloads


def test_a_broken_download_continues_where_it_stopped(files: FileServer) -> None:
    content = bytes(range(256)) * (_SIZE // 256)
    files.files["/m.onnx"] = content
    files.failures["m.onnx"] = ["cut", 503, "cut"]
    address = _address(f"{files.url}/m.onnx")
    seen: list[tuple[int, int | None]] = []
    assert Mirror(address).update(progress=lambda _, done, total: seen.append((done, total)))
    assert address.path.read_bytes() == content
    half = len(content) // 2
    assert files.ranges == [f"bytes={half}-", f"bytes={half + half // 2}-"]
    assert seen == sorted(seen)
    assert seen[-1] == (len(content), len(content))


def test_a_later_process_continues_a_download(files: FileServer) -> None:
    files.files["/m.onnx"] = b"m" * _SIZE
    files.failures["m.onnx"] = ["cut", 404]
    address = _address(f"{files.url}/m.onnx")
    with pytest.raises(StorageFailure, match="answers 404"):
        Mirror(address).update()
    assert not Mirror(address).is_usable
    assert Mirror(address).update()
    assert (address.path.stat().st_size, files.ranges[-1]) == (_SIZE, f"bytes={_SIZE // 2}-")


def test_a_download_that_always_breaks_at_the_same_place_fails(
    files: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "_FIRST_PAUSE_SECONDS", 0.001)
    files.files["/m.onnx"] = b"m" * _SIZE
    files.has_ranges = False
    files.failures["/m.onnx"] = ["cut"] * 20
    seen: list[int] = []
    with pytest.raises(StorageFailure, match="cannot be downloaded"):
        Mirror(_address(f"{files.url}/m.onnx")).update(progress=lambda _, done, total: seen.append(done))
    assert max(seen) <= _SIZE // 2
    assert len(files.failures["/m.onnx"]) >= 14


@pytest.mark.parametrize("is_linked", [True, False])
@pytest.mark.parametrize("name", ["m.onnx", "m.zip"])
def test_an_unchanged_address_is_downloaded_once(
    files: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_linked: bool
) -> None:
    with zipfile.ZipFile(tmp_path / "m.zip", "w") as archive:
        archive.writestr("1/model.onnx", "text")
    files.files["/m.onnx"], files.files["/m.zip"] = b"text", (tmp_path / "m.zip").read_bytes()
    if is_linked:
        (tmp_path / "disk").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "disk")
        monkeypatch.setenv("OVMSTRIO_DOWNLOADS", str(tmp_path / "link" / "downloads"))
    mirror = Mirror(_address(f"{files.url}/{name}"))
    assert [mirror.update(), mirror.update(), mirror.update()] == [True, False, False]
    assert files.requests.count(f"GET /{name}") == 1


@pytest.mark.parametrize(
    ("path", "name"),
    [("a/m.onnx", "m.onnx"), ("a%2Fm.onnx", "m.onnx"), ("a/..%2F..%2Fm.onnx", "m.onnx"), ("..%2F..", "model")],
)
def test_a_file_is_stored_by_the_last_part_of_its_path(path: str, name: str) -> None:
    address = _address(f"http://localhost/{path}")
    assert address.path == address.folder / "current" / name


def test_an_encrypted_archive_is_refused(files: FileServer, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.zip", "w") as archive:
        archive.writestr("model.onnx", "text")
    content = bytearray((tmp_path / "m.zip").read_bytes())
    content[6] |= 1
    content[content.index(b"PK\1\2") + 8] |= 1
    files.files["/m.zip"] = bytes(content)
    with pytest.raises(StorageFailure, match=r"the archive cannot be unpacked: .*password"):
        Mirror(_address(f"{files.url}/m.zip")).update()


def test_a_changed_file_is_not_continued(files: FileServer) -> None:
    files.files["/m.onnx"] = b"m" * _SIZE
    files.failures["m.onnx"] = ["cut", 404]
    address = _address(f"{files.url}/m.onnx")
    with pytest.raises(StorageFailure):
        Mirror(address).update()
    files.files["/m.onnx"] = b"n" * _SIZE
    assert Mirror(address).update()
    assert address.path.read_bytes() == b"n" * _SIZE


def _zipped(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("1/model.onnx", content)
    return file.getvalue()


def test_an_archive_is_downloaded_again_only_if_it_has_changed_or_is_missing(files: FileServer) -> None:
    files.files["/m.zip"] = _zipped(b"one")
    address = _address(f"{files.url}/m.zip")
    mirror = Mirror(address)
    assert [mirror.update() for _ in range(3)] == [True, False, False]
    files.files["/m.zip"] = _zipped(b"other")
    assert [mirror.update() for _ in range(2)] == [True, False]
    assert (address.path / "1" / "model.onnx").read_bytes() == b"other"
    shutil.rmtree((address.folder / "current").resolve())
    assert [mirror.update() for _ in range(2)] == [True, False]
    assert (address.path / "1" / "model.onnx").read_bytes() == b"other"


def test_a_server_says_how_long_to_wait(files: FileServer) -> None:
    files.files["/m.onnx"] = b"m"
    files.failures["m.onnx"], files.retry_after = [429, 429], "7"
    with closing(open_storage(files.url)) as storage, pytest.raises(StorageFailure, match="answers 429") as caught:
        storage.list_files(f"{files.url}/m.onnx")
    assert (caught.value.retry_after_seconds, caught.value.is_permanent) == (7, False)
    files.retry_after = "0"
    assert Mirror(_address(f"{files.url}/m.onnx")).update()


async def test_a_hanging_store_is_given_up(files: FileServer) -> None:
    files.hangs.set()
    mirror = Mirror(_address(f"{files.url}/m.onnx"))
    with pytest.raises(StorageFailure, match=r"m.onnx sent no data for 0.2 s"):
        await update_mirror(mirror, stall_seconds=0.2)


def test_two_processes_download_once(files: FileServer) -> None:
    files.files["/m.onnx"] = b"m" * _SIZE
    address = _address(f"{files.url}/m.onnx")
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(Mirror(address).update())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False, False, True]
    assert len([each for each in files.requests if each.startswith("GET")]) == 1


# Folders


class _Folder(LocalStorage):
    """A local folder in place of a bucket."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fetched: list[str] = []
        self.damages = False

    def list_files(self, location: str) -> list[StoredFile]:
        return super().list_files(str(self.root))

    def fetch(self, file: StoredFile, target: Path, on_progress: OnProgress) -> None:
        self.fetched.append(file.path)
        super().fetch(file, target, on_progress)
        if self.damages:
            target.write_bytes(b"")

    def open(self, location: str) -> ModelStorage:
        return self


def _write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").lstrip("v")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _present(address: Address) -> list[str]:
    return sorted(each.relative_to(address.path).as_posix() for each in address.path.rglob("*") if each.is_file())


def test_only_chosen_versions_and_changed_files_are_downloaded(files: FileServer, tmp_path: Path) -> None:
    store, address = _Folder(tmp_path / "up"), _address("s3://bucket/m")
    mirror = Mirror(address, store.open)
    _write(store.root, v1__a="1", v2__a="2", v2__b="2")

    def latest(versions: object) -> list[int]:
        return [max(versions)]  # type: ignore[call-overload]

    assert mirror.update(latest)
    assert _present(address) == ["2/a", "2/b"]
    _write(store.root, v2__b="changed", v3__a="3")
    assert mirror.update(latest)
    # The version that may still serve stays.
    assert _present(address) == ["2/a", "2/b", "3/a"]
    assert (address.path / "2" / "b").read_text() == "changed"
    assert store.fetched == ["2/a", "2/b", "2/b", "3/a"]
    assert not mirror.update(latest)
    (store.root / "2" / "a").unlink()
    assert mirror.update(latest)
    assert _present(address) == ["2/b", "3/a"]


def test_a_damaged_copy_is_repaired(files: FileServer, tmp_path: Path) -> None:
    store, address = _Folder(tmp_path / "up"), _address("s3://bucket/m")
    _write(store.root, a="text")
    mirror = Mirror(address, store.open)
    assert mirror.update()
    (address.path / "a").write_text("")
    assert mirror.update()
    assert (address.path / "a").read_text() == "text"


def test_a_failed_update_keeps_the_copy(files: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, address = _Folder(tmp_path / "up"), _address("s3://bucket/m")
    _write(store.root, a="old")
    mirror = Mirror(address, store.open)
    assert mirror.update()
    _write(store.root, a="newer")
    store.damages = True
    with pytest.raises(StorageFailure, match="is damaged: expected 5 bytes, got 0"):
        mirror.update()
    assert (address.path / "a").read_text() == "old"


def test_the_least_recently_used_copies_are_removed(files: FileServer) -> None:
    mirrors = {name: Mirror(_address(f"{files.url}/{name}.onnx")) for name in "abc"}
    for name, mirror in mirrors.items():
        files.files[f"/{name}.onnx"] = name.encode() * 1000
        mirror.keep()
        mirror.update()
    mirrors["b"].release()
    mirrors["c"].release()
    assert evict(4000) == []
    evict(2500)
    assert [mirror.is_usable for mirror in mirrors.values()] == [True, False, True]
    evict(0)
    assert [mirror.is_usable for mirror in mirrors.values()] == [True, False, False]
    mirrors["a"].release()


# Hub


def _hub() -> None:
    pytest.importorskip("huggingface_hub")


def test_a_changed_revision_downloads_the_changed_files(files: FileServer) -> None:
    _hub()
    first = {
        "openvino_model.xml": b"<x/>",
        "openvino_model.bin": b"w" * 24_000_000,
        "config.json": b"1",
        "a.safetensors": b"s",
    }
    commit = files.publish("org/name", first)
    files.failures["lfs"] = ["cut"]
    address = _address("hf://org/name")
    assert Mirror(address).update()
    assert _present(address) == ["config.json", "openvino_model.bin", "openvino_model.xml"]
    # The client of the hub continues after pieces of 10 MiB.
    assert files.ranges == [f"bytes={10 * 2**20}-"]
    files.publish("org/name", {**first, "config.json": b"2"})
    seen = len(files.requests)
    assert Mirror(address).update()
    assert (address.path / "config.json").read_bytes() == b"2"
    assert not any("lfs" in each or ".bin" in each for each in files.requests[seen:])
    pinned = _address(f"hf://org/name@{commit}")
    assert Mirror(pinned).update()
    assert ((pinned.path / "config.json").read_bytes(), pinned.is_immutable) == (b"1", True)


def test_a_damaged_file_of_a_hub_is_refused(files: FileServer) -> None:
    _hub()
    files.publish("org/name", {"model.onnx": b"good"})
    files.damaged = b"evil"
    with pytest.raises(StorageFailure, match="is damaged: expected sha256:"):
        Mirror(_address("hf://org/name")).update()


def test_without_a_network_files_of_the_hub_cache_are_used(
    tmp_path: Path, files: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _hub()
    from huggingface_hub import hf_hub_download

    files.publish("org/name", {"model.onnx": b"model", "sub/config.json": b"{}"})
    for path in ("model.onnx", "sub/config.json"):
        hf_hub_download("org/name", path, endpoint=files.url, cache_dir=tmp_path / "hub" / "hub")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    seen = len(files.requests)
    address = _address("hf://org/name")
    assert Mirror(address).update()
    assert _present(address) == ["model.onnx", "sub/config.json"]
    with pytest.raises(StorageFailure, match="was not downloaded before, and HF_HUB_OFFLINE is set"):
        Mirror(_address("hf://org/other")).update()
    assert len(files.requests) == seen


def test_a_private_repository_needs_the_token(files: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    _hub()
    files.publish("org/name", {"model.onnx": b"model"})
    files.token = "hf_secret"
    with pytest.raises(StorageFailure, match="set HF_TOKEN") as caught:
        Mirror(_address("hf://org/name")).update()
    assert "hf_secret" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert Mirror(_address("hf://org/name")).update()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["q4.gguf", "q8.gguf"], "has several models: q4.gguf, q8.gguf; name one, as in hf://org/name/q4.gguf"),
        (["model.safetensors", "config.json"], r"expected .xml, .gguf or .onnx, got .json, .safetensors; convert"),
    ],
)
def test_a_repository_without_one_usable_model_is_refused(files: FileServer, names: list[str], message: str) -> None:
    _hub()
    files.publish("org/name", dict.fromkeys(names, b"m"))
    with pytest.raises(StorageFailure, match=message):
        Mirror(_address("hf://org/name")).update()


# The command line of OVMS


def test_pull_places_a_model_in_the_repository(files: FileServer, tmp_path: Path) -> None:
    _hub()
    files.publish("org/name", {"openvino_model.xml": b"<x/>", "openvino_model.bin": b"w"})
    files.publish("org/gguf", {"q4.gguf": b"4", "q8.gguf": b"8"})
    where = ["--model-repository-path", str(tmp_path / "models"), "--task", "text_generation"]
    runs = [
        CliRunner().invoke(command_line(), ["--pull", "--source-model", name, *options, *where])
        for name, options in (("org/name", []), ("org/gguf", ["--gguf-filename", "q8.gguf"]), ("org/none", []))
    ]
    assert [run.exit_code for run in runs] == [0, 0, 1], [run.output for run in runs]
    assert (tmp_path / "models/org/name/openvino_model.bin").read_bytes() == b"w"
    assert [each.name for each in (tmp_path / "models/org/gguf").iterdir()] == ["q8.gguf"]
    assert "does not exist, or is private" in runs[2].output
    assert not (tmp_path / "models/org/none").exists()


def test_a_source_model_is_downloaded_and_served(
    files: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _hub()
    taken: list[dict[str, object]] = []
    monkeypatch.setattr(serve, "run_server", taken.append)
    files.publish("org/name", {"openvino_model.xml": b"<x/>"})
    where = ["--source-model", "org/name", "--model-repository-path", str(tmp_path), "--rest-port", "8000"]
    run = CliRunner().invoke(command_line(), where)
    assert run.exit_code == 0, run.output
    assert (taken[0]["model_name"], taken[0]["model_path"]) == ("org/name", str(tmp_path / "org/name"))
    assert (tmp_path / "org/name/openvino_model.xml").is_file()
