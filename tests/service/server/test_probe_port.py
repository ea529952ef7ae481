"""Probes of a server that wants certificates: a plain port of their own, for health alone."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import httpx
import pytest
import trustme

from tests.support import ir
from tests.support.ports import free_ports
from tests.support.processes import serving

pytestmark = pytest.mark.e2e


def _until(probe: httpx.Client, status: int) -> httpx.Response:
    """Ask for readiness until it is as it should be, and give the answer; fail after a minute."""
    ends = time.monotonic() + 60
    while (answer := probe.get("/v2/health/ready")).status_code != status:
        assert time.monotonic() < ends, answer.text
        threading.Event().wait(0.05)
    return answer


def test_probes_need_no_certificate_and_see_nothing_but_health(tmp_path: Path) -> None:
    """Every other path is not there, and the port of REST still wants a certificate; not ready has its reason."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    base = ir.save(ir.dummy(), tmp_path / "models", "dummy")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_config_list": [{"config": {"name": "dummy", "base_path": str(base)}}]}))
    (port,) = free_ports(1)
    tls = ("--tls_cert", str(tmp_path / "server.pem"), "--tls_key", str(tmp_path / "server.pem"))
    options = (*tls, "--client_ca", str(tmp_path / "ca.pem"), "--config_path", str(config), "--probe_port", str(port))
    with (
        serving(*options, ready=False, log=tmp_path / "log") as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=httpx.HTTPTransport(retries=20)) as probe,
    ):
        ready = _until(probe, 200)
        assert (ready.status_code, ready.json()) == (200, {"ready": True})
        assert probe.get("/v2/health/live").json() == {"live": True}
        assert probe.head("/v2/health/live").status_code == 200
        for path in ("/metrics", "/v2", "/v2/models/dummy", "/v1/config", "/v2/models/dummy/ready", "/"):
            assert "Invalid request URL" in probe.get(path).json()["error"], path
        assert "Invalid request URL" in probe.post("/v2/models/dummy/infer", json={}).json()["error"]
        with pytest.raises(httpx.TransportError):
            httpx.get(server.rest + "/v2/health/live", timeout=10)
        config.write_text(json.dumps({"model_config_list": [{"config": {"name": "x", "base_path": "nowhere"}}]}))
        assert "Server is not ready" in _until(probe, 503).json()["error"]
