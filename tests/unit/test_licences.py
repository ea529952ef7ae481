from __future__ import annotations

import re
import tomllib

from tests.support.licences import PAGE, ROOT, installed_packages

_PERMISSIVE = re.compile(r"(Apache-2\.0|BSD-[23]-Clause|0BSD|MIT|ISC|Zlib|CC0-1\.0|PSF-2\.0|MPL-2\.0| AND | OR |[()])+")


def test_a_plain_installation_has_permissive_licences_only() -> None:
    refused = {name: text for name, text in installed_packages().items() if not _PERMISSIVE.fullmatch(text)}
    assert not refused


def test_the_page_of_licences_lists_every_direct_dependency() -> None:
    listed = set(re.findall(r"^\| ([\w-]+) \|", PAGE.read_text(), re.MULTILINE))
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {re.match(r"[\w-]+", text)[0] for text in declared} <= listed  # type: ignore[index]  # each has a name
