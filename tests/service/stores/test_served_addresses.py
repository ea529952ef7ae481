from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ovmstrio.core.errors import ConfigError, StorageFailure
from ovmstrio.server.check import check_config
from ovmstrio.server.plan import read_plan
from ovmstrio.server.settings import ServerSettings
from tests.support.ir import dummy, save
from tests.support.onnx_files import onnx_file
from tests.support.served_in_thread import ServedInThread, serving_in_thread
from tests.support.stores import FileServer, file_server
from tests.support.waits import until

_INPUT = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}]}


def _link(name: str, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    with file_server() as server:
        monkeypatch.setenv("OVMSTRIO_DOWNLOADS", str(tmp_path / "downloads"))
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def _model(folder: Path, addend: int) -> dict[str, bytes]:
    """Return the files of a model that adds a number."""
    place = save(dummy((1, 2), addend=addend), folder, f"m{addend}") / "1"
    return {path.name: path.read_bytes() for path in place.iterdir()}


def _outputs(server: ServedInThread, name: str) -> list[float]:
    (output,) = server.ask("POST", f"/v2/models/{name}/infer", json=_INPUT | _names(server, name)).json()["outputs"]
    return list(output["data"])


def _names(server: ServedInThread, name: str) -> dict[str, object]:
    metadata = server.ask("GET", f"/v2/models/{name}").json()
    return {"inputs": [{**_INPUT["inputs"][0], "name": metadata["inputs"][0]["name"]}]}


def _config(path: Path, **models: str) -> Path:
    entries = [{"config": {"name": name, "base_path": address}} for name, address in models.items()]
    path.write_text(json.dumps({"model_config_list": entries}))
    return path


def _is_ready(server: ServedInThread, name: str) -> bool:
    return server.ask("GET", f"/v2/models/{name}/ready").status_code == 200


def test_a_model_file_of_a_web_server_is_served(files: FileServer) -> None:
    files.files["/m/model.onnx"] = onnx_file("Neg")
    with serving_in_thread(model_name="m", model_path=f"{files.url}/m/model.onnx") as server:
        assert _is_ready(server, "m")
    requests = len(files.requests)
    # The second start has the file, even if the server hangs.
    files.hangs.set()
    with serving_in_thread(model_name="m", model_path=f"{files.url}/m/model.onnx") as server:
        assert _is_ready(server, "m")
    assert len([each for each in files.requests[requests:] if each.startswith("GET")]) == 0


def test_both_files_of_a_model_are_downloaded(files: FileServer, tmp_path: Path) -> None:
    for name, content in _model(tmp_path, 5).items():
        files.files[f"/m/{name}"] = content
    with serving_in_thread(model_name="m", model_path=f"{files.url}/m/model.xml") as server:
        assert _outputs(server, "m") == [6.0, 7.0]


@pytest.mark.parametrize("kind", ["zip", "gztar"])
def test_an_archive_of_versions_is_served(files: FileServer, tmp_path: Path, kind: str) -> None:
    base = save(dummy((1, 2), addend=7), tmp_path / "up", "m", 3)
    archive = Path(shutil.make_archive(str(tmp_path / "models"), kind, base.parent))
    files.files[f"/{archive.name}"] = archive.read_bytes()
    with serving_in_thread(model_name="m", model_path=f"{files.url}/{archive.name}") as server:
        assert _outputs(server, "m") == [8.0, 9.0]
        assert server.ask("GET", "/v2/models/m").json()["versions"] == ["3"]


def test_a_remote_configuration_names_models_next_to_it(files: FileServer, tmp_path: Path) -> None:
    files.files["/conf/model.onnx"] = onnx_file("Neg")
    _config(tmp_path / "config.json", near="model.onnx")
    files.files["/conf/config.json"] = (tmp_path / "config.json").read_bytes()
    settings = {"file_system_poll_wait_seconds": 0.05, "store_poll_seconds": 0.05}
    with serving_in_thread(config_path=f"{files.url}/conf/config.json", **settings) as server:
        until(lambda: _is_ready(server, "near"))
        _config(tmp_path / "config.json", other="model.onnx")
        files.files["/conf/config.json"] = (tmp_path / "config.json").read_bytes()
        until(lambda: _is_ready(server, "other"))


def test_a_hanging_store_blocks_no_other_service(files: FileServer, tmp_path: Path) -> None:
    files.files["/m/model.onnx"] = onnx_file("Neg")
    base = save(dummy((1, 2), addend=2), tmp_path, "near")
    files.hangs.set()
    config = _config(tmp_path / "config.json", near=str(base), far=f"{files.url}/m/model.onnx")
    with serving_in_thread(config_path=config, file_system_poll_wait_seconds=0.05) as server:
        assert _outputs(server, "near") == [3.0, 4.0]
        assert not _is_ready(server, "far")
        assert "is downloading" in server.ask("GET", "/v2/health/ready").text
        save(dummy((1, 2), addend=4), tmp_path, "near", 2)
        until(lambda: _outputs(server, "near") == [5.0, 6.0])
        _config(config, near=str(base), next=str(base))
        until(lambda: _is_ready(server, "next"))


def test_an_unusable_download_cache_keeps_no_other_service(
    files: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.files["/m/model.onnx"] = onnx_file("Neg")
    (tmp_path / "file").touch()
    monkeypatch.setenv("OVMSTRIO_DOWNLOADS", str(tmp_path / "file"))
    base = save(dummy((1, 2), addend=2), tmp_path, "near")
    config = _config(tmp_path / "config.json", near=str(base), far=f"{files.url}/m/model.onnx")
    with serving_in_thread(config_path=config, file_system_poll_wait_seconds=0.05) as server:
        assert _outputs(server, "near") == [3.0, 4.0]
        until(lambda: "cannot be stored in" in server.ask("GET", "/v2/health/ready").text)


def test_a_changed_version_policy_downloads_its_versions(files: FileServer, tmp_path: Path) -> None:
    files.publish("org/m", {f"{number}/model.onnx": onnx_file("Neg") for number in (1, 2)})
    config = tmp_path / "config.json"

    def choose(version: int) -> None:
        policy = {"specific": {"versions": [version]}}
        entry = {"name": "m", "base_path": "hf://org/m", "model_version_policy": policy}
        config.write_text(json.dumps({"model_config_list": [{"config": entry}]}))

    def versions(server: ServedInThread) -> object:
        return server.ask("GET", "/v2/models/m").json().get("versions")

    choose(1)
    settings = {"file_system_poll_wait_seconds": 0.05, "store_poll_seconds": 0}
    with serving_in_thread(config_path=config, **settings) as server:
        until(lambda: versions(server) == ["1"])
        choose(2)
        until(lambda: versions(server) == ["2"])


def test_a_failed_store_keeps_what_is_served(
    files: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = Path(shutil.make_archive(str(tmp_path / "a"), "tar", save(dummy((1, 2)), tmp_path / "up", "m").parent))
    files.files["/m.tar"] = archive.read_bytes()
    config = _config(tmp_path / "config.json", m=f"{files.url}/m.tar")
    with serving_in_thread(config_path=config, store_poll_seconds=0.05) as server:
        until(lambda: _is_ready(server, "m"))
        content = files.files.pop("/m.tar")
        seen = len(files.requests)
        until(lambda: len(files.requests) > seen + 3)
        assert _outputs(server, "m") == [2.0, 3.0]
        save(dummy((1, 2), addend=9), tmp_path / "up", "m", 2)
        archive = Path(shutil.make_archive(str(tmp_path / "a"), "tar", tmp_path / "up" / "m"))
        files.files["/m.tar"] = archive.read_bytes()
        assert content != archive.read_bytes()
        until(lambda: _outputs(server, "m") == [10.0, 11.0])
    logged = capsys.readouterr()
    assert (logged.out + logged.err).count("store unreachable") == 1
    assert (logged.out + logged.err).count("store reachable") == 1


@pytest.mark.parametrize("has_filters", [True, False])
@pytest.mark.parametrize(
    "member",
    [
        tarfile.TarInfo("../outside"),
        tarfile.TarInfo("/outside"),
        _link("inner", "/etc/passwd"),
        _link("inner", "../../outside"),
    ],
    ids=lambda member: f"{member.name} {member.linkname}",
)
async def test_an_archive_with_a_member_outside_of_it_is_refused(
    files: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: tarfile.TarInfo, has_filters: bool
) -> None:
    if not has_filters:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    elif not hasattr(tarfile, "data_filter"):
        pytest.skip("this release of Python has no filters")
    elif member.name.startswith("/"):
        pytest.skip("the filter makes the name relative")
    with tarfile.open(tmp_path / "m.tar", "w") as packed:
        packed.addfile(member)
    files.files["/m.tar"] = (tmp_path / "m.tar").read_bytes()
    with pytest.raises(StorageFailure, match="the archive cannot be unpacked"):
        await read_plan(ServerSettings(model_name="m", model_path=Path(f"{files.url}/m.tar")))
    assert "outside" not in {name for _, folders, names in os.walk(tmp_path) for name in (*folders, *names)}


async def test_an_unreachable_model_ends_the_start(files: FileServer) -> None:
    address = files.url.replace("//", "//me:hidden@") + "/none.onnx?X-Amz-Signature=hidden"
    with pytest.raises(StorageFailure, match="nothing is stored at http://127") as caught:
        await read_plan(ServerSettings(model_name="m", model_path=Path(address)))
    assert "hidden" not in str(caught.value)


def test_a_repository_of_a_hub_is_served(files: FileServer, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    commit = files.publish("org/name", _model(tmp_path, 5) | {"README.md": b"text", "model.safetensors": b"unused"})
    addresses = {
        "whole": "hf://org/name",
        "pinned": f"hf://org/name@{commit}",
        "file": "hf://org/name/model.xml",
    }
    config = _config(tmp_path / "config.json", **addresses)
    with serving_in_thread(config_path=config, store_poll_seconds=0.05) as server:
        for name in addresses:
            until(partial(_is_ready, server, name))
            assert _outputs(server, name) == [6.0, 7.0]
    assert not any("safetensors" in each for each in files.requests)


@pytest.mark.parametrize("address", ["hf://org/one", "hf://org/several/tiny.gguf"])
@pytest.mark.parametrize("is_configured", [False, True])
def test_a_language_model_of_a_hub_is_served(
    files: FileServer, tmp_path: Path, address: str, *, is_configured: bool
) -> None:
    for module in ("huggingface_hub", "openvino_genai", "gguf"):
        pytest.importorskip(module)
    from tests.support.tiny_llm import write_tiny_gguf

    content = write_tiny_gguf(tmp_path / "tiny.gguf").read_bytes()
    files.publish("org/one", {"tiny.gguf": content, "README.md": b"text"})
    files.publish("org/several", {"tiny.gguf": content, "other.gguf": b"another quantization"})
    config = tmp_path / "config.json"
    entry = {"config": {"name": "tiny", "base_path": address}}
    config.write_text(json.dumps({"model_config_list": [], "text_model_config_list": [entry]}))
    settings = {"config_path": config} if is_configured else {"model_name": "tiny", "model_path": address}
    with serving_in_thread(**settings) as server:
        until(lambda: server.ask("GET", "/v2/health/ready").status_code == 200)
        body = {"model": "tiny", "prompt": "a", "max_tokens": 3, "temperature": 0}
        assert server.ask("POST", "/v3/completions", json=body).json()["usage"]["completion_tokens"] == 3
    assert not any("other.gguf" in each for each in files.requests)


async def test_a_missing_hub_client_is_named(files: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[hub\]"):
        await read_plan(ServerSettings(model_name="m", model_path=Path("hf://org/name")))


async def test_a_check_downloads_the_services_of_a_configuration(files: FileServer, tmp_path: Path) -> None:
    files.files["/m.onnx"] = onnx_file("Neg")
    config = _config(tmp_path / "config.json", m=f"{files.url}/m.onnx", none=f"{files.url}/none.onnx")
    report = await check_config(config)
    assert [(each.model, each.version) for each in report.loaded] == [("m", 1)]
    assert [(problem.line, problem.message) for problem in report.errors] == [
        (1, f"nothing is stored at {files.url}/none.onnx")
    ]
