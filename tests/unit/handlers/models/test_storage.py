from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.core.errors import ConfigError, StorageFailure
from ovmstrio.runtimes.handlers.models.sources import CopyMaker, ModelSource, open_sources, problem_of_saved_model
from ovmstrio.runtimes.handlers.models.storage import LocalStorage, open_storage
from ovmstrio.runtimes.handlers.models.tree import ModelKey, StoredFile, VersionFiles, versions_of
from tests.support.model_projects import CountingStorage, several_models, write_model


def test_local_folders_are_listed_with_what_they_link_to(tmp_path: Path) -> None:
    """Links to folders are followed, in no circle; links to nothing are no files."""
    write_model(tmp_path, "linked", "elsewhere")
    folder = write_model(tmp_path, "text", "up", "1")
    (tmp_path / "up" / "2").symlink_to(tmp_path / "elsewhere")
    (folder / "round").symlink_to(tmp_path / "up")
    (folder / "dangling").symlink_to(tmp_path / "nothing")
    files = {file.path: file for file in LocalStorage().list_files(str(tmp_path / "up"))}
    assert set(files) == {"1/model.txt", "2/model.txt"}
    assert (files["1/model.txt"].size, files["2/model.txt"].size) == (4, 6)


def test_a_local_place_may_be_a_url_a_file_or_nothing(tmp_path: Path) -> None:
    """A file is listed as itself, which is no model; what is not there is empty."""
    write_model(tmp_path, "text", "a b")
    storage = open_storage("file:///")
    assert [file.path for file in storage.list_files(f"file://{tmp_path}/a%20b/")] == ["model.txt"]
    (itself,) = storage.list_files(str(tmp_path / "a b" / "model.txt"))
    assert versions_of("m", [itself]) == {}
    assert storage.list_files(str(tmp_path / "nothing")) == []
    storage.close()


@pytest.mark.parametrize(
    ("location", "package", "hint"),
    [("s3://bucket/m", "s3fs", r"pip install .*\[s3\]"), ("gs://bucket/m", "gcsfs", "pip install gcsfs")],
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, location: str, package: str, hint: str) -> None:
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=hint):
        open_storage(location)


def test_an_unknown_scheme_is_told() -> None:
    """The error shows the location."""
    with pytest.raises(ConfigError, match="carrier-pigeon://"):
        open_storage("carrier-pigeon://loft/m")


def test_one_storage_serves_all_places_of_its_kind(tmp_path: Path) -> None:
    """Places with the same scheme share connections."""
    spec = several_models({"a": tmp_path / "a", "b": tmp_path / "b", "c": f"file://{tmp_path}/c"})
    first, second, third = open_sources(spec, open_storage)
    assert first.storage is second.storage is not third.storage
    assert [source.has(ModelKey("b", "1")) for source in (first, second)] == [False, True]


def test_a_copy_is_whole_or_not_there(tmp_path: Path) -> None:
    """When a file cannot be fetched, nothing is left of the copy."""
    write_model(tmp_path, "a", "up", "1", "inner")
    storage = CountingStorage()
    maker = CopyMaker(tmp_path / "down", [ModelSource("m", str(tmp_path / "up"), storage)])
    ((key, version),) = versions_of("m", storage.list_files(str(tmp_path / "up"))).items()
    copy = maker.make(key, version)
    assert copy.folder.relative_to(tmp_path / "down").parts[1:] == ("m", "1")
    assert (copy.folder / "inner" / "model.txt").read_text() == "a"
    storage.failure = StorageFailure("away")
    with pytest.raises(StorageFailure, match="away"):
        maker.make(key, version)
    (tmp_path / "up" / "1" / "inner" / "model.txt").unlink()
    storage.failure = None
    with pytest.raises(StorageFailure, match="cannot be copied"):
        maker.make(key, version)
    assert len(list((tmp_path / "down").iterdir())) == 1
    maker.remove(copy)
    assert list((tmp_path / "down").iterdir()) == []


def test_a_disk_that_cannot_be_written_is_a_failure_of_the_storage(tmp_path: Path) -> None:
    """The message names the version and the folder."""
    (tmp_path / "down").touch()
    version = VersionFiles((StoredFile("a", "a", 1, "", 0.0),))
    with pytest.raises(StorageFailure, match=r"m:1 cannot be kept below .*down"):
        CopyMaker(tmp_path / "down", [ModelSource(None, "", LocalStorage())]).make(ModelKey("m", "1"), version)


@pytest.mark.parametrize(
    ("paths", "problem"),
    [
        (["saved_model.pb"], None),
        (["saved_model.pb", "variables/variables.index", "variables/variables.data-00000-of-00001", "x"], None),
        (["model.pb"], "needs saved_model.pb"),
        (["saved_model.pb", "variables/variables.data-00000-of-00001"], "not variables/variables.index"),
    ],
)
def test_a_saved_model_has_its_files(paths: list[str], problem: Any) -> None:
    """The graph must be there, and the index of variables if there are any."""
    version = VersionFiles(tuple(StoredFile(path, path, 1, "", 0.0) for path in paths))
    found = problem_of_saved_model(version)
    assert found is None if problem is None else problem in str(found)
