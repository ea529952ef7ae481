"""The access log: one line for each request, whatever it came over and however it ended."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from ovmstrio.core.events import CallEvent, Door, WireRequest
from ovmstrio.observability.access_log import AccessLog
from ovmstrio.observability.log_writer import LogOutlet, LogWriter
from ovmstrio.observability.tracing.spans import QuietSpan
from tests.support.peers import REMOTE

if TYPE_CHECKING:
    from ovmstrio.core.events import WireProtocol
    from ovmstrio.observability.access_log import AccessLogForm

SECRET = "s3cr3t"


class _Lines:
    """An end that keeps what is written."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        """Keep lines."""
        self.text += f"{text}\n"

    def give_up(self) -> None:
        """Never happens, as nothing waits here."""
        raise AssertionError

    def close(self) -> None:
        """Keep everything."""


def _access_line(form: AccessLogForm, request: WireRequest) -> str:
    """Give what is written of a request."""
    lines = _Lines()
    AccessLog(form, LogOutlet(lines, LogWriter())).request_ended(request)
    (line,) = lines.text.splitlines()
    assert SECRET not in line
    return line


def _request_over(protocol: WireProtocol, target: str, status: int, **headers: str) -> WireRequest:
    """Make a request that was answered with a status."""
    given = ((name.replace("_", "-"), value) for name, value in headers.items())
    pairs = [("authorization", f"Bearer {SECRET}"), *given]
    request = WireRequest(protocol, "POST", target, pairs, REMOTE)
    request.status, request.sent, request.received = status, 321, 123
    return request


def test_a_combined_line_has_the_fields_of_web_servers_and_no_query() -> None:
    request = _request_over(
        "HTTP", f"/v2/models/m/infer?key={SECRET}", 200, user_agent="curl/8", referer=f"http://x/?{SECRET}"
    )

    line = _access_line("combined", request)

    match = re.fullmatch(r'(\S+) - (\S+) \[(.+)\] "(.*?)" (\d+) (\d+) "(.*?)" "(.*?)"', line)
    assert match is not None
    assert match[1] == "10.0.0.7"
    assert match[2] == "-"
    assert match.groups()[3:] == ("POST /v2/models/m/infer HTTP/1.1", "200", "321", "http://x/", "curl/8")


@pytest.mark.parametrize(("status", "shown"), [(0, "200"), (5, "404"), (8, "429"), (13, "500"), (-1, "499")])
def test_a_combined_line_of_grpc_has_the_equivalent_http_status(status: int, shown: str) -> None:
    line = _access_line("combined", _request_over("gRPC", "/inference.GRPCInferenceService/ModelInfer", status))

    assert f'"POST /inference.GRPCInferenceService/ModelInfer HTTP/2.0" {shown} 321 "-" "-"' in line


def test_client_text_is_escaped_in_its_field() -> None:
    line = _access_line("combined", _request_over("HTTP", '/a"b\nc', 404, user_agent='x" 200 "\r\né'))

    assert r'"POST /a\x22b\x0ac HTTP/1.1" 404' in line
    assert line.endswith(r'"x\x22 200 \x22\x0d\x0a\xe9"')


def test_a_json_line_describes_the_call_of_its_request() -> None:
    request = _request_over("gRPC", "/inference.GRPCInferenceService/ModelInfer", 13)
    door = Door("KServe", "gRPC", infer="ModelInfer")
    request.event = CallEvent("m", "3", "model", door, "ModelInfer", "r7", caller="ann", code="ModelFailure")
    request.event.span = QuietSpan(0xAB)

    line: dict[str, Any] = json.loads(_access_line("json", request))

    assert line.pop("milliseconds") >= 0
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "protocol": "gRPC",
        "client": "10.0.0.7",
        "caller": "ann",
        "method": "POST",
        "path": "/inference.GRPCInferenceService/ModelInfer",
        "status": "INTERNAL",
        "received": 123,
        "sent": 321,
        "user_agent": "",
        "name": "m",
        "version": "3",
        "kind": "model",
        "request_id": "r7",
        "code": "ModelFailure",
        "trace_id": f"{0xAB:032x}",
    }


def test_a_json_line_without_a_call_has_only_the_request() -> None:
    line = json.loads(_access_line("json", _request_over("HTTP", "/nowhere", -1)))

    assert line["status"] is None
    assert "name" not in line
