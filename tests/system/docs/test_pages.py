from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fetched_samples import WHEELS, prepare_cached
from tests.support.page_commands import has_network_namespaces

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
HELM = os.environ.get("HELM") or shutil.which("helm")
PATIENCE_SECONDS = 900


@pytest.mark.skipif(not has_network_namespaces(), reason="network namespaces are not permitted")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    if "$ helm" in text and not HELM:
        pytest.skip("helm is not installed")
    if "--sample chat" in text:
        prepare_cached("chat", tmp_path / "fetched")
    folder, cache = tmp_path / "page", tmp_path / "cache" / "ovmstrio"
    folder.mkdir()
    cache.mkdir(parents=True)
    (cache / "wheels").symlink_to(WHEELS)
    # Pages of the checkout name its folders.
    (folder / "deploy").symlink_to(ROOT / "deploy")
    helm = [] if HELM is None else [str(Path(HELM).parent)]
    path = ":".join([str(Path(sys.executable).parent), *helm, os.environ["PATH"]])
    program = f"ip link set lo up && exec {sys.executable} -m tests.support.page_commands {page} {folder}"
    done = subprocess.run(
        ["unshare", "-rn", "bash", "-c", program],
        cwd=ROOT,
        env=os.environ | {"PATH": path, "NO_COLOR": "1", "XDG_CACHE_HOME": str(cache.parent)},
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert (done.returncode, done.stderr) == (0, "")
