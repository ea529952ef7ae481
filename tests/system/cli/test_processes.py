from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from ovmstrio.ops.process_info import FILE_NAME, record_process
from tests.support.commands import run_command
from tests.support.ports import free_ports
from tests.support.processes import OvmsProcess, environment, run_ovms

_SHOW = """
import atexit, sys

@atexit.register
def show():
    sys.stderr.write("imported: " + " ".join(sys.modules))

from ovmstrio.cli.entry import main
main()
"""


@pytest.mark.parametrize(
    ("arguments", "without"),
    [
        (("--help",), ("pydantic", "numpy", "trio", "openvino", "rich", "ovmstrio.cli.serve")),
        (("--version",), ("pydantic", "numpy", "trio", "openvino", "rich")),
        (("keys", "list"), ("ovmstrio.cli.serve", "ovmstrio.cli.chat", "ovmstrio.server.settings", "numpy", "trio")),
        (("serve", "--help"), ("numpy", "trio", "openvino", "rich", "ovmstrio.server.command_line")),
        (
            ("health", "--help"),
            ("pydantic", "rich", "ovmstrio.cli.serve", "ovmstrio.cli.chat", "ovmstrio.server.settings", "numpy"),
        ),
    ],
)
def test_a_command_imports_only_its_own_modules(arguments: tuple[str, ...], without: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", _SHOW, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    imported = done.stderr.partition("imported: ")[2].split()
    assert "ovmstrio.cli.main" in imported, done.stderr
    assert [name for name in without if name in imported] == []


def test_the_garbage_collector_is_on_for_commands() -> None:
    """Garbage collection is off during imports only; a command may run for hours."""
    code = _SHOW.replace('" ".join(sys.modules)', 'str(__import__("gc").get_threshold()[0])')
    command = [sys.executable, "-c", code, "health", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert int(done.stderr.partition("imported: ")[2]) <= 20_000


# Both outputs go to a pipe without a reader.
UNREAD = ">&3 2>&3"


def _ovms(redirections: str, *arguments: str) -> subprocess.Popen[str]:
    command = ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, "-m", "ovmstrio.cli", *arguments]
    null = subprocess.DEVNULL
    if redirections != UNREAD:
        return subprocess.Popen(command, env=environment(), stdin=null, stdout=null, stderr=null, text=True)
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.Popen(command[4:], env=environment(), stdin=null, stdout=writer, stderr=writer, text=True)
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    "redirections",
    [
        "<&- >&- 2>&-",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("2>&-", ">/dev/full 2>/dev/full", "2>/dev/full", ">&- 2>/dev/full", UNREAD)
        ),
    ],
)
def test_a_server_without_usable_standard_streams_logs_to_its_file(redirections: str, tmp_path: Path) -> None:
    grpc, rest = free_ports(2)
    log, config = tmp_path / "server.log", tmp_path / "config.json"
    config.write_text('{"model_config_list": []}')
    process = _ovms(
        redirections, "serve", "--port", str(grpc), "--rest_port", str(rest), "--config_path", str(config),
        "--allow_empty", "--log_path", str(log), "--log_format", "json", "--grpc_workers", "4",
    )  # fmt: skip
    server = OvmsProcess(process, grpc, rest)
    try:
        server.wait_ready()
        streams = [str(Path(f"/proc/{process.pid}/fd/{number}").readlink()) for number in range(3)]
        assert all(stream.startswith(("/dev/", "pipe:")) for stream in streams)
        assert server.stop()[0] == 0
    finally:
        process.kill()
        process.wait()
    lines = log.read_text().splitlines()
    assert any("grpc-workers" in line for line in lines)
    assert all(isinstance(json.loads(line), dict) for line in lines)
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize("redirections", ["2>&-", ">/dev/full 2>/dev/full"])
def test_a_failed_start_without_standard_error_has_an_exit_code_and_a_log_file(
    redirections: str, tmp_path: Path
) -> None:
    log, config = tmp_path / "server.log", tmp_path / "missing.json"
    process = _ovms(redirections, "serve", "--config_path", str(config), "--log_path", str(log))
    assert process.wait(60) == 1
    (line,) = log.read_text().splitlines()
    assert "[error" in line
    assert f"{config}: the file cannot be read" in line
    # Scripts distinguish a wrong option from a failed start.
    assert _ovms(redirections, "serve", "--no_such_option", "1").wait(60) == 64


def test_a_log_file_on_a_full_disk_prints_no_traceback(tmp_path: Path) -> None:
    options = ["--config_path", str(tmp_path / "no.json"), "--log_path", "/dev/full"]
    command = [sys.executable, "-m", "ovmstrio.cli", "serve", *options]
    done = subprocess.run(command, check=False, capture_output=True, env=environment(), text=True, timeout=60)
    assert done.returncode == 1
    assert "no.json: the file cannot be read" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments", [("--version",), ("infer", "--help"), ("--list-models", "--model-repository-path", ".")]
)
@pytest.mark.parametrize(
    ("place", "message"),
    [("/dev/full", "error: standard output: No space left on device\n"), ("a pipe without a reader", "")],
)
def test_results_that_cannot_be_written_are_one_line_and_an_exit_code(
    arguments: tuple[str, ...], place: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "model" / "1").mkdir(parents=True)
    (tmp_path / "model" / "1" / "model.xml").touch()
    if place.startswith("/"):
        output = os.open(place, os.O_WRONLY)
    else:
        reader, output = os.pipe()
        os.close(reader)
    try:
        command = [sys.executable, "-m", "ovmstrio.cli", *arguments]
        done = subprocess.run(
            command, check=False, cwd=tmp_path, stdout=output, stderr=subprocess.PIPE, env=environment(), text=True,
            timeout=60,
        )  # fmt: skip
    finally:
        os.close(output)
    assert (done.returncode, done.stderr) == (1, message)


_IN_A_NURSERY = """
import sys, trio
import ovmstrio.cli.main
from ovmstrio.cli.entry import main

async def write():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        sys.stdout.write("one\\n" * 100_000)

ovmstrio.cli.main.main = lambda: trio.run(write)
main()
"""


def test_results_of_a_task_that_cannot_be_written_are_one_line_and_an_exit_code() -> None:
    with Path("/dev/full").open("w") as output:
        command = [sys.executable, "-c", _IN_A_NURSERY]
        done = subprocess.run(
            command, check=False, stdout=output, stderr=subprocess.PIPE, env=environment(), text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (1, "error: standard output: No space left on device\n")


run = partial(run_command, "paddle", "stop")

STUBBORN = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); input()"


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SERVING_HOME", raising=False)


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    _note(process.pid)
    yield process
    process.kill()
    process.communicate()


def _note(pid: int) -> None:
    with record_process([9998, 18082]) as file:
        entry: dict[str, Any] = json.loads(file.read_text())[0]
    file.write_text(json.dumps([{**entry, "pid": pid, "start_time": entry["start_time"] + 5, "began": None}]))


def test_stop_ends_the_service_of_a_port(server: subprocess.Popen[bytes]) -> None:
    other = run("--port", "1")
    assert other.exit_code == 1
    assert "no running service of port 1 found" in " ".join(other.stderr.split())
    late = run("--port", "9998", "--timeout", "0.1")
    assert late.exit_code == 1
    message = " ".join(late.stderr.split())
    assert f"process {server.pid} (ports 9998, 18082) did not end within 0.1 s; --kill ends it at once" in message
    killed = run("--kill")
    assert killed.exit_code == 0, killed.output
    assert f"ended process {server.pid} (ports 9998, 18082)" in " ".join(killed.stdout.split())
    assert server.wait(60) == -9


def test_stop_interrupts_the_service_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stderr=subprocess.DEVNULL) as process:
        _note(process.pid)
        monkeypatch.chdir(elsewhere)
        assert run(str(tmp_path)).exit_code == 0
        assert process.wait(60) != 0


def test_stop_without_a_service_fails(tmp_path: Path) -> None:
    assert run().exit_code == 1
    assert str(tmp_path) in run().stderr.replace("\n", "")
    assert run("nowhere").exit_code == 64
    (tmp_path / FILE_NAME).write_text("[]")
    assert run().exit_code == 1


PATIENCE_SECONDS = 300
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")


def _configuration(folder: Path, **settings: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_config_list": [{"config": {"name": "m", "base_path": "m", **settings}}]}))
    return path


@needs_ray
def test_deploy_writes_a_file_with_absolute_paths_for_the_commands_of_ray(tmp_path: Path) -> None:
    config, output = tmp_path / "current.json", tmp_path / "serve.yaml"
    config.symlink_to(_configuration(tmp_path))
    settings = {"hide_errors": "true", "cache_dir": "kept", "server_name": "kept"}
    options = [text for name, value in settings.items() for text in ("--setting", f"{name}={value}")]
    done = run_ovms("deploy", "ray", str(config), "--output", str(output), *options, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    document = yaml.safe_load(output.read_text())
    (application,) = document["applications"]
    assert application["import_path"] == "ovmstrio.cluster.ray.application:application"
    settings["cache_dir"] = str(Path.cwd() / "kept")
    assert application["args"] == {"config": str(config), "settings": settings, "ingress": {}}
    assert document["grpc_options"]["grpc_servicer_functions"] == ["ovmstrio.cluster.ray.grpc_services.add_services"]


@needs_ray
@pytest.mark.parametrize(
    ("settings", "options", "code", "reason"),
    [
        (
            {"stateful": True, "placement": {"autoscaling": {"max_replicas": 2}}},
            (),
            1,
            '"m" has sequences, which require a fixed number of replicas',
        ),
        ({}, ("--setting", "rest_port=1"), 1, "settings not supported in a replica: rest_port"),
        ({}, ("--address", "127.0.0.1:{free}"), 2, "no cluster at 127.0.0.1:{free}: "),
    ],
    ids=["sequences", "setting of a server", "no cluster"],
)
def test_a_deployment_that_cannot_work_is_refused(
    tmp_path: Path, settings: dict[str, object], options: tuple[str, ...], code: int, reason: str
) -> None:
    (free,) = free_ports(1)
    config = str(_configuration(tmp_path, **settings))
    arguments = [option.format(free=free) for option in options]
    done = run_ovms("deploy", "ray", config, *arguments, timeout=PATIENCE_SECONDS)
    assert done.returncode == code, done.stderr
    assert reason.format(free=free) in done.stdout + done.stderr
