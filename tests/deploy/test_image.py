"""The image, built by the shipped recipe and run as Kubernetes would: no root, nothing writable, no shell.

No Docker engine is needed: stand-ins for the recipe's bases are made of Debian's packages, buildah runs the recipe, and
bubblewrap the result.  It loads some 300 MB of packages, so it runs only where ``OVMSTRIO_TRY_IMAGE`` is set, as
``just image`` does.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support import ir
from tests.support.processes import free_ports

_PROJECT = Path(__file__).parents[2]
_RECIPE = _PROJECT / "deploy" / "container" / "Containerfile"
_TOOLS = ("buildah", "mmdebstrap", "bwrap")
_BASES = {
    "build": ["--variant=minbase", "--include=python3,python3-venv,ca-certificates"],
    # What the usual base of the last stage has: Python and what it and compiled packages need.
    "run": [
        "--variant=extract",
        "--include=python3.11-minimal,libpython3.11-stdlib,libstdc++6,libgomp1,zlib1g,libssl3,libffi8,ca-certificates",
    ],
}
_MOST_MEGABYTES = 600
_PIPS_OWN = ("/etc/pip.conf", "/etc/xdg/pip", "/etc/ssl/certs", "/usr/local/share/ca-certificates")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("OVMSTRIO_TRY_IMAGE" not in os.environ, reason="OVMSTRIO_TRY_IMAGE is not set"),
    pytest.mark.skipif(not all(map(shutil.which, _TOOLS)), reason=f"needs {', '.join(_TOOLS)}"),
]


class _Builder:
    """Buildah with a store of its own."""

    def __init__(self, folder: Path) -> None:
        self._options = ["--root", str(folder / "store"), "--runroot", str(folder / "run"), "--storage-driver", "vfs"]

    def __call__(self, verb: str, *arguments: str) -> str:
        command = ["buildah", *self._options, verb, *arguments]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1800, cwd=_PROJECT)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def base(self, name: str, archive: Path) -> None:
        """Make an image of a tree of files."""
        container = self("from", "scratch")
        self("add", "--quiet", container, str(archive), "/")
        self("commit", "--quiet", container, f"localhost/{name}")
        self("rm", container)


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """The files of the built image."""
    with tempfile.TemporaryDirectory(prefix="ovmstrio-image-") as made:
        folder = Path(made)
        builder = _Builder(folder)
        for name, options in _BASES.items():
            archive = folder / f"{name}.tar"
            subprocess.run(["mmdebstrap", "--quiet", *options, "bookworm", str(archive)], check=True, timeout=1800)
            builder.base(name, archive)
            archive.unlink()
        mounts = [text for path in _PIPS_OWN if Path(path).exists() for text in ("-v", f"{path}:{path}:ro")]
        arguments = ["--build-arg", "BUILD_BASE=localhost/build", "--build-arg", "BASE=localhost/run"]
        builder("build", "--isolation", "chroot", "-f", str(_RECIPE), *arguments, *mounts, "-t", "localhost/made", ".")
        container = builder("from", "--pull-never", "localhost/made")
        mounted = Path(builder("mount", container))
        # Mount points are made by whoever runs an image.
        for name in ("proc", "dev", "tmp"):
            (mounted / name).mkdir(exist_ok=True)
        yield mounted
        builder("umount", container)


@contextmanager
def _run(root: Path, *arguments: str, binds: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    options = ["--ro-bind", str(root), "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", *binds]
    options += ["--unshare-user", "--uid", "5000", "--gid", "5000", "--die-with-parent", "--clearenv"]
    options += ["--setenv", "HOME", "/tmp", "--setenv", "XDG_CACHE_HOME", "/tmp/cache"]
    command = ["bwrap", *options, "/opt/ovmstrio/bin/python3.11", "-m", "ovms_cli", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_image_is_small_and_has_no_shell(root: Path) -> None:
    """Nor pip; with the stand-in for its base."""
    size = sum(path.lstat().st_size for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    assert size < _MOST_MEGABYTES * 10**6
    names = {path.name for folder in ("bin", "usr/bin", "opt/ovmstrio/bin") for path in (root / folder).glob("*")}
    assert not names & {"sh", "bash", "dash", "pip", "pip3"}
    assert "python3.11" in names


def test_the_server_serves_from_it(root: Path, tmp_path: Path) -> None:
    """As a user without rights, on a root that cannot be written, until it is told to end."""
    models = ir.save(ir.dummy(), tmp_path, "dummy")
    rpc, rest = free_ports(2)
    arguments = [
        "serve",
        "--model_name",
        "dummy",
        "--model_path",
        "/models",
        "--port",
        str(rpc),
        "--rest_port",
        str(rest),
    ]
    arguments += ["--grpc_bind_address", "127.0.0.1", "--rest_bind_address", "127.0.0.1"]
    with _run(root, *arguments, binds=("--ro-bind", str(models), "/models")) as process:
        with httpx.Client(base_url=f"http://127.0.0.1:{rest}", transport=httpx.HTTPTransport(retries=8)) as client:
            for _ in range(600):
                if client.get("/v2/health/ready").is_success:
                    break
                threading.Event().wait(0.1)
            body = {"inputs": [{"name": "b", "datatype": "FP32", "shape": [1, 10], "data": [1] * 10}]}
            answer = client.post("/v2/models/dummy/infer", json=body)
        assert answer.json()["outputs"][0]["data"] == [2.0] * 10
        (server,) = psutil.Process(process.pid).children()
        server.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
