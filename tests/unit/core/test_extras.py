from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from ovmstrio.client import open_client
from ovmstrio.client.pipeline import PipelineClient
from ovmstrio.encoding.number_arrays import simdjson_module
from ovmstrio.protocols.kserve.large_document import read_large_document
from ovmstrio.util.extras import Extra, install_command

ROOT = Path(__file__).parents[3]
DEVELOPER_EXTRAS = {"dev", "dev-system", "docs", "release"}
BY_NAME_ALONE = re.compile(r"""pip install [^\n`]*['" ]ovmstrio(\[|[ '"`\n=]|$)""")


class _Installed(Distribution):
    def __init__(self, origin: dict[str, Any] | None) -> None:
        self._files = {
            "direct_url.json": None if origin is None else json.dumps(origin),
            "METADATA": "Name: ovmstrio\n"
            "Requires-Dist: trio\n"
            "Requires-Dist: openvino-genai<2027,>=2026.1; extra == 'llm'\n"
            'Requires-Dist: openvino-tokenizers<2027; extra == "llm"\n'
            "Requires-Dist: dill; extra == 'handlers'\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(path)


@pytest.fixture(autouse=True)
def _without_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ovmstrio.util.extras.which", lambda _: None)


def test_an_environment_without_pip_installs_with_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ovmstrio.util.extras.which", lambda _: "/usr/bin/uv")
    monkeypatch.setattr("ovmstrio.util.extras.find_spec", lambda _: None)
    words = shlex.split(install_command(Extra.LLM, lambda _: _Installed(None)))
    assert words == ["uv", "pip", "install", "--python", sys.executable, *PACKAGES]


def _command(origin: dict[str, Any] | None, extra: Extra = Extra.LLM) -> list[str]:
    words = shlex.split(install_command(extra, lambda _: _Installed(origin)))
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    return words[4:]


PACKAGES = ["openvino-genai<2027,>=2026.1", "openvino-tokenizers<2027"]
COMMIT = {"url": "https://host/o/ovmstrio.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}


def test_an_extra_is_installed_from_the_origin_of_the_package_while_the_origin_exists(tmp_path: Path) -> None:
    folder, wheel = tmp_path / "with a blank", tmp_path / "ovmstrio-0.1.0-py3-none-any.whl"
    folder.mkdir()
    wheel.touch()
    assert _command({"url": folder.as_uri(), "dir_info": {}}) == [f"{folder}[llm]"]
    assert _command({"url": folder.as_uri(), "dir_info": {"editable": True}}) == ["-e", f"{folder}[llm]"]
    assert _command({"url": wheel.as_uri(), "archive_info": {}}) == [f"{wheel}[llm]"]
    assert _command(COMMIT) == ["ovmstrio[llm] @ git+https://host/o/ovmstrio.git@abc"]
    wheel.unlink()
    for origin in ({"url": wheel.as_uri(), "archive_info": {}}, None, {}):
        assert _command(origin) == PACKAGES
    assert _command(None, Extra.HANDLERS) == ["dill"]


def test_a_checkout_that_is_not_installed_is_the_origin() -> None:
    def nothing(name: str) -> Distribution:
        raise PackageNotFoundError(name)

    assert shlex.split(install_command(Extra.VISION, nothing))[4:] == [f"{ROOT}[vision]"]


def test_every_declared_extra_is_known() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(declared) - DEVELOPER_EXTRAS == set(Extra)


def test_no_page_installs_the_package_by_name() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("ovmstrio/samples/**/*.md")]
    code = [*ROOT.glob("ovmstrio/**/*.py")]
    found = [str(file.relative_to(ROOT)) for file in (*pages, *code) if BY_NAME_ALONE.search(file.read_text())]
    assert found == []


def test_only_clients_on_grpcio_need_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    with open_client("127.0.0.1:1"), open_client("127.0.0.1:1", rest=True):
        pass
    with pytest.raises(ModuleNotFoundError, match=r"PipelineClient needs grpcio"):
        PipelineClient().connect("127.0.0.1:1")


def test_a_missing_parser_of_large_bodies_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simdjson", None)
    simdjson_module.cache_clear()
    try:
        with capture_logs() as lines:
            assert read_large_document(memoryview(b'{"inputs": []}'), 8) is None
            assert read_large_document(memoryview(b'{"inputs": []}'), 8) is None
    finally:
        simdjson_module.cache_clear()
    assert [line["event"] for line in lines] == ["large JSON bodies parsed without pysimdjson"]
    assert "[json]" in lines[0]["install"]
