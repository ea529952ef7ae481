from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_MAX_WHEEL_BYTES = 4_000_000
_FILES = {
    "graph/node.py": """
from pyovms import Tensor
import pyovms
assert "ovmstrio" in pyovms.__file__

class OvmsPythonModel:
    def execute(self, inputs):
        return [Tensor("out", inputs[0])]
""",
    "graph/graph.pbtxt": """
input_stream: "OVMS_PY_TENSOR:in"
output_stream: "OVMS_PY_TENSOR:out"
node {
  name: "node"
  calculator: "PythonExecutorCalculator"
  input_side_packet: "PYTHON_NODE_RESOURCES:py"
  input_stream: "IN:in"
  output_stream: "OUT:out"
  node_options: {
    [type.googleapis.com/mediapipe.PythonExecutorCalculatorOptions]: { handler_path: "node.py" }
  }
}
""",
    "handler/handler.py": """
from cortex_internal.lib.client.python import ModelClient
from cortex_internal.lib.exceptions import UserRuntimeException
from cortex_internal.lib.log import logger

class Handler:
    def __init__(self, config):
        logger.info("created")

    def handle_post(self, payload):
        return payload
""",
    "handler/nucleus.yaml": "type: python\npath: handler.py\n",
    "ops/web_service.py": """
from paddle_serving_server.web_service import Op, WebService
from paddle_serving_app.reader import LACReader

class Service(WebService):
    def get_pipeline_response(self, read_op):
        return Op(name="a", input_ops=[read_op])

service = Service("s")
service.prepare_pipeline_config("config.yml")
service.run_service()
""",
    "ops/config.yml": "dag:\n  is_thread_op: false\n",
}
_CONFIG = {
    "model_config_list": [],
    "mediapipe_config_list": [
        {"name": "echo", "base_path": "graph"},
        {"name": "echo_in_process", "base_path": "graph", "python_isolation": "process"},
        {"name": "echo_elsewhere", "base_path": "graph", "python": sys.executable},
    ],
    "handler_config_list": [
        {"name": "handler", "path": "handler"},
        {"name": "handler_in_process", "path": "handler", "python_isolation": "process"},
    ],
    "op_pipeline_config_list": [{"name": "s", "path": "ops"}],
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    if "hatchling" in done.stderr and done.returncode:
        pytest.skip("the build backend hatchling cannot be installed")
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with the wheel, and with the dependencies of this one."""
    folder = tmp_path_factory.mktemp("environment")
    # A name that no path of the tests has, so that the packages come from the wheel.
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def _run(python: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), *arguments]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=120, cwd=folder, env=environment
    )  # fmt: skip


def test_a_wheel_installs_one_package_and_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = next(name.partition("/")[0] for name in names if ".dist-info/" in name)
        scripts = archive.read(f"{info}/entry_points.txt").decode().split()
        metadata = HeaderParser().parsestr(archive.read(f"{info}/METADATA").decode())
    assert {name.partition("/")[0] for name in names} == {"ovmstrio", info}
    assert "ovmstrio/py.typed" in names
    assert f"{info}/licenses/LICENSE" in names
    assert scripts == ["[console_scripts]", "ovms", "=", "ovmstrio.cli.entry:run_alias", "ovmstrio", "=", "ovmstrio.cli.entry:main"]  # fmt: skip  # noqa: E501
    assert metadata["License-Expression"] == "Apache-2.0"
    assert wheel.stat().st_size < _MAX_WHEEL_BYTES


def test_packages_of_other_servers_are_importable_by_user_code_only(installed: Path, tmp_path: Path) -> None:
    names = ("pyovms", "cortex_internal", "paddle_serving_server", "paddle_serving_app")
    program = f"""
import sys
from importlib.util import find_spec
sys.path[:] = [entry for entry in sys.path if not entry.endswith("compat")]  # of an editable installation
import ovmstrio.server.server
print([name for name in {names} if find_spec(name)])
from ovmstrio.extras import add_compat_path
add_compat_path()
print([name for name in {names} if "ovmstrio" in find_spec(name).origin])
"""
    done = _run(installed, "-c", program, folder=tmp_path)
    assert done.stdout.splitlines() == ["[]", str(list(names))], done.stderr


def test_user_code_of_an_installed_server_imports_packages_of_other_servers(installed: Path, tmp_path: Path) -> None:
    for file, text in _FILES.items():
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    done = _run(installed, "-m", "ovmstrio.cli", "check", "--strict", "config.json", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 versions loaded" in done.stdout


def test_an_installed_package_of_the_same_name_is_ignored_and_logged(installed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "pyovms.py").write_text("Tensor = None\n")
    program = """
import logging, sys
sys.path.insert(0, sys.argv[1])
logging.basicConfig()
from ovmstrio.extras import add_compat_path
add_compat_path()
add_compat_path()
import pyovms
print(pyovms.Tensor)
"""
    done = _run(installed, "-c", program, str(other), folder=tmp_path)
    assert done.stdout == "<class 'pyovms.Tensor'>\n", done.stderr
    assert done.stderr.count(f"installed package ignored: pyovms in {other}/pyovms.py") == 1


@pytest.mark.parametrize("is_binary", [True, False])
def test_the_alias_yields_to_another_program(installed: Path, tmp_path: Path, is_binary: bool) -> None:
    program = tmp_path / "ovms"
    if is_binary:
        program.write_bytes(Path("/bin/echo").resolve().read_bytes())
    else:
        program.write_text("#!/bin/sh\necho the script\n")
    program.chmod(0o755)
    code = f"import os, sys; os.environ['PATH'] = {str(tmp_path)!r}; sys.argv = ['ovms', '--version']"
    done = _run(installed, "-c", f"{code}; from ovmstrio.cli.entry import run_alias; run_alias()", folder=tmp_path)
    is_ours = "ovmstrio" in done.stdout
    assert is_ours is not is_binary, done.stdout + done.stderr
