from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.page_commands import has_network_namespaces
from tests.support.processes import environment

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
HELM = os.environ.get("HELM") or shutil.which("helm")
PATIENCE_SECONDS = 900

needs_namespace = pytest.mark.skipif(not has_network_namespaces(), reason="network namespaces are not permitted")


@needs_namespace
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    if page.stem == "kubernetes" and not HELM:
        pytest.skip("helm is not installed")
    # Pages of the checkout name its folders.
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    program = f"ip link set lo up && exec {sys.executable} -m tests.support.page_commands {page} {tmp_path}"
    settings = environment() | {"PATH": ":".join(_folders()), "NO_COLOR": "1"}
    done = subprocess.run(
        ["unshare", "-rn", "bash", "-c", program],
        cwd=ROOT,
        env=settings,
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert (done.returncode, done.stderr) == (0, "")


def _folders() -> list[str]:
    helm = [] if HELM is None else [str(Path(HELM).parent)]
    return [str(Path(sys.executable).parent), *helm, os.environ["PATH"]]
