"""The image, built by the shipped recipe and run as Kubernetes would: no root, nothing writable, no shell.

No Docker engine is needed: stand-ins for the recipe's bases are made of Debian's packages, buildah runs the recipe, and
bubblewrap the result.  It loads some 300 MB of packages for each variant, so it runs only where ``OVMSTRIO_TRY_IMAGE``
is set, as ``just image`` does.
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
from tests.support.ports import free_ports
from tests.support.processes import end_of_output
from tests.support.tiny_llm import write_tiny_folder

_PROJECT = Path(__file__).parents[3]
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
_PLAIN, _LLM, _VISION = "", "[llm]", "[vision]"
_MOST_MEGABYTES = {_PLAIN: 600, _LLM: 900, _VISION: 700}
_PIPS_OWN = ("/etc/pip.conf", "/etc/xdg/pip", "/etc/ssl/certs", "/usr/local/share/ca-certificates")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("OVMSTRIO_TRY_IMAGE" not in os.environ, reason="OVMSTRIO_TRY_IMAGE is not set"),
    pytest.mark.skipif(not all(map(shutil.which, _TOOLS)), reason=f"needs {', '.join(_TOOLS)}"),
]


class _Builder:
    def __init__(self, folder: Path) -> None:
        self._options = ["--root", str(folder / "store"), "--runroot", str(folder / "run"), "--storage-driver", "vfs"]

    def __call__(self, verb: str, *arguments: str) -> str:
        command = ["buildah", *self._options, verb, *arguments]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1800, cwd=_PROJECT)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def base(self, name: str, archive: Path) -> None:
        container = self("from", "scratch")
        self("add", "--quiet", container, str(archive), "/")
        self("commit", "--quiet", container, f"localhost/{name}")
        self("rm", container)


@pytest.fixture(scope="module")
def builder() -> Iterator[_Builder]:
    with tempfile.TemporaryDirectory(prefix="ovmstrio-image-") as made:
        folder = Path(made)
        builder = _Builder(folder)
        for name, options in _BASES.items():
            archive = folder / f"{name}.tar"
            subprocess.run(["mmdebstrap", "--quiet", *options, "bookworm", str(archive)], check=True, timeout=1800)
            builder.base(name, archive)
            archive.unlink()
        yield builder


@contextmanager
def _built(builder: _Builder, extras: str) -> Iterator[Path]:
    mounts = [text for path in _PIPS_OWN if Path(path).exists() for text in ("-v", f"{path}:{path}:ro")]
    given = {"BUILD_BASE": "localhost/build", "BASE": "localhost/run", "EXTRAS": extras}
    arguments = [text for name, value in given.items() for text in ("--build-arg", f"{name}={value}")]
    builder("build", "--isolation", "chroot", "-f", str(_RECIPE), *arguments, *mounts, "-t", "localhost/made", ".")
    container = builder("from", "--pull-never", "localhost/made")
    mounted = Path(builder("mount", container))
    # The user who runs the image creates mount points.
    for name in ("proc", "dev", "tmp"):
        (mounted / name).mkdir(exist_ok=True)
    try:
        yield mounted
    finally:
        builder("umount", container)
        builder("rm", container)
        builder("rmi", "localhost/made")


@pytest.fixture(scope="module", params=[_PLAIN, _LLM, _VISION], ids=["plain", "llm", "vision"])
def variant(request: pytest.FixtureRequest, builder: _Builder) -> Iterator[tuple[str, Path]]:
    with _built(builder, request.param) as root:
        yield request.param, root


@contextmanager
def _run(root: Path, *arguments: str, binds: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    options = ["--ro-bind", str(root), "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", *binds]
    options += ["--unshare-user", "--uid", "5000", "--gid", "5000", "--die-with-parent", "--clearenv"]
    options += ["--setenv", "HOME", "/tmp", "--setenv", "XDG_CACHE_HOME", "/tmp/cache"]
    command = ["bwrap", *options, "/opt/ovmstrio/bin/python3.11", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        end_of_output(process)


@contextmanager
def _serving(root: Path, folder: Path, *options: str) -> Iterator[httpx.Client]:
    """Serve what lies in a folder, which is ``/models``, until the end of the block, and then have it end gently."""
    rpc, rest = free_ports(2)
    ports = ["--port", str(rpc), "--rest_port", str(rest)]
    addresses = ["--grpc_bind_address", "127.0.0.1", "--rest_bind_address", "127.0.0.1"]
    command = ["-m", "ovmstrio.cli", "serve", "--model_path", "/models", *options, *ports, *addresses]
    transport = httpx.HTTPTransport(retries=8)
    with (
        _run(root, *command, binds=("--ro-bind", str(folder), "/models")) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{rest}", transport=transport, timeout=60) as client,
    ):
        for _ in range(600):
            if client.get("/v2/health/ready").is_success:
                break
            threading.Event().wait(0.1)
        (server,) = psutil.Process(process.pid).children()
        yield client
        server.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output


def test_the_image_is_small_and_has_no_shell(variant: tuple[str, Path]) -> None:
    extras, root = variant
    size = sum(path.lstat().st_size for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    assert size < _MOST_MEGABYTES[extras] * 10**6
    names = {path.name for folder in ("bin", "usr/bin", "opt/ovmstrio/bin") for path in (root / folder).glob("*")}
    assert not names & {"sh", "bash", "dash", "pip", "pip3"}
    assert "python3.11" in names


def test_the_server_runs_without_rights_on_a_read_only_root(variant: tuple[str, Path], tmp_path: Path) -> None:
    models = ir.save(ir.dummy(), tmp_path, "dummy")
    with _serving(variant[1], models, "--model_name", "dummy") as client:
        body = {"inputs": [{"name": "b", "datatype": "FP32", "shape": [1, 10], "data": [1] * 10}]}
        answer = client.post("/v2/models/dummy/infer", json=body)
        assert answer.json()["outputs"][0]["data"] == [2.0] * 10


@pytest.mark.parametrize("variant", [_LLM], ids=["llm"], indirect=True)
def test_the_variant_for_language_models_generates_text(variant: tuple[str, Path], tmp_path: Path) -> None:
    models = write_tiny_folder(tmp_path / "chat")
    with _serving(variant[1], models, "--model_name", "chat", "--task", "text_generation") as client:
        asked = {"model": "chat", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
        answer = client.post("/v3/chat/completions", json=asked).json()
        assert answer["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("variant", [_VISION], ids=["vision"], indirect=True)
def test_the_vision_variant_resizes_images(variant: tuple[str, Path]) -> None:
    program = "import cv2, numpy; print(cv2.resize(numpy.zeros((4, 6, 3), 'u1'), (2, 2)).shape)"
    with _run(variant[1], "-c", program) as process:
        assert process.communicate(timeout=60)[0] == "(2, 2, 3)\n"
