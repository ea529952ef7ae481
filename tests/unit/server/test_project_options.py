"""The command line's part of a project's server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ovmstrio.server.command_line import UsageProblems
from ovmstrio.server.plan import Plan
from ovmstrio.server.project_plan import plan_project
from tests.support.projects import make_project

FILE = Path("file.pem")
PROTO = """
syntax = "proto3";
package talk;
message Text { string value = 1; }
service Talk { rpc Say (Text) returns (Text); }
"""


def _plan(folder: Path, options: dict[str, Any], **keys: Any) -> Plan:
    if "protobuf_path" in keys:
        folder.joinpath(keys["protobuf_path"]).write_text(PROTO)
    return plan_project(make_project(folder, "", **keys), options)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"tls_cert": FILE}, "each needs the other"),
        ({"tls_key": FILE}, "each needs the other"),
        ({"client_ca": FILE}, "needs --tls_cert and --tls_key"),
        ({"port": 9000, "probe_port": 9000}, "--probe_port: 9000 is the port of a protocol"),
        ({"port": 65_536}, "--port: the value cannot be used .expected 65535 or less, found 65536"),
        ({"drain_seconds": -1}, "--drain_seconds: the value cannot be used .expected 0.0 or more, found -1"),
    ],
    ids=["cert", "key", "ca", "probes", "port", "drain"],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, given: dict[str, Any], problem: str) -> None:
    """Above all, nobody who asks for TLS is served without it."""
    with pytest.raises(UsageProblems, match=problem):
        _plan(tmp_path, given)


def test_tls_with_and_without_certificates_of_clients_is_fine(tmp_path: Path) -> None:
    """Both files of it are there."""
    assert _plan(tmp_path, {"tls_cert": FILE, "tls_key": FILE}).settings.client_ca is None
    assert _plan(tmp_path, {"tls_cert": FILE, "tls_key": FILE, "client_ca": FILE}).settings.client_ca == FILE


@pytest.mark.parametrize(
    ("options", "grpc", "rest"),
    [
        ({}, (), ("h:7",)),
        ({"port": 1}, (), ("h:1",)),
        ({"rest_port": 2}, (), ("h:2",)),
        ({"port": 1, "rest_port": 2}, ("h:1",), ("h:2",)),
    ],
    ids=["file", "port", "rest_port", "both"],
)
def test_ports_of_a_project_over_http(
    tmp_path: Path, options: dict[str, Any], grpc: tuple[str, ...], rest: tuple[str, ...]
) -> None:
    """It has one, which --port or --rest_port names, and gRPC beside it if both do."""
    plan = _plan(tmp_path, {"grpc_bind_address": "h", "rest_bind_address": "h", **options}, serve_port=7)
    assert (plan.grpc, plan.rest) == (grpc, rest)


@pytest.mark.parametrize(
    ("options", "grpc", "rest"),
    [
        ({}, ("h:7",), ()),
        ({"port": 1}, ("h:1",), ()),
        ({"rest_port": 2}, ("h:7",), ("h:2",)),
        ({"port": 1, "rest_port": 2}, ("h:1",), ("h:2",)),
    ],
    ids=["file", "port", "rest_port", "both"],
)
def test_ports_of_a_project_over_grpc(
    tmp_path: Path, options: dict[str, Any], grpc: tuple[str, ...], rest: tuple[str, ...]
) -> None:
    """It has one, which --port names, and HTTP beside it if --rest_port is there."""
    given = {"grpc_bind_address": "h", "rest_bind_address": "h", **options}
    plan = _plan(tmp_path, given, serve_port=7, protobuf_path="talk.proto")
    assert (plan.grpc, plan.rest) == (grpc, rest)


def test_a_project_has_defaults_of_its_own(tmp_path: Path) -> None:
    """Its messages are as large as they can be, and its files are not looked at; what is given counts more."""
    settings = _plan(tmp_path, {}).settings
    assert (settings.max_message_size, settings.file_system_poll_wait_seconds) == (2**31 - 1, 0)
    settings = _plan(tmp_path, {"max_message_size": 2048, "file_system_poll_wait_seconds": 2}).settings
    assert (settings.max_message_size, settings.file_system_poll_wait_seconds) == (2048, 2)
