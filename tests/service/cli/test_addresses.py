from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from ovmstrio.client import open_client
from tests.support.commands import CommandResult, run_command
from tests.support.ports import free_ports
from tests.support.served_in_thread import ServedInThread, serving_in_thread

STANDARD_HOST = "127.31.0.1"
"""Address of this machine at which no other server has the standard ports."""


def models(url: str, *options: str) -> CommandResult:
    return run_command("models", "--json", "--url", url, *options)


def top(url: str) -> CommandResult:
    return run_command("top", "--once", "--interval", "0.1", "--json", "--url", url)


def names(done: CommandResult) -> set[str]:
    assert done.exit_code == 0, done.stderr
    assert done.stderr == ""
    return {each["name"] for each in json.loads(done.stdout)}


@pytest.mark.parametrize("form", ["{grpc}", "{http}", "grpc://{grpc}", "http://{http}"])
def test_an_address_of_either_port_works_with_and_without_a_scheme(server: ServedInThread, form: str) -> None:
    assert "dummy" in names(models(form.format(grpc=server.grpc, http=server.http)))


@pytest.mark.parametrize("form", ["{grpc}", "{http}", "grpc://{grpc}", "http://{http}"])
def test_a_command_that_needs_rest_finds_its_port(server: ServedInThread, form: str) -> None:
    url = form.format(grpc=server.grpc, http=server.http)
    done = top(url)
    assert done.exit_code == 0, done.stderr
    assert "dummy" in {each["name"] for each in json.loads(done.stdout)["servables"]}
    listed = run_command("sequence", "list", "sum", "--json", "--url", url)
    assert (listed.exit_code, listed.stdout) == (0, "[]\n"), listed.stderr
    stages = run_command("paddle", "trace", "--once", "--url", url)
    assert "figures of a pipeline" in stages.stderr


@pytest.mark.parametrize("form", ["{grpc}", "{http}", "http://{http}"])
def test_a_stream_of_several_requests_finds_the_grpc_port(server: ServedInThread, tmp_path: Path, form: str) -> None:
    url = form.format(grpc=server.grpc, http=server.http)
    requests = tmp_path / "requests.jsonl"
    lines = [json.dumps({"inputs": {"first_number": [number]}}) for number in (1, 2)]
    requests.write_text("\n".join(lines))
    done = run_command("stream", "--model", "incrementer", "--requests", str(requests), "--json", "--url", url)
    assert done.exit_code == 0, done.stderr
    assert [json.loads(line)["outputs"] for line in done.stdout.splitlines()] == [
        {"last_number": [4]},
        {"last_number": [5]},
    ]


@pytest.mark.parametrize("path", ["/v2", ""])
def test_the_metadata_of_a_server_has_its_ports(server: ServedInThread, path: str) -> None:
    ports = [address.rpartition(":")[2] for address in (server.grpc, server.http)]
    extension = "ports(grpc={},rest={})".format(*ports)
    if path:
        assert extension in server.ask("GET", path).json()["extensions"]
    else:
        with open_client(server.grpc) as client:
            assert extension in client.server_metadata().extensions


@pytest.mark.parametrize(("flag", "form"), [("--rest", "{http}"), ("--grpc", "{grpc}")])
def test_the_earlier_options_for_the_protocol_work_with_a_note(server: ServedInThread, flag: str, form: str) -> None:
    done = models(form.format(grpc=server.grpc, http=server.http), flag)
    assert "dummy" in {each["name"] for each in json.loads(done.stdout)}
    assert done.stderr.startswith(f"{flag} is deprecated; use --url ")
    assert flag not in run_command("models", "--help").stdout


@pytest.mark.parametrize(("form", "right"), [("http://{grpc}", "grpc://{grpc}"), ("grpc://{http}", "http://{http}")])
def test_a_wrong_scheme_is_reported_with_the_right_url(server: ServedInThread, form: str, right: str) -> None:
    wrong, url = (each.format(grpc=server.grpc, http=server.http) for each in (form, right))
    done = models(wrong)
    assert (done.exit_code, f"use --url {url}\n" in done.stderr) == (2, True), done.stderr


def test_tls_at_a_plain_port_is_reported_with_the_right_url(server: ServedInThread) -> None:
    done = models(f"https://{server.http}")
    assert (done.exit_code, f"without TLS: use --url http://{server.http}\n" in done.stderr) == (2, True), done.stderr


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServedInThread, str]]:
    """Serve with TLS; the second value is the file of the CA."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    with serving_in_thread(tls_cert=folder / "cert.pem", tls_key=folder / "key.pem", allow_empty=True) as server:
        yield server, str(folder / "ca.pem")


@pytest.mark.parametrize("form", ["{grpc}", "{http}", "grpcs://{grpc}", "https://{http}"])
def test_ports_with_tls_are_found_out_like_others(secure: tuple[ServedInThread, str], form: str) -> None:
    server, ca = secure
    url = form.format(grpc=server.grpc, http=server.http)
    assert names(models(url, "--ca", ca)) == set()
    done = run_command("top", "--once", "--interval", "0.1", "--json", "--url", url, "--ca", ca)
    assert (done.exit_code, json.loads(done.stdout)["servables"]) == (0, []), done.stderr


@pytest.mark.parametrize(("form", "right"), [("{grpc}", "grpcs://{grpc}"), ("{http}", "https://{http}")])
def test_a_port_with_tls_is_reported_with_the_right_url(
    secure: tuple[ServedInThread, str], form: str, right: str
) -> None:
    server, _ = secure
    done = models(form.format(grpc=server.grpc, http=server.http))
    url = right.format(grpc=server.grpc, http=server.http)
    assert (done.exit_code, f"with TLS: use --url {url}\n" in done.stderr) == (2, True), done.stderr


@pytest.fixture(scope="module")
def standard() -> Iterator[None]:
    """Serve at the standard ports."""
    hosts = {"grpc_bind_address": STANDARD_HOST, "rest_bind_address": STANDARD_HOST}
    with serving_in_thread(f"{STANDARD_HOST}:8000", port=9000, allow_empty=True, **hosts):
        yield


@pytest.mark.usefixtures("standard")
def test_a_wrong_port_is_reported_with_the_standard_ports_that_answer() -> None:
    done = models(f"{STANDARD_HOST}:8001")
    assert done.exit_code == 2
    assert f"REST answers at {STANDARD_HOST}:8000" in done.stderr


@pytest.mark.usefixtures("standard")
def test_a_host_without_a_port_means_the_standard_port() -> None:
    assert names(models(f"http://{STANDARD_HOST}")) == set()


def test_a_port_at_which_nothing_listens_is_reported_with_the_start_of_a_server() -> None:
    (port,) = free_ports(1)
    for url in (f"127.0.0.1:{port}", f"http://127.0.0.1:{port}", f"grpc://127.0.0.1:{port}"):
        done = models(url)
        assert (done.exit_code, "ovms serve PATH starts one" in done.stderr) == (2, True), done.stderr


@pytest.fixture
def other_server() -> Iterator[str]:
    """A gRPC server that does not tell the port of REST."""
    made: Any = grpc.server(ThreadPoolExecutor(1))
    port = made.add_insecure_port("127.0.0.1:0")
    made.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        made.stop(0).wait()


@pytest.mark.parametrize("scheme", ["", "grpc://"])
def test_a_server_that_does_not_tell_its_port_is_reported_with_the_needed_protocol(
    other_server: str, scheme: str
) -> None:
    done = top(scheme + other_server)
    assert (done.exit_code, f"{other_server} answers gRPC, and this command needs REST" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://a:1", "scheme ftp is not supported"),
        ("127.0.0.1:port", "expected HOST:PORT with a port up to 65535, got 'port'"),
    ],
)
def test_a_malformed_address_is_a_usage_error(url: str, reason: str) -> None:
    done = models(url)
    assert (done.exit_code, reason in done.stderr) == (64, True), done.stderr
