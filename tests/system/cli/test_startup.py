from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.support import ir
from tests.support.commands import on_terminal, piped
from tests.support.graphs import graph_text, python_node
from tests.support.ports import free_ports

_SLOW_NODE = """
import pathlib, time

while not pathlib.Path(__file__).with_name("go").exists():
    time.sleep(0.05)


class OvmsPythonModel:
    def execute(self, inputs):
        return inputs
"""
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LINKED = re.compile(r"\x1b\]8;[^;]*;([^\x1b]+)\x1b\\([^\x1b]*(?:\x1b\[[0-9;]*m[^\x1b]*)*)\x1b\]8;;\x1b\\")


@pytest.fixture
def ports() -> tuple[int, int]:
    grpc, rest = free_ports(2)
    return grpc, rest


def _options(ports: tuple[int, int]) -> list[str]:
    local = ("--grpc_bind_address", "127.0.0.1", "--rest_bind_address", "127.0.0.1", "--crash_probe", "off")
    return ["--port", str(ports[0]), "--rest_port", str(ports[1]), *local]


def test_a_terminal_shows_links_places_and_a_command_to_try(tmp_path: Path, ports: tuple[int, int]) -> None:
    folder = ir.save(ir.dummy((1, 4)), tmp_path, "mine")
    with on_terminal("serve", "--model_name", "mine", "--model_path", str(folder), *_options(ports)) as command:
        command.wait_for("try ")
        command.wait_for(f"localhost:{ports[1]}", times=7)
        (tried,) = re.findall(r"^try +(\S.*?)\r?$", _CODES.sub("", command.shown), re.MULTILINE)
        arguments = shlex.split(tried)
        with piped(*arguments[arguments.index("infer") :], "--json") as call:
            answer = json.loads(call.stdout.read())
            assert call.end() == (0, "")
        command.interrupt()
        assert command.end() == 0
    base = f"http://localhost:{ports[1]}"
    links = {target: _CODES.sub("", text) for target, text in _LINKED.findall(command.shown)}
    assert links == {f"{base}{path}": f"{base}{path}" for path in ("/console", "/v2/docs", "/metrics")}
    lines = [line.strip(" │\r") for line in _CODES.sub("", command.shown).split("\n")]
    (row,) = [line.split() for line in lines if line.startswith("mine ") and "AVAILABLE" in line]
    assert row[:5] == ["mine", "model", "1", "AVAILABLE", "CPU"]
    assert f"gRPC     127.0.0.1:{ports[0]}" in lines
    assert tried.endswith(f"infer mine '[[0, 0, 0, 0]]' --url {base}")
    assert answer == {"a": [[1, 1, 1, 1]]}


def test_a_terminal_shows_the_step_of_a_service_that_loads(tmp_path: Path, ports: tuple[int, int]) -> None:
    (tmp_path / "node.py").write_text(_SLOW_NODE)
    (tmp_path / "graph.pbtxt").write_text(graph_text(python_node("node.py")))
    with on_terminal("serve", "--model_name", "slow", "--model_path", str(tmp_path), *_options(ports)) as command:
        command.wait_for("slow: loading")
        command.wait_for("0:00:01")
        (tmp_path / "go").touch()
        command.wait_for("AVAILABLE")
        command.wait_for("ready")
        command.interrupt()
        assert command.end() == 0
    (row,) = [line for line in _CODES.sub("", command.shown).split("\n") if "AVAILABLE" in line]
    assert row.strip("│\r ").split()[:5] == ["slow", "graph", "1", "AVAILABLE", "threads"]


def test_a_pipe_gets_one_line_for_each_service_and_no_links(tmp_path: Path, ports: tuple[int, int]) -> None:
    folder = ir.save(ir.dummy((1, 4)), tmp_path, "mine")
    with piped("serve", "--model_name", "mine", "--model_path", str(folder), *_options(ports)) as command:
        lines: list[str] = []
        while not lines or not lines[-1].startswith("ready after"):
            lines.append(command.stderr.readline())
            assert lines[-1]
        command.interrupt()
        assert command.end()[0] == 0
    assert "\x1b" not in "".join(lines)
    assert [line.split()[:3] for line in lines if line.startswith("mine ")] == [["mine", "1", "AVAILABLE"]]
