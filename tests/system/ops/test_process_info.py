from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ovmstrio.runtimes.ops.process_info import FILE_NAME, home, list_processes, record_process, signal_processes


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_server_is_in_the_file_while_it_runs(tmp_path: Path) -> None:
    with record_process([9998, 18082], tmp_path) as file:
        (entry,) = json.loads(file.read_text())
        assert (entry["pid"], entry["port"], entry["model"]) == (os.getpid(), [9998, 18082], "pipline")
        assert entry["start_time"] > 0
        assert [each.is_ours for each in list_processes(tmp_path)] == [True]
    assert list_processes(tmp_path) == []


def test_servers_share_the_file(tmp_path: Path) -> None:
    dead = {"pid": 2**22, "port": [1], "model": "pipline", "start_time": 1.0}
    (tmp_path / FILE_NAME).write_text(json.dumps([dead, "rubbish", {"pid": "x"}]))
    with record_process([1001], tmp_path), record_process([1002], tmp_path):
        assert [each.port for each in list_processes(tmp_path)] == [[1001], [1002]]
        with record_process([1001], tmp_path):
            assert [each.port for each in list_processes(tmp_path)] == [[1002], [1001]]


def test_a_process_with_another_start_time_is_not_signalled(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    with record_process([1001], tmp_path) as file:
        (entry,) = json.loads(file.read_text())
    stat = {"pid": other.pid, "model": "pipline"}
    began_earlier = {**stat, "port": [1002], "start_time": entry["start_time"] - 1000}
    file.write_text(json.dumps([began_earlier, {**stat, "port": [1003], "start_time": entry["start_time"] + 5}]))
    sent, stale = signal_processes(signal.SIGINT, 1002, tmp_path)
    assert (sent, [each.pid for each in stale]) == ([], [other.pid])
    sent, stale = signal_processes(signal.SIGKILL, 1003, tmp_path)
    assert ([each.pid for each in sent], stale) == ([other.pid], [])
    assert other.wait(10) == -signal.SIGKILL
    assert signal_processes(signal.SIGINT, 1004, tmp_path) == ([], [])


@pytest.mark.parametrize("text", [None, "", "rubbish", "{}"], ids=["missing", "empty", "no JSON", "no list"])
def test_a_file_without_entries_names_no_process(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / FILE_NAME).write_text(text)
    assert list_processes(tmp_path) == []


def test_serving_home_names_the_folder_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SERVING_HOME", raising=False)
    assert home() == tmp_path
    monkeypatch.setenv("SERVING_HOME", str(tmp_path / "there"))
    with record_process([1001]) as file:
        assert file == tmp_path / "there" / FILE_NAME
