"""The conformance test of the Open Inference Protocol, against this server and against one that keeps no rule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ovmstrio_conformance.__main__ import main
from ovmstrio_conformance.grpc_cases import GRPC_CASES
from ovmstrio_conformance.rest_cases import REST_CASES
from tests.support import ir
from tests.support.plain_http import QuietHandler, answering_http
from tests.support.served_in_thread import serving_in_thread


@pytest.mark.parametrize("model", ["numbers", "texts"])
def test_this_server_keeps_every_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str) -> None:
    """Over both interfaces, with a model of numbers and of texts; no case is skipped."""
    made = ir.sum_of_two((-1, 5)) if model == "numbers" else ir.string_passthrough()
    base = ir.save(made, tmp_path, "m")
    with serving_in_thread(model_name="m", model_path=base) as server:
        capsys.readouterr()
        code = main([f"http://{server.http}", "--grpc", server.grpc, "--output", "json"])
        printed = capsys.readouterr().out

    results = json.loads(printed[printed.index("[\n") : printed.rindex("\n]") + 2])
    assert [each for each in results if each["outcome"] != "passed"] == []
    assert (code, len(results)) == (0, len(REST_CASES) + len(GRPC_CASES))


class _Agreeable(QuietHandler):
    """Says yes to everything, in no form that the protocol knows."""

    def do_GET(self) -> None:  # noqa: N802 - the library's name
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"[]")

    do_POST = do_GET  # noqa: N815 - the library's name


def test_a_server_that_keeps_no_rule_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Each rule beyond a bare 200 fails, with what was expected; all are tried, and the command exits with 1."""
    with answering_http(_Agreeable) as url:
        code = main([url, "--model", "m"])

    *lines, last = capsys.readouterr().out.splitlines()
    assert (code, last) == (1, "m: 3 passed, 20 failed, 0 skipped")
    assert sum(line.startswith("failed") and "(expected" in line for line in lines) == 20


def test_nobody_at_home_fails_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    """A refused connection is no crash of the command, over either interface."""
    assert main(["http://127.0.0.1:9", "--grpc", "127.0.0.1:9", "--model", "m"]) == 1
    counts = f"0 passed, {len(REST_CASES) + len(GRPC_CASES)} failed, 0 skipped"
    assert counts in capsys.readouterr().out


def test_a_model_must_be_known(capsys: pytest.CaptureFixture[str]) -> None:
    """Without an index and without the option there is nothing to ask."""
    assert main(["http://127.0.0.1:9"]) == 2
    assert "Give --model" in capsys.readouterr().err
