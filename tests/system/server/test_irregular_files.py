from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support import ir
from tests.support.commands import run_command
from tests.support.ports import free_ports
from tests.support.processes import environment, run_ovms, serving
from tests.support.served_in_thread import serving_in_thread
from tests.support.system_servers import write_config
from tests.support.waits import WAIT_SECONDS, until


def _run_ovms(*arguments: str) -> tuple[int, str]:
    ended = run_command(*arguments)
    return ended.exit_code, " ".join(ended.output.split())


def _config(folder: Path) -> Path:
    return write_config(folder, {"name": "m", "base_path": str(ir.save(ir.dummy(), folder / "repository", "m"))})


def _make_fifo(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("option", ["config_path", "keys_file", "api_key_file", "jwks_file", "tls_cert", "log_path"])
def test_server_refuses_a_fifo_as_option_file(tmp_path: Path, option: str) -> None:
    fifo = _make_fifo(tmp_path / "fifo")
    options = {"config_path": str(_config(tmp_path)), option: str(fifo)}
    more = {"tls_cert": {"tls_key": str(fifo)}, "jwks_file": {"jwt_audience": "a"}}.get(option, {})
    (port,) = free_ports(1)
    arguments = [f"--{name}={value}" for name, value in (options | more).items()]
    code, output = _run_ovms("serve", "--rest_port", str(port), "--crash_probe", "off", *arguments)
    assert code == 1, output
    assert str(fifo) in output
    assert "a FIFO" in output


def test_configuration_larger_than_the_limit_is_refused(tmp_path: Path) -> None:
    config = _config(tmp_path)
    os.truncate(config, 10**12)
    code, output = _run_ovms("check", str(config))
    assert code == 1
    assert "expected at most 67108864 bytes, got 1000000000000" in output


def _link_device(path: Path) -> Path:
    path.unlink()
    path.symlink_to("/dev/zero")
    return path


@pytest.mark.parametrize("replace", [_make_fifo, _link_device])
def test_configuration_replaced_by_a_fifo_or_device_changes_nothing(
    tmp_path: Path, replace: Callable[[Path], Path]
) -> None:
    log = tmp_path / "log"
    config = _config(tmp_path)
    with serving(f"--config_path={config}", "--file_system_poll_wait_seconds=1", log=log) as server:
        replace(config)

        answer = httpx.post(f"{server.rest}/v1/config/reload", timeout=WAIT_SECONDS)

        assert not answer.is_success
        assert server.get("/v2/models/m/ready").is_success
        until(lambda: "expected a regular file" in server.printed_so_far(), why=server.printed_so_far)
        code, _ = server.stop()
    assert code == 0


@pytest.mark.parametrize("name", ["m.xml", "m.bin", "labels.txt", "mapping_config.json", "other"])
def test_fifo_in_a_version_directory_is_a_load_error(tmp_path: Path, name: str) -> None:
    base = ir.save(ir.dummy(), tmp_path, "m")
    (version,) = base.iterdir()
    for file in version.iterdir():
        file.rename(version / f"m{file.suffix}")
    _make_fifo(version / name)
    code, output = _run_ovms("check", str(base))
    assert code == 1
    assert str(version / name) in output
    assert "not a regular file expected a regular file found a FIFO" in output


def test_graph_file_that_is_a_fifo_is_a_load_error(tmp_path: Path) -> None:
    _make_fifo(tmp_path / "graph.pbtxt")
    config = write_config(tmp_path, mediapipe_config_list=[{"name": "g", "base_path": str(tmp_path)}])
    with serving_in_thread(config_path=config) as server:
        assert not server.ask("GET", "/v2/models/g/ready").is_success


@contextlib.contextmanager
def _reading(fifo: Path) -> Iterator[list[str]]:
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(fifo.read_text().splitlines()))
    reader.start()
    yield lines
    reader.join(WAIT_SECONDS)
    assert not reader.is_alive()


def test_log_file_may_be_a_fifo_that_is_read(tmp_path: Path) -> None:
    fifo = _make_fifo(tmp_path / "log")
    with (
        _reading(fifo) as lines,
        serving(f"--config_path={_config(tmp_path)}", f"--log_path={fifo}", "--log_format=json") as server,
    ):
        assert server.stop()[0] == 0
    assert [json.loads(line)["event"] for line in lines].count("drained") == 1


@contextlib.contextmanager
def _full_fifo(path: Path) -> Iterator[Path]:
    """Make a FIFO with a reader that does not read, and without room."""
    fifo = _make_fifo(path)
    reader = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    try:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(reader, bytes(4096))
        yield fifo
    finally:
        os.close(reader)


@pytest.mark.parametrize("options", [(), ("--grpc_workers=3", "--log_format=json")])
def test_full_fifo_as_log_file_does_not_block_the_end_of_the_server(tmp_path: Path, options: tuple[str, ...]) -> None:
    with (
        _full_fifo(tmp_path / "log") as fifo,
        serving(f"--config_path={_config(tmp_path)}", f"--log_path={fifo}", *options) as server,
    ):
        code, output = server.stop()
    assert code == 0
    assert "drained" in output


def test_full_fifo_as_log_file_does_not_block_a_start_that_fails(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_config_list": 5}')
    with _full_fifo(tmp_path / "log") as fifo:
        ended = run_ovms("serve", str(tmp_path / "config.json"), f"--log_path={fifo}")
    assert (ended.returncode, "expected a list, found 5" in ended.stderr) == (1, True)


@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/stderr", "/dev/null", "link"])
def test_log_file_may_be_a_stream_or_a_device(tmp_path: Path, path: str) -> None:
    link = tmp_path / "link"
    link.symlink_to("/dev/stdout")
    config = _config(tmp_path)
    with serving(f"--config_path={config}", f"--log_path={tmp_path / path}", "--log_format=json") as server:
        code, output = server.stop()
    assert code == 0
    assert output.count('"event": "drained"') == (1 if path == "/dev/null" else 2)


def test_log_file_replaced_by_a_fifo_does_not_block_the_end_of_the_server(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(f"--config_path={_config(tmp_path)}", f"--log_path={log}") as server:
        kept = log.rename(tmp_path / "kept")
        _make_fifo(log)
        code, _ = server.stop()
    assert code == 0
    assert "drained" in kept.read_text()


_STUCK = """
import signal, sys
from functools import partial
from pathlib import Path
import trio
from ovmstrio.server.end_watchdog import SHUTDOWN_WATCHDOG
from ovmstrio.workers.serve import serve_in_processes
from ovmstrio.server.plan import read_plan
from ovmstrio.server.settings import ServerSettings

config, fifo, where, port = sys.argv[1:]
SHUTDOWN_WATCHDOG.enable = partial(SHUTDOWN_WATCHDOG.enable, margin_seconds=0.5)

async def show(running):
    signal.raise_signal(signal.SIGTERM)
    if where == "thread":
        await trio.to_thread.run_sync(open, fifo)
    open(fifo)

async def main():
    settings = ServerSettings(config_path=Path(config), rest_port=int(port), drain_seconds=0, crash_probe="off")
    await serve_in_processes(await read_plan(settings), show=show)

trio.run(main)
"""

_STUCK_AT_EXIT = """
import sys, threading
from ovmstrio.cli.entry import main
from ovmstrio.server.end_watchdog import SHUTDOWN_WATCHDOG

SHUTDOWN_WATCHDOG.enable(0, margin_seconds=0.5)
threading.Thread(target=open, args=(sys.argv[2],)).start()
sys.argv[1:] = ["--version"]
main()
"""


@pytest.mark.parametrize(
    ("program", "where", "shown"),
    [(_STUCK, "thread", "_threads.py"), (_STUCK, "loop", "in show"), (_STUCK_AT_EXIT, "exit", "threading.py")],
)
def test_server_with_a_stuck_thread_ends_and_dumps_its_stacks(
    tmp_path: Path, program: str, where: str, shown: str
) -> None:
    fifo = _make_fifo(tmp_path / "fifo")
    (port,) = free_ports(1)
    ended = subprocess.run(
        [sys.executable, "-c", program, str(_config(tmp_path)), str(fifo), where, str(port)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert ended.returncode == 1
    assert "Timeout (0:00:00.500000)!" in ended.stderr
    assert shown in ended.stderr
