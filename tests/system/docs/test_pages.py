from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.page_commands import has_network_namespaces
from tests.support.processes import environment

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PATIENCE_SECONDS = 900

needs_namespace = pytest.mark.skipif(not has_network_namespaces(), reason="network namespaces are not permitted")


@needs_namespace
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    program = f"ip link set lo up && exec {sys.executable} -m tests.support.page_commands {page} {tmp_path}"
    settings = environment() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NO_COLOR": "1"}
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
