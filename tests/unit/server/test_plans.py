from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.server.command_line import UsageError, text_model
from ovmstrio.server.plan import Plan, plan_project, read_plan
from ovmstrio.server.settings import ServerSettings
from ovmstrio.server.start_failures import log_failures
from ovmstrio.telemetry.log_levels import LOG_LEVEL
from ovmstrio.workers.handoff import WorkerTask
from ovmstrio.workers.worker import _plan_of
from tests.support.projects import make_project

FILE = Path("file.pem")
HOST = {"grpc_bind_address": "h", "rest_bind_address": "h"}
PROTO = """
syntax = "proto3";
package talk;
message Text { string value = 1; }
service Talk { rpc Say (Text) returns (Text); }
"""


def _plan(folder: Path, options: dict[str, Any], **keys: Any) -> Plan:
    (folder / "talk.proto").write_text(PROTO)
    return plan_project(make_project(folder, "", **keys), options)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tls_cert": FILE}, "both are required"),
        ({"tls_key": FILE}, "both are required"),
        ({"client_ca": FILE}, "needs --tls-cert and --tls-key"),
        ({"port": 9000, "probe_port": 9000}, "--probe-port: port 9000 is in use by gRPC or REST"),
        ({"port": 65_536}, "--port: the value cannot be used .expected an integer of 0 to 65535, found 65536"),
        ({"drain_seconds": -1}, "--drain-seconds: the value cannot be used .expected a number of 0 or more, found -1"),
        ({"workers": "2"}, r"--workers.*nucleus\.yaml"),
    ],
)
def test_invalid_options_of_a_project_are_refused(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        _plan(tmp_path, options)


@pytest.mark.parametrize("client_ca", [None, FILE])
def test_project_may_have_tls(tmp_path: Path, client_ca: Path | None) -> None:
    settings = _plan(tmp_path, {"tls_cert": FILE, "tls_key": FILE, "client_ca": client_ca}).settings
    assert (settings.tls_cert, settings.tls_key, settings.client_ca) == (FILE, FILE, client_ca)


@pytest.mark.parametrize(
    ("protobuf_path", "options", "grpc", "rest"),
    [
        ("", {}, (), ("h:7",)),
        ("", {"port": 1}, (), ("h:1",)),
        ("", {"rest_port": 2}, (), ("h:2",)),
        ("", {"port": 1, "rest_port": 2}, ("h:1",), ("h:2",)),
        ("", {"port": 0}, (), ("h:0",)),
        ("", {"port": 0, "rest_port": 2}, (), ("h:2",)),
        ("", {"port": 1, "rest_port": 0}, ("h:1",), ("h:0",)),
        ("talk.proto", {}, ("h:7",), ()),
        ("talk.proto", {"port": 1}, ("h:1",), ()),
        ("talk.proto", {"rest_port": 2}, ("h:7",), ("h:2",)),
        ("talk.proto", {"port": 1, "rest_port": 2}, ("h:1",), ("h:2",)),
        ("talk.proto", {"port": 0}, ("h:0",), ()),
        ("talk.proto", {"port": 1, "rest_port": 0}, ("h:1",), ()),
    ],
)
def test_port_options_of_a_project_name_the_ports_of_its_protocols(
    tmp_path: Path, protobuf_path: str, options: dict[str, Any], grpc: tuple[str, ...], rest: tuple[str, ...]
) -> None:
    keys = {"protobuf_path": protobuf_path} if protobuf_path else {}
    plan = _plan(tmp_path, {**HOST, **options}, serve_port=7, **keys)
    assert (plan.grpc, plan.rest) == (grpc, rest)


def test_project_has_separate_defaults(tmp_path: Path) -> None:
    settings = _plan(tmp_path, {}).settings
    assert (settings.max_message_size, settings.file_system_poll_wait_seconds) == (2**31 - 1, 0)
    settings = _plan(tmp_path, {"max_message_size": 2048, "file_system_poll_wait_seconds": 2}).settings
    assert (settings.max_message_size, settings.file_system_poll_wait_seconds) == (2048, 2)


@pytest.mark.parametrize(("options", "max_queue"), [({}, 256), ({"max_queue": 3}, 3)])
def test_queue_option_applies_to_the_text_model_of_the_command_line(
    tmp_path: Path, options: dict[str, int], max_queue: int
) -> None:
    settings = ServerSettings(model_name="chat", model_path=tmp_path, task="text_generation", **options)
    assert text_model(settings, None, "here").max_queue == max_queue


async def test_worker_process_has_the_options_and_log_levels_of_its_server(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_config_list": []}', encoding="utf-8")
    settings = ServerSettings(config_path=file, workers="2", log_levels="registry=error", drain_seconds=7)
    plan = await read_plan(settings)
    before = dict(LOG_LEVEL.parts)
    try:
        made = await _plan_of(WorkerTask.of(plan, 2, 1, "secret"))
        assert dict(LOG_LEVEL.parts) == {"registry": logging.ERROR}
    finally:
        LOG_LEVEL.set_logger_levels(before)
    assert (made.processes, made.settings.config_path, made.settings.drain_seconds) == (2, file, 7)


def _busy_port() -> OSError:
    error = OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    error.add_note("cannot listen at here:1")
    error.add_note("choose another port")
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConfigError([Problem("no", file="a.yaml", line=3)]), "a.yaml:3: no"),
        (_busy_port(), "Address already in use; cannot listen at here:1; choose another port"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/x"), "No such file: /x"),
        pytest.param(ValueError("a bug"), None, id="a fault, which is logged with its traceback"),
    ],
)
def test_reason_of_a_failed_start_is_logged(error: Exception, reason: str | None) -> None:
    with capture_logs() as logs:
        log_failures(ExceptionGroup("", [ExceptionGroup("", [error])]))
    assert [(line["event"], line.get("reason")) for line in logs] == [("failed to start api", reason)]
