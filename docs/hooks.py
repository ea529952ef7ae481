"""Hooks of the documentation site: pages outside ``docs``, and links to other files of the checkout.

Pages link to each other as files of the checkout, so that they can be read without the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
SAMPLES = "ovmstrio/samples"
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def _pages() -> dict[str, str]:
    """Return the pages outside ``docs``: the path in the site of each path in the checkout."""
    found = {name: name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md")}
    for path in (ROOT / SAMPLES).rglob("*.md"):
        found[path.relative_to(ROOT).as_posix()] = "samples/" + path.relative_to(ROOT / SAMPLES).as_posix()
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside ``docs``."""
    for source, target in _pages().items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: MkDocsConfig) -> str:
    """Turn links between files of the checkout into links between pages; other files appear as their path."""
    uri, outside = page.file.src_uri, _pages()
    source = next((path for path, target in outside.items() if target == uri), f"docs/{uri}")

    def replaced(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        target = outside.get(path) or outside.get(f"{path}/README.md") or path.removeprefix("docs/")
        if files.get_file_from_path(target) is not None:
            return f"[{link[1]}]({posixpath.relpath(target, posixpath.dirname(uri) or '.')}{link[3] or ''})"
        return f"{link[1]} (`{path}`)" if (ROOT / path).exists() else link[0]

    return _LINK.sub(replaced, markdown)
