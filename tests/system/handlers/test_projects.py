"""``ovms serve PROJECT`` as a user runs it: environment, readiness, logs, processes, limits and the end."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import ssl
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from tests.support.project_processes import serving_project
from tests.support.projects import write_project

pytestmark = pytest.mark.e2e

PLAIN = """
import os
import threading
import time
from pathlib import Path

from cortex_internal.lib.log import logger
import sibling
import elsewhere

SEEN = {name: os.environ.get(name) for name in ("A", "B", "C", "CORTEX_PROCESSES")}

class Handler:
    def __init__(self, config):
        self.thread = threading.get_ident()
        logger.info("made", extra={"config": config, "object": object()})

    def handle_get(self, query_params):
        if "die" in query_params:
            os.kill(os.getpid(), 9)
        if "wait" in query_params:
            Path(query_params["wait"]).mkdir(parents=True, exist_ok=True)
            (Path(query_params["wait"]) / str(time.time_ns())).touch()
            while not Path(query_params["until"]).exists():
                time.sleep(0.01)
        return {"seen": SEEN, "cwd": os.getcwd(), "sibling": sibling.NAME, "elsewhere": elsewhere.NAME,
                "same_thread": threading.get_ident() == self.thread, "pid": os.getpid()}

    def handle_post(self, payload):
        raise ValueError("a secret")
"""

ONE_AND_MORE = pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
"""For what both start alike, more than one for seconds."""

BROKEN = """
class Handler:
    def __init__(self):
        raise ValueError("no luck")

    def handle_get(self):
        return 1
"""


def _project(folder: Path, code: str = PLAIN, **keys: object) -> Path:
    file = write_project(folder / "project", code, python_path="lib", **keys)
    (file.parent / "sibling.py").write_text("NAME = 'sibling'")
    (file.parent / "lib").mkdir(exist_ok=True)
    (file.parent / "lib" / "elsewhere.py").write_text("NAME = 'elsewhere'")
    return file


def _wait_files(folder: Path, count: int) -> None:
    for _ in range(2000):
        if folder.is_dir() and len(list(folder.iterdir())) >= count:
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"{folder} has not {count} files")


def test_a_handler_finds_its_environment(tmp_path: Path) -> None:
    """What ``env`` and ``.env`` export is there at its import, its folder is the working one, and modules are found."""
    file = _project(tmp_path, env={"A": 1, "B": "b"})
    (file.parent / ".env").write_text("B=changed\nC='see'\n")
    with serving_project(file.parent) as server:
        answer = server.ask().json()
        assert server.stop() == 0
    assert answer.pop("pid") == server.process.pid
    assert answer == {
        "seen": {"A": "1", "B": "changed", "C": "see", "CORTEX_PROCESSES": "1"},
        "cwd": str(file.parent),
        "sibling": "sibling",
        "elsewhere": "elsewhere",
        "same_thread": True,
    }


def test_the_log_is_json_with_a_line_for_each_answer(tmp_path: Path) -> None:
    """Every line has the four keys; what is extra is beside them; an error is one line with its traceback."""
    with serving_project(_project(tmp_path)) as server:
        assert server.ask(path="/?a=1").status_code == 200
        answer = server.ask("POST", json=1)
        assert (answer.status_code, answer.text) == (500, "internal server error")
        assert server.ask(path="/elsewhere").status_code == 404
        assert server.stop() == 0
        lines = server.log()
    assert len(lines) == len(server.lines)
    assert all(list(line)[:4] == ["asctime", "levelname", "message", "process"] for line in lines)
    made = next(line for line in lines if line["message"] == "made")
    assert made["config"] == {}
    assert made["object"].startswith("<object object")
    seen = [(line["method"], line["path"], line["status_code"]) for line in lines if "status_code" in line]
    assert seen == [
        ("GET", "/", "200 OK"),
        ("POST", "/", "500 Internal Server Error"),
        ("GET", "/elsewhere", "404 Not Found"),
    ]
    (error,) = [line for line in lines if line["levelname"] == "ERROR"]
    assert "ValueError: a secret" in error["exc_info"]
    access = next(line for line in lines if line.get("status_code", "").startswith("500"))
    assert error["request_id"] == access["request_id"] == answer.headers["x-request-id"]


def test_debug_tells_callers_what_was_raised(tmp_path: Path) -> None:
    """As whoever writes a handler wants it."""
    with serving_project(_project(tmp_path), "--debug") as server:
        assert "ValueError: a secret" in server.ask("POST", json=1).text


def test_a_constructor_that_fails_ends_the_server(tmp_path: Path) -> None:
    """With exit code 1 and the reason in the log, and it was never ready."""
    file = _project(tmp_path, BROKEN)
    with serving_project(file, ready=False) as server:
        assert server.wait_end() == 1
        errors = {line["message"]: line for line in server.log() if line["levelname"] == "ERROR"}
        assert "ValueError: no luck" in errors["a handler raised"]["exc_info"]
        assert "handler.py:4: the constructor of the handler failed" in errors["failed to start api"]["reason"]
        assert not server.readiness_file.exists()


@ONE_AND_MORE
def test_it_is_ready_when_the_constructor_is_done_and_not_any_more_when_it_ends(tmp_path: Path, processes: int) -> None:
    """The file is removed before the listener closes, and requests in flight are answered."""
    started, go = tmp_path / "started", tmp_path / "go"
    slow = PLAIN.replace(
        "        self.thread =",
        f"        Path({str(started)!r}).mkdir(exist_ok=True); (Path({str(started)!r}) / 'x').touch()\n"
        f"        while not Path({str(go)!r}).exists(): time.sleep(0.01)\n        self.thread =",
    )
    waiting, until = tmp_path / "waiting", tmp_path / "until"
    file = _project(tmp_path, slow, processes=processes)
    with serving_project(file, "--drain_delay", "1", ready=False) as server:
        _wait_files(started, 1)
        assert not server.readiness_file.exists()
        go.touch()
        server.wait_serving()
        assert server.readiness_file.exists()
        assert server.ask(path="/v2/health/ready").status_code == 200
        with concurrent.futures.ThreadPoolExecutor() as pool:
            asked = pool.submit(server.ask, path=f"/?wait={waiting}&until={until}")
            _wait_files(waiting, 1)
            server.process.send_signal(signal.SIGTERM)
            server.wait_file(exists=False)
            # Within the delay the listener is still open, and the health says what the file says.
            assert server.ask(path="/v2/health/ready").status_code == 503
            server.wait_logged(lambda line: line["message"] == "draining")
            until.touch()
            assert asked.result().status_code == 200
        assert server.wait_end() == 0


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """Whatever is in flight."""
    waiting, never = tmp_path / "waiting", tmp_path / "until"
    with serving_project(_project(tmp_path)) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        asked = pool.submit(server.ask, path=f"/?wait={waiting}&until={never}")
        _wait_files(waiting, 1)
        server.process.send_signal(signal.SIGTERM)
        server.wait_logged(lambda line: line["message"] == "draining")
        server.process.send_signal(signal.SIGTERM)
        server.wait_logged(lambda line: line["message"] == "stopping at once")
        with pytest.raises(httpx.TransportError):
            asked.result()
        never.touch()
        server.wait_end()


def test_processes_and_threads_are_what_runs_at_once(tmp_path: Path) -> None:
    """Of five requests to two processes with two threads, four begin, and the fifth when one has ended."""
    waiting, until = tmp_path / "waiting", tmp_path / "until"
    file = _project(tmp_path, processes=2, threads_per_process=2)
    with serving_project(file) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        asked = [pool.submit(server.ask, path=f"/?wait={waiting}&until={until}") for _ in range(5)]
        _wait_files(waiting, 4)
        assert server.ask(path="/info").status_code == 200
        assert len(list(waiting.iterdir())) == 4
        until.touch()
        pids = {each.result().json()["pid"] for each in asked}
        assert len(pids) == 2
        assert server.process.pid not in pids
        assert len(list(waiting.iterdir())) == 5
        assert server.stop() == 0


@ONE_AND_MORE
def test_one_limit_holds_for_all_processes(tmp_path: Path, processes: int) -> None:
    """What is beyond it is refused at once; ends of every kind make room, that of a process too."""
    until = tmp_path / "until"
    file = _project(tmp_path, processes=processes, threads_per_process=1, max_concurrency=2)
    with serving_project(file) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = tmp_path / "waiting"
        asked = [pool.submit(server.ask, path=f"/?wait={waiting}&until={until}") for _ in range(3)]
        refused = next(concurrent.futures.as_completed(asked)).result()
        until.touch()
        assert refused.status_code == 503
        assert sorted(each.result().status_code for each in asked) == [200, 200, 503]
        assert server.ask("POST", json=1).status_code == 500
        if processes > 1:
            assert server.ask(path="/?die=1").status_code == 500
            server.wait_file(exists=True)
        assert [server.ask().status_code for _ in range(4)] == [200] * 4


def _until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come about in time")


@pytest.mark.slow
def test_a_process_that_dies_is_started_again(tmp_path: Path) -> None:
    """The log names its signal, the others serve meanwhile, so that the file stays, and health tells the truth."""
    file = _project(tmp_path, processes=2)
    with serving_project(file) as server:
        answer = server.ask(path="/?die=1")
        assert (answer.status_code, answer.json()) == (
            500,
            {"error": "the process that ran this call ended by SIGKILL"},
        )
        line = server.wait_logged(lambda line: line["message"] == "a worker process has ended")
        assert (line["signal"], line["requests_lost"], line["levelname"]) == ("SIGKILL", 1, "ERROR")
        assert server.ask().status_code == 200
        assert server.readiness_file.exists()
        server.wait_logged(lambda line: line["message"] == "made", count=3)
        _until(lambda: server.ask(path="/v2/health/ready").status_code == 200)
        pids: set[int] = set()

        def both_answer() -> bool:
            pids.add(server.ask().json()["pid"])
            return len(pids) > 1

        _until(both_answer)
        assert line["pid"] not in pids
        assert server.stop() == 0


@pytest.mark.slow
def test_a_process_that_keeps_dying_is_started_ever_later(tmp_path: Path) -> None:
    """It is not ready meanwhile, but the other one serves, so that the file stays, and all is well once it lives."""
    broken = tmp_path / "broken"
    code = PLAIN.replace(
        "        self.thread =",
        f"        if Path({str(broken)!r}).exists(): os.kill(os.getpid(), 11)\n        self.thread =",
    )
    with serving_project(_project(tmp_path, code, processes=2)) as server:
        broken.touch()
        answer = server.ask(path="/?die=1")
        assert (answer.status_code, answer.json()) == (
            500,
            {"error": "the process that ran this call ended by SIGKILL"},
        )
        server.wait_logged(lambda line: line["message"] == "starting another worker process", count=3)
        ends = [line for line in server.log() if line["message"] == "a worker process has ended"]
        pauses = [line["seconds"] for line in server.log() if line["message"] == "starting another worker process"]
        assert [line["signal"] for line in ends[:3]] == ["SIGKILL", "SIGSEGV", "SIGSEGV"]
        assert pauses[:3] == [0.25, 0.5, 1.0]
        assert server.readiness_file.exists()
        assert server.ask(path="/v2/health/ready").status_code == 503
        assert server.ask().status_code == 200
        broken.unlink()
        _until(lambda: server.ask(path="/v2/health/ready").status_code == 200)
        assert server.stop() == 0


@pytest.mark.slow
def test_a_server_without_living_processes_ends_all_the_same(tmp_path: Path) -> None:
    """Those who wait for one are told by the end of their connection; a file that was changed meanwhile matters not."""
    broken = tmp_path / "broken"
    code = PLAIN.replace(
        "        self.thread =", f"        assert not Path({str(broken)!r}).exists()\n        self.thread ="
    )
    file = _project(tmp_path, code, processes=2)
    with serving_project(file) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        file.write_text(file.read_text().replace("processes: 2", "processes: 3"))
        answer = server.ask(path="/?die=1")
        assert (answer.status_code, answer.json()) == (
            500,
            {"error": "the process that ran this call ended by SIGKILL"},
        )
        server.wait_logged(lambda line: line["message"] == "made", count=3)
        _until(lambda: server.ask(path="/v2/health/ready").status_code == 200)
        broken.touch()
        for _ in range(2):
            assert server.ask(path="/?die=1").status_code == 500
        asked = pool.submit(server.ask)
        server.wait_logged(lambda line: line.get("exit_code") == 1, count=2)
        assert server.stop() == 0
        with pytest.raises(httpx.TransportError):
            asked.result()


@ONE_AND_MORE
def test_a_project_is_served_over_tls(tmp_path: Path, processes: int) -> None:
    """A connection goes to its process before the handshake; clients without a certificate get nowhere if need be."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    key, chain, ca = tmp_path / "key.pem", tmp_path / "chain.pem", tmp_path / "ca.pem"
    certificate.private_key_pem.write_to_path(key)
    chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    authority.cert_pem.write_to_path(ca)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    stranger = ssl.create_default_context()
    authority.configure_trust(stranger)
    authority.issue_cert("client@localhost").configure_cert(context)
    file = _project(tmp_path, processes=processes, max_concurrency=1)
    with (
        serving_project(file, "--tls_cert", str(chain), "--tls_key", str(key), "--client_ca", str(ca)) as server,
        httpx.Client(base_url=f"https://{server.address}", verify=context, trust_env=False) as client,
    ):
        pids = {client.get("/").json()["pid"]}
        assert client.get("/info").json() == {}
        pids |= {httpx.get(f"https://{server.address}", verify=context, trust_env=False).json()["pid"] for _ in "abcd"}
        assert len(pids) == processes
        with pytest.raises(httpx.TransportError):
            httpx.get(f"https://{server.address}", verify=stranger, trust_env=False)
        with pytest.raises(httpx.TransportError):
            server.ask()
        assert client.get("/").status_code == 200
        assert server.stop() == 0


@ONE_AND_MORE
def test_a_port_that_is_in_use_is_told(tmp_path: Path, processes: int) -> None:
    """With the address, and what can be done."""
    with serving_project(_project(tmp_path / "first")) as first:
        port = first.address.rpartition(":")[2]
        file = _project(tmp_path / "second", processes=processes)
        with serving_project(file, "--port", port, ready=False) as second:
            assert second.wait_end() == 1
            (line,) = [line for line in second.log() if line["levelname"] == "ERROR"]
    assert f"127.0.0.1:{port}" in line["reason"]
    assert "--port" in line["reason"]


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    """Even if it had no time to tell them."""
    with serving_project(_project(tmp_path, processes=2)) as server:

        def made() -> list[int]:
            return [line["process"] for line in server.log() if line["message"] == "made"]

        _until(lambda: len(made()) == 2)
        pids = made()
        server.process.kill()
        server.wait_end()
        _until(lambda: not any(_is_alive(pid) for pid in pids))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # One that has ended stays in the table until whoever has taken it over looks.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@ONE_AND_MORE
def test_a_server_that_is_not_ready_ends_without_delay(tmp_path: Path, processes: int) -> None:
    """Whatever its constructor waits for, and without a word of errors."""
    started = tmp_path / "started"
    endless = PLAIN.replace(
        "        self.thread =",
        f"        Path({str(started)!r}).touch()\n        while True: time.sleep(0.01)\n        self.thread =",
    )
    with serving_project(_project(tmp_path, endless, processes=processes), ready=False) as server:
        _until(started.exists)
        server.process.send_signal(signal.SIGTERM)
        server.wait_end()
        assert [line["levelname"] for line in server.log() if line["levelname"] == "ERROR"] == []
        assert not any(line["message"] == "serving" for line in server.log())


@ONE_AND_MORE
def test_an_end_that_cuts_calls_is_an_exit_code(tmp_path: Path, processes: int) -> None:
    """When ``--drain_seconds`` are over; the log counts what was cut, and says nothing of a gentle end."""
    waiting, until = tmp_path / "waiting", tmp_path / "until"
    file = _project(tmp_path, processes=processes)
    with serving_project(file, "--drain_seconds", "0.2") as server, concurrent.futures.ThreadPoolExecutor() as pool:
        asked = pool.submit(server.ask, path=f"/?wait={waiting}&until={until}")
        _wait_files(waiting, 1)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.TransportError):
            asked.result()
        until.touch()
        assert server.wait_end() == 1
        (cut,) = [line for line in server.log() if line["message"] == "requests cut"]
        assert (cut["count"], cut["levelname"]) == (1, "WARNING")
        assert [line for line in server.log() if line["message"] == "drained" or line["levelname"] == "ERROR"] == []


@ONE_AND_MORE
def test_logs_are_of_the_form_that_is_asked_for(tmp_path: Path, processes: int) -> None:
    """By all processes."""
    path = tmp_path / "server.log"
    file = _project(tmp_path, processes=processes)
    options = ("--log_level", "DEBUG", "--log_format", "json", "--log_path", str(path))
    with serving_project(file, *options, ready=False) as server:
        server.wait_file(exists=True)
        assert server.ask().status_code == 200
        assert server.stop() == 0
    lines = list(map(json.loads, path.read_text().splitlines()))
    (request,) = [line for line in lines if line["event"] == "request"]
    assert (request["kind"], request["interface"], request["level"]) == ("handler", "REST", "debug")
    assert [line["event"] for line in lines if line["event"] in {"serving", "drained"}] == ["serving", "drained"]


def test_a_worker_that_cannot_start_ends_the_server(tmp_path: Path) -> None:
    """With exit code 1 and the reason in the log."""
    file = _project(tmp_path, BROKEN, processes=2)
    with serving_project(file, ready=False) as server:
        assert server.wait_end() == 1
        assert any("no luck" in str(line) for line in server.log())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--nireq", "4"], "--nireq: cannot be used with a project"),
        (["--tls_cert", "chain.pem"], "--tls_cert and --tls_key: each needs the other"),
        (["--drain_delay", "-1"], '--drain_delay: the value cannot be used (expected 0.0 or more, found "-1")'),
    ],
    ids=["of models", "half", "out of range"],
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options: list[str], text: str) -> None:
    """Those of models, too: a project has its own settings."""
    with serving_project(_project(tmp_path), *options, ready=False) as server:
        assert server.wait_end() == 64
        assert text in "".join(server.lines)


def test_a_project_that_is_wrong_is_told_whole(tmp_path: Path) -> None:
    """Every problem at once, and what is only doubtful apart from them."""
    file = write_project(tmp_path / "project", PLAIN, processes=0, threads_per_process="many", log_levl="info")
    with serving_project(file, ready=False) as server:
        assert server.wait_end() != 0
        text = "".join(server.lines)
    warnings, _, errors = text.partition("error:")
    assert "unknown key 'log_levl'" in warnings
    assert "processes" in errors
    assert "threads_per_process" in errors
    assert "log_levl" not in errors


def test_what_is_logged_changes_in_every_process(tmp_path: Path) -> None:
    """One process is told; another one logs its next call accordingly, lines of the handler's logger among them."""
    code = """
import os
from cortex_internal.lib.log import logger

class Handler:
    def handle_get(self):
        logger.debug("called")
        return {"pid": os.getpid()}
"""
    with serving_project(write_project(tmp_path / "project", code, processes=2)) as server:
        assert server.ask("POST", "/v2/logging", json={"log_verbose_level": 1}).json()["log_verbose_level"] == 1
        with httpx.Client(base_url=f"http://{server.address}", trust_env=False, timeout=20) as held:
            pids = {held.get("/").json()["pid"], server.ask().json()["pid"]}
            assert len(pids) == 2
            for wanted in [(pid, message) for pid in pids for message in ("request", "called")]:
                server.wait_logged(partial(_is_line, wanted))


def _is_line(wanted: tuple[int, str], line: dict[str, Any]) -> bool:
    return (line["process"], line["message"]) == wanted
