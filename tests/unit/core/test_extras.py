"""Commands that install a missing extra from the origin of the package."""

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

from ovmstrio.core.extras import Extra, way_to_install

ROOT = Path(__file__).parents[3]
DEVELOPER_EXTRAS = {"dev", "dev-system"}
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


def _command(origin: dict[str, Any] | None, extra: Extra = Extra.LLM) -> list[str]:
    """Return the arguments of pip."""
    words = shlex.split(way_to_install(extra, lambda _: _Installed(origin)))
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    return words[4:]


def test_an_extra_of_a_folder_is_installed_from_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "with a blank"
    folder.mkdir()
    address = folder.as_uri()
    assert _command({"url": address, "dir_info": {}}) == [f"{folder}[llm]"]
    assert _command({"url": address, "dir_info": {"editable": True}}) == ["-e", f"{folder}[llm]"]


def test_an_extra_of_a_wheel_is_installed_from_the_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "ovmstrio-0.1.0-py3-none-any.whl"
    wheel.touch()
    assert _command({"url": wheel.as_uri(), "archive_info": {}}) == [f"{wheel}[llm]"]
    wheel.unlink()
    assert _command({"url": wheel.as_uri(), "archive_info": {}}) == [
        "openvino-genai<2027,>=2026.1",
        "openvino-tokenizers<2027",
    ]


def test_an_extra_of_a_repository_is_installed_from_its_commit() -> None:
    origin = {"url": "https://host/o/ovmstrio.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}
    assert _command(origin) == ["ovmstrio[llm] @ git+https://host/o/ovmstrio.git@abc"]


@pytest.mark.parametrize("origin", [None, {}])
def test_without_a_known_origin_the_packages_of_the_extra_are_named(origin: dict[str, Any] | None) -> None:
    assert _command(origin) == ["openvino-genai<2027,>=2026.1", "openvino-tokenizers<2027"]
    assert _command(origin, Extra.HANDLERS) == ["dill"]


def test_a_checkout_that_is_not_installed_is_the_origin() -> None:
    def nothing(name: str) -> Distribution:
        raise PackageNotFoundError(name)

    assert shlex.split(way_to_install(Extra.VISION, nothing))[4:] == [f"{ROOT}[vision]"]


def test_every_declared_extra_is_known() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(declared) - DEVELOPER_EXTRAS == set(Extra)


def test_no_page_installs_the_package_by_name() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("samples/**/*.md")]
    code = [*ROOT.glob("ovmstrio/**/*.py"), *ROOT.glob("cli/**/*.py"), *ROOT.glob("samples/**/*.py")]
    found = [str(file.relative_to(ROOT)) for file in (*pages, *code) if BY_NAME_ALONE.search(file.read_text())]
    assert found == []
